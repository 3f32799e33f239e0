"""Intervals for ratios of sums: the speed-up and the acceptance. NumPy and SciPy, no torch.

Both figures are sums over prompts divided by sums over prompts, so what is resampled is the prompt: rounds of one prompt
resemble each other, and an interval over rounds would be too narrow.

The interval is a studentised bootstrap (bootstrap-t; Efron and Tibshirani 1993, section 12.5), of the logarithm for a speed-up: each
resample's deviation is measured in its own standard error. Measured on 1,000 simulated runs of each of five kinds of draft whose acceptance
differs between prompts and whose texts differ in length, nominal 95 %, at 16 / 40 prompts: studentised .93-.96 / .94-.96; BCa, widened
for small samples, .92-.94 / .92-.95; percentile .87-.94 / .92-.96; t of the linearised ratio .90-.95 / .93-.96. With fewer than 8
prompts there are too few resamples to studentise and t is taken: .89-.93.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Timed = tuple[Sequence[float], Sequence[float]]
"""Seconds and emitted tokens, by prompt."""

_FEWEST = 8
"""Prompts below which nothing is studentised."""
_MOST = 1_000_000
"""Prompts beyond which no number is named."""


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and the bounds of its confidence interval."""

    estimate: float
    low: float
    high: float
    method: str
    """``bootstrap-t``; ``t: ...`` where the data are too few for it; ``none: ...`` where they allow no interval (low = high = estimate)."""
    prompts: int | None = None
    """That it was made from; what its width is to be judged by."""

    def excludes(self, value: float) -> bool:
        """Whether the interval speaks against ``value``. Never, where there is no interval."""
        return not self.method.startswith("none") and not self.low <= value <= self.high

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Best:
    """The fastest of several arms, with intervals that hold for all of them at once."""

    arm: str
    speedups: dict[str, Interval]
    """Of every arm against the baseline, simultaneous: the best one's may be quoted although it was picked for being the best."""
    rivals: dict[str, Interval]
    """Speed of the best arm over that of every other one. Its lower bound above 1 rules the other one out as the fastest in truth, and with the
    stated confidence no fastest one is ruled out, whichever arms are compared (comparisons with the best: Hsu 1984)."""


def paired_ratio(baseline_seconds: Sequence[float], arm_seconds: Sequence[float], baseline_tokens: Sequence[float],
                 arm_tokens: Sequence[float], *, confidence: float = 0.95, resamples: int = 2000, seed: int = 0) -> Interval:  # fmt: skip
    """Speed-up of an arm: (sum baseline seconds / sum baseline tokens) / (sum arm seconds / sum arm tokens).

    Entry i of all four belongs to prompt i; prompts are resampled jointly, which keeps the pairing: a prompt that is slow
    for both arms says nothing about either.

    Raises:
        ValueError: unequal lengths, no prompts, or a value that is not finite and positive.
    """
    columns = _columns(baseline_seconds, arm_tokens, arm_seconds, baseline_tokens)
    if (columns <= 0).any():
        raise ValueError("seconds and tokens must be positive")
    return _exp(_interval(_log_ratio, columns, confidence, resamples, seed))


def pooled_ratio(parts: Sequence[float], wholes: Sequence[float], *, confidence: float = 0.95, resamples: int = 2000,
                 seed: int = 0) -> Interval | None:  # fmt: skip
    """sum(parts) / sum(wholes), for example accepted / proposed; None where the wholes add up to nothing.

    A prompt with an empty whole (lookup found nothing to propose) is left out: it has no ratio. Where no part exceeds its whole,
    neither does the interval exceed 1.

    Raises:
        ValueError: unequal lengths, no prompts, or a value that is negative or not finite.
    """
    columns = _columns(parts, wholes)
    if (columns < 0).any():
        raise ValueError("counts must not be negative")
    columns = columns[:, columns[1] > 0]
    if not columns.size:
        return None
    found = _interval(_plain_ratio, columns, confidence, resamples, seed)
    most = 1.0 if (columns[0] <= columns[1]).all() else math.inf
    return replace(found, low=max(found.low, 0.0), high=min(found.high, most))


