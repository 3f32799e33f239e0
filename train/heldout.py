"""Held-out acceptance: sum min(p, q) along target-written text, exact, at the temperature asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from draftstill.decode import Sampling, probabilities
from draftstill.distill import Recording

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


@torch.inference_mode()
def measure(
    hidden_of: Callable[[Tensor], Tensor], head_VH: Tensor, recording: Recording, target_head_VH: Tensor, deploy: Sampling
) -> HeldOut:
    """Compare draft and target on a recording of hidden states.

    Args:
        hidden_of: the draft's final hidden states [1, T, H] of ids [1, T].
        head_VH: the draft's head over the real tokens.
        recording: in ``hidden`` mode.
        target_head_VH: the target's head over the real tokens.
        deploy: the deployment's sampler.
    """
    assert recording.mode == "hidden"
    sums = torch.zeros(3, dtype=torch.float64)
    positions = 0
    for index in range(len(recording)):
        item = recording[index]
        assert item.hidden is not None
        draft_NH = hidden_of(item.tokens[None].to(head_VH.device))[0, item.start :].to(head_VH.dtype)
        target_NH = item.hidden[item.start :].to(target_head_VH)
        for at in range(0, len(target_NH), _ROWS):
            rows = slice(at, at + _ROWS)
            z_p, z_q = (target_NH[rows] @ target_head_VH.T).float(), (draft_NH[rows] @ head_VH.T).float()
            one = torch.minimum(z_p.softmax(-1), z_q.softmax(-1)).sum(-1)
            dep = torch.minimum(probabilities(z_p, deploy), probabilities(z_q, deploy)).sum(-1)
            same = (z_p.argmax(-1) == z_q.argmax(-1)).float()
            sums += torch.stack([x.double().sum() for x in (one, dep, same)]).cpu()
        positions += len(target_NH)
    alpha, deployed, top1 = (sums / max(positions, 1)).tolist()
    return HeldOut(alpha, deployed, top1, positions)
