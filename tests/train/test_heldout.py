"""Held-out alpha and expected tokens per round: against enumeration, with the head that is decoded from, in the target's own precision."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState

from draftstill.decode import ModelDrafter, Sampling, make_network, probabilities
from draftstill.decode.theory import expected_tokens
from draftstill.distill import Recording
from draftstill.distill.recording import write_manifest, write_shard
from draftstill.errors import DraftstillError
from draftstill.train.heldout import MEASURED, HeldOut, expected_accepted, measure, told
from draftstill.train.launch import train
from draftstill.train.loop import Job
from tests.pipeline import REAL, borrowed, finished, make_model, opened
from tests.train.jobs import RECORDED, Stop, facts_of, job_of, stop_at

DEPLOY = Sampling(0.7, 40, 0.9)


@pytest.mark.parametrize("gamma", [1, 2, 5])
def test_tau_is_the_sum_over_rounds_from_each_position(gamma: int) -> None:
    alpha, kept = torch.rand(2, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for inner in (kept, alpha):
        total = 0.0
        for start in range(11):
            for accepted in range(1, gamma + 1):
                if start + accepted <= 11:
                    total += float(inner[start : start + accepted - 1].prod() * alpha[start + accepted - 1])
        found = expected_accepted(alpha, gamma, None if inner is alpha else inner)
        assert float(found) == pytest.approx(total, rel=1e-12)


# --- against enumeration -----------------------------------------------------------------------------------------------------

V, N = 3, 4
"""Ids, and positions of a text: V ** (N - 1) texts begin with the same token."""


@functools.cache
def law(who: str, context: tuple[int, ...]) -> torch.Tensor:
    """p or q of the token behind a context; far from each other in some, close in others, one id ruled out by p here and there."""
    seed = (1 if who == "p" else 1000) + sum((i + 1) * 7**n for n, i in enumerate(context))
    z = 2.5 * torch.randn(V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if who == "q" and len(context) % 2:
        z = 0.8 * law("p", context).log().clamp_min(-30) + 0.2 * z
    if who == "p" and sum(context) % 4 == 1:
        z[0] = -torch.inf
    return z.softmax(-1)


def texts(count: int) -> Iterator[tuple[int, ...]]:
    yield from ((0, *rest) for rest in itertools.product(range(V), repeat=count - 1))


def written_by_p(text: tuple[int, ...]) -> float:
    return float(torch.stack([law("p", text[:n])[text[n]] for n in range(1, len(text))]).prod()) if len(text) > 1 else 1.0


def truth(gamma: int) -> float:
    """Tokens that rounds from each position keep, summed: over all contexts that p writes and all guesses that q makes there."""
    total = 0.0
    for start in range(N):
        for context in texts(start + 1):
            for k in range(1, min(gamma, N - start) + 1):
                for guess in itertools.product(range(V), repeat=k):
                    kept = 1.0
                    for n, token in enumerate(guess):
                        p, q = (float(law(who, (*context, *guess[:n]))[token]) for who in "pq")
                        kept *= min(p, q)
                    total += written_by_p(context) * kept
    return total


@pytest.mark.parametrize("gamma", [1, 2, 4])
def test_along_texts_of_the_target_it_is_what_rounds_keep(gamma: int) -> None:
    found = naive = 0.0
    for text in texts(N):
        laws = [(law("p", text[: n + 1]), law("q", text[: n + 1])) for n in range(N)]
        alpha = torch.stack([torch.minimum(p, q).sum() for p, q in laws])
        kept = torch.tensor([min(1.0, float(q[t] / p[t])) if p[t] > 0 else 0.0 for (p, q), t in zip(laws, (*text[1:], 0), strict=True)])
        share = written_by_p(text)
        found += share * float(expected_accepted(alpha, gamma, kept))
        naive += share * float(expected_accepted(alpha, gamma))
    assert found == pytest.approx(truth(gamma), rel=1e-5)
    assert gamma == 1 or abs(naive - truth(gamma)) > 0.01, "products of alphas are another figure"


def test_at_one_alpha_it_is_the_closed_formula() -> None:
    N = 20_000
    for a in (0.0, 0.4, 1.0):
        tau = 1 + float(expected_accepted(torch.full((N,), a), 4)) / N
        assert tau == pytest.approx(expected_tokens(a, 4), rel=1e-3)


def test_acceptances_that_go_together_are_worth_more_than_their_mean() -> None:
    """What a product of means would miss."""
    runs = torch.tensor([0.9] * 50 + [0.1] * 50, dtype=torch.float64)
    assert 1 + float(expected_accepted(runs, 3)) / 100 > expected_tokens(0.5, 3) + 0.2


def test_short_and_empty_texts() -> None:
    assert float(expected_accepted(torch.tensor([0.5]), 4)) == 0.5 and float(expected_accepted(torch.tensor([]), 4)) == 0.0
    assert float(expected_accepted(torch.tensor([0.5]), 4, torch.tensor([0.1]))) == 0.5


# --- on a recording, with the head that is decoded from ----------------------------------------------------------------------


@functools.cache
def pair() -> tuple[Any, Any, Recording]:
    """Target, another model with its vocabulary, and the finished run's held-out recording."""
    return make_model(), make_model(5, 2), Recording(finished() / "run" / "recording" / "heldout")


