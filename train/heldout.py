"""Held-out acceptance: sum min(p, q) along target-written text, exact, at the temperature asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from draftstill.decode import Sampling, probabilities
from draftstill.distill import Recording, agrees_at_top1, alpha_at_least

_ROWS = 64
"""Positions per block of whole laws: at 150,000 ids two float32 blocks take 77 MB."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Means over the held-out positions."""

    alpha: float
    """At temperature 1, whole head."""
    alpha_deploy: float
    """At the deployment's sampler, whole head."""
    top1: float
    """Argmax agreement: alpha at temperature 0."""
    positions: int
    tau: float = 1.0
    """Expected tokens per round, bonus included, at the deployment's sampler and ``gamma``: see ``expected_accepted``."""
    gamma: int = 0


def expected_accepted(alpha_N: Tensor, gamma: int) -> Tensor:
    """Expected accepted tokens of the rounds that begin at each position of one sequence, added up, float64:

        sum_i sum_{k=1..gamma} prod_{i <= j < i+k} alpha_j

    A guess at j is kept with probability alpha_j and looked at only if those before it were kept (arXiv 2211.17192). A round that
    begins near the end proposes only what is left. Over the number of positions, plus 1 for the bonus token, this is tau.
    """
    alpha, N = alpha_N.double(), len(alpha_N)
    kept, total = torch.ones_like(alpha), torch.zeros((), dtype=torch.float64, device=alpha.device)
    for k in range(min(gamma, N)):
        kept = kept[: N - k] * alpha[k:]
        total = total + kept.sum()
    return total


@torch.inference_mode()
def measure(hidden_of: Callable[[Tensor], Tensor], head_VH: Tensor, recording: Recording, target_head_VH: Tensor, deploy: Sampling,
            gamma: int = 0) -> HeldOut:  # fmt: skip
    """Compare draft and target on a recording of hidden states; on one without them, say what alpha is at least.

    Args:
        hidden_of: the draft's final hidden states [1, T, H] of ids [1, T].
        head_VH: the draft's head over the real tokens.
        recording: of the held-out side. Other modes than ``hidden``: see ``distill.alpha_at_least``.
        target_head_VH: the target's head over the real tokens.
        deploy: the deployment's sampler.
        gamma: guesses per round, for tau.
    """
    if recording.mode != "hidden":
        return _bounded(hidden_of, head_VH, recording, deploy, gamma)
    sums = torch.zeros(4, dtype=torch.float64)
    positions = 0
    for index in range(len(recording)):
        item = recording[index]
        assert item.hidden is not None
        draft_NH = hidden_of(item.tokens[None].to(head_VH.device))[0, item.start :].to(head_VH.dtype)
        target_NH = item.hidden[item.start :].to(target_head_VH)
        deployed: list[Tensor] = []
        for at in range(0, len(target_NH), _ROWS):
            rows = slice(at, at + _ROWS)
            z_p, z_q = (target_NH[rows] @ target_head_VH.T).float(), (draft_NH[rows] @ head_VH.T).float()
            one = torch.minimum(z_p.softmax(-1), z_q.softmax(-1)).sum(-1)
            dep = torch.minimum(probabilities(z_p, deploy), probabilities(z_q, deploy)).sum(-1)
            same = (z_p.argmax(-1) == z_q.argmax(-1)).float()
            sums[:3] += torch.stack([x.double().sum() for x in (one, dep, same)]).cpu()
            deployed.append(dep)
        if deployed:
            sums[3] += expected_accepted(torch.cat(deployed), gamma).cpu()
        positions += len(target_NH)
    alpha, alpha_deploy, top1, accepted = (sums / max(positions, 1)).tolist()
    return HeldOut(alpha, alpha_deploy, top1, positions, 1 + accepted, gamma)


def _bounded(hidden_of: Callable[[Tensor], Tensor], head_VH: Tensor, recording: Recording, deploy: Sampling, gamma: int) -> HeldOut:
    """``measure`` where the target's whole law is not known: every alpha is a lower bound."""
    sums = torch.zeros(4, dtype=torch.float64)
    positions = 0
    for index in range(len(recording)):
        item = recording[index]
        draft_NH = hidden_of(item.tokens[None].to(head_VH.device))[0].to(head_VH.dtype)
        deployed: list[Tensor] = []
        for rows in item.rows.split(_ROWS):
            z_q = (draft_NH[rows.to(draft_NH.device)] @ head_VH.T).float()
            deployed.append(alpha_at_least(item, rows, z_q, deploy, recording.mode))
            one = alpha_at_least(item, rows, z_q, Sampling(), recording.mode)
            sums[:3] += torch.stack([x.double().sum() for x in (one, deployed[-1], agrees_at_top1(item, rows, z_q))]).cpu()
        if deployed:
            sums[3] += expected_accepted(torch.cat(deployed), gamma).cpu()
        positions += len(item.rows)
    alpha, alpha_deploy, same, accepted = (sums / max(positions, 1)).tolist()
    return HeldOut(alpha, alpha_deploy, same, positions, 1 + accepted, gamma)
