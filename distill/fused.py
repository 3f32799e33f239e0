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

_BLOCK_BYTES = 64 << 20
"""Logits of a block of rows on a CPU, in the dtype of the products: enough rows that adding to the head's gradient costs little."""
_TILE_ELEMENTS = 1 << 20
"""Logits per elementwise tile: 4 MB, so that a tile and its temporaries stay in cache. At 48 MB softmax takes three times as long."""
_COLUMNS = 8 << 10
"""Columns per product where the head is float32 and the products are not: a cast copy of the whole head would be as large as a block."""
_CUDA_ELEMENTS = 1 << 28, 1 << 26
"""Block and tile on CUDA, where no cache holds a tile and each launch has a price: 1 GiB and 256 MiB in float32. Not yet timed on a device."""


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


STATS = (*TOKEN_STATS[:4], "weight", *TOKEN_STATS[4:])
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
    """Per-token statistics [S, N], the weights used [N] (both float64), and the gradients of hidden states and head."""
    (N, H), V, device = hidden_NH.shape, head_VH.shape[0], hidden_NH.device
    hidden, working, cuda = hidden_NH.to(compute), torch.promote_types(compute, torch.float32), device.type == "cuda"
    grad_hidden = torch.empty_like(hidden_NH) if need[0] else None
    grad_head = torch.zeros(V, H, dtype=torch.promote_types(head_VH.dtype, torch.float32), device=device) if need[1] else None
    tokens, used = torch.zeros(len(TOKEN_STATS), N, dtype=torch.float64, device=device), weight_N.double().clone()
    block, tile = (max(1, size // V) for size in (_CUDA_ELEMENTS if cuda else (_BLOCK_BYTES // compute.itemsize, _TILE_ELEMENTS)))
    block = -(-N // -(-N // block)) if N else 1  # blocks of one size: a short last one would cost as much as a long one
    # CUDA gives a float32 product of bfloat16 factors; a CPU rounds it anyway, so there a block keeps the factors' dtype.
    draft = _Logits(hidden, head_VH, compute, working if cuda else compute, block, objective.temperature)
    target = None
    if teacher.hidden_NH is not None and teacher.head_VH is not None:
        target = _Logits(
            teacher.hidden_NH.to(compute), teacher.head_VH, compute, working if cuda else compute, block, objective.temperature
        )
    for start in range(0, N, block):
        rows = slice(start, min(start + block, N))
        for side in (draft, target):
            if side is not None:
                side.fill(rows)
        for first in range(start, rows.stop, tile):
            part = slice(first, min(first + tile, rows.stop))

            def weigh(alpha_N: Tensor, part: slice = part) -> Tensor:
                if confidence is not None:
                    before = tokens[_ALPHA, max(0, part.start - confidence.gamma + 1) : part.start]
                    used[part] *= prefix_confidence(alpha_N.double(), confidence.run_N[part], confidence.gamma, before)
                return used[part]

            inside = slice(first - start, part.stop - start)
            z = draft.tile(inside, working)
            if offset_V is not None:
                z += offset_V
            token = None if teacher.token_N is None else teacher.token_N[part]
            if target is None:
                assert teacher.ids_NK is not None and teacher.p_NK is not None and teacher.tail_N is not None
                found, _ = recorded(z, teacher.ids_NK[part], teacher.p_NK[part], teacher.tail_N[part], token, objective, weigh, any(need))
            else:
                found, _ = dense(z, target.tile(inside, working), token, objective, weigh, any(need), offset_V is not None)
            tokens[:, part] = found.double()
            if any(need):
                draft.put(inside, z)
        if grad_hidden is not None:
            grad_hidden[rows] = draft.times_head(len(grad_hidden[rows]), working)
        if grad_head is not None:
            draft.add_outer(grad_head, rows)
    if grad_head is not None:
        grad_head = grad_head.to(head_VH.dtype)
    return tokens, used, (grad_hidden, grad_head)


class _Logits:
    """The logits of a block of rows over the temperature, and later their gradient in the same place.

    In float32, and on CUDA, one matrix. Where a CPU multiplies in a narrower dtype, matrices of some columns each, so that of a float32
    head only a piece is ever there in that dtype.
    """

    def __init__(
        self, hidden_NH: Tensor, head_VH: Tensor, compute: torch.dtype, stored: torch.dtype, block: int, temperature: float
    ) -> None:
        self.hidden, self.head, self.compute, self.temperature = hidden_NH, head_VH, compute, temperature
        V, device = len(head_VH), head_VH.device
        pieces = head_VH.dtype != compute and device.type != "cuda"
        self.columns = [slice(at, min(at + _COLUMNS, V)) for at in range(0, V, _COLUMNS)] if pieces else [slice(0, V)]
        self.whole = None if pieces else head_VH.to(compute)
        self.blocks = [torch.empty(block, c.stop - c.start, dtype=stored, device=device) for c in self.columns]
        self.small: Tensor | None = None

    def _head(self, columns: slice) -> Tensor:
        return self.head[columns].to(self.compute) if self.whole is None else self.whole

    def fill(self, rows: slice) -> None:
        self.now = [b[: rows.stop - rows.start] for b in self.blocks]
        for columns, z in zip(self.columns, self.now, strict=True):
            _logits(self.hidden[rows], self._head(columns), z, self.temperature)

    def tile(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """Some rows in ``dtype``, to be overwritten: those of the block itself where it is one matrix of that dtype."""
        if len(self.now) == 1 and self.now[0].dtype == dtype:
            return self.now[0][rows]
        if self.small is None or len(self.small) < rows.stop - rows.start:
            self.small = torch.empty(rows.stop - rows.start, self.columns[-1].stop, dtype=dtype, device=self.hidden.device)
        z = self.small[: rows.stop - rows.start]
        for columns, part in zip(self.columns, self.now, strict=True):
            z[:, columns] = part[rows]
        if self.now[0].dtype != dtype and self.temperature != 1:  # not divided before it was rounded
            z /= self.temperature
        return z

    def put(self, rows: slice, z: Tensor) -> None:
        """Their gradient, back into the block."""
        if self.small is not None:
            for columns, part in zip(self.columns, self.now, strict=True):
                part[rows] = z[:, columns]

    def times_head(self, rows: int, dtype: torch.dtype) -> Tensor:
        """The block's gradient times the head, [rows, H]; summed over pieces in ``dtype``."""
        if len(self.now) == 1:
            return self.now[0].to(self.compute) @ self._head(self.columns[0])
        total = torch.zeros(rows, self.head.shape[1], dtype=dtype, device=self.head.device)
        for columns, dz in zip(self.columns, self.now, strict=True):
            total += dz.to(self.compute) @ self._head(columns)
        return total

    def add_outer(self, sum_VH: Tensor, rows: slice) -> None:
        """The head's gradient, added up."""
        for columns, dz in zip(self.columns, self.now, strict=True):
            _accumulate(sum_VH[columns], dz.to(self.compute).t(), self.hidden[rows])


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


def _accumulate(sum_VH: Tensor, a: Tensor, b: Tensor) -> None:
    """sum += a @ b, in float32 whatever the factors' dtype, without a product of its own size beside it where the device can."""
    if a.dtype == sum_VH.dtype:
        sum_VH.addmm_(a, b)
    elif a.device.type == "cuda" and sum_VH.dtype == torch.float32:
        torch.addmm(sum_VH, a, b, out_dtype=torch.float32, out=sum_VH)
    else:
        sum_VH += _product(a, b)


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
