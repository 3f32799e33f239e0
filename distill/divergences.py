"""What a draft is asked to match, once, as pure functions of outcome probabilities: the oracles of the fused kernel.

p: target, q: draft, both [N, O] over O outcomes that sum to (about) 1 per row: the whole vocabulary, or a recording's K ids
plus one tail bucket. Each returns one value per token [N], in nats where there is a logarithm. Directions are written KL(p||q).

    forward_kl   sum p log(p/q)
    reverse_kl   sum q log(q/p)
    jsd(b)       b KL(p||m) + (1-b) KL(q||m),  m = b p + (1-b) q, 0 < b < 1: arXiv 2306.13649's. b -> 0 is b KL(p||q), not KL(p||q)
    tvd          1 - alpha, half the L1 distance of two laws
    nla          -log alpha
    lk(eta)      l KL(p||q) + (1-l) TVD,  l = exp(-eta alpha) per token, not differentiated  (arXiv 2602.23881)
    ce           -log q of the token that was written

alpha = sum min(p, q) is the probability that rejection sampling keeps the draft's token (arXiv 2211.17192, theorem 3.5).

Recorded log-probabilities are rounded, so sum p may miss 1 a little. Both KLs carry + sum q - sum p (or its opposite): 0 between
laws, no gradient through a softmax, and it keeps them from going below 0 (Csiszar's I-divergence).

q = 0 where p > 0 (the draft's own top-k or top-p cut it off): log q counts as log FLOOR, constant; gradients flow through q's kept
outcomes alone. TVD, NLA and JSD are finite there anyway. Likewise log p where the target cut and the draft did not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

LOSSES = ("forward_kl", "reverse_kl", "jsd", "tvd", "nla", "lk", "ce")

FLOOR = 1e-30
"""Stands in for a probability of exactly 0 inside a logarithm: 69 nats."""
LOG_FLOOR = math.log(FLOOR)


@dataclass(frozen=True, slots=True)
class Objective:
    """Which divergence, of which laws.

    ``temperature`` divides both sides' logits inside the loss; then ``top_k`` and ``top_p`` cut both laws as the deployment's sampler
    would. None of them has to do with how the text was sampled.
    """

    name: str = "forward_kl"
    eta: float = 3.0
    """Decay of the KL share in ``lk``."""
    temperature: float = 1.0
    beta: float = 0.5
    """Weight of p in ``jsd``'s mixture."""
    mix: tuple[tuple[str, float], ...] = ()
    """(name, weight) pairs; when given, the loss is their weighted sum and ``name`` is not used."""
    top_k: int = 0
    """Keep the k most probable outcomes of each law (0: all)."""
    top_p: float = 1.0
    """Keep each law's smallest set that holds this much."""

    def __post_init__(self) -> None:
        for name, _ in self.terms:
            if name not in LOSSES:
                raise ValueError(f"unknown loss {name!r}; there are {', '.join(LOSSES)}")
        if not 0 < self.beta < 1:
            raise ValueError(f"jsd's beta must lie between 0 and 1, not {self.beta}: its ends are b*KL, use forward_kl or reverse_kl")

    @property
    def terms(self) -> tuple[tuple[str, float], ...]:
        return self.mix or ((self.name, 1.0),)

    @property
    def cuts(self) -> bool:
        """Whether laws are cut to a top-k or top-p."""
        return self.top_k > 0 or self.top_p < 1


def alpha(p_NO: Tensor, q_NO: Tensor) -> Tensor:
    """Acceptance probability, [N] in [0, 1]."""
    return torch.minimum(p_NO, q_NO).sum(-1)


def forward_kl(p_NO: Tensor, q_NO: Tensor) -> Tensor:
    """KL(p||q); outcomes with p = 0 add nothing."""
    return torch.where(p_NO > 0, p_NO * (_log(p_NO) - _log(q_NO)), 0.0).sum(-1) + (q_NO - p_NO).sum(-1)


