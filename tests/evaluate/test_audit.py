"""The audit passes on a sound decoder and fails on every planted fault."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftstill.decode import Decoder, acceptance, drafters, engine
from draftstill.decode import round as rounds
from draftstill.decode.trace import Round, Trace
from draftstill.distill import Prompt
from draftstill.evaluate import audit as audits
from draftstill.evaluate.arms import Bench, open_bench
from draftstill.evaluate.audit import audit, chi_squared, failures, greedy, identities, sampling, self_pair, step_at, ties
from draftstill.evaluate.auditing import audit_table
from draftstill.runfolder import read_json
from tests.pipeline import REAL, borrowed, command, finished, opened

DRAWS = 700


@pytest.fixture(scope="module")
def bench() -> Bench:
    recipe, _ = opened(finished() / "recipe.yaml")
    return open_bench(recipe, finished() / "run" / "draft", dtype="float32")


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    rng = np.random.default_rng(0)
    return [Prompt(f"p{n}", [int(t) for t in rng.integers(6, REAL, 8)], 8) for n in range(2)]


def checks(bench: Bench, prompts: list[Prompt], draws: int = DRAWS) -> list[str]:
    """Failures of the checks that look at the decoder."""
    watch: list[Trace] = []
    found = {"greedy_fp32": greedy(bench, prompts, watch), "self_pair": self_pair(bench, prompts, watch),
             "sampling": sampling(bench, prompts[0], draws, arm="tuned", watch=watch)}  # fmt: skip
    return failures({**found, "identities": identities(watch)})


def test_a_sound_decoder_passes(bench: Bench, prompts: list[Prompt]) -> None:
    assert checks(bench, prompts) == []


@pytest.mark.parametrize("arm", ["untuned", "tuned", "lookup", "composite"])
def test_every_arm_samples_the_law(arm: str, bench: Bench, prompts: list[Prompt]) -> None:
    found = sampling(bench, prompts[1], 400, arm=arm)
    assert found["p_value"] > 1e-3 and found["arm"] == arm and found["places"][0]["cells"] > 0 < found["places"][1]["cells"]


# --- planted faults ------------------------------------------------------------------------------------------------------------


def wrong_residual(patch: pytest.MonkeyPatch) -> None:
    """After a rejection the target's whole law, not what is left of it."""
    patch.setattr(acceptance, "_q_at", lambda proposal, accepted, like: torch.zeros_like(like))


def one_too_many(patch: pytest.MonkeyPatch) -> None:
    """The first rejected token stays."""
    for name in ("accept_greedy", "accept_sampled"):
        real = getattr(rounds, name)

        def late(scores: torch.Tensor, proposal: Any, *rest: Any, real: Callable[..., Any] = real) -> Any:
            accepted, _ = real(scores, proposal, *rest)
            accepted = torch.minimum(accepted + 1, proposal.counts_B)
            own = scores[torch.arange(len(accepted)), accepted] if scores.dim() == 3 else scores.gather(1, accepted[:, None])[:, 0]
            return accepted, own

        patch.setattr(rounds, name, late)


def another_law(patch: pytest.MonkeyPatch) -> None:
    """Acceptance is told a law that is flatter than the one sampled from."""
    real = drafters.draft_block

    def told(*args: Any, **options: Any) -> Any:
        proposal, steps = real(*args, **options)
        if proposal.q_BGK is not None:
            flat = proposal.q_BGK.sqrt()
            flat /= flat.sum(-1, keepdim=True)
            at = proposal.tokens_BG if proposal.ids_K is None else torch.searchsorted(proposal.ids_K, proposal.tokens_BG)
            proposal = replace(proposal, q_BGK=flat, q_drawn_BG=flat.gather(2, at[..., None])[..., 0])
        return proposal, steps

    patch.setattr(drafters, "draft_block", told)


def no_rollback(patch: pytest.MonkeyPatch) -> None:
    """Rejected tokens stay in the target's cache, and the text goes on behind them."""
    behind: dict[int, int] = {}
    shifts: list[int] = []
    commit, verify, verify_rows = Decoder.commit, engine.verify, Decoder._verify

    def counted(self: Decoder, item: Any, asked: Any, offered: Any, count: int, accepted: int, following: int) -> Any:
        behind[id(item.row)] = behind.get(id(item.row), 0) + count - accepted
        return commit(self, item, asked, offered, count, accepted, following)

    def noted(self: Decoder, rows: Any, *rest: Any) -> Any:
        shifts[:] = [behind.get(id(r), 0) for r in rows]
        return verify_rows(self, rows, *rest)

    def shifted(target: Any, cache: Any, ids: Any, starts: Any, *rest: Any) -> Any:
        return verify(target, cache, ids, [s + by for s, by in zip(starts, shifts, strict=True)], *rest)

    patch.setattr(Decoder, "commit", counted)
    patch.setattr(Decoder, "_verify", noted)
    patch.setattr(engine, "verify", shifted)


