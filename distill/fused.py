"""The fused head: hidden states and head weights in, loss sum and gradients out; logits are never whole in memory.

The gradient is formed in the forward pass, block by block and over the block's own logits, so nothing has to be kept or computed again:
three products of N x H x V (four with a hidden teacher), one buffer of logits, and the gradients. ``kernels`` has what is between the
products, with the formulas; ``divergences`` the same losses as plain functions. Everything but the products is float32 or better.
Shape suffixes: N tokens, H hidden, V head rows, K recorded ids.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from draftstill.distill.divergences import Objective
from draftstill.distill.kernels import TOKEN_STATS, dense, recorded
from draftstill.distill.weights import prefix_confidence

_BLOCK_ELEMENTS = 24 << 20
"""Logits per block (rows x V): large matrix products at 100 MB in float32 beside a few hundred MB of weights."""
_TILE_ELEMENTS = 1 << 20
"""Logits per elementwise tile: 4 MB, so that a tile and its temporaries stay in cache. At 48 MB softmax takes three times as long."""
_TARGET_ELEMENTS = 6 << 20
"""The target's logits per product: 24 MB, several tiles, since thin products are slow."""


@dataclass(slots=True)
class Teacher:
    """The target's law at N positions, in one of two forms.

    Recording: ``ids_NK`` (-1: unused place), ``p_NK``, ``tail_N``. Hidden: ``hidden_NH`` and the target's ``head_VH``, from which
    all of p follows at any temperature. ``token_N``: what was written there, for ``ce`` (-1: nothing).
    """

    ids_NK: Tensor | None = None
    p_NK: Tensor | None = None
    tail_N: Tensor | None = None
    hidden_NH: Tensor | None = None
    head_VH: Tensor | None = None
    token_N: Tensor | None = None

    def to(self, device: torch.device) -> Teacher:
        """On a device; the target's head is already there."""
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        return Teacher(**{k: v if v is None or k == "head_VH" else v.to(device, non_blocking=True) for k, v in moved.items()})


@dataclass(frozen=True, slots=True)
class Confidence:
    """Prefix-confidence weights, from alpha of the very pass: see ``weights.prefix_confidence``."""

    gamma: int
    run_N: Tensor


STATS = ("loss", "alpha_low", "alpha_high", "top1", "weight", "tail", "entropy_p", "entropy_q")
"""Weighted sums over tokens that every call returns (``kernels.TOKEN_STATS``). top1: argmax of draft and target agree."""


_ALPHA = TOKEN_STATS.index("alpha_high")


class _FusedHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, head_VH: Tensor, weight_N: Tensor, teacher: Teacher, objective: Objective,
                offset_V: Tensor | None, compute: torch.dtype, confidence: Confidence | None, need: tuple[bool, bool]
                ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        with torch.autocast(hidden_NH.device.type, enabled=False):
            tokens, used, ctx.grads = _pass(hidden_NH, head_VH, weight_N, teacher, objective, offset_V, compute, confidence, need)
        sums = (tokens * used).sum(1)
        at = STATS.index("weight")
        stats = torch.cat([sums[:at], used.sum()[None], sums[at:]])
        ctx.mark_non_differentiable(stats, tokens)
        return stats[0].to(torch.float32), stats, tokens

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        if ctx.grads is None:
            raise RuntimeError("the fused head's gradient was formed once, and has been handed out")
        scaled = [None if g is None else g.mul_(grads[0].to(g.dtype)) for g in ctx.grads]  # in place: a head's gradient is large
        ctx.grads = None
        return (*scaled, *[None] * 7)


