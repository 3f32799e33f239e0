"""``kernels.row_sums`` and ``row_scale`` for CUDA: two reads and one write of the logits, no temporaries. float32.

Tested in Triton's interpreter; not yet timed on a device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 4096


@triton.jit
def _sums(z_ptr, top_ptr, sum_ptr, V, stride, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, COLUMNS)
    top = tl.full([COLUMNS], -3.0e38, tl.float32)  # per lane, so that the loop has no reduction; finite, so that -inf - top is no nan
    total = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, V, COLUMNS):
        z = tl.load(z_ptr + row * stride + start + at, mask=start + at < V, other=-float("inf"))
        larger = tl.maximum(top, z)
        total = total * tl.exp(top - larger) + tl.exp(z - larger)
        top = larger
    best = tl.max(top, axis=0)
    tl.store(top_ptr + row, best)
    tl.store(sum_ptr + row, tl.sum(total * tl.exp(top - best), axis=0))


@triton.jit
def _scale(z_ptr, top_ptr, factor_ptr, V, stride, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    place = z_ptr + row * stride + at
    z = tl.load(place, mask=at < V, other=-float("inf"))
    tl.store(place, tl.load(factor_ptr + row) * tl.exp(z - tl.load(top_ptr + row)), mask=at < V)


def row_sums(z_NV: Tensor) -> tuple[Tensor, Tensor]:
    """(largest, sum of exp(z - largest)) of each row, z left as it is."""
    N, V = z_NV.shape
    top_N, sum_N = torch.empty(2, N, dtype=torch.float32, device=z_NV.device)
    if N:
        _sums[(N,)](z_NV, top_N, sum_N, V, z_NV.stride(0), COLUMNS=_COLUMNS)
    return top_N, sum_N


def row_scale(z_NV: Tensor, top_N: Tensor, factor_N: Tensor) -> None:
    """z becomes factor exp(z - top), in place."""
    N, V = z_NV.shape
    if N:
        _scale[(N, triton.cdiv(V, _COLUMNS))](z_NV, top_N, factor_N, V, z_NV.stride(0), COLUMNS=_COLUMNS)
