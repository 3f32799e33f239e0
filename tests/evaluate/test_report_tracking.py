"""The score's summary in the trackers: told once, offline, and never the end of a score."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from draftstill import running
from draftstill.evaluate.tracking import track_score
from draftstill.recipe_io import load_recipe
from draftstill.runfolder import RunFolder, write_json
from draftstill.stages import stages
from tests.pipeline import make_home
from tests.train.test_trackers import Recorder

SAMPLE = json.loads((Path(__file__).parent / "sample_score_2.json").read_text())


@pytest.fixture
def scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, RunFolder]:
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "wandb", Recorder)
    monkeypatch.setattr(Recorder, "made", [])
    recipe = load_recipe(make_home(tmp_path, train={"report_to": ["wandb"]}))
    run = RunFolder(recipe.run_dir)
    stage = stages(recipe, run)["score"]
    stage.begin()
    write_json(stage.work / "score.json", SAMPLE)
    stage.finish()
    return recipe, run


def test_the_tracker_hears_of_winner_alpha_and_speed_offline(scored: tuple[Any, RunFolder], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    track_score(*scored)
    (made,) = Recorder.made
    ((_, told),) = made.rows
    assert told["score/speedup"] == pytest.approx((SAMPLE["winner"]["speedup"] or SAMPLE["winner"]["fastest"]["speedup"])["estimate"])
    assert "score/tuned/alpha" in told and "score/verdict" in told and "finish" in made.calls
    assert made.options["mode"] == "offline" and made.options["name"].endswith("-score")


@pytest.mark.parametrize("fails", ["start", "log", "finish"])
def test_a_tracker_that_fails_does_not_fail_the_score(
    fails: str, scored: tuple[Any, RunFolder], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Recorder, "fails", frozenset({fails}))
    track_score(*scored)
    shown = capsys.readouterr()
    assert "tracker wandb: RuntimeError: the server is down; the score goes on without it" in shown.out + shown.err


def test_only_a_score_that_was_just_made_is_told(scored: tuple[Any, RunFolder], monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, run = scored
    told = []

    def face(_: str, name: str) -> Any:
        if name == "score":
            return lambda recipe, run: (stages(recipe, run)["score"].begin(), stages(recipe, run)["score"].finish())
        return (lambda *_: told.append(True)) if name == "track_score" else (lambda *_, **__: None)

    monkeypatch.setattr(running, "face", face)
    for name, stage in stages(recipe, run).items():
        if name not in ("score", "published"):
            stage.begin()
            stage.finish(curve=[])
    running.through("score", recipe, run)
    assert told == []
    (run.path / "score").rename(run.path / "elsewhere")
    running.through("score", recipe, run)
    assert told == [True]
