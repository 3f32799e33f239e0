"""Throughput under load: what is chosen, what is measured, and what joins the score."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftstill.decode import GoodputGamma
from draftstill.decode.adaptive import Judged
from draftstill.errors import DraftstillError
from draftstill.evaluate import load
from draftstill.evaluate.load import measure_load
from draftstill.runfolder import read_json
from tests.pipeline import borrowed, command, opened

WHOLE = ("corpus", "responses", "recording", "draft", "score")
CHEAP, DEAR = dict.fromkeys(range(1, 5), 1.0), {g: 1.0 + g for g in range(1, 5)}


def play(policy: GoodputGamma, right: bool, rounds: int) -> list[int]:
    """The gammas of so many rounds of all rows, every guess of which is right, or wrong."""
    chosen = []
    for _ in range(rounds):
        gammas = [policy.choose(Judged()) for _ in range(policy.rows)]
        assert len(set(gammas)) == 1, "all rows of a round draft alike"
        chosen.append(gammas[0])
        for g in gammas:
            policy.learn(Judged(), g, g if right else 0)
    return chosen


def test_goodput_drafts_where_it_pays_and_not_where_it_does_not() -> None:
    assert set(play(GoodputGamma(0.1, CHEAP, 4, 4, prior_alpha=0.9), True, 20)) == {4}
    dear = play(GoodputGamma(0.1, DEAR, 4, 16, prior_alpha=0.9, probe_every=10), True, 35)
    assert sum(dear) == 3 and set(dear) == {0, 1}, "verifying costs what it saves: one round in ten probes, all rows together"
    assert set(play(GoodputGamma(0.1, DEAR, 0, 2), True, 30)) == {0}


def test_goodput_learns_from_the_whole_batch() -> None:
    hopeful = GoodputGamma(0.2, CHEAP, 4, 8, prior_alpha=0.9, prior_weight=16)
    assert play(hopeful, False, 40)[-1] == 0 and hopeful.alpha < 0.2
    doubtful = GoodputGamma(0.2, CHEAP, 4, 8, prior_alpha=0.05, prior_weight=16, probe_every=2)
    assert play(doubtful, True, 60)[-1] == 4
    with pytest.raises(ValueError, match="gamma"):
        GoodputGamma(0.1, {1: 1.0}, 2, 1)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = borrowed(tmp_path_factory.mktemp("load"), *WHOLE)
    assert command("evaluate", path, "--load", "evaluate.batches=[1,3]", "evaluate.load_prompts=8") == 0
    return path


def test_load_joins_the_score(measured: Path) -> None:
    run = measured.parent / "run"
    result = read_json(run / "score" / "score.json")["load"]
    assert result == read_json(run / "load" / "load.json")
    assert [b["rows"] for b in result["batches"]] == [1, 3]
    for b in result["batches"]:
        assert set(b["arms"]) == {"plain", "fixed", "adaptive"} and b["arms"]["plain"]["ratio"] is None
        assert b["costs"]["rows"] == b["rows"] and b["fastest"] in b["arms"]
        for arm in b["arms"].values():
            assert [x["emitted"] for x in arm["blocks"]] == [12 * max(2, 2 * b["rows"])] * 4, "every block and arm does the same work"
            assert arm["tokens_per_s"] == pytest.approx(sum(x["emitted"] for x in arm["blocks"]) / sum(x["wall_s"] for x in arm["blocks"]))
            assert arm["tokens_per_s"] <= arm["decode_tokens_per_s"], "wall time holds the prefill"
        for name in ("fixed", "adaptive"):
            assert b["arms"][name]["ratio"]["estimate"] == pytest.approx(
                b["arms"][name]["tokens_per_s"] / b["arms"]["plain"]["tokens_per_s"]
            )
        assert b["goodput"]["speedup_by_gamma"]["0"] == 1.0
    slower = [b["rows"] for b in result["batches"] if b["arms"]["adaptive"]["ratio"]["high"] < 1]
    assert result["adaptive_slower_at"] == slower and result["adaptive_never_slower"] is (not slower)
    lost = [b["rows"] for b in result["batches"] if b["arms"]["fixed"]["ratio"]["estimate"] <= 1]
    assert result["stops_paying_at"] == min(lost, default=None)


def test_measured_once(measured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(load, "_batch", never)
    keys = ("evaluate.batches=[1,3]", "evaluate.load_prompts=8")
    recipe, run = opened(measured, *keys)
    assert measure_load(recipe, run) == read_json(measured.parent / "run" / "load" / "load.json")
    assert command("evaluate", measured) == 0, "without --load the score is what it was"


def test_an_interrupted_load_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, run = opened(borrowed(tmp_path, *WHOLE), "evaluate.batches=[1,2]", "evaluate.load_prompts=4")
    real = load._batch

    def stops(bench: Any, prompts: Any, rows: int, chosen: Any) -> Any:
        if rows == 2:
            raise KeyboardInterrupt
        return real(bench, prompts, rows, chosen)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(load, "_batch", stops)
        measure_load(recipe, run)
    first = (tmp_path / "run" / "load.partial" / "rows-0001.json").read_bytes()
    measure_load(recipe, run)
    assert (tmp_path / "run" / "load" / "rows-0001.json").read_bytes() == first


def test_load_needs_a_score(tmp_path: Path) -> None:
    recipe, run = opened(borrowed(tmp_path, *WHOLE[:-1]), "evaluate.batches=[1,2]")
    with pytest.raises(DraftstillError, match="no score"):
        measure_load(recipe, run)
