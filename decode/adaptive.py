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
    probes: int = 0
    """Proposals in a row that were made only to see whether drafting pays again."""


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
        probe_every: idle rounds after which one token is proposed all the same, or the estimate could never recover;
            ever more seldom as long as that changes nothing.
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
        return _or_probe(best, self.most, history, self.probe_every)

    def learn(self, history: Judged, proposed: int, accepted: int) -> None:
        _wait(history, proposed)
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
        probe_every: rounds without a draft after which one token is proposed all the same; ever more seldom as long as that changes
            nothing.
        margin: predicted speed-up from which on it drafts at all: costs and alpha are known to a few percent, and a gain of less is as
            likely a loss.
    """

    c: float | Mapping[int, float]
    v: Mapping[int, float]
    most: int
    rows: int
    prior_alpha: float = 0.5
    prior_weight: float = 256.0
    half_life: float = 2048.0
    probe_every: int = 128
    margin: float = 1.02
    shared: Judged = field(default_factory=Judged)
    _known: tuple[float, int] = field(default=(-1.0, 0), init=False, repr=False)
    """An alpha, and the gamma that is best at it."""

    def __post_init__(self) -> None:
        _check(self.most, self.c, self.v)

    @property
    def alpha(self) -> float:
        """Estimated acceptance per token of the whole batch."""
        return (self.shared.accepted + self.prior_alpha * self.prior_weight) / (self.shared.judged + self.prior_weight)

    def choose(self, history: Judged) -> int:
        # Idle rounds are counted by row, so that all rows of a round probe together.
        return _or_probe(self._best(), self.most, self.shared, self.probe_every * self.rows)

    def _best(self) -> int:
        """Found once for all rows, and for as long as nothing is judged."""
        if self._known[0] != self.alpha:
            gamma, speed = best_gamma(self.alpha, self.c, self.v, self.most)
            self._known = self.alpha, gamma if speed > self.margin else 0
        return self._known[1]

    def learn(self, history: Judged, proposed: int, accepted: int) -> None:
        mine = self.shared
        _wait(mine, proposed)
        judged = accepted + (accepted < proposed)
        fade = 0.5 ** (judged / self.half_life)
        mine.accepted, mine.judged = mine.accepted * fade + accepted, mine.judged * fade + judged

    def describe(self) -> dict[str, object]:
        return {"policy": "goodput", "gamma": self.most, "rows": self.rows, "margin": self.margin, "c": _told(self.c), "v": dict(self.v)}


_DOUBLINGS = 4
"""Of the idle rounds between probes: 16 times as many at most."""


def _or_probe(best: int, most: int, history: Judged, every: int) -> int:
    """The best gamma; where that is 0, one token after ``every`` idle rounds, and after twice as many for each probe before it that changed
    nothing: a probing draft has to read all it missed."""
    if best:
        history.probes = 0
        return best
    return int(most > 0 and history.idle >= every << min(history.probes, _DOUBLINGS))


def _wait(history: Judged, proposed: int) -> None:
    """Count idle rounds, and the probes that ended them."""
    if not proposed:
        history.idle += 1
    elif history.idle:
        history.idle, history.probes = 0, history.probes + 1


def _check(most: int, c: float | Mapping[int, float], v: Mapping[int, float]) -> None:
    for what, cost in (("draft", c), ("verify", v)):
        missing = [g for g in range(1, most + 1) if isinstance(cost, Mapping) and g not in cost]
        if missing:
            raise ValueError(f"no {what} cost for gamma {missing}")


def _told(c: float | Mapping[int, float]) -> float | dict[int, float]:
    return dict(c) if isinstance(c, Mapping) else c
