"""How many tokens to propose, decided row by row from what was accepted so far. Pure Python: no torch, no clock.

A row's choice depends on its own history and on costs given beforehand, so a text does not depend on its neighbours or on
how busy the machine is. It never looks at tokens that are not yet judged: the target's distribution stays exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from draftstill.decode.theory import best_gamma


@dataclass(slots=True)
class Judged:
    """A row's acceptance history, older rounds counting less."""

    accepted: float = 0.0
    judged: float = 0.0
    """Proposed tokens that the target looked at: the accepted ones, and the first rejected one."""
    idle: int = 0
    """Rounds since the last proposal."""


class GammaPolicy(Protocol):
    """Decides each row's gamma before its round."""

    most: int

    def choose(self, history: Judged) -> int:
        """Tokens to propose next, 0 .. most."""

    def learn(self, history: Judged, proposed: int, accepted: int) -> None:
        """What became of the row's last proposal."""

    def describe(self) -> dict[str, object]:
        """For the trace."""


@dataclass(slots=True)
class FixedGamma:
    """The same number in every round."""

    most: int

    def choose(self, history: Judged) -> int:
        return self.most

    def learn(self, history: Judged, proposed: int, accepted: int) -> None: ...

    def describe(self) -> dict[str, object]:
        return {"policy": "fixed", "gamma": self.most}


@dataclass(slots=True)
class AdaptiveGamma:
    """The gamma with the best predicted speed-up at the row's own estimated alpha; 0 where drafting would lose.

    Args:
        c: draft step over plain target step.
        v: by gamma, verifying gamma + 1 tokens over a plain target step. Not smooth on CPUs: measure it.
        most: largest gamma; every 1 .. most needs an entry in ``v``.
        prior_alpha, prior_weight: the estimate before anything is known, and how many judged tokens it counts for.
        half_life: judged tokens after which older ones count half.
        probe_every: idle rounds after which one token is proposed all the same, or the estimate could never recover.
    """

    c: float
    v: Mapping[int, float]
    most: int
    prior_alpha: float = 0.5
    prior_weight: float = 8.0
    half_life: float = 64.0
    probe_every: int = 16

    def __post_init__(self) -> None:
        missing = [g for g in range(1, self.most + 1) if g not in self.v]
        if missing:
            raise ValueError(f"no verify cost for gamma {missing}")

    def alpha(self, history: Judged) -> float:
        """Estimated acceptance per token: accepted over judged, shrunk to the prior."""
        return (history.accepted + self.prior_alpha * self.prior_weight) / (history.judged + self.prior_weight)

    def choose(self, history: Judged) -> int:
        best, _ = best_gamma(self.alpha(history), self.c, self.v, self.most)
        return 1 if best == 0 and self.most and history.idle >= self.probe_every else best

    def learn(self, history: Judged, proposed: int, accepted: int) -> None:
        history.idle = 0 if proposed else history.idle + 1
        judged = accepted + (accepted < proposed)
        fade = 0.5 ** (judged / self.half_life)
        history.accepted, history.judged = history.accepted * fade + accepted, history.judged * fade + judged

    def describe(self) -> dict[str, object]:
        return {"policy": "adaptive", "gamma": self.most, "c": self.c, "v": dict(self.v)}
