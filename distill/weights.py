"""Which positions count, and how much: weights that multiply a token's loss. Shape suffix N: positions of whole sequences, in order.

``place_N`` counts the supervised positions of each sequence from 0, so a new sequence begins at every 0. ``run_N`` counts them from 0
again after every gap, since a round of guesses never jumps.
"""

from __future__ import annotations

import torch
from torch import Tensor


def within(place_N: Tensor, first: int = 0, last: int = 0) -> Tensor:
    """1 from supervised position ``first`` of a sequence up to, not including, ``last`` (0: to the end), else 0."""
    return ((place_N >= first) & ((place_N < last) if last else torch.ones_like(place_N, dtype=torch.bool))).float()


def runs(rows_N: Tensor, place_N: Tensor) -> Tensor:
    """run_N from the positions' places in the text: 0 at the start of a sequence and after a gap."""
    at = torch.arange(len(rows_N), device=rows_N.device)
    begins = place_N == 0
    begins[1:] |= rows_N[1:] != rows_N[:-1] + 1
    return at - torch.where(begins, at, 0).cummax(0).values if len(at) else at


def prefix_confidence(alpha_N: Tensor, run_N: Tensor, gamma: int, before: Tensor | None = None) -> Tensor:
    """Chance that a round of up to ``gamma`` guesses gets to a position, averaged over where the round may have begun:

        w_i = 1/m sum_{d < m} prod_{i-d <= j < i} alpha_j,   m = min(gamma, run_i + 1)

    prod alpha is the chance that all d guesses before it are kept (arXiv 2211.17192); where it is small the position is seldom asked
    for. Looks back only, so it can be formed while a pass goes through the positions, block by block.

    Args:
        alpha_N: acceptance probability of each position; taken as a constant.
        before: alpha of the positions just before the first, at least gamma - 1 of them where there are any.

    Returns:
        weights in [0, 1], 1 at the start of each run.
    """
    alpha = alpha_N if before is None else torch.cat([before, alpha_N])
    lead, N = len(alpha) - len(alpha_N), len(alpha_N)
    total, product = torch.ones_like(alpha_N), torch.ones_like(alpha_N)
    for d in range(1, gamma):
        shifted = torch.nn.functional.pad(alpha, (d, 0))[lead : lead + N]  # alpha_{i-d}
        product = product * torch.where(run_N >= d, shifted, 0.0)
        total = total + product
    return total / (run_N + 1).clamp_max(gamma)


def largest_gaps(gap_N: Tensor, place_N: Tensor, share: float) -> Tensor:
    """1 on each sequence's ``share`` of positions (rounded up) with the largest gap, else 0. Ties go to the earlier position.

    Of each sequence rather than of a batch, so that it does not depend on how a batch is cut. Selective distillation (AdaSPEC, arXiv
    2510.19779) has gap = the draft's loss - a reference draft's.
    """
    sequence_N = (place_N == 0).cumsum(0)
    order = gap_N.argsort(descending=True, stable=True)
    order = order[sequence_N[order].argsort(stable=True)]
    count = torch.bincount(sequence_N, minlength=int(sequence_N[-1]) + 1 if len(sequence_N) else 1)
    first = count.cumsum(0) - count
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device) - first[sequence_N[order]]
    return (rank < torch.ceil(share * count.double() - 1e-9)[sequence_N]).float()
