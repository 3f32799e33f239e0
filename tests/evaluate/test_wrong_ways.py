"""Known ways of measuring speculative decoding wrongly, one test each: what others have published by mistake must fail here."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftstill.decode import Decoder, ModelDrafter, Network, Request, Sampling, probabilities
from draftstill.decode import round as rounds
from draftstill.decode.trace import Round, Trace, check, metrics
from draftstill.distill import Prompt
from draftstill.distill.divergences import alpha
from draftstill.evaluate.arms import PLAIN, Bench, open_bench
from draftstill.evaluate.audit import failures, ties
from draftstill.evaluate.choosing import best_arm
from draftstill.evaluate.forced import forced
from draftstill.evaluate.scoring import score
from draftstill.evaluate.stats import paired_ratio, pooled_ratio
from draftstill.runfolder import read_json
from tests.decode.conftest import make_model, noised
from tests.pipeline import SETTINGS, borrowed, finished, opened

TRAINED = ("corpus", "responses", "recording", "draft")
PROMPT = [3, 7, 11, 5, 2]


@pytest.fixture(scope="module")
def pair() -> tuple[Network, Network]:
    target = make_model()
    return Network(target), Network(noised(target, 0.3))


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return read_json(finished() / "run" / "score" / "score.json")  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def bench() -> Bench:
    recipe, _ = opened(finished() / "recipe.yaml")
    return open_bench(recipe, finished() / "run" / "draft", dtype="float32")


def decoder(pair: tuple[Network, Network], **options: Any) -> Decoder:
    return Decoder(pair[0], ModelDrafter(pair[1], 4), **options)


def test_01_the_bonus_token_is_not_an_accepted_one(pair: tuple[Network, Network]) -> None:
    for length in range(1, 9):
        for draft in pair:  # the target itself accepts everything
            m = metrics(Decoder(pair[0], ModelDrafter(draft, 4)).run([Request(PROMPT, length)]))
            assert m["accepted"] <= m["proposed"] and m["tau"] <= 5 and m["emitted"] == m["accepted"] + m["bonus"]
            assert m["token_acceptance"] is None if not m["proposed"] else 0 <= m["token_acceptance"] <= 1
    with pytest.raises(AssertionError, match="more than proposed"):
        check([Trace(1, [1, 2, 3], [Round("model", 2, 3, 3)])])


def test_02_what_falls_behind_the_end_of_a_text_is_not_counted(pair: tuple[Network, Network]) -> None:
    plain = Decoder(pair[0]).run([Request(PROMPT, 12)])[0].tokens
    end = plain[5]
    (trace,) = Decoder(pair[0], ModelDrafter(pair[0], 4), eos=[end]).run([Request(PROMPT, 12)])
    assert trace.tokens == plain[: plain.index(end) + 1] and trace.finish == "eos"
    assert sum(r.accepted for r in trace.rounds) <= len(trace.tokens) == sum(r.emitted for r in trace.rounds)
    assert metrics([trace])["token_acceptance"] == 1.0, "a self-pair scores 1 however its text ends"


def test_03_the_baseline_is_the_same_engine_with_the_same_weights_and_backend(bench: Bench) -> None:
    arms = {name: bench.decoder(name, Sampling(0.0)) for name in bench.arms}
    assert len({id(d.target) for d in arms.values()}) == 1 and {type(d) for d in arms.values()} == {Decoder}
    assert {d.backend for d in arms.values()} == {arms[PLAIN].backend} and {d.target.packed for d in arms.values()} == {
        arms[PLAIN].target.packed
    }
    assert arms[PLAIN].gamma == 0 and arms[PLAIN].drafter is None


def test_04_both_arms_count_tokens_alike_and_do_the_same_work(result: dict[str, Any]) -> None:
    for arm in result["arms"]:
        assert {p["emitted"] for p in arm["per_prompt"]} == {SETTINGS["evaluate"]["max_new_tokens"]}


def test_05_a_speedup_is_paired_and_a_ratio_of_sums(result: dict[str, Any]) -> None:
    assert paired_ratio([2, 4], [1, 1], [10, 20], [10, 10]).estimate == pytest.approx(2.0), "not 1.75, the mean of ratios"
    rng = np.random.default_rng(0)
    slow, n = rng.uniform(1, 9, 12), np.full(12, 10)
    assert paired_ratio(slow, slow / 1.5 * rng.normal(1, 0.01, 12), n, n).excludes(1.0), "what prompts share is no noise"
    plain = next(a for a in result["arms"] if a["arm"] == PLAIN)
    for arm in result["arms"]:
        assert [p["prompt"] for p in arm["per_prompt"]] == [p["prompt"] for p in plain["per_prompt"]]


def test_06_an_error_ends_the_score_and_leaves_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = borrowed(tmp_path, *TRAINED, evaluate={"candidates": ["lookup"], "audit_prompts": 0, "temperatures": [0.7]})
    real, calls = Decoder.run, []

    def failing(self: Decoder, *args: Any, **options: Any) -> Any:
        calls.append(self.drafter is not None)
        if sum(calls) == 3:  # the second timing of the arm, after its warm-up
            raise RuntimeError("out of memory")
        return real(self, *args, **options)

    monkeypatch.setattr(Decoder, "run", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        score(*opened(path))
    assert not (tmp_path / "run" / "score").exists()
    kept = sorted(p.parent.name for p in (tmp_path / "run" / "score.partial" / "cells" / "timing").rglob("lookup*.json"))
    assert kept == ["0000"], "the failed prompt has no timing, and not that of its neighbour either"


def test_07_warm_up_is_not_timed_and_is_stated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = borrowed(tmp_path, *TRAINED, evaluate={"candidates": ["lookup"], "audit_prompts": 0, "temperatures": [0.7]})
    real, seen = Decoder.run, set()

    def slow_at_first(self: Decoder, *args: Any, **options: Any) -> Any:
        traces = real(self, *args, **options)
        if id(self) not in seen and self.rows == 1:
            seen.add(id(self))
            traces[0].rounds[0].host_s += 1000.0  # as a compiler would take it
        return traces

    monkeypatch.setattr(Decoder, "run", slow_at_first)
    found = score(*opened(path))
    assert seen and all(a["metrics"]["decode_s"] < 100 for a in found["arms"])
    assert found["conditions"]["warm_up_s"] >= 0


def test_08_prefill_is_apart_from_decoding() -> None:
    trace = Trace(900, list(range(10)), [Round("none", 0, 0, 1, verify_s=0.1) for _ in range(10)], prefill_s=1.0)
    m = metrics([trace])
    assert m["tokens_per_s"] == pytest.approx(10.0) and m["prefill_s"] == 1.0 and m["decode_s"] == pytest.approx(1.0)


def test_09_every_figure_states_its_temperature_and_both_are_scored(result: dict[str, Any]) -> None:
    assert {a["temperature"] for a in result["arms"]} == {0.0, 0.7}
    assert all("temperature" in r for r in [*result["arms"], *result["sweep"], *result["comparisons"], result["winner"]])
    assert {"top_k", "top_p", "gamma", "dtype", "device", "seed", "versions", "rows"} <= set(result["conditions"])


def test_10_arms_are_ranked_by_speed_not_by_acceptance() -> None:
    def row(arm: str, acceptance: float, speed: float) -> dict[str, Any]:
        interval = {"estimate": speed, "low": speed - 0.1, "high": speed + 0.1, "method": "bootstrap-t"}
        counts = {"acceptance": {"estimate": acceptance}, "predicted": interval, "tau": None}
        return {"arm": arm, "kind": "tuned", "candidate": arm, "swept": 3, "temperature": 0.0, "speedup": interval, "counts": counts,
                "acceptance": {"estimate": acceptance}}  # fmt: skip

    chosen = best_arm([row("seldom", 0.95, 1.1), row("often", 0.55, 1.6)])
    assert chosen is not None and chosen["arm"] == "often"


@torch.inference_mode()
def test_11_alpha_is_the_overlap_of_the_laws_not_the_chance_of_an_exact_match(pair: tuple[Network, Network]) -> None:
    written = Decoder(pair[0], sampling=Sampling(1.0)).run([Request(PROMPT, 12, seed=1)])[0].tokens
    (found,) = forced(pair[0], {"d": pair[1]}, [(PROMPT, written)], Sampling(1.0))
    laws = []
    for network in pair:
        ids = torch.tensor([[*PROMPT, *written]])
        hidden = network.forward(ids, network.new_cache(1, ids.shape[1]), [0])[0, len(PROMPT) - 1 : -1]
        laws.append(probabilities(network.logits(hidden), Sampling(1.0)))
    p, q = laws
    assert found["drafts"]["d"]["alpha"] == pytest.approx(torch.minimum(p, q).sum(-1).tolist(), abs=1e-4)
    assert (p * q).sum(-1).mean() < 0.9 * torch.minimum(p, q).sum(-1).mean(), "the two definitions differ on this pair"


def test_12_a_difference_in_a_low_precision_dtype_passes_only_at_a_tie(pair: tuple[Network, Network]) -> None:
    plain = Decoder(pair[0]).run([Request(PROMPT, 6)])[0].tokens
    prompt = Prompt("p", PROMPT, len(PROMPT))
    network = copy.copy(pair[0])
    network.logits = lambda hidden: pair[0].logits(hidden) * 0  # type: ignore[method-assign]
    wrong = [*plain[:2], (plain[2] + 1) % 90, *plain[3:]]
    tie, error = (ties(n, [prompt], {PLAIN: [plain], "d": [wrong]}, "bfloat16") for n in (network, pair[0]))
    assert (tie["tied"], tie["failed"]) == (1, 0) and (error["tied"], error["failed"]) == (0, 1)
    assert failures({"greedy_fp32": {"prompts": 1, "identical": 1}, "ties": error})


def test_13_a_run_does_not_inherit_the_counts_of_an_earlier_one(pair: tuple[Network, Network]) -> None:
    used = decoder(pair, sampling=Sampling(0.7))
    other = [8, 1, 60]
    used.run([Request(other, 30, seed=4)])
    fresh = decoder(pair, sampling=Sampling(0.7))
    again, first = used.run([Request(PROMPT, 20, seed=1)])[0], fresh.run([Request(PROMPT, 20, seed=1)])[0]
    count = lambda t: [(r.proposed, r.accepted, r.emitted, r.draft_steps) for r in t.rounds]  # noqa: E731
    assert again.tokens == first.tokens and count(again) == count(first)


def test_14_training_and_decoding_mean_the_same_by_acceptance(pair: tuple[Network, Network]) -> None:
    """The loss's own alpha, the scorer's, and the share that the decoder accepts at the first position."""
    ids = torch.tensor([PROMPT])
    z_p, z_q = (n.logits(n.forward(ids, n.new_cache(1, 5), [0])[:, -1]) for n in pair)
    law = Sampling(1.0)
    trained = float(alpha(z_p.softmax(-1), z_q.softmax(-1)))
    draws = [Request(PROMPT, 3, seed=s) for s in range(800)]
    traces = decoder(pair, sampling=law, rows=32).run(draws)
    share = np.mean([t.rounds[0].accepted > 0 for t in traces])
    assert trained == pytest.approx(float(torch.minimum(*(probabilities(z, law) for z in (z_p, z_q))).sum()), abs=1e-5)
    assert abs(share - trained) < 4 * np.sqrt(trained * (1 - trained) / 800)


def test_15_the_time_of_a_round_is_split_and_the_parts_add_up(pair: tuple[Network, Network]) -> None:
    engine = decoder(pair)
    (trace,) = engine.run([Request(PROMPT, 100)])
    m = metrics([trace])
    assert m["decode_s"] == pytest.approx(sum(m[k] for k in ("draft_s", "verify_s", "sample_s", "host_s")))
    assert all(m[k] > 0 for k in ("draft_s", "verify_s", "sample_s")) and engine.accounted is not None and engine.accounted > 0.7


def test_16_a_backend_that_was_not_had_is_named(pair: tuple[Network, Network], result: dict[str, Any]) -> None:
    engine = decoder(pair, backend="graphs")
    (trace,) = engine.run([Request(PROMPT, 4)])
    assert trace.engine["backend"] == "eager" and trace.engine["asked"] == "graphs" and trace.engine["fallback"]
    assert result["conditions"]["backend"] == "eager"


@torch.inference_mode()
def test_17_acceptance_is_judged_by_the_law_that_was_sampled_from(pair: tuple[Network, Network], monkeypatch: pytest.MonkeyPatch) -> None:
    law = Sampling(0.7, top_k=4)
    ids = torch.tensor([PROMPT])
    p, q = (probabilities(n.logits(n.forward(ids, n.new_cache(1, 5), [0])[:, -1]), law) for n in pair)
    exact = float(torch.minimum(p, q).sum())
    judged: list[float] = []
    real = rounds.accept_sampled

    def watched(p_: Any, proposal: Any, u: Any) -> Any:
        assert proposal.q_BGK.sum(-1) == pytest.approx(torch.ones(proposal.q_BGK.shape[:2]), abs=1e-5)
        assert ((proposal.q_BGK > 0).sum(-1) <= 4).all(), "q has the support that was sampled from"
        assert torch.equal(proposal.q_drawn_BG, proposal.q_BGK.gather(2, proposal.tokens_BG[..., None])[..., 0])
        judged.append(float((proposal.q_drawn_BG > 0).float().mean()))
        return real(p_, proposal, u)

    monkeypatch.setattr(rounds, "accept_sampled", watched)
    traces = decoder(pair, sampling=law, rows=32).run([Request(PROMPT, 3, seed=s) for s in range(640)])
    share = np.mean([t.rounds[0].accepted > 0 for t in traces])
    assert judged and set(judged) == {1.0}
    assert abs(share - exact) < 4 * np.sqrt(exact * (1 - exact) / 640) + 1e-3


def test_18_texts_that_are_missing_or_short_are_differences(pair: tuple[Network, Network]) -> None:
    plain = Decoder(pair[0]).run([Request(PROMPT, 6)])[0].tokens
    prompts = [Prompt(str(n), PROMPT, len(PROMPT)) for n in range(2)]
    short = ties(pair[0], prompts, {PLAIN: [plain, plain], "d": [plain, plain[:-1]]}, "bfloat16")
    assert short["failed"] == 1
    with pytest.raises(ValueError):
        ties(pair[0], prompts, {PLAIN: [plain, plain], "d": [plain]}, "bfloat16")
    assert failures({"greedy_fp32": {"prompts": 2, "identical": 1}}) and failures({})
    assert pooled_ratio([0], [0]) is None, "nothing to divide by is no zero"
