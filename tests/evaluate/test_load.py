"""Throughput under load: what is chosen, what is measured, and what joins the score."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftstill.decode import Costs, GoodputGamma, Request, adaptive
from draftstill.decode.adaptive import Judged
from draftstill.errors import DraftstillError
from draftstill.evaluate import load
from draftstill.evaluate.load import measure_load, verdict
from draftstill.runfolder import read_json
from draftstill.stages import draft_stage, note_failure, stages
from tests.pipeline import borrowed, command, finished, opened

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
    dear = play(GoodputGamma(0.1, DEAR, 4, 16, prior_alpha=0.9, probe_every=10), True, 75)
    assert set(dear) == {0, 1}, "verifying costs what it saves, all rows probe together"
    assert [n for n, g in enumerate(dear) if g] == [10, 31, 72], "ever more seldom: after 10 idle rounds, then 20, then 40"
    assert set(play(GoodputGamma(0.1, DEAR, 0, 2), True, 30)) == {0}


def test_probes_stop_growing_rarer_and_start_anew_once_drafting_pays() -> None:
    poor = GoodputGamma(0.1, CHEAP, 4, 1, prior_alpha=0.0, prior_weight=1e9, probe_every=2)
    probes = [n for n, g in enumerate(play(poor, False, 400)) if g]
    assert [b - a - 1 for a, b in itertools.pairwise(probes)][:6] == [4, 8, 16, 32, 32, 32]
    poor.prior_alpha = 0.9
    assert poor.choose(Judged()) == 4 and poor.shared.probes == 0


def test_goodput_wants_a_margin() -> None:
    """A gain of 1 % is within what costs and acceptance are known to."""
    barely, enough = ({1: 1.9 / gain} for gain in (1.01, 1.04))
    for v, gamma in ((barely, 0), (enough, 1)):
        assert GoodputGamma(0.0, v, 1, 4, prior_alpha=0.9, prior_weight=1e9).choose(Judged()) == gamma


def test_goodput_looks_for_the_best_gamma_once_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[float] = []
    real = adaptive.best_gamma
    monkeypatch.setattr(adaptive, "best_gamma", lambda alpha, *rest: looked.append(alpha) or real(alpha, *rest))
    play(GoodputGamma(0.1, CHEAP, 4, 32, prior_alpha=0.9), True, 20)
    assert len(looked) == 20 == len(set(looked)), "every round is judged"
    looked.clear()
    play(GoodputGamma(0.1, DEAR, 4, 32, prior_alpha=0.9), True, 20)
    assert len(looked) == 1, "nothing is judged while nobody drafts"


def test_goodput_learns_from_the_whole_batch() -> None:
    hopeful = GoodputGamma(0.2, CHEAP, 4, 8, prior_alpha=0.9, prior_weight=16)
    assert play(hopeful, False, 40)[-1] == 0 and hopeful.alpha < 0.25
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
            assert [x["emitted"] for x in arm["blocks"]] == [12 * max(2, 2 * b["rows"])] * 8, "every block and arm does the same work"
            assert arm["tokens_per_s"] == pytest.approx(sum(x["emitted"] for x in arm["blocks"]) / sum(x["wall_s"] for x in arm["blocks"]))
            assert arm["tokens_per_s"] <= arm["decode_tokens_per_s"], "wall time holds the prefill"
        for name in ("fixed", "adaptive"):
            assert b["arms"][name]["ratio"]["estimate"] == pytest.approx(
                b["arms"][name]["tokens_per_s"] / b["arms"]["plain"]["tokens_per_s"]
            )
        assert b["goodput"]["speedup_by_gamma"]["0"] == 1.0
    slower = [b["rows"] for b in result["batches"] if b["arms"]["adaptive"]["ratio"]["high"] < 1]
    assert result["adaptive_slower_at"] == slower and result["adaptive_never_slower"] is (not slower)
    assert {k: result[k] for k in ("stops_paying_at", "adaptive_never_slower", "adaptive_slower_at")} == verdict(result["batches"])
    assert all(b["other_cores"] >= 0 for b in result["batches"]) and result["blocks"] == 8
    for b in result["batches"]:
        assert b["costs"]["sampling"]["temperature"] == result["temperature"], "a plain step's own draw is in the costs"


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


def ratio(low: float, high: float) -> dict[str, Any]:
    return {"estimate": (low * high) ** 0.5, "low": low, "high": high, "method": "bootstrap-t"}


def batches(fixed: Sequence[tuple[float, float]], varied: Sequence[tuple[float, float]] = ()) -> list[dict[str, Any]]:
    rows = [1, 4, 16, 64][: len(fixed)]
    found = [{"rows": r, "arms": {"fixed": {"ratio": ratio(*x)}}} for r, x in zip(rows, fixed, strict=True)]
    for b, x in zip(found, varied, strict=False):
        b["arms"]["adaptive"] = {"ratio": ratio(*x)}
    return found


GAINS, LOSES, OPEN = (1.1, 1.4), (0.7, 0.9), (0.9, 1.3)


@pytest.mark.parametrize(
    ("fixed", "stops"),
    [
        ([GAINS, GAINS, LOSES], 16), ([GAINS, LOSES, GAINS], None), ([LOSES, LOSES, LOSES], 1), ([GAINS, OPEN, LOSES], 4), ([OPEN], 1), ([GAINS], None),
        ([LOSES, GAINS, OPEN, LOSES], 16),
    ],
)  # fmt: skip
def test_speculation_stops_paying_where_it_is_not_proven_to_gain_any_more(fixed: list[tuple[float, float]], stops: int | None) -> None:
    assert verdict(batches(fixed))["stops_paying_at"] == stops
    assert verdict(batches(fixed)[::-1])["stops_paying_at"] == stops, "in any order"
    assert verdict(batches(fixed))["adaptive_never_slower"] is None, "it did not run"


def test_never_slower_is_said_of_intervals() -> None:
    assert verdict(batches([LOSES] * 2, [OPEN, GAINS]))["adaptive_never_slower"] is True
    assert verdict(batches([LOSES] * 2, [OPEN, LOSES])) == {"stops_paying_at": 1, "adaptive_never_slower": False, "adaptive_slower_at": [4]}


def test_no_interval_proves_no_gain() -> None:
    found = batches([(1.4, 1.4)])
    found[0]["arms"]["fixed"]["ratio"]["method"] = "none: one prompt"
    assert verdict(found)["stops_paying_at"] == 1


def scored(home: Path, **faster: float) -> dict[str, Any]:
    """A score in which these arms have these speed-ups."""
    result = read_json(home / "run" / "score" / "score.json")
    for row in result["arms"]:
        if row["arm"] in faster:
            row["speedup"] = {**row["speedup"], "estimate": faster[row["arm"]]}
    return result


def test_the_policy_gates_all_that_proposes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lookup with the draft behind it is the fastest, and verifying is so dear that nothing should be proposed: nothing is."""
    path = borrowed(tmp_path, *WHOLE)
    recipe, run = opened(path, "evaluate.batches=[2]", "evaluate.load_prompts=8")
    real = load._costs

    def dear(*arguments: Any) -> Costs:
        found = real(*arguments)
        return replace(found, verify_s={w: s if w == "1" else 9.0 * int(w) * found.verify_s["1"] for w, s in found.verify_s.items()})

    monkeypatch.setattr(load, "_costs", dear)
    result = scored(tmp_path, composite=9.0, tuned=1.1)
    (batch,) = load._measure(recipe, run, result, tmp_path)["batches"]
    assert batch["arms"]["fixed"]["mean_gamma"] > 0.5
    assert batch["arms"]["adaptive"]["mean_gamma"] < 0.05 and batch["arms"]["adaptive"]["tau"] < 1.05
    chosen = load._chosen(result, recipe)
    assert chosen["fixed"]["kind"] == "composite" and chosen["adaptive"]["kind"] == "tuned"
    without = {**result, "arms": [r for r in result["arms"] if r["kind"] != "tuned"]}
    assert set(load._chosen(without, recipe)) == {"fixed"}, "nobody's gamma could be varied"


