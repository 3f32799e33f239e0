"""How many tokens to propose, decided from what was accepted so far. Pure Python: no torch, no clock.

No policy looks at tokens that are not yet judged: the target's distribution stays exact. ``AdaptiveGamma`` decides row by row, from
the row's own history and costs given beforehand, so a text does not depend on its neighbours or on how busy the machine is;
``GoodputGamma`` decides for a batch as a whole, which a large one needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
        c: draft step over plain target step, one number or by gamma.
        v: by gamma, verifying gamma + 1 tokens over a plain target step. Not smooth on CPUs: measure it.
        most: largest gamma; every 1 .. most needs an entry in ``v``.
        prior_alpha, prior_weight: the estimate before anything is known, and how many judged tokens it counts for.
        half_life: judged tokens after which older ones count half.
        probe_every: idle rounds after which one token is proposed all the same, or the estimate could never recover.
    """

    c: float | Mapping[int, float]
    v: Mapping[int, float]
    most: int
    prior_alpha: float = 0.5
    prior_weight: float = 8.0
    half_life: float = 64.0
    probe_every: int = 16

    def __post_init__(self) -> None:
        _check(self.most, self.c, self.v)

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
        return {"policy": "adaptive", "gamma": self.most, "c": _told(self.c), "v": dict(self.v)}


@dataclass(slots=True)
class GoodputGamma:
    """One gamma for all rows of a batch: the one with the most emitted tokens per second at this batch size; 0 where plain decoding has.

    Goodput of Liu et al. (arXiv 2406.14066): expected tokens of all rows over the time of drafting and verifying. A batch runs as long
    as its longest block, so rows that draft while others do not cost as if all did: the choice, the history and the probing are
    shared. Rounds depend on the neighbours, therefore, though each text's distribution does not.

    Args:
        c, v, most: as in ``AdaptiveGamma``, measured with as many rows as are decoded.
        rows: rows side by side.
        prior_alpha, prior_weight: the estimate before anything is judged, and for how many judged tokens it counts.
        half_life: judged tokens after which older ones count half.
        probe_every: rounds without a draft after which one token is proposed all the same.
    """

    c: float | Mapping[int, float]
    v: Mapping[int, float]
    most: int
    rows: int
    prior_alpha: float = 0.5
    prior_weight: float = 256.0
    half_life: float = 2048.0
    probe_every: int = 128
    shared: Judged = field(default_factory=Judged)

    def __post_init__(self) -> None:
        _check(self.most, self.c, self.v)

    @property
    def alpha(self) -> float:
        """Estimated acceptance per token of the whole batch."""
        return (self.shared.accepted + self.prior_alpha * self.prior_weight) / (self.shared.judged + self.prior_weight)

    def choose(self, history: Judged) -> int:
        best, _ = best_gamma(self.alpha, self.c, self.v, self.most)
        # Idle is counted by row, so that all rows of a round probe together.
        return 1 if best == 0 and self.most and self.shared.idle >= self.probe_every * self.rows else best

    def learn(self, history: Judged, proposed: int, accepted: int) -> None:
        mine = self.shared
        mine.idle = 0 if proposed else mine.idle + 1
        judged = accepted + (accepted < proposed)
        fade = 0.5 ** (judged / self.half_life)
        mine.accepted, mine.judged = mine.accepted * fade + accepted, mine.judged * fade + judged

    def describe(self) -> dict[str, object]:
        return {"policy": "goodput", "gamma": self.most, "rows": self.rows, "c": _told(self.c), "v": dict(self.v)}


def _check(most: int, c: float | Mapping[int, float], v: Mapping[int, float]) -> None:
    for what, cost in (("draft", c), ("verify", v)):
        missing = [g for g in range(1, most + 1) if isinstance(cost, Mapping) and g not in cost]
        if missing:
            raise ValueError(f"no {what} cost for gamma {missing}")


def _told(c: float | Mapping[int, float]) -> float | dict[int, float]:
    return dict(c) if isinstance(c, Mapping) else c