def reverse_kl(p_NO: Tensor, q_NO: Tensor) -> Tensor:
    """KL(q||p); outcomes with q = 0 add nothing. Needs p where q is large: on a recording all of that is in the bucket."""
    return torch.where(q_NO > 0, q_NO * (_log(q_NO) - _log(p_NO)), 0.0).sum(-1) + (p_NO - q_NO).sum(-1)


def jsd(p_NO: Tensor, q_NO: Tensor, beta: float = 0.5) -> Tensor:
    """Generalised Jensen-Shannon divergence; at most the entropy of (b, 1-b)."""
    log_m = _log(beta * p_NO + (1 - beta) * q_NO)
    to_p = torch.where(p_NO > 0, p_NO * (_log(p_NO) - log_m), 0.0).sum(-1)
    to_q = torch.where(q_NO > 0, q_NO * (_log(q_NO) - log_m), 0.0).sum(-1)
    return beta * to_p + (1 - beta) * to_q


def tvd(p_NO: Tensor, q_NO: Tensor) -> Tensor:
    """Total variation distance, 1 - alpha."""
    return p_NO.sum(-1) - alpha(p_NO, q_NO)


def nla(p_NO: Tensor, q_NO: Tensor) -> Tensor:
    """-log alpha: TVD's direction for each token, at a size that does not vanish with alpha."""
    return -alpha(p_NO, q_NO).clamp_min(FLOOR).log()


def lk(p_NO: Tensor, q_NO: Tensor, eta: float = 3.0) -> Tensor:
    """KL where the draft is bad, TVD where it is good."""
    share = torch.exp(-eta * alpha(p_NO, q_NO).detach())
    return share * forward_kl(p_NO, q_NO) + (1 - share) * tvd(p_NO, q_NO)


def cross_entropy(q_NV: Tensor, token_N: Tensor) -> Tensor:
    """-log q(token), 0 where there is no token (-1)."""
    q_N = q_NV.gather(1, token_N.clamp_min(0)[:, None])[:, 0]
    return torch.where(token_N >= 0, -_log(q_N), 0.0)


def divergence(name: str, p_NO: Tensor, q_NO: Tensor, eta: float = 3.0, beta: float = 0.5) -> Tensor:
    """One of LOSSES by name, but ``ce``, which is no divergence from p."""
    if name == "lk":
        return lk(p_NO, q_NO, eta)
    if name == "jsd":
        return jsd(p_NO, q_NO, beta)
    plain = {"forward_kl": forward_kl, "reverse_kl": reverse_kl, "tvd": tvd, "nla": nla}
    if name not in plain:
        raise ValueError(f"unknown loss {name!r}")
    return plain[name](p_NO, q_NO)


def _log(x: Tensor) -> Tensor:
    """log x; log FLOOR without a gradient where x is 0."""
    return torch.where(x > 0, x.clamp_min(torch.finfo(x.dtype).tiny).log(), LOG_FLOOR)