def measured(recording: Recording, deploy: Sampling = DEPLOY, gamma: int = 3, ids: torch.Tensor | None = None) -> HeldOut:
    target, draft, _ = pair()
    hidden_of = lambda x: draft.model(x, use_cache=False).last_hidden_state  # noqa: E731
    return measure(hidden_of, draft.lm_head.weight.detach()[:REAL], recording, target.lm_head.weight.detach()[:REAL], deploy, gamma, ids)


@pytest.mark.parametrize("deploy", [DEPLOY, Sampling(0.7), Sampling(0.0)], ids=["nucleus", "0.7", "greedy"])
@pytest.mark.parametrize("count", [0, 60])
def test_alpha_and_tau_are_those_of_the_law_that_the_decoder_draws_from(count: int, deploy: Sampling) -> None:
    """Position by position, from the two models' own logits; a draft's law over kept ids is as the decoder's network gives it."""
    target, draft, heldout = pair()
    ids = torch.randperm(REAL, generator=torch.Generator().manual_seed(3))[:count] if count else None
    found = measured(heldout, deploy, 3, ids)
    network = make_network(draft, vocab=REAL, head_ids=None if ids is None else ids.sort().values)
    assert ModelDrafter(network, 3).network.columns == (count or REAL)
    deployed, one, accepted, positions = by_hand(network, ids, deploy)
    assert found.positions == positions and found.gamma == 3
    assert found.alpha_deploy == pytest.approx(deployed, abs=1e-4)
    assert found.alpha == pytest.approx(one, abs=1e-4), "at temperature 1 of the whole head, whatever is cut"
    assert found.tau == pytest.approx(1 + accepted, abs=1e-3)


@torch.inference_mode()
def by_hand(network: Any, ids: torch.Tensor | None, deploy: Sampling) -> tuple[float, float, float, int]:
    """(alpha as deployed, alpha at temperature 1, accepted tokens a round at gamma 3, positions), from the two models' own logits."""
    target, draft, heldout = pair()
    sums, positions = torch.zeros(3, dtype=torch.float64), 0
    for i in range(len(heldout)):
        item = heldout[i]
        z_p, hidden = target(item.tokens[None], use_cache=False).logits[0, :, :REAL], draft.model(item.tokens[None], use_cache=False)[0]
        p, q = probabilities(z_p, deploy), torch.zeros(len(item.tokens), REAL)
        q[:, slice(None) if ids is None else ids.sort().values] = probabilities(network.logits(hidden)[0], deploy)
        rows = item.rows.tolist()
        alpha = [float(torch.minimum(p[r], q[r]).sum()) for r in rows]
        kept = []
        for r, a in zip(rows, alpha, strict=True):
            token = int(item.tokens[r + 1]) if r + 1 < len(item.tokens) else 0
            kept.append(min(1.0, float(q[r, token] / p[r, token])) if p[r, token] > 0 else a)
        plain = torch.minimum(z_p.softmax(-1), draft(item.tokens[None], use_cache=False).logits[0, :, :REAL].softmax(-1)).sum(-1)[item.rows]
        sums += torch.tensor([sum(alpha), float(plain.sum()), float(expected_accepted(torch.tensor(alpha), 3, torch.tensor(kept)))])
        positions += len(rows)
    deployed, one, accepted = (sums / positions).tolist()
    return deployed, one, accepted, positions


def test_a_cut_head_counts_for_less_and_decides_what_is_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = job_of(borrowed(tmp_path / "whole", *RECORDED))
    cut = job_of(borrowed(tmp_path / "cut", *RECORDED, draft={"head_tokens": 40}))
    one, other = whole.held_out(), cut.held_out()
    assert other.alpha == one.alpha and other.top1 == one.top1
    assert other.alpha_deploy < one.alpha_deploy - 0.05 and other.tau < one.tau
    cut._measure()
    assert cut.best is not None and cut.best["alpha_deploy"] == other.alpha_deploy
    assert f"held-out alpha {other.alpha_deploy:.3f} (deployment, 40 ids), {other.alpha:.3f} (T = 1)" in capsys.readouterr().out


