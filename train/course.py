"""What each step of a training sees: its sequences, its learning rate and its loss. All of it follows from the step, and what was measured so far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from draftstill.distill import Objective, Recording, seed_of
from draftstill.errors import DraftstillError
from draftstill.recipe import Loss, Train
from draftstill.train.data import Order
from draftstill.train.schedule import Part, learning_rate, part_of, parts, switched


class Course:
    """The steps from the first to the last.

    Args:
        peak: learning rate where a phase names none.
        kept: sequences of the recording that are learnt from.
        per_step: sequences of a step, over all processes.

    Raises:
        DraftstillError: a phase asks for a kind of text that the recording does not hold.
    """

    def __init__(
        self, settings: Train, peak: float, seed: int, recording: Recording, kept: Sequence[int], per_step: int, temperature: float
    ) -> None:
        self.settings, self.per_step, self._temperature = settings, per_step, temperature
        epochs = math.ceil(settings.num_train_epochs * len(kept) / per_step)
        self.steps = settings.max_steps if settings.max_steps > 0 else max(1, epochs)
        self._parts = parts(settings, peak, self.steps)
        kinds = {index: recording.kind(index) for index in kept} if any(p.kinds for p in self._parts) else {}
        self._drawn = [[i for i in kept if not p.kinds or kinds[i] in p.kinds] for p in self._parts]
        for part, drawn in zip(self._parts, self._drawn, strict=True):
            if not drawn:
                raise DraftstillError("the recording holds no text of this kind", key=f"train.phases.{part.number}.kinds", value=list(part.kinds),
                                      mend=f"it holds {', '.join(sorted(set(kinds.values())))}; record.replays and record.rollouts make more")  # fmt: skip
        self._orders = [Order(len(drawn), seed_of(seed, "phase", n) if n else seed) for n, drawn in enumerate(self._drawn)]

    def sequences(self, step: int) -> list[int]:
        """Of one step, all processes' in turn. Each phase reads its kinds of text epoch by epoch from its own beginning."""
        part = part_of(self._parts, step)
        drawn = self._drawn[part.number]
        return [drawn[place] for place in self._orders[part.number].take((step - part.first) * self.per_step, self.per_step)]

    def learning_rate(self, step: int) -> float:
        return learning_rate(self.settings, part_of(self._parts, step).peak, step, self.steps)

    def part(self, step: int) -> Part:
        return part_of(self._parts, step)

    def objective(self, step: int, curve: Sequence[dict[str, Any]]) -> Objective:
        """The divergence, given the measurements so far."""
        loss = self.part(step).loss
        return objective_of(loss, self._temperature, switched=switched(loss, curve))


def objective_of(loss: Loss, temperature: float, *, switched: bool = False) -> Objective:
    """The recipe's words as the kernels' objective; ``temperature`` stands where the loss names none."""
    to = loss.switch.to if switched and loss.switch else None
    return Objective(to or loss.name, loss.eta, loss.temperature or temperature, loss.beta, () if to else tuple(loss.mix.items()), loss.top_k,
                     loss.top_p)  # fmt: skip
