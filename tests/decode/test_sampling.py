"""Sampled speculative decoding has exactly the target's distribution: against enumeration, not against itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from draftstill.decode import CompositeDrafter, Decoder, LookupDrafter, ModelDrafter, Network, Request, Sampling
from draftstill.decode.acceptance import Proposal, accept_sampled
from draftstill.decode.sampling import argmax, draw, probabilities, uniforms
from draftstill.decode.steady import draw_steadily
from tests.decode.conftest import make_model, noised

SAMPLERS = [Sampling(0.5), Sampling(1.0), Sampling(0.7, top_k=4), Sampling(1.0, top_p=0.8), Sampling(1.3, top_k=6, top_p=0.9)]


@pytest.mark.parametrize("sampling", SAMPLERS)
def test_processing_equals_transformers(sampling):
    logits = 3 * torch.randn(50, 40, generator=torch.Generator().manual_seed(0))
    z = TemperatureLogitsWarper(sampling.temperature)(None, logits) if sampling.temperature != 1 else logits
    if sampling.top_k:
        z = TopKLogitsWarper(sampling.top_k)(None, z)
    if sampling.top_p < 1:
        z = TopPLogitsWarper(sampling.top_p)(None, z)
    assert torch.allclose(probabilities(logits, sampling), z.softmax(-1), atol=1e-6)


def test_draw_follows_its_weights_and_skips_zeros():
    weights = torch.tensor([[0.0, 0.2, 0.0, 0.3, 0.5, 0.0]])
    u = torch.linspace(0, 1, 100_001, dtype=torch.float64)[:-1]
    picked = draw(weights.expand(len(u), -1), u)
    share = torch.bincount(picked, minlength=6) / len(u)
    assert torch.allclose(share, weights[0], atol=1e-4) and share[[0, 2, 5]].sum() == 0
    assert draw(weights, torch.tensor([1 - 2**-53], dtype=torch.float64)).item() == 4
    assert draw(weights * 1e-30, torch.tensor([0.0], dtype=torch.float64)).item() == 1


@pytest.mark.parametrize("shape", [(3, 1 << 14), (2, 5, 49_152), (4, 50_000)])
def test_argmax_is_the_first_largest(shape):
    z = torch.randn(shape, generator=torch.Generator().manual_seed(0)).round(decimals=1)  # many equals
    assert torch.equal(argmax(z), z.argmax(-1))
    z.fill_(-torch.inf)
    assert not argmax(z).any()
    z[..., 777] = torch.nan
    assert (argmax(z) == 777).all()


@pytest.mark.parametrize(("columns", "zeros"), [(5, 1), (64, 10), (70, 40), (300, 0)])
def test_a_steady_draw_follows_its_weights(columns, zeros):
    """With all ids in the race, and with most of them behind it."""
    g = torch.Generator().manual_seed(columns)
    weights = torch.rand(1, columns, generator=g) ** 3
    weights[0, torch.randperm(columns, generator=g)[:zeros]] = 0
    u = uniforms(g, 200_000)
    counts = sum(torch.bincount(draw_steadily(weights.expand(len(part), -1), part), minlength=columns) for part in u.split(20_000))
    assert chi_squared(counts.numpy(), (weights[0].double() / weights.double().sum()).numpy()) > 1e-3
    again = draw_steadily(weights.expand(1000, -1), u[:1000])
    assert torch.equal(again, draw_steadily(weights.expand(1000, -1) * 3, u[:1000])), "only shares count"


def test_a_steady_draw_gives_the_same_token_where_the_weights_differ_by_rounding():
    """As logits of a row alone and of the same row in a batch do."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(49_152, generator=g) * 2.5
    logits[torch.randperm(49_152, generator=g)[:40]] += 12
    noisy = logits + 2e-6 * torch.randn(49_152, generator=g)
    u = uniforms(g, 2_000)

    def changed(draw):
        one, two = (torch.cat([draw(z.softmax(-1).expand(100, -1), part) for part in u.split(100)]) for z in (logits, noisy))
        return int((one != two).sum())

    assert changed(draw) > 0 == changed(draw_steadily)