def prompts_to_settle(ratio: Interval, prompts: int, confidence: float) -> int | None:
    """How many prompts in all an interval needs to exclude 1, if the estimate and the prompts' scatter stay what they are.

    ``prompts`` itself where it does so already. None where no number can be named: there is no interval, the estimate is 1, or it
    would take more than a million.
    """
    if ratio.method.startswith("none") or prompts < 2 or min(ratio.estimate, ratio.low) <= 0:
        return prompts if ratio.excludes(1.0) else None
    if ratio.excludes(1.0):
        return prompts
    away = abs(math.log(ratio.estimate))
    bound = ratio.low if ratio.estimate > 1 else ratio.high  # the side that faces 1
    scatter = abs(math.log(ratio.estimate / bound)) / _t(confidence, prompts) * math.sqrt(prompts)
    if not math.isfinite(scatter) or away * math.sqrt(_MOST) < scatter * _t(confidence, _MOST):
        return None
    low, high = prompts, _MOST
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _t(confidence, middle) * scatter < away * math.sqrt(middle) else (middle + 1, high)
    return max(low, prompts + 1)


def best_of(baseline: Timed, arms: Mapping[str, Timed], *, confidence: float = 0.95, resamples: int = 2000, seed: int = 0) -> Best:
    """The fastest arm, and what may be said of it after having looked at all of them.

    The largest of several noisy figures is too large on average, and an interval for one arm alone does not say how much. The bounds here hold for all
    arms at once, by the distribution of the largest studentised deviation over the arms (max-T; Westfall and Young 1993). To rule an arm
    out as the fastest, the bound must hold for all comparisons with that arm, on one side; all pairs of arms would ask for more than is
    claimed. With fewer than 8 prompts: Bonferroni's t.

    Raises:
        ValueError: no arms, unequal lengths, no prompts, or a value that is not finite and positive.
    """
    if not arms:
        raise ValueError("no arms")
    names = list(arms)
    columns = _columns(*baseline, *itertools.chain.from_iterable(arms.values()))
    if (columns <= 0).any():
        raise ValueError("seconds and tokens must be positive")
    n = columns.shape[1]
    value, cov = _speeds(columns[:, None, :])
    draws = _speeds(columns[:, _resamples(n, resamples, seed)]) if n >= _FEWEST else None

    def critical(family: list[tuple[int, int]], sides: int) -> float:
        """Standard errors that the deviations of all (i, j), j over i, stay within: above, or on both sides."""
        found = _t(1 - 2 / sides * (1 - confidence) / max(len(family), 1), n) if n > 1 else math.inf
        if draws is not None and family:
            deviations = []
            for i, j in family:
                again, scatter = _difference(*draws, i, j)
                away = _studentised(again, scatter, _difference(value, cov, i, j)[0])
                deviations.append(np.abs(away) if sides == 2 else away)
            reached = _quantile(np.max(deviations, 0), confidence)
            found = reached if math.isfinite(reached) else found
        return found

    method = "bootstrap-t: simultaneous" if draws is not None else f"t: simultaneous, {n} prompts"
    every = range(1, len(arms) + 1)
    wide = critical([(0, i) for i in every], 2)
    speedups = {names[i - 1]: _around(*_difference(value, cov, 0, i), wide, method, n) for i in every}
    best = int(value[0, 1:].argmax()) + 1
    ratios = {}
    for other in every:
        if other != best:
            bound = critical([(other, i) for i in every if i != other], 1)
            ratios[names[other - 1]] = _around(*_difference(value, cov, other, best), bound, method, n)
    return Best(names[best - 1], speedups, ratios)


def _columns(*values: Sequence[float]) -> Floats:
    columns = [np.asarray(v, dtype=np.float64) for v in values]
    if len({c.shape for c in columns}) != 1 or columns[0].ndim != 1:
        raise ValueError(f"one value per prompt and column is needed, got shapes {[c.shape for c in columns]}")
    if not columns[0].size:
        raise ValueError("no prompts")
    if not all(np.isfinite(c).all() for c in columns):
        raise ValueError("values must be finite")
    return np.stack(columns)


def _t(confidence: float, n: int) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(n - 1, (1 + confidence) / 2))


def _resamples(n: int, resamples: int, seed: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, n, (resamples, n))


