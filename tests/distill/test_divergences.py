"""The oracles themselves: values known otherwise, bounds, and what happens at zeros."""

from __future__ import annotations

import math

import pytest
import torch

from draftstill.decode import Sampling, probabilities
from draftstill.distill.divergences import (
    LOG_FLOOR,
    LOSSES,
    Objective,
    alpha,
    alpha_bounds,
    bucketed,
    cross_entropy,
    cut_record,
    divergence,
    forward_kl,
    jsd,
    kept,
    lk,
    nla,
    reverse_kl,
    tvd,
)
from draftstill.distill.fused import Objective as Same
from tests.distill.laws import BASES, N, V, problem, record, run

P, Q = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64), torch.tensor([[0.25, 0.25, 0.5]], dtype=torch.float64)


def laws(acceptance: float = 0.6) -> tuple[torch.Tensor, torch.Tensor]:
    truth, hidden, head = problem(acceptance)
    return (truth @ head.T).softmax(-1), (hidden @ head.T).softmax(-1)


def test_values_by_hand() -> None:
    assert alpha(P, Q).item() == tvd(P, Q).item() == 0.5
    assert forward_kl(P, Q).item() == pytest.approx(math.log(2))
    assert reverse_kl(Q, P).item() == pytest.approx(math.log(2))
    assert nla(P, Q).item() == pytest.approx(math.log(2))
    share = math.exp(-1.5)
    assert lk(P, Q, 3.0).item() == pytest.approx(share * math.log(2) + (1 - share) * 0.5)
    assert jsd(P, Q).item() == pytest.approx((math.log(0.5 / 0.375) + 0.5 * math.log(0.25 / 0.375) + 0.5 * math.log(2)) / 2)
    assert cross_entropy(Q, torch.tensor([2])).item() == pytest.approx(math.log(2)) and cross_entropy(Q, torch.tensor([-1])).item() == 0


def test_against_torch() -> None:
    p, q = laws()
    assert torch.allclose(forward_kl(p, q), torch.nn.functional.kl_div(q.log(), p, reduction="none").sum(-1))
    assert torch.allclose(reverse_kl(p, q), torch.nn.functional.kl_div(p.log(), q, reduction="none").sum(-1))
    assert torch.allclose(tvd(p, q), (p - q).abs().sum(-1) / 2)
    for beta in (0.1, 0.5, 0.9):  # the mixture's weight b lies on p, and KL(p||m) has it, too
        m = beta * p + (1 - beta) * q
        assert torch.allclose(jsd(p, q, beta), beta * forward_kl(p, m) + (1 - beta) * forward_kl(q, m))
        assert torch.allclose(jsd(p, q, beta), jsd(q, p, 1 - beta))
    assert torch.allclose(jsd(p, q, 1e-7) / 1e-7, forward_kl(p, q), rtol=1e-4)


@pytest.mark.parametrize("name", BASES)
def test_zero_between_equals_and_never_below(name: str) -> None:
    for acceptance in (0.3, 0.9):
        p, q = laws(acceptance)
        assert (divergence(name, p, q) > 0).all() and divergence(name, p, p).abs().max() < 1e-12


def test_pinsker_and_the_bound_of_jsd() -> None:
    p, q = laws(0.3)
    assert (tvd(p, q) <= (forward_kl(p, q) / 2).sqrt()).all() and (jsd(p, q) <= math.log(2)).all()


@pytest.mark.parametrize("name", BASES)
def test_finite_differences(name: str) -> None:
    """Autograd of each oracle through a softmax, against central differences in float64."""
    g = torch.Generator().manual_seed(1)
    z, p = (
        torch.randn(3, 9, generator=g, dtype=torch.float64, requires_grad=True),
        torch.randn(3, 9, generator=g, dtype=torch.float64).softmax(-1),
    )
    if name == "lk":  # its share is a constant to the gradient
        share = torch.exp(-3 * alpha(p, z.softmax(-1))).detach()
        f = lambda z: share * forward_kl(p, z.softmax(-1)) + (1 - share) * tvd(p, z.softmax(-1))  # noqa: E731
        assert torch.allclose(torch.autograd.grad(lk(p, z.softmax(-1)).sum(), z)[0], torch.autograd.grad(f(z).sum(), z)[0])
    else:
        f = lambda z: divergence(name, p, z.softmax(-1), beta=0.3)  # noqa: E731
    assert torch.autograd.gradcheck(f, (z,), eps=1e-6, atol=1e-8)
    assert torch.autograd.gradcheck(lambda z: cross_entropy(z.softmax(-1), torch.tensor([0, 8, -1])), (z,), eps=1e-6, atol=1e-8)