def chi_squared(counts: np.ndarray, law: np.ndarray) -> float:
    """p-value; cells with fewer than 5 expected draws are pooled, impossible cells must be empty."""
    assert counts[law <= 0].sum() == 0, "an impossible outcome was drawn"
    expected = law * counts.sum()
    big = expected >= 5
    observed, wanted = list(counts[big]), list(expected[big])
    if expected[~big].sum() > 0:
        observed.append(counts[~big].sum())
        wanted.append(expected[~big].sum())
    wanted = np.array(wanted) * (sum(observed) / sum(wanted))
    return stats.chisquare(observed, wanted).pvalue


def two_token_law(model, prompt, sampling, vocab):
    """Exact law of the first two tokens, by enumeration without a cache."""
    with torch.no_grad():
        p1 = probabilities(model(torch.tensor([prompt])).logits[:, -1, :vocab], sampling)[0]
        after = torch.tensor([[*prompt, t] for t in range(vocab)])
        p2 = probabilities(model(after).logits[:, -1, :vocab], sampling)
    return (p1[:, None] * p2).double().numpy()


@pytest.mark.parametrize("sampling", SAMPLERS, ids=str)
@pytest.mark.parametrize("name", ["noised", "independent", "lookup", "composite", "trimmed", "composite_trimmed", "plain", "steady"])
def test_first_two_tokens_follow_the_target(name, sampling):
    vocab, prompt, draws = 12, [3, 1, 4, 1, 5, 3, 1], 2000
    target = make_model(vocab=vocab, sharp=3.0)
    draft = make_model(vocab=vocab, seed=8, layers=1, sharp=3.0) if name == "independent" else noised(target, 0.4)
    lookup = LookupDrafter(3, vocab, torch.device("cpu"))
    kept = torch.tensor([0, 1, 3, 4, 7, 8, 11])
    model = lambda **kw: ModelDrafter(Network(draft, **kw), 2)  # noqa: E731
    drafter = {
        "lookup": lambda: lookup,
        "composite": lambda: CompositeDrafter(lookup, model()),
        "trimmed": lambda: model(head_ids=kept),
        "composite_trimmed": lambda: CompositeDrafter(lookup, model(head_ids=kept)),
        "plain": lambda: None,
        "steady": lambda: None,
    }.get(name, model)()
    decoder = Decoder(Network(target), drafter, gamma=3, sampling=sampling, rows=500, steady=name == "steady")
    traces = decoder.run([Request(prompt, 3, seed=s) for s in range(draws)])
    counts = np.zeros((vocab, vocab))
    for t in traces:
        counts[t.tokens[0], t.tokens[1]] += 1
    assert chi_squared(counts.ravel(), two_token_law(target, prompt, sampling, vocab).ravel()) > 1e-4
    if name == "lookup":  # its one guess may lie outside the kept ids
        assert sum(r.proposed for t in traces for r in t.rounds) > 0
    elif drafter is not None:
        assert sum(r.accepted for t in traces for r in t.rounds) > 0, "nothing was accepted: the test shows nothing"


def test_acceptance_rate_is_the_overlap():
    """Mean acceptance of the first token is sum min(p, q)."""
    g = torch.Generator().manual_seed(1)
    p, q = (torch.randn(1, 30, generator=g) * 2).softmax(-1), (torch.randn(1, 30, generator=g) * 2).softmax(-1)
    n = 200_000
    x = draw(q.expand(n, -1), uniforms(g, n))
    proposal = Proposal(x[:, None], torch.ones(n, dtype=torch.long), q[0][x][:, None], q.expand(n, 1, -1))
    accepted, _ = accept_sampled(p.expand(n, 2, -1), proposal, uniforms(g, n)[:, None])
    alpha = torch.minimum(p, q).sum().item()
    assert abs(accepted.double().mean().item() - alpha) < 4 * (alpha * (1 - alpha) / n) ** 0.5