def _error(deviation: Floats) -> Floats:
    """Standard error of a mean from the deviations of its terms, along the last axis."""
    n = deviation.shape[-1]
    return np.sqrt((deviation**2).sum(-1) / (n * (n - 1)))


def _plain_ratio(columns: Floats) -> tuple[Floats, Floats]:
    """sum a / sum b and its standard error, linearised."""
    a, b = columns
    value = a.sum(-1) / b.sum(-1)
    return value, _error((a - value[..., None] * b) / b.mean(-1, keepdims=True))


def _log_ratio(columns: Floats) -> tuple[Floats, Floats]:
    """log(sum a / sum b * sum c / sum d), for columns a, c, b, d, and its standard error, linearised."""
    a, c, b, d = columns / columns.mean(-1, keepdims=True)
    sums = np.log(columns.sum(-1))
    return sums[0] + sums[1] - sums[2] - sums[3], _error(a + c - b - d)


def _interval(statistic: Any, columns: Floats, confidence: float, resamples: int, seed: int) -> Interval:
    n = columns.shape[1]
    if n == 1:
        # Two equal prompts have the ratio of one.
        value = float(statistic(np.repeat(columns, 2, 1))[0])
        return Interval(value, value, value, "none: one prompt", n)
    value, error = (float(x) for x in statistic(columns))
    if not error > 1e-12:
        return Interval(value, value, value, "none: all prompts have the same ratio", n)
    wide = _t(confidence, n)
    if n < _FEWEST:
        return Interval(value, value - wide * error, value + wide * error, f"t: {n} prompts", n)
    again, scatter = statistic(columns[:, _resamples(n, resamples, seed)])
    deviation = np.sort(_studentised(again, scatter, value))
    below, above = (_quantile(deviation, (1 + sign * confidence) / 2) for sign in (-1, 1))
    if not math.isfinite(below + above):
        return Interval(value, value - wide * error, value + wide * error, "t: most prompts have the same ratio", n)
    return Interval(value, value - above * error, value - below * error, "bootstrap-t", n)


def _studentised(value: Floats, error: Floats, truth: float | Floats) -> Floats:
    """Deviations in their own standard errors; infinite where a resample has no scatter, 0 where it has no deviation either."""
    away = value - truth
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(np.abs(away) < 1e-12, 0.0, away / np.where(error > 1e-12, error, 0.0))


def _quantile(values: Floats, share: float) -> float:
    """An order statistic: no interpolation between a finite value and an infinite one."""
    return float(np.quantile(values, share, method="closest_observation"))


def _exp(found: Interval) -> Interval:
    return replace(found, estimate=math.exp(found.estimate), low=math.exp(found.low), high=math.exp(found.high))


def _speeds(columns: Floats) -> tuple[Floats, Floats]:
    """log(tokens per second) of K arms, [B, K], and the covariance of their errors, [B, K, K]; columns [2 K, B, n] are seconds, tokens, ..."""
    n = columns.shape[-1]
    seconds, tokens = (columns[i::2] for i in (0, 1))
    value = np.log(tokens.sum(-1)) - np.log(seconds.sum(-1))
    deviation = (tokens / tokens.mean(-1, keepdims=True) - seconds / seconds.mean(-1, keepdims=True)).transpose(1, 0, 2)
    return value.T, deviation @ deviation.transpose(0, 2, 1) / (n * max(n - 1, 1))


def _difference(value: Floats, cov: Floats, i: int, j: int) -> tuple[Floats, Floats]:
    """log speed of arm j over arm i, and its standard error."""
    return value[:, j] - value[:, i], np.sqrt(np.maximum(cov[:, i, i] + cov[:, j, j] - 2 * cov[:, i, j], 0.0))


def _around(value: Floats, error: Floats, critical: float, method: str, n: int) -> Interval:
    """A symmetric interval on the log scale."""
    estimate = math.exp(float(value[0]))
    if n == 1 or not error[0] > 1e-9:
        return Interval(estimate, estimate, estimate, "none: one prompt" if n == 1 else "none: all prompts have the same ratio", n)
    wide = math.exp(min(critical * float(error[0]), 50.0))  # two prompts and many arms overflow; so wide says nothing either way
    return Interval(estimate, estimate / wide, estimate * wide, method, n)
