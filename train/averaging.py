"""A moving average of the weights (EMA), measured and published in their place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from draftstill.train.checkpoint import alike


class Average:
    """Beside a model's trained parameters, on their devices: average = d * average + (1 - d) * weights after every step.

    d = min(decay, (1 + step) / (10 + step)): in the first steps the average follows, or the untrained weights would stay in it for long.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.tensors: dict[str, Tensor] = {name: p.detach().clone() for name, p in self._trained.items()}
        """By parameter name."""

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after ``step`` steps."""
        decay = min(self.decay, (1 + step) / (10 + step))
        for name, p in self._trained.items():
            self.tensors[name].lerp_(p, 1 - decay)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        for name, own in self.tensors.items():
            own.copy_(alike(tensors[name], own))

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The model holds the averaged weights, and its own again afterwards, to the bit."""
        own = {name: p.detach().clone() for name, p in self._trained.items()}
        with torch.no_grad():
            for name, p in self._trained.items():
                p.copy_(self.tensors[name])
        try:
            yield
        finally:
            with torch.no_grad():
                for name, p in self._trained.items():
                    p.copy_(own[name])