def kept(z_NV: Tensor, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """What a sampler with top-k, then top-p leaves of softmax(z): bool [N, V]. As ``decode.probabilities``: ties with the k-th
    stay, and a token stays while the mass before it is below top_p."""
    z = z_NV
    if 0 < top_k < z.shape[-1]:
        z = z.masked_fill(z < z.topk(top_k, -1).values[:, -1:], -torch.inf)
    if top_p < 1:
        ordered, order = torch.sort(z, dim=-1, descending=True, stable=True)
        q = ordered.softmax(-1)
        before = q.double().cumsum(-1) - q
        z = z.masked_fill(torch.empty_like(order, dtype=torch.bool).scatter_(-1, order, before >= top_p), -torch.inf)
    return z > -torch.inf


def cut_record(p_NK: Tensor, tail_N: Tensor, top_k: int = 0, top_p: float = 1.0) -> tuple[Tensor, Tensor]:
    """A recorded law after top-k, then top-p, scaled back to 1, as far as it is known. Every id in the tail is less probable than the recorded ones.

    A row with fewer than ``top_k`` recorded ids keeps them all, and as much of the bucket as the missing ids can hold, none of them being more
    probable than the last recorded one. Where the nucleus reaches beyond the recorded ids, it holds
    between ``top_p`` and that plus one more id: p counts over ``top_p``, and the bucket is what that leaves. ``cut_bounds`` tells how far that may be off.
    """
    p_NK, tail_N, _ = _first(p_NK, tail_N, top_k)
    total_N = p_NK.sum(-1) + tail_N
    if top_p < 1:
        limit_N = top_p * total_N.double()
        reached_N = p_NK.double().sum(-1) >= limit_N
        p_NK = torch.where(_before(p_NK) < limit_N[:, None], p_NK, 0.0)
        held_N = p_NK.double().sum(-1)
        tail_N = torch.where(reached_N, 0.0, (limit_N - held_N).clamp_min(0)).to(tail_N.dtype)
        total_N = torch.where(reached_N, held_N, limit_N).to(p_NK.dtype)
    total_N = total_N.clamp_min(FLOOR)
    return p_NK / total_N[:, None], tail_N / total_N


def cut_bounds(p_NK: Tensor, tail_N: Tensor, top_k: int = 0, top_p: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """What ``cut_record``'s true law can be: each recorded id's least and largest probability [N, K], and the most that the bucket can hold [N].

    The ids after top-k hold a mass T in all, the nucleus a mass S of it; both lie between what the recorded ids settle and what the tail
    can add at most, one id of it being no more probable than the least recorded one. p_i is p_i / S, where i is in the nucleus at all.
    """
    p_NK, tail_N, last_N = (x.double() for x in _first(p_NK, tail_N, top_k))
    held_N, before_NK = p_NK.sum(-1), _before(p_NK)
    most_N = held_N + tail_N
    fewest_N = held_N if top_k else most_N

    def nucleus(limit_N: Tensor, beyond_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Its recorded ids, its mass, and whether it is all recorded."""
        inside_NK, reached_N = p_NK * (before_NK < limit_N[:, None]), held_N >= limit_N
        return inside_NK, torch.where(reached_N, inside_NK.sum(-1), beyond_N).clamp_min(FLOOR), reached_N

    low_N, high_N = top_p * fewest_N, top_p * most_N
    small_NK, least_N, _ = nucleus(low_N, low_N)
    large_NK, largest_N, recorded_N = nucleus(high_N, torch.minimum(most_N, high_N + last_N))
    return (
        small_NK / largest_N[:, None],
        (large_NK / least_N[:, None]).clamp_max(1.0),
        torch.where(recorded_N, 0.0, (1 - held_N / largest_N).clamp_min(0)),
    )


def _first(p_NK: Tensor, tail_N: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """After top-k, not scaled: p, the most that the tail can keep, and its least probable recorded id. Ties with the k-th stay."""
    last_N = torch.where(p_NK > 0, p_NK, torch.inf).amin(-1).nan_to_num(posinf=1.0)
    if top_k == 0:
        return p_NK, tail_N, last_N
    missing_N = (top_k - (p_NK > 0).sum(-1)).clamp_min(0)
    if top_k <= p_NK.shape[1]:
        # A row with fewer ids has 0 for its k-th.
        p_NK = torch.where(p_NK >= p_NK.topk(top_k, -1).values[:, -1:], p_NK, 0.0)
    return p_NK, torch.minimum(tail_N, missing_N * last_N), last_N


def _before(p_NK: Tensor) -> Tensor:
    """Mass of the more probable ids of the row, float64 [N, K]."""
    ordered_NK, order_NK = torch.sort(p_NK, dim=-1, descending=True, stable=True)
    ordered_NK = ordered_NK.double()
    return torch.empty_like(ordered_NK).scatter_(-1, order_NK, ordered_NK.cumsum(-1) - ordered_NK)


def bucketed(q_NV: Tensor, ids_NK: Tensor, p_NK: Tensor, tail_N: Tensor) -> tuple[Tensor, Tensor]:
    """Both laws on K + 1 outcomes: the recorded ids and everything else in one bucket.

    Merging outcomes can only lower a divergence (data processing), so a draft is never flattered by less than alpha's
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