def test_zeros_of_q_where_p_has_mass() -> None:
    """Only reachable by cutting q: the KL terms take a constant, with no gradient there; the others stay what they are."""
    p, q = torch.tensor([[0.5, 0.5]], dtype=torch.float64), torch.tensor([[1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    assert forward_kl(p, q).item() == pytest.approx(math.log(0.5) - 0.5 * LOG_FLOOR)
    gradient = torch.autograd.grad(forward_kl(p, q).sum(), q)[0]
    assert torch.isfinite(gradient).all() and gradient[0, 1] == 1  # of + sum q alone, which a softmax takes out
    assert (
        reverse_kl(p, q).item() == pytest.approx(math.log(2)) and tvd(p, q).item() == 0.5 and nla(p, q).item() == pytest.approx(math.log(2))
    )
    assert jsd(p, q).item() == pytest.approx((0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)) / 2 + math.log(1 / 0.75) / 2)
    assert nla(p[:, :1] * 0, q[:, :1]).item() == pytest.approx(-LOG_FLOOR)


@pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (0, 0.8), (20, 0.6), (1, 1.0), (1000, 0.999)])
def test_what_is_kept_is_what_the_decoder_keeps(top_k: int, top_p: float) -> None:
    truth, _, head = problem(0.6)
    z = (truth @ head.T).float()
    mine = torch.where(kept(z, top_k, top_p), z, -torch.inf).softmax(-1)
    assert torch.allclose(mine, probabilities(z, Sampling(1.0, top_k, top_p)), atol=1e-6)
    p = z.double().softmax(-1)
    whole = record(p, V)
    cut, tail = cut_record(whole.p_NK, whole.tail_N, top_k, top_p)
    assert torch.allclose(torch.zeros_like(p).scatter_(1, whole.ids_NK, cut), mine.double(), atol=1e-6) and tail.abs().max() < 1e-6


def test_a_cut_beyond_the_record_keeps_the_bucket() -> None:
    p, tail = torch.tensor([[0.5, 0.2, 0.1]] * 2, dtype=torch.float64), torch.tensor([0.2, 0.2], dtype=torch.float64)
    beyond, left = cut_record(p, tail, 4, 1.0)  # the fourth id has at most what the third has
    assert torch.allclose(beyond, p / 0.9) and torch.allclose(left, torch.full_like(tail, 0.1 / 0.9))
    beyond, left = cut_record(p, tail, 5, 1.0)
    assert torch.allclose(beyond, p) and torch.allclose(left, tail)
    beyond, left = cut_record(p, tail, 0, 0.9)  # the nucleus holds .9 of it, and a little more
    assert torch.allclose(beyond, p / 0.9) and torch.allclose(left, torch.full_like(tail, 0.1 / 0.9))
    cut, left = cut_record(p, tail, 0, 0.6)
    assert torch.allclose(cut[0], torch.tensor([5 / 7, 2 / 7, 0], dtype=torch.float64)) and left.sum() == 0


def test_bounds_hold_the_true_alpha() -> None:
    truth, hidden, head = problem(0.5)
    p, q = laws(0.5)
    true = alpha(p, q)
    for k in (1, 4, 16, 64, V):
        teacher = record(p, k)
        low, high = alpha_bounds(*bucketed(q, teacher.ids_NK, teacher.p_NK, teacher.tail_N))
        assert (low <= true + 1e-6).all() and (true <= high + 1e-6).all()
    _, _, _, stats = run(hidden, head, record(p, 16), Objective())
    assert stats["alpha_low"] <= true.sum().item() + 1e-5 and true.sum().item() <= stats["alpha_high"] + 1e-5


def test_a_bucket_is_never_worse_than_the_whole() -> None:
    """Merging outcomes cannot raise a divergence, and with K = V it is the divergence itself."""
    p, q = laws(0.5)
    for name in ("forward_kl", "reverse_kl", "jsd", "tvd", "nla"):
        full = divergence(name, p, q)
        for k in (1, 16, V):
            t = record(p, k)
            merged = divergence(name, *bucketed(q, t.ids_NK, t.p_NK, t.tail_N))
            assert (merged <= full + 1e-5).all()
        assert torch.allclose(merged, full, atol=1e-5)


def test_objectives_name_what_they_cannot_do() -> None:
    assert Same is Objective and N and set(BASES) | {"ce"} == set(LOSSES)
    with pytest.raises(ValueError, match="unknown loss 'kl'; there are forward_kl"):
        Objective("kl")
    with pytest.raises(ValueError, match="unknown loss 'x'"):
        Objective(mix=(("tvd", 1.0), ("x", 1.0)))
    with pytest.raises(ValueError, match="use forward_kl or reverse_kl"):
        Objective("jsd", beta=1.0)
    with pytest.raises(ValueError, match="unknown loss"):
        divergence("ce", P, Q)
