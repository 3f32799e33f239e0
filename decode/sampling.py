"""The law that tokens are drawn from, and the drawing. Float32 probabilities, float64 inverse transform.

Shape suffixes: N independent rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sampling:
    """temperature 0 is greedy; top_k 0 and top_p 1 keep everything. Order: temperature, top-k, top-p, as in transformers."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def probabilities(logits_NV: Tensor, sampling: Sampling) -> Tensor:
    """Processed distribution of each row, float32 [N, V]; greedy rows are one-hot at the (first) argmax."""
    if sampling.greedy:
        best = logits_NV.argmax(-1, keepdim=True)
        return torch.zeros_like(logits_NV, dtype=torch.float32).scatter_(-1, best, 1.0)
    z = logits_NV.float()
    if sampling.temperature != 1.0:
        z = z / sampling.temperature
    if 0 < sampling.top_k < z.shape[-1]:
        # A threshold, as transformers has it: ties with the k-th value all stay.
        z = z.masked_fill(z < z.topk(sampling.top_k, -1).values[..., -1:], -torch.inf)
    if sampling.top_p < 1.0:
        sorted_p, order = torch.sort(z.softmax(-1), dim=-1, descending=True, stable=True)
        # A token stays while the mass before it is below top_p: the smallest set that holds top_p.
        drop = (sorted_p.cumsum(-1) - sorted_p) >= sampling.top_p
        drop[..., 0] = False
        z = z.masked_fill(drop.scatter(-1, order, drop), -torch.inf)
    return z.softmax(-1)


def draw(weights_NV: Tensor, u_N: Tensor) -> Tensor:
    """Inverse-transform sample of each row, proportional to its non-negative weights.

    Args:
        weights_NV: need not sum to 1; each row must have a positive entry.
        u_N: float64 uniforms in [0, 1).

    Returns:
        ids [N]; an entry of weight 0 is never drawn.
    """
    cdf = weights_NV.cumsum(-1, dtype=torch.float64)
    total = cdf[..., -1:].contiguous()
    picked = torch.searchsorted(cdf, u_N.unsqueeze(-1) * total, right=True)
    # u * total can round up to total: the last id with weight is then the right one.
    last = torch.searchsorted(cdf, total)
    return torch.minimum(picked, last).squeeze(-1)


def uniforms(generator: torch.Generator, count: int) -> Tensor:
    """Float64 uniforms in [0, 1) of one row's own stream; the global RNG is left alone."""
    return torch.rand(count, generator=generator, dtype=torch.float64)