def test_measurements_of_two_heads_are_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training that goes on with another head would compare its best with what was measured otherwise; a finished draft may be scored so."""
    path = borrowed(tmp_path, *RECORDED, draft={"head_tokens": 40})
    with monkeypatch.context() as patch, pytest.raises(Stop):
        stop_at(patch, Job, "_optimize", 6)
        train(*opened(path))
    with pytest.raises(DraftstillError, match="guesses among 40 ids") as caught:
        train(*opened(path, "draft.head_tokens=0"))
    assert caught.value.key == "draft.head_tokens" and "draft.head_tokens=40" in str(caught.value)
    folder = train(*opened(path))
    assert train(*opened(path, "draft.head_tokens=0")) == folder


# --- what it is called -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MEASURED)
def test_the_line_says_what_was_measured(mode: str) -> None:
    line = told(HeldOut(0.3, 0.4, 0.5, 10, 1.9, 3), mode, 0)
    assert line == f"{MEASURED[mode]} 0.400 (deployment), 0.300 (T = 1), top-1 0.500, tau 1.90 at gamma 3"
    assert line.startswith({"hidden": "alpha 0.4", "topk": "alpha at least 0.4", "text": "mean q of the written token 0.4"}[mode])


@pytest.mark.parametrize("mode", ["topk", "text"])
def test_what_a_server_or_a_text_lets_one_know(mode: str, tmp_path: Path) -> None:
    """A bound below the exact alpha; the mean of q at the written token. tau multiplies what stands for alpha."""
    target, draft, heldout = pair()
    items = [heldout[i] for i in range(len(heldout))]
    columns: dict[str, torch.Tensor] = {}
    if mode == "topk":
        with torch.inference_mode():
            logp = torch.cat([target(x.tokens[None], use_cache=False).logits[0, :, :REAL].log_softmax(-1) for x in items])
        top = logp.topk(16)
        columns = {"ids": top.indices.to(torch.uint16), "logp": top.values, "tail": (1 - top.values.exp().sum(-1)).clamp_min(0)}
    masks = [range(x.start, len(x.tokens) - (mode == "text")) for x in items]
    write_shard(tmp_path / "shard-00000.safetensors", [x.tokens.tolist() for x in items], [x.start for x in items], columns, masks=masks)
    write_manifest(tmp_path, {"mode": mode, "vocab": REAL, "top_k": 16, "temperature": 1.0})
    found, exact = measured(Recording(tmp_path), Sampling(0.7)), measured(heldout, Sampling(0.7))
    assert found.alpha_deploy < exact.alpha_deploy and found.tau < exact.tau
    if mode == "topk":
        assert found.alpha_deploy > 0.2 * exact.alpha_deploy and found.positions == exact.positions
        return
    with torch.inference_mode():
        laws = [(0.7**-1 * draft(x.tokens[None], use_cache=False).logits[0, :, :REAL]).softmax(-1) for x in items]
    q = torch.cat([law[x.start : -1].gather(1, x.tokens[x.start + 1 :, None])[:, 0] for law, x in zip(laws, items, strict=True)])
    assert found.alpha_deploy == pytest.approx(float(q.mean()), abs=1e-5) and found.positions == len(q)


# --- precision ---------------------------------------------------------------------------------------------------------------


def test_the_targets_law_keeps_its_precision_beside_a_draft_in_bfloat16(tmp_path: Path) -> None:
    """What the draft is compared with does not depend on how the draft is computed."""
    AcceleratorState._reset_state(True)  # one process holds one mixed precision
    try:
        job = job_of(borrowed(tmp_path, *RECORDED, train={"bf16": True}))
        found = job.held_out()
        draft, head = job.module.model, job.target_head
        total = count = 0.0
        with torch.inference_mode():
            for i in range(len(job.heldout)):
                item = job.heldout[i]
                assert item.hidden is not None
                with torch.autocast("cpu", torch.bfloat16):
                    hidden = draft.model(item.tokens[None], use_cache=False).last_hidden_state[0]
                q = (hidden[item.rows].bfloat16() @ draft.lm_head.weight[: job.draft.vocab].bfloat16().T).float().softmax(-1)
                p = (item.hidden[item.rows].float() @ head.float().T).softmax(-1)
                total, count = total + float(torch.minimum(p, q).sum()), count + len(item.rows)
                rough = (item.hidden[item.rows].bfloat16() @ head.bfloat16().T).float().softmax(-1)
                assert float((rough - p).abs().max()) > 1e-3, "rounding would be seen"
    finally:
        AcceleratorState._reset_state(True)
    assert head.dtype == torch.float32 and found.alpha == pytest.approx(total / count, abs=1e-6)
    assert facts_of(finished() / "run" / "draft")["curve"][0]["alpha"] == pytest.approx(found.alpha, abs=0.02)
