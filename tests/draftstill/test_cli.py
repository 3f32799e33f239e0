"""The front door: quick, without tracebacks, and with exit codes that a script can trust."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest

from draftstill import cli, guard, running
from draftstill.errors import DraftstillError
from draftstill.runfolder import RunFolder, write_json
from draftstill.stages import stages
from tests.pipeline import ORDER

SCORE: dict[str, Any] = {
    "winner": {"arm": "tuned", "temperature": 0.7, "speedup": {"estimate": 1.3, "low": 1.2, "high": 1.4}},
    "arms": [
        {"arm": "tuned", "temperature": 0.0, "alpha": 0.9},
        {"arm": "tuned", "temperature": 0.7, "alpha": 0.5},
        {"arm": "lookup", "temperature": 0.7, "alpha": 0.1},
    ],
}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "text").mkdir()
    path = tmp_path / "recipe.yaml"
    path.write_text(f"run_dir: {tmp_path / 'run'}\ntarget: {{source: some/target}}\ncorpus: {{source: {tmp_path / 'text'}}}\n")
    return path


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stages run as stubs that write their folders; the list says which ran."""
    ran: list[str] = []
    names = {function: stage for stage, (_, function) in running.MAKERS.items()}

    def face(folder: str, name: str) -> Any:
        if name == "preflight_all":
            return lambda recipe, **options: None

        def make(recipe: Any, run: RunFolder, **options: Any) -> None:
            ran.append(names[name])
            stage = stages(recipe, run)[names[name]]
            stage.begin()
            if names[name] == "score":
                write_json(stage.work / "score.json", SCORE)
            stage.finish()

        return make

    monkeypatch.setattr(running, "face", face)
    report = types.ModuleType("draftstill.evaluate.report")
    report.to_terminal = lambda score, paths: "the last screen"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "draftstill.evaluate.report", report)
    return ran


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["draftstill", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert isinstance(stop.value.code, int)
    return stop.value.code


def test_help_is_quick_and_without_torch() -> None:
    code = (
        "import sys\nfrom draftstill import cli\nsys.argv = ['draftstill', '--help']\n"
        "try: cli.main()\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"
    )
    took = []
    for _ in range(3):
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        took.append(time.perf_counter() - start)
    assert all(verb in done.stdout for verb in ("plan", "distill", "train", "evaluate", "publish", "run", "decode", "demo"))
    assert min(took) < 0.7


@pytest.mark.parametrize(
    ("verb", "last"), [("distill", "recording"), ("train", "draft"), ("evaluate", "score"), ("publish", "published"), ("run", "published")]
)
def test_a_verb_makes_all_stages_up_to_its_own(
    verb: str, last: str, recipe: Path, made: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, verb, recipe) == 0
    assert made == list(ORDER[: ORDER.index(last) + 1])
    capsys.readouterr()
    assert call(monkeypatch, verb, recipe) == 0
    assert made == list(ORDER[: ORDER.index(last) + 1]), "the second time everything is reused"
    assert "corpus: reused (made 20" in capsys.readouterr().out


def test_an_override_reaches_the_stage(recipe: Path, made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert call(monkeypatch, "run", recipe) == 0
    made.clear()
    assert call(monkeypatch, "run", recipe, "train.learning_rate=2e-4", "--set-aside") == 0
    assert made == ["draft", "score", "published"]
    assert (RunFolder(recipe.parent / "run").path / "draft.old-1").is_dir()


def test_a_folder_of_another_recipe_is_refused_before_any_work(
    recipe: Path, made: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "run", recipe) == 0
    made.clear()
    before = sorted(p for p in recipe.parent.rglob("*"))
    assert call(monkeypatch, "run", recipe, "evaluate.gamma=5") == 1
    error = capsys.readouterr().err
    assert "gamma was 3, is 5" in error and "Traceback" not in error
    assert made == [] and sorted(p for p in recipe.parent.rglob("*")) == before


def test_a_partial_of_another_recipe_is_refused_before_any_work(recipe: Path, made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    write_json(recipe.parent / "run" / "score.partial" / "stage.json", {"stage": "score", "fingerprint": "other", "inputs": {}})
    write_json(recipe.parent / "run" / "score.partial" / "cells" / "t0-0000.json", {})
    assert call(monkeypatch, "run", recipe) == 1
    assert made == []


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ([], 0),
        (["--min-speedup", "1.2"], 0),
        (["--min-speedup", "1.21"], 2),
        (["--min-alpha", "0.5"], 0),
        (["--min-alpha", "0.51"], 2),
        (["--min-alpha", "0.5", "--min-speedup", "9"], 2),
    ],
)
def test_gates(
    options: list[str], code: int, recipe: Path, made: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "evaluate", recipe, *options) == code
    assert ("gate missed" in capsys.readouterr().err) == (code == 2)


def test_a_figure_that_was_not_measured_passes_no_gate() -> None:
    score = {"winner": {"arm": None, "temperature": 0.7, "speedup": None}, "arms": []}
    assert len(cli.gates(score, 0.0, 0.0)) == 2
    assert cli.gates(score, None, None) == []


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (DraftstillError("is missing", key="corpus.source", value="x", mend="look"), 1, "corpus.source: is missing"),
        (KeyboardInterrupt(), 130, "stopped; the same command goes on where it stopped"),
        (OSError(errno.ENOSPC, "No space left on device", "/full/disk/file"), 1, "disk full: /full/disk/file"),
        (PermissionError(errno.EACCES, "Permission denied", "/locked"), 1, "Permission denied: /locked"),
    ],
)
def test_errors_of_a_stage(
    error: BaseException, code: int, says: str, recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(running, "face", lambda *_: fail)
    assert call(monkeypatch, "run", recipe) == code
    shown = capsys.readouterr().err
    assert says in shown and "Traceback" not in shown


def test_our_own_faults_keep_their_traceback(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "face", lambda *_: lambda *a, **k: {}["missing"])
    with pytest.raises(KeyError):
        call(monkeypatch, "run", recipe)


@pytest.mark.parametrize("arguments", [["run"], ["nonsense"], ["evaluate", "x.yaml", "--min-alpha", "much"], ["plan", "absent.yaml"]])
def test_a_wrong_command_line_exits_1(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, *arguments) == 1
    assert "Traceback" not in capsys.readouterr().err


def test_bad_recipe_shows_every_fault(recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    recipe.write_text(recipe.read_text() + "train: {learning_rat: 1e-4}\nevaluate: {gamma: 0}\n")
    assert call(monkeypatch, "run", recipe) == 1
    shown = capsys.readouterr().err
    assert "did you mean 'learning_rate'?" in shown and "evaluate.gamma" in shown
    assert not (recipe.parent / "run").exists()


def test_recipe_verbs(recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "recipe", "schema") == 0
    assert '"run_dir"' in capsys.readouterr().out
    assert call(monkeypatch, "recipe", "show", recipe, "seed=7") == 0
    assert "seed: 7" in capsys.readouterr().out


def test_decode_passes_its_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def show(target: str, draft: str | None, prompt: str, **options: Any) -> None:
        seen.update(target=target, draft=draft, prompt=prompt, **options)

    monkeypatch.setattr(running, "face", lambda *_: show)
    options = [
        "--gamma",
        "2",
        "--top-p",
        "0.9",
        "--repetition-penalty",
        "1.2",
        "--stop",
        "a",
        "--stop",
        "b",
        "--lookup",
        "--adaptive",
        "--chat",
    ]
    assert call(monkeypatch, "decode", "--target", "t", "--draft", "d", *options, "--json", tmp_path / "x.json", "hello") == 0
    assert seen == {
        "target": "t", "draft": "d", "prompt": ["hello"], "gamma": 2, "temperature": 0.0, "max_new_tokens": 128, "seed": 0, "json_path": tmp_path / "x.json",
        "top_k": 0, "top_p": 0.9, "min_p": 0.0, "repetition_penalty": 1.2, "no_repeat_ngram": 0, "min_new_tokens": 0, "stop": ["a", "b"], "lookup": True,
        "adaptive": True, "chat": True, "min_confidence": 0.0, "backend": "auto", "sha256": None,
    }  # fmt: skip
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n"))
    assert call(monkeypatch, "decode", "--target", "t", "--lines", "-") == 0 and seen["prompt"] == ["one", "two"]
    for missing in (["--target", "t", ""], ["--target", "t"]):
        assert call(monkeypatch, "decode", *missing) == 1


def test_what_the_terminal_cannot_show_is_escaped(tmp_path: Path) -> None:
    """A key, a path or a decoded text: none of them may end a run because a log is written in ASCII."""
    path = tmp_path / "recipe.yaml"
    path.write_text("run_dir: \u6f22\ntarget: {source: a/b}\ncorpus: {source: texts}\n", encoding="utf-8")
    code = f"import sys; from draftstill.cli import main; sys.argv = ['draftstill', 'recipe', 'show', {str(path)!r}]; main()"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, cwd=tmp_path, check=False)
    assert done.returncode == 0 and b"run_dir: \\u6f22" in done.stdout, done.stderr


def test_environment_defaults_leave_the_users_values(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in guard.ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "online")
    call(monkeypatch, "--help")
    assert os.environ["WANDB_MODE"] == "online" and os.environ["TOKENIZERS_PARALLELISM"] == "false"
    for name in guard.ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)


def test_recipe_new_writes_a_valid_recipe_and_overwrites_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from draftstill.recipe_io import load_recipe

    path = tmp_path / "my.yaml"
    assert call(monkeypatch, "recipe", "new", str(path)) == 0
    assert load_recipe(path).corpus.source
    before = path.read_bytes()
    assert call(monkeypatch, "recipe", "new", str(path)) == 1
    assert "nothing was overwritten" in capsys.readouterr().err and path.read_bytes() == before
