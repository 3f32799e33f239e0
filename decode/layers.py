"""Uniform layers: the records that a family's modules are read into, and the arithmetic that families differ in.

Shape suffixes: B rows, T new tokens, S cache slots, H hidden, N heads, K key-value heads, D head width.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Linear(NamedTuple):
    """Weight [out, in] and bias."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


_ROWS = 32
"""Rows that a packed weight is laid out for. With this hint every number of rows from 1 to 512 was at its fastest; with 1 float32 lost half."""


_LEAST_ROWS = {torch.float32: 4, torch.bfloat16: 1}
"""Fewer rows are slower: in float32 a step of the demo's target took 33.8, 37.2, 33.3 and 31.8 ms with 1 to 4 of them. In bfloat16 the difference is too
small to pay for the padding."""


@dataclass(slots=True)
class Packed:
    """A linear map whose weight lies as oneDNN's kernels read it.

    Handed a plain weight, they read memory at a third of its speed, since each call lays it out anew; laid out once, a step of the demo's
    target takes about half the time, and one of 2 to 9 tokens little more than one of a single token (docs/benchmarks.md).
    torch has no public call for it; inductor's own (torch.ops.mkldnn) is used, and only after ``can_pack`` has tried it.
    """

    weight: Tensor
    """Opaque."""
    bias: Tensor | None
    least: int
    """Fewer rows are padded to this many."""

    def __call__(self, x: Tensor) -> Tensor:
        *rows, width = x.shape
        count = math.prod(rows)
        if count >= self.least:
            return self._multiply(x)
        x = x.reshape(count, width)
        x = x.expand(self.least, width) if count == 1 else F.pad(x, (0, 0, 0, self.least - count))
        return self._multiply(x)[:count].view(*rows, -1)

    def _multiply(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, "none", [], "")  # type: ignore[no-any-return]


Map = Linear | Packed


@functools.cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether this build and CPU lay weights out, and compute with them what they should."""
    if dtype not in (torch.float32, torch.bfloat16) or not torch.backends.mkldnn.is_available():
        return False
    try:
        if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        plain = Linear(torch.linspace(-1, 1, 48 * 32).view(48, 32).to(dtype), torch.linspace(0, 1, 48).to(dtype))
        x = torch.linspace(1, -1, 3 * 32).view(1, 3, 32).to(dtype)
        return bool(torch.allclose(pack(plain)(x), plain(x), atol=1e-4, rtol=1e-5 if dtype == torch.float32 else 1e-2))
    except (AttributeError, RuntimeError, NotImplementedError):
        return False


def pack(linear: Map) -> Map:
    """The same map, laid out for oneDNN."""
    if isinstance(linear, Packed):
        return linear
    return Packed(torch.ops.mkldnn._reorder_linear_weight(linear.weight.contiguous(), _ROWS), linear.bias, _LEAST_ROWS[linear.weight.dtype])


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
            if x.is_cuda or self.weight is None:
                return F.rms_norm(x, self.shape, self.weight, self.eps)
            # A CPU has no kernel for it, and the composite takes 13 us for one token. x and -x together have mean 0, and a layer norm
            # then is an RMS norm: 8 us, rounded where transformers rounds.
            return F.layer_norm(torch.cat((x, -x), -1), (2 * x.shape[-1],), None, None, self.eps)[..., : x.shape[-1]] * self.weight
        if self.kind == "layer":
            return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)
        return F.rms_norm(x.float(), self.shape, self.weight, self.eps).to(x.dtype)


@dataclass(slots=True)
class Cross:
    """Attention to what an encoder read; ``kv`` is used once per text."""

    norm: Norm
    q: Map
    kv: Map
    out: Map


@dataclass(slots=True)
class Layer:
    """norm -> attention -> post -> (+ residual) -> after, then the same around the feed-forward part. None: not there."""

    qkv: Map
    """Heads of q, then k, then v, one after the other."""
    out: Map
    up: Map
    """Gate and up stacked where the family is gated."""
    down: Map
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
    head: Map
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
    project_in: Map | None = None
    project_out: Map | None = None
    softcap: float | None = None
    """Of the attention scores: cap * tanh(score / cap)."""
    logit_cap: float | None = None
    out_scale: float | None = None
    """Of the final hidden states."""


def pack_all(record: Any) -> None:
    """Lay out every map of a record of this module, and of the records in it."""
    for f in fields(record):
        value = getattr(record, f.name)
        if isinstance(value, Linear):
            setattr(record, f.name, pack(value))
        elif isinstance(value, Cross):
            pack_all(value)


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
    """Rotary positions, over the last dimension; the first half of ``sin`` is negated."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


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
