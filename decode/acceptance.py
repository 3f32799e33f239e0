"""Exact rejection sampling: which proposed tokens stay, and the token that the target adds.

Source: Leviathan et al. (arXiv 2211.17192), algorithm 1; Chen et al. (arXiv 2302.01318), algorithm 2.
Pure functions of tensors with static shapes: no host reads.
Shape suffixes: B rows, G proposed tokens (padded), G1 = G + 1, V vocabulary, K ids that the draft can propose.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class Proposal:
    """What a drafter offers for B rows.

    ``counts_B`` tokens of each row are real, the rest padding. For a sampling drafter ``q_BGK`` is, to the bit, the law
    each token was drawn from, over ``ids_K`` (None: all ids), and ``q_drawn_BG`` its value at the token. Rows marked in
    ``certain_B`` did not sample (prompt lookup): their q is one-hot at the token.
    """

    tokens_BG: Tensor
    counts_B: Tensor
    q_drawn_BG: Tensor | None = None
    q_BGK: Tensor | None = None
    ids_K: Tensor | None = None
    certain_B: Tensor | None = None


def accept_greedy(best_BG1: Tensor, proposal: Proposal) -> tuple[Tensor, Tensor]:
    """Keep proposed tokens while they equal the target's argmax.

    Returns:
        (accepted_B, next_B): how many stay, and the target's own next token.
    """
    G = proposal.tokens_BG.shape[1]
    same = (best_BG1[:, :G] == proposal.tokens_BG) & _real(proposal)
    accepted_B = same.long().cumprod(1).sum(1)
    return accepted_B, best_BG1.gather(1, accepted_B[:, None]).squeeze(1)


def accept_sampled(p_BG1V: Tensor, proposal: Proposal, u_BG: Tensor) -> tuple[Tensor, Tensor]:
    """Keep x with probability min(1, p(x)/q(x)); the rest of the law is the residual.

    Args:
        p_BG1V: the target's processed probabilities, float32; row i is the law of the token after i accepted ones.
        u_BG: float64 uniforms in [0, 1).

    Returns:
        (accepted_B, rest_BV): how many stay, and the unnormalised law of the next token: max(p - q, 0) after a rejection,
        p itself after none. Where rounding leaves no residual (p = q to the bit, which exact arithmetic never rejects)
        it is p.
    """
    G = proposal.tokens_BG.shape[1]
    p_drawn_BG = p_BG1V[:, :G].gather(2, proposal.tokens_BG[..., None]).squeeze(2)
    q_drawn_BG = torch.ones_like(p_drawn_BG) if proposal.q_drawn_BG is None else proposal.q_drawn_BG
    keep = (u_BG * q_drawn_BG.double() < p_drawn_BG.double()) & _real(proposal)
    accepted_B = keep.long().cumprod(1).sum(1)
    p_BV = p_BG1V[torch.arange(len(p_BG1V), device=p_BG1V.device), accepted_B]
    rest_BV = (p_BV - _q_at(proposal, accepted_B, p_BV)).clamp_min_(0)
    return accepted_B, torch.where(rest_BV.sum(-1, keepdim=True) > 0, rest_BV, p_BV)


def _real(proposal: Proposal) -> Tensor:
    G = proposal.tokens_BG.shape[1]
    return torch.arange(G, device=proposal.tokens_BG.device) < proposal.counts_B[:, None]


def _q_at(proposal: Proposal, accepted_B: Tensor, like_BV: Tensor) -> Tensor:
    """The law of the rejected token of each row, over the whole vocabulary; zero where nothing was rejected."""
    rows = torch.arange(len(accepted_B), device=accepted_B.device)
    rejected_B = accepted_B < proposal.counts_B
    at_B = accepted_B.clamp_max(proposal.tokens_BG.shape[1] - 1)
    q_BV = torch.zeros_like(like_BV)
    sampled_B, certain_B = rejected_B, proposal.certain_B
    if certain_B is not None:
        token_B1 = proposal.tokens_BG[rows, at_B][:, None]
        q_BV.scatter_(1, token_B1, (rejected_B & certain_B).to(q_BV.dtype)[:, None])
        sampled_B = rejected_B & ~certain_B
    if proposal.q_BGK is not None:
        q_BK = proposal.q_BGK[rows, at_B] * sampled_B[:, None]
        if proposal.ids_K is None:
            q_BV += q_BK
        else:
            q_BV.index_add_(1, proposal.ids_K, q_BK)
    return q_BV
