"""Held-out acceptance: sum min(p, q) along target-written text, exact, at the temperature asked for.

Shape suffixes: N positions, V vocabulary, H hidden, K ids that the draft may guess.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from draftstill.decode import Sampling, probabilities
from draftstill.distill import Recorded, Recording, agrees_at_top1, alpha_at_least

_ROWS = 64
"""Positions per block of whole laws: at 150,000 ids two float32 blocks take 77 MB."""

MEASURED = {"hidden": "alpha", "topk": "alpha at least", "text": "mean q of the written token"}
"""What a recording's mode lets one know of alpha, in words."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Means over the held-out positions. In modes other than ``hidden`` alpha is what MEASURED calls it."""

    alpha: float
    """At temperature 1, whole head."""
    alpha_deploy: float
    """At the deployment's sampler, with the head that the decoder drafts from."""
    top1: float
    """Argmax agreement, whole head: alpha at temperature 0."""
    positions: int
    tau: float = 1.0
    """Expected tokens per round, bonus included, at the deployment's sampler, head and ``gamma``: see ``expected_accepted``."""
    gamma: int = 0


def expected_accepted(alpha_N: Tensor, gamma: int, kept_N: Tensor | None = None) -> Tensor:
    """Expected accepted tokens of the rounds that begin at each position of one sequence, added up, float64:

        sum_i sum_{k=1..gamma} alpha_{i+k-1} prod_{i <= j < i+k-1} r_j,    r_j = min(1, q_j(y) / p_j(y)) of the token y written behind j

    A round keeps k guesses with probability sum over all x_1..x_k of prod min(p, q) (arXiv 2211.17192). Of this, the last guess's sum is
    alpha, and the others are the expectation of prod r along a text drawn from p: so along such a text it is unbiased. alpha in place of r
    is not, since a text that takes the tokens that p and q agree on leads to other places than one that does not. A round that begins near
    the end proposes only what is left. Over the number of positions, plus 1 for the bonus token, this is tau.

    Args:
        kept_N: r; the last one is not looked at. None where p and q of the written tokens are not known: alpha then stands for them.
    """
    alpha, N = alpha_N.double(), len(alpha_N)
    kept = alpha if kept_N is None else kept_N.double()
    before, total = torch.ones_like(alpha), torch.zeros((), dtype=torch.float64, device=alpha.device)
    for k in range(min(gamma, N)):
        total = total + (before * alpha[k:]).sum()
        before = (before * kept[k:])[:-1]
    return total


@torch.inference_mode()
def measure(hidden_of: Callable[[Tensor], Tensor], head_VH: Tensor, recording: Recording, target_head_VH: Tensor, deploy: Sampling,
            gamma: int = 0, ids_K: Tensor | None = None) -> HeldOut:  # fmt: skip
    """Compare draft and target on a recording of hidden states; on one without them, say what alpha is at least.

    Args:
        hidden_of: the draft's final hidden states [1, T, H] of ids [1, T].
        head_VH: the draft's head over the real tokens.
        recording: of the held-out side. Other modes than ``hidden``: see ``distill.alpha_at_least``.
        target_head_VH: the target's head over the real tokens.
        deploy: the deployment's sampler.
        gamma: guesses per round, for tau.
        ids_K: what the decoder lets the draft guess; elsewhere its q is 0 (None: all ids).
    """
    outside_V = None
    if ids_K is not None:
        outside_V = torch.ones(len(head_VH), dtype=torch.bool, device=head_VH.device)
        outside_V[ids_K.to(head_VH.device)] = False
    sums = torch.zeros(4, dtype=torch.float64)
    positions = 0
    for index in range(len(recording)):
        item = recording[index]
        draft_TH = hidden_of(item.tokens[None].to(head_VH.device))[0].to(head_VH.dtype)
        found: list[Tensor] = []
        for rows in item.rows.split(_ROWS):
            z_q = (draft_TH[rows.to(draft_TH.device)] @ head_VH.T).float()
            z_cut = z_q if outside_V is None else z_q.masked_fill(outside_V, -torch.inf)
            compare = _bounded if item.hidden is None else _exact
            found.append(compare(item, rows, z_q, z_cut, target_head_VH, deploy, recording.mode))
        if found:
            one_N, deployed_N, same_N, kept_N = torch.cat(found, 1).double()
            kept = None if item.hidden is None else kept_N
            accepted = expected_accepted(deployed_N, gamma, kept)
            sums += torch.stack([one_N.sum(), deployed_N.sum(), same_N.sum(), accepted]).cpu()
        positions += len(item.rows)
    alpha, alpha_deploy, same, accepted_sum = (sums / max(positions, 1)).tolist()
    return HeldOut(alpha, alpha_deploy, same, positions, 1 + accepted_sum, gamma)


def _exact(item: Recorded, rows: Tensor, z_q: Tensor, z_cut: Tensor, target_head_VH: Tensor, deploy: Sampling, mode: str) -> Tensor:
    """[4, N]: alpha at temperature 1, alpha as deployed, argmax agreement, and r of ``expected_accepted``."""
    assert item.hidden is not None
    z_p = (item.hidden[rows].to(target_head_VH) @ target_head_VH.T).float()
    one = torch.minimum(z_p.softmax(-1), z_q.softmax(-1)).sum(-1)
    p, q = probabilities(z_p, deploy), probabilities(z_cut, deploy)
    alpha = torch.minimum(p, q).sum(-1)
    written = item.written.clamp_min(0)[rows].to(p.device)[:, None]
    p_y, q_y = p.gather(1, written)[:, 0], q.gather(1, written)[:, 0]
    # A token on the border of top-k or top-p may have been written and lie outside now: nothing is known of its ratio.
    kept = torch.where(p_y > 0, (q_y / p_y).clamp_max(1), alpha)
    return torch.stack([one, alpha, (z_p.argmax(-1) == z_q.argmax(-1)).float(), kept])


def _bounded(item: Recorded, rows: Tensor, z_q: Tensor, z_cut: Tensor, target_head_VH: Tensor, deploy: Sampling, mode: str) -> Tensor:
    """As ``_exact`` where the target's whole law is not known: every alpha is what MEASURED says, and stands for r, too."""
    alpha = alpha_at_least(item, rows, z_cut, deploy, mode)
    return torch.stack([alpha_at_least(item, rows, z_q, Sampling(), mode), alpha, agrees_at_top1(item, rows, z_q), alpha])


def told(found: HeldOut, mode: str, head_tokens: int) -> str:
    """A measurement in one line.

    Args:
        mode: of the held-out recording.
        head_tokens: ids that the decoder drafts from (0: all).
    """
    among = f", {head_tokens:,} ids" if head_tokens else ""
    return (f"{MEASURED[mode]} {found.alpha_deploy:.3f} (deployment{among}), {found.alpha:.3f} (T = 1), top-1 {found.top1:.3f}, "
            f"tau {found.tau:.2f} at gamma {found.gamma}")  # fmt: skip
