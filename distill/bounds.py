"""What a draft's alpha is at least, where the whole of p is not known: a recording of top log-probabilities, or of text alone.

Shape suffixes: N positions, K kept ids, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftstill.decode import Sampling, probabilities
from draftstill.distill.recording import Recorded


def alpha_at_least(item: Recorded, rows: Tensor, z_q_NV: Tensor, sampling: Sampling, mode: str) -> Tensor:
    """A lower bound of alpha = sum min(p, q) at each position, both sides processed by ``sampling``.

    ``topk``: rigorous, from the kept ids and the tail; exact at temperature 0, and where top-k keeps no more than was recorded. ``text``: q of the
    written token. Its mean estimates sum p q <= sum min(p, q) where the text was written with this sampling.

    Args:
        item: recorded at temperature 1.
        rows: positions of the item, as many as z_q_NV has rows.
        z_q_NV: the draft's logits.
    """
    q_NV = probabilities(z_q_NV, sampling)
    assert item.ids is not None and item.p is not None and item.tail is not None
    ids_NK, p_NK, tail_N = (x[rows].to(q_NV.device) for x in (item.ids, item.p, item.tail))
    q_NK = q_NV.gather(1, ids_NK.clamp_min(0)) * (ids_NK >= 0)
    if mode == "text":
        return q_NK[:, 0]
    least_N, most_N = tail_at(p_NK, tail_N, q_NV.shape[1], sampling.temperature)
    if sampling.top_k > 0:
        least_N = torch.zeros_like(least_N)  # top-k may leave none of it
    # A larger tail makes each id's share smaller or the nucleus larger, which makes it smaller, too, but lets later ids in: the lesser of both
    # extremes bounds all between them.
    laws = [processed(p_NK, mass_N, sampling) for mass_N in (least_N, most_N)]
    return torch.minimum(torch.minimum(*laws), q_NK).sum(-1)


def tail_at(p_NK: Tensor, tail_N: Tensor, vocab: int, temperature: float) -> tuple[Tensor, Tensor]:
    """Least and largest sum of p^(1/temperature) over the ids that were not kept. They have ``tail`` in all and none is more probable than the
    least kept one: spread evenly is one extreme, as few of that size as make it up the other."""
    if temperature in (0.0, 1.0):
        return tail_N, tail_N
    power, rest = 1 / temperature, (vocab - (p_NK > 0).sum(-1)).clamp_min(1)
    least_N = torch.where(p_NK > 0, p_NK, 1.0).amin(-1)
    few = tail_N * least_N ** (power - 1)
    even = rest ** (1 - power) * tail_N**power
    return torch.minimum(few, even), torch.maximum(few, even)


def processed(p_NK: Tensor, mass_N: Tensor, sampling: Sampling) -> Tensor:
    """The processed law of the kept ids, [N, K], if those that were not kept weigh ``mass_N`` beside p^(1/temperature) of the kept."""
    if sampling.greedy:
        first = torch.zeros_like(p_NK)
        first[:, 0] = (p_NK[:, 0] > 0).float()
        return first
    weight_NK = p_NK ** (1 / sampling.temperature)
    if 0 < sampling.top_k <= p_NK.shape[1]:
        weight_NK = weight_NK * (torch.arange(p_NK.shape[1], device=p_NK.device) < sampling.top_k)
        mass_N = torch.where((p_NK > 0).sum(-1) >= sampling.top_k, 0.0, mass_N)
    law_NK = weight_NK / (weight_NK.sum(-1) + mass_N).clamp_min(torch.finfo(torch.float32).tiny)[:, None]
    if sampling.top_p < 1:
        # An id stays if those before it hold less than top_p; where all kept ids together do not, ids of the tail stay, too, up to one that is
        # no more probable than the last kept one.
        last_N = torch.where(law_NK > 0, law_NK, torch.inf).amin(-1)
        before_NK = law_NK.cumsum(-1) - law_NK
        law_NK = law_NK * (before_NK < sampling.top_p)
        held_N = law_NK.sum(-1)
        whole_N = torch.where(held_N >= sampling.top_p, held_N, (sampling.top_p + last_N).clamp_max(1.0))
        law_NK = law_NK / whole_N[:, None]
    return law_NK


def agrees_at_top1(item: Recorded, rows: Tensor, z_q_NV: Tensor) -> Tensor:
    """Whether the draft's argmax is the target's; of a recording of text alone, whether it is the written token."""
    assert item.ids is not None
    return (z_q_NV.argmax(-1) == item.ids[rows, 0].to(z_q_NV.device)).float()
