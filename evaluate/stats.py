"""Intervals for ratios of sums: the speed-up and the acceptance. NumPy and SciPy, no torch.

Both figures are sums over prompts divided by sums over prompts, so what is resampled is the prompt: rounds of one prompt
resemble each other, and an interval over rounds would be too narrow.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and the bounds of its confidence interval."""

    estimate: float
    low: float
    high: float
    method: str
    """``BCa``; ``percentile: ...`` where BCa is undefined; ``none: ...`` where the data allow no interval (low = high = estimate)."""

    def excludes(self, value: float) -> bool:
        """Whether the interval speaks against ``value``. Never, where there is no interval."""
        return not self.method.startswith("none") and not self.low <= value <= self.high

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def paired_ratio(baseline_seconds: Sequence[float], arm_seconds: Sequence[float], baseline_tokens: Sequence[float],
                 arm_tokens: Sequence[float], *, confidence: float = 0.95, resamples: int = 2000, seed: int = 0) -> Interval:  # fmt: skip
    """Speed-up of an arm: (sum baseline seconds / sum baseline tokens) / (sum arm seconds / sum arm tokens).

    Entry i of all four belongs to prompt i; prompts are resampled jointly, which keeps the pairing: a prompt that is slow
    for both arms says nothing about either.

    Raises:
        ValueError: unequal lengths, no prompts, or a value that is not finite and positive.
    """
    columns = _columns(baseline_seconds, arm_seconds, baseline_tokens, arm_tokens)
    if any((c <= 0).any() for c in columns):
        raise ValueError("seconds and tokens must be positive")

    def speedup(base_s: Floats, arm_s: Floats, base_n: Floats, arm_n: Floats, axis: int = -1) -> Floats:
        return (base_s.sum(axis) / base_n.sum(axis)) / (arm_s.sum(axis) / arm_n.sum(axis))

    return _bootstrap(columns, speedup, confidence, resamples, seed)


def pooled_ratio(parts: Sequence[float], wholes: Sequence[float], *, confidence: float = 0.95, resamples: int = 2000,
                 seed: int = 0) -> Interval | None:  # fmt: skip
    """sum(parts) / sum(wholes), for example accepted / proposed; None where the wholes add up to nothing.

    A prompt with an empty whole (lookup found nothing to propose) is left out: it has no ratio, and a resample made of such
    prompts alone would divide by zero.

    Raises:
        ValueError: unequal lengths, no prompts, or a value that is negative or not finite.
    """
    part, whole = _columns(parts, wholes)
    if (part < 0).any() or (whole < 0).any():
        raise ValueError("counts must not be negative")
    if not whole.sum():
        return None

    def pooled(a: Floats, b: Floats, axis: int = -1) -> Floats:
        return a.sum(axis) / b.sum(axis)

    return _bootstrap([part[whole > 0], whole[whole > 0]], pooled, confidence, resamples, seed)


def _columns(*values: Sequence[float]) -> list[Floats]:
    columns = [np.asarray(v, dtype=np.float64) for v in values]
    if len({c.shape for c in columns}) != 1 or columns[0].ndim != 1:
        raise ValueError(f"one value per prompt and column is needed, got shapes {[c.shape for c in columns]}")
    if not columns[0].size:
        raise ValueError("no prompts")
    if not all(np.isfinite(c).all() for c in columns):
        raise ValueError("values must be finite")
    return columns


def _bootstrap(columns: list[Floats], statistic: Callable[..., Floats], confidence: float, resamples: int, seed: int) -> Interval:
    estimate = float(statistic(*columns))
    if columns[0].size == 1:
        return Interval(estimate, estimate, estimate, "none: one prompt")
    if all(np.ptp(c) == 0 for c in columns):
        return Interval(estimate, estimate, estimate, "none: all prompts equal")
    confidence = _expanded(confidence, columns[0].size)
    low, high = _scipy(columns, statistic, confidence, resamples, seed, "BCa")
    if np.isfinite([low, high]).all():
        return Interval(estimate, low, high, "BCa")
    return Interval(
        estimate, *_scipy(columns, statistic, confidence, resamples, seed, "percentile"), "percentile: BCa is undefined on these data"
    )


def _expanded(confidence: float, n: int) -> float:
    """The nominal confidence that makes a bootstrap over n prompts cover ``confidence``.

    A bootstrap of n values is too narrow by sqrt((n-1)/n) and takes normal where t is due: the expanded percentile interval of
    Hesterberg, "What Teachers Should Know About the Bootstrap" (2015). At 95 % and 16 prompts plain BCa covered 91 to 93 % of
    simulated truths, expanded 93 to 96 %; with 4 prompts it stays at 87 %, because no resample leaves the range of the data.
    """
    from scipy.stats import norm, t

    wide = math.sqrt(n / (n - 1)) * t.ppf((1 + confidence) / 2, n - 1)
    return min(float(1 - 2 * norm.sf(wide)), 1 - 1e-9)


def _scipy(
    columns: list[Floats], statistic: Callable[..., Floats], confidence: float, resamples: int, seed: int, method: str
) -> tuple[float, float]:
    from scipy.stats import bootstrap  # about a second to import

    with warnings.catch_warnings(), np.errstate(all="ignore"):
        # BCa divides by the spread of the jackknife and takes the normal quantile of a share that can be 0 or 1:
        # both come back as NaN with a warning, and the caller falls back.
        warnings.simplefilter("ignore")
        interval = bootstrap(columns, statistic, paired=True, vectorized=True, confidence_level=confidence, n_resamples=resamples,
                             method=method, rng=np.random.default_rng(seed)).confidence_interval  # fmt: skip
    return float(interval.low), float(interval.high)
