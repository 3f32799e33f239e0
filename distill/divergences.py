"""What a draft is asked to match, once, as pure functions of outcome probabilities: the oracles of the fused kernel.

p: target, q: draft, both [N, O] over O outcomes that sum to (about) 1 per row: the whole vocabulary, or a recording's K ids
plus one tail bucket. Each returns one value per token [N]. Directions are always written KL(p||q).

    forward KL   sum p log(p/q)
    TVD          1 - sum min(p, q) = 1 - alpha, half the L1 distance of two laws
    LK(eta)      l KL(p||q) + (1-l) TVD,  l = exp(-eta alpha) per token, not differentiated  (arXiv 2602.23881)

alpha = sum min(p, q) is the probability that rejection sampling keeps the draft's token (arXiv 2211.17192, theorem 3.5).
"""

from __future__ import annotations

import torch
from torch import Tensor

LOSSES = ("forward_kl", "tvd", "lk")


def alpha(p_NO: Tensor, q_NO: Tensor) -> Tensor:
    """Acceptance probability, [N] in [0, 1]."""
    return torch.minimum(p_NO, q_NO).sum(-1)


def forward_kl(p_NO: Tensor, q_NO: Tensor) -> Tensor:
    """KL(p||q) in nats; outcomes with p = 0 add nothing."""
    tiny = torch.finfo(q_NO.dtype).tiny
    return torch.where(p_NO > 0, p_NO * (p_NO.clamp_min(tiny).log() - q_NO.clamp_min(tiny).log()), 0.0).sum(-1)


def tvd(p_NO: Tensor, q_NO: Tensor) -> Tensor:
    """Total variation distance, 1 - alpha."""
    return p_NO.sum(-1) - alpha(p_NO, q_NO)


def lk(p_NO: Tensor, q_NO: Tensor, eta: float = 3.0) -> Tensor:
    """KL where the draft is bad, TVD where it is good."""
    share = torch.exp(-eta * alpha(p_NO, q_NO).detach())
    return share * forward_kl(p_NO, q_NO) + (1 - share) * tvd(p_NO, q_NO)


def divergence(name: str, p_NO: Tensor, q_NO: Tensor, eta: float = 3.0) -> Tensor:
    """One of LOSSES by name."""
    if name == "forward_kl":
        return forward_kl(p_NO, q_NO)
    if name == "tvd":
        return tvd(p_NO, q_NO)
    if name == "lk":
        return lk(p_NO, q_NO, eta)
    raise ValueError(f"unknown loss {name!r}")


def bucketed(q_NV: Tensor, ids_NK: Tensor, p_NK: Tensor, tail_N: Tensor) -> tuple[Tensor, Tensor]:
    """Both laws on K + 1 outcomes: the recorded ids and everything else in one bucket.

    Merging outcomes can only lower KL and TVD (data processing), so a draft is never flattered by less than alpha's
    upper bound says and never blamed for how it spreads the tail. Ids of -1 are unused places of a row.

    Returns:
        (p_NO, q_NO), O = K + 1, the bucket last.
    """
    used = ids_NK >= 0
    q_NK = q_NV.gather(1, ids_NK.clamp_min(0)) * used
    V = q_NV.shape[1]
    recorded = torch.zeros(len(q_NV), V + 1, dtype=torch.bool, device=q_NV.device)
    recorded.scatter_(1, torch.where(used, ids_NK, V), True)
    # Summed from its members: 1 - sum(q_NK) would lose a thin bucket to cancellation.
    q_tail = q_NV.masked_fill(recorded[:, :V], 0.0).sum(-1)
    return torch.cat([p_NK * used, tail_N[:, None]], 1), torch.cat([q_NK, q_tail[:, None]], 1)


def alpha_bounds(p_NO: Tensor, q_NO: Tensor) -> tuple[Tensor, Tensor]:
    """Rigorous bounds on the true alpha from bucketed laws: sum_K min <= alpha <= sum_K min + min(tail_p, tail_q)."""
    low = torch.minimum(p_NO[:, :-1], q_NO[:, :-1]).sum(-1)
    return low, low + torch.minimum(p_NO[:, -1], q_NO[:, -1])