class Spy:
    """A decoder that notes what it is given; making programs takes part of its time."""

    def __init__(self, made_s: float = 0.0) -> None:
        self.given: list[list[Request]] = []
        self.made_s = made_s

    def run(self, requests: list[Request]) -> list[Any]:
        self.given.append(requests)
        return [SimpleNamespace(engine={"warm_s": self.made_s})]


def test_captures_are_in_no_wall_time(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ("decode_s", "prefill_s", "emitted", "rounds", "proposed", "accepted")
    monkeypatch.setattr(load, "metrics", lambda traces: dict.fromkeys(keys, 1))
    monkeypatch.setattr(load, "check", lambda traces: None)
    clock = iter(range(0, 100, 5))
    monkeypatch.setattr(load, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    found = load._run({"plain": Spy(), "fixed": Spy(made_s=2.0)}, [[Request([1], 4)]], 4, 1)  # type: ignore[dict-item]
    assert [found[n][0]["wall_s"] for n in ("plain", "fixed")] == [5.0, 3.0]


def test_a_whole_block_goes_before_what_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = borrowed(tmp_path, *WHOLE)
    recipe, run = opened(path, "evaluate.batches=[2]", "evaluate.load_prompts=8")
    seen: list[tuple[int, int, int]] = []
    real = load.Decoder.run

    def noted(self: Any, requests: Any, *rest: Any) -> Any:
        seen.append((id(self), len(requests), max(r.max_new_tokens for r in requests)))
        return real(self, requests, *rest)

    monkeypatch.setattr(load.Decoder, "run", noted)
    load._measure(recipe, run, scored(tmp_path), tmp_path)
    decoders = list(dict.fromkeys(d for d, _, _ in seen))
    assert len(decoders) == 3 and [d for d, _, _ in seen[:3]] == decoders
    for d in decoders:
        mine = [(count, length) for other, count, length in seen if other == d]
        assert len(mine) == 1 + 8 and set(mine) == {(4, recipe.evaluate.timed_tokens)}, "the warm-up is a block like the others"


def test_a_candidate_that_failed_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"one": {}, "broken": {"train": {"learning_rate": 2e-3}}}
    path = borrowed(tmp_path, *WHOLE[:-1], train={"candidates": own}, evaluate={"candidates": ["untuned", "tuned"]})
    recipe, run = opened(path, "evaluate.batches=[2]")
    note_failure(stages(recipe, run)[draft_stage("broken")], ValueError("no"))
    rows = [r for r in scored(finished())["arms"] if r["arm"] in ("plain", "untuned", "tuned")]
    rows = [{**r, "arm": "one", "candidate": "one"} if r["arm"] == "tuned" else r for r in rows]
    for r in rows:
        if r["arm"] == "untuned":
            r["speedup"] = {**r["speedup"], "estimate": 9.0}  # every candidate's draft before training would be opened
    opening: list[Any] = []

    def noted(recipe: Any, folders: Any) -> Any:
        opening.append((set(folders), recipe.evaluate.candidates))
        raise KeyboardInterrupt

    monkeypatch.setattr(load, "open_bench", noted)
    with pytest.raises(KeyboardInterrupt):
        load._measure(recipe, run, {"winner": {"temperature": 0.7}, "publish": "one", "arms": rows}, tmp_path)
    assert opening == [({"one"}, ("untuned", "tuned"))]
