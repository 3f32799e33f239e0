"""The fused head: hidden states and head weights in, loss sum and gradients out; logits are never whole in memory.

The gradient is formed in the forward pass, block by block, so nothing has to be kept or computed again. With z = h W^T / T,
q = softmax z, per token and up to the token's weight:

    forward KL   dz = S q - p                                          S = sum p (1 for a whole law)
    TVD          dz = -q (1[q <= p] - Q),  Q = sum of q where q <= p
    LK(eta)      dz = l dKL + (1-l) dTVD,  l = exp(-eta alpha)

and T dz for the unscaled logits is divided by T once more. Against a recording (K ids and a tail bucket) each of them is
    dz = (row scalar) q in the bucket, whose ids share one ratio p/q, and S q - p and so on at the K ids.
 Shape suffixes: N tokens, H hidden, V head rows, K recorded ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_BLOCK_ELEMENTS = 24 << 20
"""Logits per block (rows x V): large matrix products at 100 MB in float32 beside a few hundred MB of weights."""
_TILE_ELEMENTS = 6 << 20
"""Logits per elementwise tile: 24 MB, so that softmax and its gradient stay in a last-level cache of 32 MB."""

_THINNEST = 1e-30
"""Least mass of the draft's bucket, so that tail / q_tail stays finite in float32."""


@dataclass(slots=True)
class Teacher:
    """The target's law at N positions, in one of two forms.

    Recording: ``ids_NK`` (-1: unused place), ``p_NK``, ``tail_N``. Hidden: ``hidden_NH`` and the target's ``head_VH``, from which
    all of p follows at ``temperature``.
    """

    ids_NK: Tensor | None = None
    p_NK: Tensor | None = None
    tail_N: Tensor | None = None
    hidden_NH: Tensor | None = None
    head_VH: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Objective:
    """Which divergence, at which loss temperature."""

    name: str = "forward_kl"
    eta: float = 3.0
    temperature: float = 1.0


STATS = ("loss", "alpha_low", "alpha_high", "top1", "weight")
"""Weighted sums over tokens that every call returns; top1: argmax of draft and target agree."""


