"""A measurement under load belongs to one score: that of another one is never joined to it, and an interrupted one is not forgotten."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from draftstill.errors import DraftstillError
from draftstill.evaluate import load
from draftstill.evaluate.load import measure_load
from draftstill.recipe import Recipe
from draftstill.runfolder import RunFolder, read_json, write_json
from draftstill.stages import stages
from tests.pipeline import borrowed, command, opened

SCORED = ("corpus", "responses", "recording", "draft", "score")
KEYS = {"batches": [1, 2], "load_prompts": 4}
RATIO = {"estimate": 1.2, "low": 1.1, "high": 1.3, "method": "bootstrap-t"}


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str, int]]:
    """Batches are not decoded; the list says which were asked for: (rows, arm, gamma)."""
    asked: list[tuple[int, str, int]] = []

    def batch(bench: Any, prompts: Any, rows: int, chosen: Any) -> dict[str, Any]:
        asked.append((rows, chosen["fixed"]["arm"], chosen["fixed"]["swept"]))
        figures = dict.fromkeys(("tokens_per_s", "decode_tokens_per_s", "tau", "mean_gamma", "token_acceptance"), 0.5)
        arm = {"ratio": RATIO, "blocks": [], **figures}
        arms = {"plain": {**arm, "ratio": None}, "fixed": arm, "adaptive": arm}
        return {"rows": rows, "costs": {}, "other_cores": 0.0, "fastest": "fixed", "arms": arms, "named": list(asked[-1]),
                "goodput": {"alpha": 0.5, "c_by_gamma": {}, "best_gamma": 1, "speedup_by_gamma": {"0": 1.0}}}  # fmt: skip

    monkeypatch.setattr(load, "_batch", batch)
    monkeypatch.setattr(load, "open_bench", lambda recipe, folders: _Bench())
    monkeypatch.setattr(load, "replace", lambda bench, **_: bench)
    monkeypatch.setattr(load, "domains", lambda *_: [_Bench()])
    return asked


class _Bench:
    def __getattr__(self, name: str) -> Any:
        return [] if name == "prompts" else self

    def __deepcopy__(self, memo: Any) -> Any:
        return self


def scored_again(run: RunFolder, fastest: str) -> None:
    """As if ``score`` had been deleted and made anew, with another arm in front."""
    path = run.path / "score" / "score.json"
    score = read_json(path)
    score.pop("load", None)
    for row in score["arms"]:
        if row["arm"] != "plain":
            row["speedup"] = {**row["speedup"], "estimate": 9.0 if row["arm"] == fastest else 0.5}
    write_json(path, score)


def joined(run: RunFolder) -> Any:
    return read_json(run.path / "score" / "score.json")["load"]


def made(tmp_path: Path) -> tuple[Recipe, RunFolder]:
    return opened(borrowed(tmp_path, *SCORED, evaluate=KEYS))


def test_the_load_of_another_score_is_not_joined(tmp_path: Path, counted: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    recipe, run = made(tmp_path)
    scored_again(run, "lookup")
    measure_load(recipe, run)
    first = read_json(run.path / "load" / "load.json")
    assert joined(run)["fixed"]["arm"] == "lookup" and [a for _, a, _ in counted] == ["lookup"] * 2
    measure_load(recipe, run)
    assert len(counted) == 2, "the same score: nothing is measured again"
    scored_again(run, "tuned")
    measure_load(recipe, run)
    assert joined(run)["fixed"]["arm"] == "tuned" and [a for _, a, _ in counted[2:]] == ["tuned"] * 2
    assert read_json(run.path / "load.old-1" / "load.json") == first and "for another score" in capsys.readouterr().out
    # The same arms, timed anew: another acceptance, perhaps other weights or another machine.
    scored_again(run, "tuned")
    score = read_json(run.path / "score" / "score.json")
    score["conditions"]["date"] = "2001-01-01"
    write_json(run.path / "score" / "score.json", score)
    measure_load(recipe, run)
    assert len(counted) == 6 and (run.path / "load.old-2").exists()


def test_what_was_begun_for_another_score_is_not_continued(tmp_path: Path, counted: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, run = made(tmp_path)
    scored_again(run, "lookup")
    whole = load._batch

    def stops(bench: Any, prompts: Any, rows: int, chosen: Any) -> Any:
        if rows == 2:
            raise KeyboardInterrupt
        return whole(bench, prompts, rows, chosen)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(load, "_batch", stops)
        measure_load(recipe, run)
    scored_again(run, "composite")
    measure_load(recipe, run)
    assert {b["named"][1] for b in joined(run)["batches"]} == {"composite"}
    assert [p.name for p in (run.path / "load.old-1").glob("rows-*.json")] == ["rows-0001.json"]


def test_another_recipe_is_still_refused(tmp_path: Path, counted: list[Any]) -> None:
    recipe, run = made(tmp_path)
    measure_load(recipe, run)
    scored_again(run, "lookup")
    other, _ = opened(tmp_path / "recipe.yaml", "evaluate.load_prompts=8")
    with pytest.raises(DraftstillError, match="load_prompts was 4, is 8"):
        measure_load(other, run)


@pytest.mark.parametrize("same", [True, False])
def test_a_load_of_before_scores_were_named_stays_with_its_score(tmp_path: Path, same: bool, counted: list[Any]) -> None:
    recipe, run = made(tmp_path)
    measure_load(recipe, run)
    path = run.path / "load" / "provenance.json"
    found = read_json(path)
    old = run.stage("load", {k: v for k, v in found["inputs"].items() if k in ("score", "batches", "load_prompts")})
    write_json(path, {**found, "inputs": old.inputs, "fingerprint": old.fingerprint})
    if not same:
        scored_again(run, "lookup")
    counted.clear()
    measure_load(recipe, run)
    assert counted == ([] if same else [(1, "lookup", 3), (2, "lookup", 3)])


def test_an_interrupted_load_is_taken_up_by_run_and_publish(tmp_path: Path, counted: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    path = borrowed(tmp_path, *SCORED, evaluate=KEYS)
    shutil.rmtree(tmp_path / "run" / "score")

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(load, "_batch", stop)
        assert command("run", path) == 130
    recipe, run = opened(path)
    assert stages(recipe, run)["score"].done and not (run.path / "published").exists()
    assert command("run", path) == 0
    assert joined(run) == read_json(run.path / "load" / "load.json") and [rows for rows, *_ in counted] == [1, 2]
    report = run.path / "published" / "model" / "draft_report.json"
    assert read_json(report)["load"]["batches"], "what is published holds it"
    for verb in ("run", "evaluate", "publish"):
        assert command(verb, path) == 0
    assert len(counted) == 2, "measured once"


@pytest.mark.parametrize("verb", ["evaluate", "publish", "run"])
def test_batches_named_after_the_score_are_measured(verb: str, tmp_path: Path, counted: list[Any]) -> None:
    path = borrowed(tmp_path, *SCORED, "published")
    assert command(verb, path) == 0 and counted == []
    assert command(verb, path, "evaluate.batches=[1,2]") == 0
    assert [rows for rows, *_ in counted] == [1, 2]
