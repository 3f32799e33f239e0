"""Laws to test losses with: a target, a draft at a chosen acceptance, recordings of it, and the oracle's value and gradients."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from draftstill.distill.divergences import Objective, alpha, bucketed, cross_entropy, divergence, kept
from draftstill.distill.fused import STATS, Teacher, fused_loss

N, H, V, K = 37, 24, 211, 16
BASES = ("forward_kl", "reverse_kl", "jsd", "tvd", "nla", "lk")


@functools.cache
def problem(acceptance: float, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Target's hidden states, draft's, and the head they share; float64 numbers that float32 holds exactly, so that both see one problem."""
    g = torch.Generator().manual_seed(seed)
    head = (torch.randn(V, H, generator=g) * 0.35).double()
    truth, noise = torch.randn(N, H, generator=g).double(), torch.randn(N, H, generator=g).double()
    p, low, high = (truth @ head.T).softmax(-1), 0.0, 8.0
    for _ in range(30):
        middle = (low + high) / 2
        found = alpha(p, ((truth + middle * noise) @ head.T).softmax(-1)).mean()
        low, high = (middle, high) if found > acceptance else (low, middle)
    return truth, (truth + low * noise).float().double(), head


def record(p_NV: Tensor, k: int) -> Teacher:
    """Top k of a law, numbers that float32 holds exactly, scaled so that they still sum to 1 to the last bit but a few."""
    values, ids = p_NV.topk(k, -1)
    values = values.float().double()
    return Teacher(ids, values, (1 - values.sum(-1)).clamp_min(0).float().double())


def cast(teacher: Teacher, dtype: torch.dtype) -> Teacher:
    to = lambda x: None if x is None or not x.is_floating_point() else x.to(dtype)  # noqa: E731
    return Teacher(teacher.ids_NK, to(teacher.p_NK), to(teacher.tail_N), to(teacher.hidden_NH), to(teacher.head_VH), teacher.token_N)


def run(hidden: Tensor, head: Tensor, teacher: Teacher, objective: Objective, **kw: Any) -> tuple[Tensor, Tensor, Tensor, dict[str, float]]:
    """The fused loss, its gradients, its statistics."""
    hidden, head = hidden.clone().requires_grad_(), head.clone().requires_grad_()
    loss, stats = fused_loss(hidden, head, teacher, objective, **kw)
    loss.backward()
    assert hidden.grad is not None and head.grad is not None
    return loss.detach(), hidden.grad, head.grad, dict(zip(STATS, stats.tolist(), strict=True))


def per_token(hidden: Tensor, head: Tensor, teacher: Teacher, objective: Objective, offset_V: Tensor | None = None,
              whole_NV: Tensor | None = None) -> Tensor:  # fmt: skip
    """The oracle's loss of each token, from whole logits. ``whole_NV``: the target's whole law, without which a recording cannot be cut."""

    def law(z: Tensor) -> Tensor:
        return z.masked_fill(~kept(z.detach(), objective.top_k, objective.top_p), -torch.inf).softmax(-1)

    z = hidden @ head.T / objective.temperature
    q = law(z if offset_V is None else z + offset_V)
    if teacher.hidden_NH is not None and teacher.head_VH is not None:
        outcomes = law(teacher.hidden_NH @ teacher.head_VH.T / objective.temperature), q
    else:
        assert teacher.ids_NK is not None and teacher.p_NK is not None and teacher.tail_N is not None
        used, p_NK, tail_N = teacher.ids_NK >= 0, teacher.p_NK, teacher.tail_N
        if objective.cuts:
            assert whole_NV is not None
            assert used.all()
            cut = law(whole_NV.log())
            p_NK, tail_N = cut.gather(1, teacher.ids_NK), cut.scatter(1, teacher.ids_NK, 0.0).sum(-1)
        outcomes = bucketed(q, teacher.ids_NK, p_NK * used, tail_N)
    total = torch.zeros(len(hidden), dtype=hidden.dtype)
    for name, weight in objective.terms:
        if name == "ce":
            assert teacher.token_N is not None
            total = total + weight * cross_entropy(q, teacher.token_N)
        else:
            total = total + weight * divergence(name, *outcomes, objective.eta, objective.beta)
    return total


def oracle(hidden: Tensor, head: Tensor, teacher: Teacher, objective: Objective, *, weight_N: Tensor | None = None,
           offset_V: Tensor | None = None, whole_NV: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Per-token losses and autograd's gradients of their weighted sum."""
    hidden, head = hidden.clone().requires_grad_(), head.clone().requires_grad_()
    losses = per_token(hidden, head, teacher, objective, offset_V, whole_NV)
    (losses * (1 if weight_N is None else weight_N)).sum().backward()
    assert hidden.grad is not None and head.grad is not None
    return losses.detach(), hidden.grad, head.grad


def error(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b|."""
    return ((a.double() - b).norm() / b.norm().clamp_min(1e-12)).item()