class _FusedHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, head_VH: Tensor, weight_N: Tensor, teacher: Teacher, objective: Objective,
                offset_V: Tensor | None, compute: torch.dtype, need_grad: bool) -> tuple[Tensor, Tensor]:  # fmt: skip
        device = hidden_NH.device.type
        with torch.autocast(device, enabled=False):
            N, V = hidden_NH.shape[0], head_VH.shape[0]
            hidden, head = hidden_NH.to(compute), head_VH.to(compute)
            grad_hidden = torch.empty_like(hidden_NH) if need_grad else None
            grad_head = torch.zeros(head_VH.shape, dtype=torch.float32, device=head_VH.device) if need_grad else None
            stats = torch.zeros(len(STATS), dtype=torch.float64, device=hidden_NH.device)
            block, tile = max(1, _BLOCK_ELEMENTS // V), max(1, _TILE_ELEMENTS // V)
            for start in range(0, N, block):
                rows = slice(start, min(start + block, N))
                logits = _product(hidden[rows], head.t())
                dz = torch.empty_like(logits, dtype=compute) if need_grad else None
                for first in range(rows.start, rows.stop, tile):
                    part = slice(first, min(first + tile, rows.stop))
                    inside = slice(first - start, part.stop - start)
                    d = _tile(logits[inside], part, weight_N[part], teacher, objective, offset_V, stats, compute, need_grad)
                    if dz is not None and d is not None:
                        dz[inside] = d
                if dz is not None and grad_hidden is not None and grad_head is not None:
                    grad_hidden[rows] = (dz @ head).to(grad_hidden.dtype)
                    grad_head += dz.t() @ hidden[rows]  # accumulated in float32 whatever the product's dtype
        if need_grad:
            ctx.save_for_backward(grad_hidden, grad_head)
        ctx.head_dtype = head_VH.dtype
        ctx.mark_non_differentiable(stats)
        return stats[0].to(torch.float32), stats

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        grad_hidden, grad_head = ctx.saved_tensors
        scale = grads[0]
        return grad_hidden * scale, (grad_head * scale).to(ctx.head_dtype), None, None, None, None, None, None


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, with a float32 result where the device can give one: rounding logits to bfloat16 puts noise on the gradient."""
    if a.device.type == "cuda" and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a @ b


def _tile(logits: Tensor, part: slice, w: Tensor, teacher: Teacher, objective: Objective, offset_V: Tensor | None, stats: Tensor,
          compute: torch.dtype, need_grad: bool) -> Tensor | None:  # fmt: skip
    """Statistics and weighted dz of a few rows, all in float32."""
    working = torch.promote_types(logits.dtype, torch.float32)
    z = logits.to(working, copy=True)
    if objective.temperature != 1.0:
        z /= objective.temperature
    if offset_V is not None:
        z += offset_V
    best = z.argmax(-1)
    q = torch.softmax(z, -1)
    if teacher.ids_NK is None:
        p = _whole_law(teacher, part, objective.temperature, compute).to(working)
        loss, low, high, dz = _dense(p, q, objective, need_grad)
        top1 = p.argmax(-1) == best
    else:
        assert teacher.p_NK is not None and teacher.tail_N is not None
        ids, used = teacher.ids_NK[part], teacher.ids_NK[part] >= 0
        p_k = teacher.p_NK[part].to(working) * used
        loss, low, high, dz = _recorded(q, ids.clamp_min(0), used, p_k, teacher.tail_N[part].to(working), objective, need_grad)
        top1 = (ids[:, 0] == best) & used[:, 0]
    w64 = w.double()
    stats += torch.stack([(x.double() * w64).sum() for x in (loss, low, high, top1)] + [w64.sum()])
    return None if dz is None else dz.mul_((w.to(working) / objective.temperature)[:, None])


def _whole_law(teacher: Teacher, part: slice, temperature: float, compute: torch.dtype) -> Tensor:
    assert teacher.hidden_NH is not None and teacher.head_VH is not None
    head = teacher.head_VH.to(compute)
    z = _product(teacher.hidden_NH[part].to(compute), head.t())
    return torch.softmax(z.to(torch.promote_types(z.dtype, torch.float32)) / temperature, -1)


def _dense(p: Tensor, q: Tensor, objective: Objective, need_grad: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    tiny = torch.finfo(q.dtype).tiny
    overlap = torch.minimum(p, q).sum(-1)
    total = p.sum(-1)
    share = _kl_share(objective, overlap)
    loss = torch.zeros_like(overlap)
    dz = torch.zeros_like(q) if need_grad else None
    if share is not None:
        loss += share * torch.where(p > 0, p * (p.clamp_min(tiny).log() - q.clamp_min(tiny).log()), 0.0).sum(-1)
        if dz is not None:
            dz += share[:, None] * (total[:, None] * q - p)
    rest = 1.0 if share is None else 1 - share
    if objective.name != "forward_kl":
        loss += rest * (total - overlap)
        if dz is not None:
            below = (q <= p).to(q.dtype)
            rest_N1 = rest if isinstance(rest, float) else rest[:, None]
            dz -= rest_N1 * q * (below - (q * below).sum(-1, keepdim=True))
    return loss, overlap, overlap, dz


def _recorded(q: Tensor, ids: Tensor, used: Tensor, p_k: Tensor, tail: Tensor, objective: Objective, need_grad: bool
              ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    tiny = torch.finfo(q.dtype).tiny
    # Unused places point at the row's first used id and write what is written there. A row without any keeps its q.
    some = used.any(1, keepdim=True)
    anchor = ids.gather(1, used.to(torch.uint8).argmax(1, keepdim=True))
    ids = torch.where(used, ids, anchor)
    q_at = q.gather(1, ids)
    q_k = q_at * used
    # The bucket's mass is summed from its members: 1 - sum(q_k) would lose a thin one to cancellation. q loses its K ids here,
    # which get their final gradient below.
    q.scatter_(1, ids, torch.where(some, 0.0, q_at))
    q_tail = q.sum(-1).clamp_min(_THINNEST)
    low = torch.minimum(p_k, q_k).sum(-1)
    high = low + torch.minimum(tail, q_tail)
    total = p_k.sum(-1) + tail
    share = _kl_share(objective, high)
    loss = torch.zeros_like(low)
    scalar, at_k = torch.zeros_like(low), torch.zeros_like(q_k)
    if share is not None:
        kl = torch.where(p_k > 0, p_k * (p_k.clamp_min(tiny).log() - q_k.clamp_min(tiny).log()), 0.0).sum(-1)
        kl += torch.where(tail > 0, tail * (tail.clamp_min(tiny).log() - q_tail.log()), 0.0)
        loss += share * kl
        scalar += share * (total - tail / q_tail)
        at_k += share[:, None] * (total[:, None] * q_k - p_k)
    if objective.name != "forward_kl":
        rest = torch.ones_like(low) if share is None else 1 - share
        below_k, below_tail = ((q_k <= p_k) & used).to(q.dtype), (q_tail <= tail).to(q.dtype)
        mass = (q_k * below_k).sum(-1) + q_tail * below_tail
        loss += rest * (total - high)
        scalar += rest * (mass - below_tail)
        at_k += rest[:, None] * q_k * (mass[:, None] - below_k)
    if not need_grad:
        return loss, low, high, None
    dz = q.mul_(scalar[:, None])
    first = at_k.gather(1, used.to(torch.uint8).argmax(1, keepdim=True))
    final = torch.where(used, at_k, torch.where(some, first, dz.gather(1, ids)))
    return loss, low, high, dz.scatter_(1, ids, final)


def _kl_share(objective: Objective, overlap: Tensor) -> Tensor | None:
    """Weight of the KL term per token; None for none."""
    if objective.name == "forward_kl":
        return torch.ones_like(overlap)
    return torch.exp(-objective.eta * overlap) if objective.name == "lk" else None


def fused_loss(hidden_NH: Tensor, head_VH: Tensor, teacher: Teacher, objective: Objective, *, weight_N: Tensor | None = None,
               offset_V: Tensor | None = None, compute: torch.dtype | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Weighted *sum* of a divergence over tokens, differentiable in hidden states and head.

    Args:
        hidden_NH: the draft's final hidden states.
        head_VH: the draft's head rows; slice padded rows off first. With a trimmed head, ``teacher.ids_NK`` count its rows.
        teacher: the target's law at the same positions.
        weight_N: per-token weights, 0 masks a token (default: ones).
        offset_V: added to the logits; log(R/m) on m rows sampled from R others makes their sum an unbiased estimate.
        compute: dtype of the matrix products (default: that of ``hidden_NH``); everything else is float32 or better.

    Returns:
        (loss, stats): a scalar; and float64 sums in the order of STATS, not differentiable.
    """
    weight = torch.ones(len(hidden_NH), device=hidden_NH.device) if weight_N is None else weight_N
    need = torch.is_grad_enabled() and (hidden_NH.requires_grad or head_VH.requires_grad)
    return _FusedHead.apply(hidden_NH, head_VH, weight, teacher, objective, offset_V, compute or hidden_NH.dtype, need)
