"""A draw that rounding hardly ever changes.

Inverse-transform sampling moves with every border between two ids: among tens of thousands of them the last bits of a law, which
depend on how many rows were multiplied together, give the same uniform another token once in about a thousand tokens. Here the most
likely ids, and all others as one, race: each has an exponential time of its own, over its weight, and the first one wins. Rounding
then matters only where two times all but meet. The law is the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

_FIRST = 64
"""Ids that race by themselves; the others, a small share of the mass, are drawn from by inverse transform if they win."""
_GAMMA, _MIX = 0x9E3779B97F4A7C15 - 2**64, (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
"""SplitMix64's constants (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014), as signed numbers."""


def draw_steadily(weights_NV: Tensor, u_N: Tensor) -> Tensor:
    """As ``sampling.draw``: ids [N], each row's in proportion to its weights, following from float64 uniforms u."""
    V, u_N1 = weights_NV.shape[-1], u_N[:, None]
    top_NK, ids_NK = weights_NV.topk(min(_FIRST, V), -1, sorted=False)
    cdf = weights_NV.scatter(-1, ids_NK, 0).cumsum(-1, dtype=torch.float64)
    rest_N1 = cdf[:, -1:].contiguous()
    other = torch.full_like(ids_NK[:, :1], V)
    at_N1 = _uniform(u_N1, other + 1) * rest_N1
    behind_N1 = torch.minimum(torch.searchsorted(cdf, at_N1, right=True), torch.searchsorted(cdf, rest_N1))
    times = -_uniform(u_N1, torch.cat([ids_NK, other], -1)).log() / torch.cat([top_NK.double(), rest_N1], -1)
    return torch.cat([ids_NK, behind_N1], -1).gather(-1, times.argmin(-1, keepdim=True)).squeeze(-1)


def _uniform(u_N1: Tensor, number: Tensor) -> Tensor:
    """The given number of SplitMix64's sequence that starts at the bits of u, as float64 in (0, 1)."""
    x = (u_N1 * 2.0**53).long() + (number + 1) * _GAMMA
    for shift, factor in zip((30, 27), _MIX, strict=True):
        x = (x ^ _right(x, shift)) * factor
    return (_right(x ^ _right(x, 31), 11).double() + 0.5) * 2.0**-53


def _right(x: Tensor, bits: int) -> Tensor:
    """A shift that brings zeros in, whatever the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