def kept_all(patch: pytest.MonkeyPatch) -> None:
    """Whatever is proposed is accepted."""
    patch.setattr(rounds, "accept_sampled", lambda p, proposal, u: (proposal.counts_B, p[torch.arange(len(p)), proposal.counts_B]))


def raw_target(patch: pytest.MonkeyPatch) -> None:
    """The target's law at another temperature than asked for."""
    real = engine.verify
    patch.setattr(engine, "verify", lambda *args: 0.7 * real(*args))


def miscounted(patch: pytest.MonkeyPatch) -> None:
    """The bonus token counts as accepted."""
    real = Decoder.commit

    def counting(self: Decoder, item: Any, *rest: Any) -> Any:
        new = real(self, item, *rest)
        item.trace.rounds[-1].accepted = item.trace.rounds[-1].emitted
        return new

    patch.setattr(Decoder, "commit", counting)


@pytest.mark.parametrize(("fault", "said"), [
    (wrong_residual, ["do not follow"]), (one_too_many, ["differ from plain", "do not follow"]), (another_law, ["do not follow"]),
    (no_rollback, ["differ from plain", "do not follow"]), (kept_all, ["do not follow"]), (raw_target, ["do not follow"]),
    (miscounted, ["contradict themselves", "instead of 1"]),
])  # fmt: skip
def test_a_planted_fault_fails_the_audit(fault: Callable[[pytest.MonkeyPatch], None], said: list[str], bench: Bench, prompts: list[Prompt],
                                         monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    with monkeypatch.context() as patch:
        fault(patch)
        # Three tokens give little room for a rollback that is left out: only rejections shift anything.
        wrong = checks(bench, prompts, 3 * DRAWS if fault is no_rollback else DRAWS)
    assert all(any(part in w for w in wrong) for part in said), wrong


# --- ties ---------------------------------------------------------------------------------------------------------------------


def test_a_step_is_the_distance_of_neighbours() -> None:
    for dtype in ("bfloat16", "float16"):
        for value in (1.0, 1.5, 3.9, 4.0, 17.0, 100.0):
            x = torch.tensor(value, dtype=getattr(torch, dtype))
            assert step_at(float(x), dtype) == float(torch.nextafter(x, torch.tensor(float("inf"), dtype=x.dtype)) - x)
            assert step_at(-float(x), dtype) == step_at(float(x), dtype)


def near(bench: Bench, prompt: Prompt, gap: float) -> tuple[Any, list[int], list[int]]:
    """The target with a second token's logit at this distance below the largest, and the two texts that then part there."""
    network = copy.copy(bench.target.network)
    real = network.logits
    plain = Decoder(bench.target.network, eos=()).run([audits.Request(prompt.ids, 6)])[0].tokens
    other = next(t for t in range(REAL) if t != plain[3])

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        found = real(hidden).clone()
        found[..., other] = found.amax(-1) - gap
        return found

    network.logits = logits  # type: ignore[method-assign]
    return network, plain, [*plain[:3], other, *plain[4:]]


@pytest.mark.parametrize(("steps", "tie"), [(0.0, True), (0.9, True), (7.5, True), (8.5, False), (32.0, False)])
def test_a_difference_is_a_tie_only_near_one(steps: float, tie: bool, bench: Bench, prompts: list[Prompt]) -> None:
    top = float(audits._next_logits(bench.target.network, [[*prompts[0].ids, *near(bench, prompts[0], 0.0)[1][:3]]]).max())
    network, plain, text = near(bench, prompts[0], steps * step_at(top, "bfloat16"))
    found = ties(network, prompts[:1], {"plain": [plain], "tuned": [text], "lookup": [plain]}, "bfloat16")
    assert (found["texts"], found["identical"], found["tied"], found["failed"]) == (2, 1, int(tie), int(not tie))
    (case,) = found["cases"]
    assert case["at"] == 3 and case["arm"] == "tuned" and case["steps"] == pytest.approx(steps, abs=1e-2)
    assert bool(failures({"greedy_fp32": {"prompts": 1, "identical": 1}, "ties": found})) is not tie


def test_a_text_that_ends_early_is_no_tie(bench: Bench, prompts: list[Prompt]) -> None:
    network, plain, _ = near(bench, prompts[0], 0.0)
    found = ties(network, prompts[:1], {"plain": [plain], "tuned": [plain[:2]]}, "bfloat16")
    assert found["failed"] == 1 and found["cases"][0]["at"] is None


def test_a_run_in_bfloat16_is_audited_for_ties(tmp_path: Path, prompts: list[Prompt]) -> None:
    recipe, _ = opened(borrowed(tmp_path, "corpus", "responses", "recording", "draft"), "target.dtype=bfloat16")
    found = audit(recipe, finished() / "run" / "draft", prompts[:1])
    assert found is not None and found["ties"]["texts"] == 4 and found["ties"]["failed"] == 0 and failures(found) == []


# --- chi-squared ----------------------------------------------------------------------------------------------------------------


def test_where_nothing_can_be_compared_nothing_was_tested(bench: Bench, prompts: list[Prompt]) -> None:
    """A handful of draws of a flat law: no token comes often enough. That is no p-value of 1."""
    flat = replace(bench, recipe=bench.recipe.model_copy(update={"respond": bench.recipe.respond.model_copy(
        update={"sampler": bench.recipe.respond.sampler.model_copy(update={"temperature": 50.0})})}))  # fmt: skip
    found = sampling(flat, prompts[0], 12, arm="tuned")
    assert found["p_value"] is None and all(p["p_value"] is None and p["cells"] == 0 for p in found["places"])
    assert failures({"greedy_fp32": {"prompts": 1, "identical": 1}, "sampling": found}) == [], "not passed, but not failed either"
    assert "not tested" in audit_table({"greedy_fp32": {"identical": 1, "prompts": 1, "arm_names": ["tuned"]}, "sampling": found,
                                        "self_pair": {"token_acceptance": 1.0}, "identities": {"traces": 1, "broken": 0}}, [])  # fmt: skip


def test_an_impossible_token_fails_even_where_nothing_else_can_be_compared(
    bench: Bench, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audits, "_cells", lambda counts, law: (math.inf, 1))
    assert sampling(bench, prompts[0], 40, arm="tuned")["p_value"] == 0.0


def test_of_several_arms_an_untested_one_hides_no_failure() -> None:
    of = lambda arm, p: {"arm": arm, "p_value": p}  # noqa: E731
    assert audits._worst([of("a", None), of("b", 1e-5)])["p_value"] == 1e-5  # type: ignore[index]
    both = audits._worst([of("a", 0.2), of("b", 1e-5), of("c", None)])
    assert both is not None and both["p_value"] == 2e-5 and both["arm"] == "b" and both["by_arm"] == {"a": 0.2, "b": 1e-5, "c": None}
    assert audits._worst([of("a", None)])["p_value"] is None  # type: ignore[index]


def test_a_scores_audit_samples_with_the_arms_it_is_told(bench: Bench, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audits, "sampling", lambda bench, prompt, draws, *, arm, watch: {"arm": arm, "p_value": 0.5, "draws": draws})
    told = lambda *arms: audit(bench.recipe, finished() / "run" / "draft", prompts[:1], arms=arms)["sampling"]["by_arm"]  # noqa: E731
    assert set(told("lookup", "composite")) == {"lookup", "composite"} and set(told()) == {"tuned"}


def test_chi_squared_is_uniform_under_the_law_and_sees_another() -> None:
    rng = np.random.default_rng(0)
    law = rng.dirichlet(np.full(300, 0.05))
    found = [chi_squared(np.bincount(rng.choice(300, 400, p=law), minlength=300).astype(float), law) for _ in range(400)]
    assert 0.02 <= np.mean(np.array(found) < 0.05) <= 0.08 and np.mean(np.array(found) < 1e-3) <= 0.01
    other = np.sqrt(law) / np.sqrt(law).sum()
    assert chi_squared(np.bincount(rng.choice(300, 400, p=other), minlength=300).astype(float), law) < 1e-6


def test_a_rare_token_is_no_alarm_and_an_impossible_one_is() -> None:
    law = np.array([0.9989, 0.001, 0.0001, 0.0])
    assert chi_squared(np.array([299.0, 0.0, 1.0, 0.0]), law) > 0.01
    assert chi_squared(np.array([299.0, 0.0, 0.0, 1.0]), law) == 0.0
    assert chi_squared(np.array([300.0]), np.array([1.0])) == 1.0


# --- the verb -------------------------------------------------------------------------------------------------------------------


def test_identities_tell_a_broken_trace() -> None:
    good, bad = Trace(1, [1, 2], [Round("model", 2, 1, 2)]), Trace(1, [1], [Round("model", 1, 2, 1)])
    assert identities([good]) == {"traces": 1, "broken": 0, "first": None}
    assert identities([good, bad])["broken"] == 1
    assert failures(None) and failures({"greedy_fp32": {"prompts": 0}})


def test_the_audit_alone_passes_or_exits_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = borrowed(tmp_path, "corpus", "responses", "recording", "draft")
    monkeypatch.setattr(audits, "_MANY_DRAWS", 150)
    assert command("evaluate", recipe, "--audit") == 0
    out = capsys.readouterr().out
    assert "passed" in out and "self-pair" in out
    found = read_json(tmp_path / "run" / "audit.json")
    assert found["failures"] == [] and set(found["sampling"]["by_arm"]) == {"untuned", "tuned", "lookup", "composite"}
    assert not (tmp_path / "run" / "score").exists() and not (tmp_path / "run" / "score.partial").exists()
    monkeypatch.setattr(
        rounds, "accept_greedy", lambda best, proposal: (proposal.counts_B, best.gather(1, proposal.counts_B[:, None])[:, 0])
    )
    assert command("evaluate", recipe, "--audit") == 2
    assert "FAILED" in capsys.readouterr().out
    assert command("evaluate", recipe, "--audit", "evaluate.audit_prompts=0") == 1