def _pass(hidden_NH: Tensor, head_VH: Tensor, weight_N: Tensor, teacher: Teacher, objective: Objective, offset_V: Tensor | None,
          compute: torch.dtype, confidence: Confidence | None, need: tuple[bool, bool]
          ) -> tuple[Tensor, Tensor, tuple[Tensor | None, Tensor | None]]:  # fmt: skip
    """Per-token statistics [7, N], the weights used [N] (both float64), and the gradients of hidden states and head."""
    (N, H), V, device = hidden_NH.shape, head_VH.shape[0], hidden_NH.device
    hidden, head, working = hidden_NH.to(compute), head_VH.to(compute), torch.promote_types(compute, torch.float32)
    y_hidden, y_head = teacher.hidden_NH, teacher.head_VH
    if y_hidden is not None and y_head is not None:
        y_hidden, y_head = y_hidden.to(compute), y_head.to(compute)
    grad_hidden = torch.empty_like(hidden_NH) if need[0] else None
    grad_head = torch.zeros(V, H, dtype=torch.promote_types(head_VH.dtype, torch.float32), device=device) if need[1] else None
    tokens, used = torch.zeros(len(TOKEN_STATS), N, dtype=torch.float64, device=device), weight_N.double().clone()
    block, tile = max(1, min(N, _BLOCK_ELEMENTS // V)), max(1, min(N, _TILE_ELEMENTS // V))
    # CUDA gives a float32 product of bfloat16 factors; a CPU rounds it anyway, so there the block keeps the factors' dtype.
    buffer = torch.empty(block, V, dtype=working if device.type == "cuda" else compute, device=device)
    small = torch.empty(min(block, tile), V, dtype=working, device=device) if buffer.dtype != working else None
    chunk = tile * max(1, min(_TARGET_ELEMENTS // V, block) // tile)
    y_buffer = None if y_head is None else torch.empty(chunk, V, dtype=working, device=device)
    for start in range(0, N, block):
        rows = slice(start, min(start + block, N))
        z_block = _logits(hidden[rows], head, buffer[: rows.stop - start], objective.temperature)
        for first in range(start, rows.stop, tile):
            part = slice(first, min(first + tile, rows.stop))

            def weigh(alpha_N: Tensor, part: slice = part) -> Tensor:
                if confidence is not None:
                    before = tokens[_ALPHA, max(0, part.start - confidence.gamma + 1) : part.start]
                    used[part] *= prefix_confidence(alpha_N.double(), confidence.run_N[part], confidence.gamma, before)
                return used[part]

            inside = z_block[first - start : part.stop - start]
            z = inside if small is None else small[: len(inside)].copy_(inside)
            if buffer.dtype != working and objective.temperature != 1:
                z /= objective.temperature
            if offset_V is not None:
                z += offset_V
            token = None if teacher.token_N is None else teacher.token_N[part]
            if y_buffer is None:
                assert teacher.ids_NK is not None and teacher.p_NK is not None and teacher.tail_N is not None
                found, _ = recorded(z, teacher.ids_NK[part], teacher.p_NK[part], teacher.tail_N[part], token, objective, weigh, any(need))
            else:
                assert y_hidden is not None and y_head is not None
                if (ahead := (first - start) % chunk) == 0:
                    some = slice(first, min(first + chunk, rows.stop))
                    _logits(y_hidden[some], y_head, y_buffer[: some.stop - some.start], objective.temperature)
                found, _ = dense(z, y_buffer[ahead : ahead + len(z)], token, objective, weigh, any(need), offset_V is not None)
            tokens[:, part] = found.double()
            if z is not inside and any(need):
                inside.copy_(z)
        dz = z_block.to(compute)
        if grad_hidden is not None:
            grad_hidden[rows] = dz @ head
        if grad_head is not None and compute == grad_head.dtype:
            grad_head.addmm_(dz.t(), hidden[rows])
        elif grad_head is not None:  # accumulated in float32 whatever the product's dtype
            grad_head += _product(dz.t(), hidden[rows])
    if grad_head is not None:
        grad_head = grad_head.to(head_VH.dtype)
    return tokens, used, (grad_hidden, grad_head)


def _logits(hidden_NH: Tensor, head_VH: Tensor, out_NV: Tensor, temperature: float) -> Tensor:
    """Logits over the temperature, into ``out_NV``; without the division if that is no wider than the factors and would round it."""
    if hidden_NH.dtype != out_NV.dtype:
        out_NV.copy_(_product(hidden_NH, head_VH.t()))
        return out_NV if temperature == 1 else out_NV.div_(temperature)
    exact = hidden_NH.dtype in (torch.float32, torch.float64)
    return torch.mm(hidden_NH / temperature if exact and temperature != 1 else hidden_NH, head_VH.t(), out=out_NV)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, with a float32 result where the device can give one: rounding logits to bfloat16 puts noise on the gradient."""
    if a.device.type == "cuda" and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a @ b


def fused_loss(hidden_NH: Tensor, head_VH: Tensor, teacher: Teacher, objective: Objective, *, weight_N: Tensor | None = None,
               offset_V: Tensor | None = None, compute: torch.dtype | None = None, confidence: Confidence | None = None
               ) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Weighted *sum* of a loss over tokens, differentiable (once) in hidden states and head.

    Args:
        hidden_NH: the draft's final hidden states.
        head_VH: the draft's head rows; slice padded rows off first. With a trimmed head, ``teacher.ids_NK`` count its rows.
        teacher: the target's law at the same positions.
        weight_N: per-token weights, 0 masks a token (default: ones).
        offset_V: added to the logits; log(R/m) on m rows sampled from R others makes their sum an unbiased estimate. -inf leaves a row out.
        compute: dtype of the matrix products (default: that of ``hidden_NH``); everything else is float32 or better.
        confidence: multiplies the weights by prefix confidence.

    Returns:
        (loss, stats): a scalar; and float64 sums in the order of STATS, not differentiable.
    """
    weight = torch.ones(len(hidden_NH), device=hidden_NH.device) if weight_N is None else weight_N
    wanted = torch.is_grad_enabled()
    need = (wanted and hidden_NH.requires_grad, wanted and head_VH.requires_grad)
    _check(teacher, objective)
    loss, stats, _ = _FusedHead.apply(
        hidden_NH, head_VH, weight, teacher, objective, offset_V, compute or hidden_NH.dtype, confidence, need
    )
    return loss, stats


@torch.no_grad()
def fused_tokens(hidden_NH: Tensor, head_VH: Tensor, teacher: Teacher, objective: Objective, *, offset_V: Tensor | None = None,
                 compute: torch.dtype | None = None) -> dict[str, Tensor]:  # fmt: skip
    """What ``fused_loss`` knows of each token, by the names of ``kernels.TOKEN_STATS``, float64 [N] each; one product, no gradient."""
    _check(teacher, objective)
    weight = torch.ones(len(hidden_NH), device=hidden_NH.device)
    with torch.autocast(hidden_NH.device.type, enabled=False):
        tokens, _, _ = _pass(hidden_NH, head_VH, weight, teacher, objective, offset_V, compute or hidden_NH.dtype, None, (False, False))
    return dict(zip(TOKEN_STATS, tokens, strict=True))


def _check(teacher: Teacher, objective: Objective) -> None:
    if teacher.token_N is None and any(name == "ce" for name, _ in objective.terms):
        raise ValueError("ce needs the written tokens: Teacher.token_N")
