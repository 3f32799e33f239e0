"""Uniform layers: the records that a family's modules are read into, and the arithmetic that families differ in.

Shape suffixes: B rows, T new tokens, S cache slots, H hidden, N heads, K key-value heads, D head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Linear(NamedTuple):
    """Weight [out, in] and bias: ``F.linear(x, *linear)``."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(slots=True)
class Norm:
    """A norm over the last dimension."""

    weight: Tensor | None
    bias: Tensor | None
    shape: tuple[int, ...]
    eps: float
    kind: str = "rms"
    """``rms``; ``rms32``: multiplied by its float32 weight before the cast back (Gemma, where the weight is 1 + w); ``layer``."""

    def __call__(self, x: Tensor) -> Tensor:
        if self.kind == "rms":
            return F.rms_norm(x, self.shape, self.weight, self.eps)
        if self.kind == "layer":
            return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)
        return F.rms_norm(x.float(), self.shape, self.weight, self.eps).to(x.dtype)


@dataclass(slots=True)
class Cross:
    """Attention to what an encoder read; ``kv`` is used once per text."""

    norm: Norm
    q: Linear
    kv: Linear
    out: Linear


@dataclass(slots=True)
class Layer:
    """norm -> attention -> post -> (+ residual) -> after, then the same around the feed-forward part. None: not there."""

    qkv: Linear
    """Heads of q, then k, then v, one after the other."""
    out: Linear
    up: Linear
    """Gate and up stacked where the family is gated."""
    down: Linear
    norm1: Norm | None = None
    norm2: Norm | None = None
    """None in a parallel layer: both parts read norm1's output."""
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    post1: Norm | None = None
    post2: Norm | None = None
    after1: Norm | None = None
    after2: Norm | None = None
    cross: Cross | None = None
    scale: float | None = None
    """Of the attention scores; None: width ** -0.5."""
    sort: int = 0
    """Index into ``Stack.sorts``."""


@dataclass(slots=True)
class Sort:
    """What layers of one sort share: how far they look back, and their rotary frequencies."""

    window: int | None = None
    inv_freq: Tensor | None = None
    scaling: float = 1.0


@dataclass(slots=True)
class Stack:
    """A whole model, ready for the one forward."""

    layers: list[Layer]
    sorts: list[Sort]
    embed: Tensor
    head: Linear
    norm: Norm | None
    heads: int
    kv_heads: int
    width: int
    max_positions: int
    activation: Callable[[Tensor], Tensor]
    gated: bool = True
    parallel: bool = False
    """Attention and feed-forward part read the same residual stream."""
    embed_scale: float | None = None
    positions: Tensor | None = None
    """Learned positions, [P, H]; row 0 is position 0."""
    project_in: Linear | None = None
    project_out: Linear | None = None
    softcap: float | None = None
    """Of the attention scores: cap * tanh(score / cap)."""
    logit_cap: float | None = None
    out_scale: float | None = None
    """Of the final hidden states."""


def tensors(record: Any) -> Iterator[Tensor]:
    """Every tensor of a record of this module."""
    values = record if isinstance(record, tuple) else [getattr(record, f.name) for f in fields(record)]
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Linear | Norm | Cross):
            yield from tensors(value)


def _gelu_new(x: Tensor) -> Tensor:
    if x.dtype == torch.float32:
        return F.gelu(x, approximate="tanh")
    # In half precision transformers rounds at every step of the formula; the fused kernel would not.
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu, "swish": F.silu, "relu": F.relu, "gelu": F.gelu, "gelu_new": _gelu_new, "gelu_pytorch_tanh": _gelu_tanh,
}  # fmt: skip


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions, over the last dimension."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def capped_attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float | None, cap: float) -> Tensor:
    """Attention with capped scores, which no fused kernel of torch has; casts as in transformers' eager attention.

    Args:
        q: [B, N, T, D].
        keys, values: [B, K, S, D].
        mask: True where a token may look; [T, S] or [B, 1, T, S].

    Returns:
        [B, T, N D].
    """
    (B, N, T, D), K = q.shape, keys.shape[1]
    s = q.reshape(B, K, N // K * T, D) @ keys.transpose(2, 3) * (D**-0.5 if scale is None else scale)
    s = (torch.tanh(s / cap) * cap).unflatten(2, (N // K, T))
    if mask is not None:
        s = s.masked_fill(~(mask if mask.dim() == 2 else mask[:, :, None]), -torch.inf)
    a = s.softmax(-1, dtype=torch.float32).to(q.dtype).flatten(2, 3) @ values
    return a.unflatten(2, (N // K, T)).permute(0, 3, 1, 2, 4).reshape(B, T, N * D)
