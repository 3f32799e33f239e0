"""What follows from a step's number alone: its phase, its learning rate. And from the measurements so far: its loss, and whether to stop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

from draftstill.recipe import Kind, Loss, Train


class Rates(Protocol):
    """The keys of a section that a learning rate follows from."""

    @property
    def lr_scheduler_type(self) -> str: ...
    @property
    def warmup_steps(self) -> int: ...


def learning_rate(settings: Rates, peak: float, step: int, steps: int) -> float:
    """Linear warm-up to ``peak``, then the recipe's shape down to 0 at the last step."""
    warm = min(settings.warmup_steps, max(0, steps - 1))
    if step < warm:
        return peak * (step + 1) / (warm + 1)
    share = (step - warm) / max(1, steps - warm)
    shape = {"constant": 1.0, "linear": 1 - share, "cosine": 0.5 * (1 + math.cos(math.pi * share))}[settings.lr_scheduler_type]
    return peak * shape


@dataclass(frozen=True, slots=True)
class Part:
    """The steps of one phase: first .. end-1."""

    number: int
    first: int
    end: int
    loss: Loss
    peak: float
    """Learning rate."""
    kinds: tuple[Kind, ...]


def parts(settings: Train, peak: float, steps: int) -> list[Part]:
    """The phases over ``steps`` steps, in order; one where the recipe names none. Their learning rate is ``peak`` where they name none. A share too small
    for a step has none."""
    if not settings.phases:
        return [Part(0, 0, steps, settings.loss, peak, ())]
    ends = [round(steps * done / sum(p.share for p in settings.phases)) for done in accumulate(p.share for p in settings.phases)]
    return [
        Part(number, first, end, phase.loss or settings.loss, phase.learning_rate or peak, phase.kinds)
        for number, (phase, first, end) in enumerate(zip(settings.phases, [0, *ends], ends, strict=False))
    ]


def part_of(found: Sequence[Part], step: int) -> Part:
    """The phase of a step; of a step behind the last one, the last."""
    return next((p for p in found if p.first <= step < p.end), found[-1])


def switched(loss: Loss, curve: Sequence[dict[str, Any]]) -> bool:
    """Whether a measurement so far has reached the alpha at which the loss gives way to another."""
    return loss.switch is not None and any(point["alpha_deploy"] >= loss.switch.alpha for point in curve)


def stale(curve: Sequence[dict[str, Any]]) -> int:
    """Measurements since the best held-out alpha."""
    alphas = [point["alpha_deploy"] for point in curve]
    return len(alphas) - 1 - alphas.index(max(alphas)) if alphas else 0