@pytest.mark.parametrize("case", ["near", "peaked", "equal", "disjoint"])
def test_residual_keeps_its_precision(case):
    p = torch.full((8,), 1 / 8)
    q = p.clone()
    if case == "near":
        q[0], q[1] = q[0] + 1e-6, q[1] - 1e-6
    elif case == "peaked":
        p = torch.full((8,), 1e-7 / 7)
        p[3] = 1 - 1e-7
    elif case == "disjoint":
        p, q = torch.tensor([0.5, 0.5] + [0.0] * 6), torch.tensor([0.0] * 6 + [0.5, 0.5])
    for token in range(8):
        if q[token] == 0:
            continue
        proposal = Proposal(torch.tensor([[token]]), torch.tensor([1]), q[token].view(1, 1), q.view(1, 1, 8))
        accepted, rest = accept_sampled(p.expand(1, 2, 8), proposal, torch.tensor([[1 - 1e-12]], dtype=torch.float64))
        assert torch.isfinite(rest).all() and rest.sum() > 0
        if not accepted and case != "equal":
            assert ((rest > 0) == (p > q)).all()
        if case == "equal":
            assert accepted.item() == 1  # p = q to the bit is never rejected


def test_whole_law_of_one_round_by_enumeration():
    """P(next token) summed over proposals, acceptance and residual is p, to 1e-7, with no sampling at all."""
    g = torch.Generator().manual_seed(3)
    p, q = (3 * torch.randn(16, generator=g)).softmax(-1), (3 * torch.randn(16, generator=g)).softmax(-1)
    total = torch.zeros(16, dtype=torch.float64)
    for x in range(16):
        keep = min(1.0, (p[x] / q[x]).item())
        proposal = Proposal(torch.tensor([[x]]), torch.tensor([1]), q[x].view(1, 1), q.view(1, 1, 16))
        total[x] += q[x].double() * keep
        if keep < 1:
            _, rest = accept_sampled(p.expand(1, 2, 16), proposal, torch.tensor([[1 - 1e-12]], dtype=torch.float64))
            total += q[x].double() * (1 - keep) * (rest[0] / rest[0].sum()).double()
    assert torch.allclose(total, p.double(), atol=1e-6)


def test_seeds_are_private():
    target = make_model()

    def decoder(rows=1):
        drafter = ModelDrafter(Network(noised(target, 0.2)), 3)
        return Decoder(Network(target), drafter, gamma=3, sampling=Sampling(1.0), rows=rows)

    def ask(seed):
        return Request([5, 6, 7], 16, seed=seed)

    torch.manual_seed(0)
    state = torch.get_rng_state()
    seven = decoder().run([ask(7)])[0].tokens
    assert torch.equal(torch.get_rng_state(), state), "the caller's RNG was touched"
    busy = decoder(3)
    busy.run([ask(1), ask(2)])
    assert busy.run([ask(7), ask(8), ask(9)])[0].tokens == seven
    assert decoder().run([ask(8)])[0].tokens != seven


def test_q_is_the_law_that_was_sampled():
    """The reported q of a top-k sampled draft lives on the k ids only, sums to 1, and holds the value at the token."""
    target = make_model()
    small = ModelDrafter(Network(noised(target, 0.3)), 4)
    from draftstill.decode.drafters import Batch, Row
    from draftstill.decode.sampling import Law

    small.reserve(1, 64)
    row = Row([1, 2, 3, 4], torch.Generator().manual_seed(0))
    law = Law.of([Sampling(0.7, top_k=4)], vocab=96, device="cpu")
    with torch.inference_mode():
        small.start(0, [row])
        offer = small.propose(Batch([row], [4], lambda _: law, uniforms(row.generator, 4)[None]))
    proposal = offer.proposal
    assert offer.steps == 4 and ((proposal.q_BGK > 0).sum(-1) == 4).all()
    assert torch.allclose(proposal.q_BGK.sum(-1), torch.ones(1, 4))
    assert torch.equal(proposal.q_BGK.gather(2, proposal.tokens_BG[..., None]).squeeze(2), proposal.q_drawn_BG)
