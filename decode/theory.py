"""Closed formulas of speculative decoding, and what follows from counts. Pure Python: no torch.

Sources: Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding" (arXiv 2211.17192), "the paper" below;
Liu et al., "Optimizing Speculative Decoding for Serving Large Language Models Using Goodput" (arXiv 2406.14066).
alpha: acceptance per token in [0, 1]; gamma: tokens proposed per round; c: draft step time over plain target step time;
v: time to verify gamma + 1 tokens over plain target step time (the paper takes v = 1).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens per round if acceptance is i.i.d., bonus included: (1 - alpha^(gamma+1)) / (1 - alpha). Paper, equation 1."""
    return float(gamma + 1) if alpha == 1.0 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def predicted_speedup(tau: float, gamma: float, c: float, v: float = 1.0) -> float:
    """tau / (gamma c + v). With tau = expected_tokens and v = 1 it is the paper's Theorem 3.8."""
    return tau / (gamma * c + v)


def operations_factor(alpha: float, gamma: int, c_ops: float) -> float:
    """Arithmetic operations over plain decoding's: (1-alpha)(gamma c' + gamma + 1) / (1 - alpha^(gamma+1)). Theorem 3.11."""
    return (gamma * c_ops + gamma + 1) / expected_tokens(alpha, gamma)


def ceiling(gamma: int, c: float, v: float = 1.0) -> float:
    """Speed-up of a draft that is always right."""
    return (gamma + 1) / (gamma * c + v)


def break_even(gamma: int, c: float, v: float = 1.0) -> float | None:
    """The alpha below which this gamma, c, v loses against plain decoding; None where even a perfect draft does."""
    if ceiling(gamma, c, v) < 1.0:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if predicted_speedup(expected_tokens(middle, gamma), gamma, c, v) < 1.0 else (low, middle)
    return high


def best_gamma(alpha: float, c: float | Mapping[int, float], v: float | Mapping[int, float] = 1.0, most: int = 16) -> tuple[int, float]:
    """The gamma in 0..most with the largest i.i.d. prediction, and that prediction; 0 means: do not speculate.

    c and v, the cost of a verify pass with gamma >= 1, are one number each or measured by gamma; plain decoding costs 1. Of equals
    the smaller gamma: it wastes less.
    """
    at = lambda cost, g: cost[g] if isinstance(cost, Mapping) else cost  # noqa: E731
    options = [(1.0, 0)] + [(predicted_speedup(expected_tokens(alpha, g), g, at(c, g), at(v, g)), -g) for g in range(1, most + 1)]
    speed, negative = max(options)
    return -negative, speed


def oracle_bound(alpha: float, c: float) -> float:
    """Speed-up if each round's gamma were chosen knowing how many guesses will pass, v = 1: 1 / (1 - alpha (1 - c)).

    A round then proposes just the N guesses that pass and emits N + 1 tokens in time N c + 1; N is geometric with mean
    alpha / (1 - alpha). No fixed or adaptive gamma does better; the paper puts the gain over the best fixed one at up to about 60 %.
    Infinite for alpha = 1 at c = 0.
    """
    lost = 1 - alpha * (1 - c)
    return 1 / lost if lost else math.inf


def histogram(accepted: Iterable[int], gamma: int) -> tuple[int, ...]:
    """Rounds by accepted count, 0 .. gamma. Give it whole rounds only: those in which gamma tokens were proposed."""
    counts = [0] * (gamma + 1)
    for a in accepted:
        counts[a] += 1
    return tuple(counts)


def tau_from_counts(rounds: tuple[int, ...], gamma: int) -> float:
    """Tokens per round, bonus included, had the rounds of a histogram proposed only ``gamma`` tokens.

    Exact for the gamma that was run. For a smaller one an estimate: its rounds would also start where none started here.

    Raises:
        ValueError: no rounds, or a gamma larger than the histogram's: nothing is known of what was not proposed.
    """
    if gamma >= len(rounds) or not sum(rounds):
        raise ValueError(f"rounds of gamma {len(rounds) - 1} ({sum(rounds)} of them) do not tell of gamma {gamma}")
    return 1 + sum(n * min(a, gamma) for a, n in enumerate(rounds)) / sum(rounds)


@dataclass(frozen=True, slots=True)
class Dispersion:
    """Accepted counts beside what independent acceptance of the same rate would give."""

    gamma: int
    rounds: int
    alpha: float
    """Accepted over judged guesses (the accepted ones and each round's first rejected one): the rate that fits a geometric law best."""
    observed: list[float]
    """Share of rounds with 0 .. gamma accepted."""
    independent: list[float]
    """The same under independence: (1 - alpha) alpha^k, and alpha^gamma at the end."""
    variance_ratio: float | None
    """Variance of the accepted count over that of the geometric law. Above 1: easy and hard stretches, long runs and immediate failures."""
    tau: float
    tau_independent: float
    """Equation 1 at ``along``: the acceptance at every position of the text, not only where rounds got to."""
    along: float

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "error": self.tau_independent / self.tau - 1}


def dispersion(rounds: tuple[int, ...], along: float | None = None) -> Dispersion:
    """How far accepted counts are from independent ones, and what that does to the prediction.

    Args:
        rounds: a histogram.
        along: alpha as the mean over positions of target-written text; the fitted rate where it is not known.

    Raises:
        ValueError: no rounds.
    """
    gamma, total = len(rounds) - 1, sum(rounds)
    tau = tau_from_counts(rounds, gamma)
    accepted = sum(a * n for a, n in enumerate(rounds))
    judged = accepted + total - rounds[gamma]
    alpha = accepted / judged if judged else 1.0
    law = [(1 - alpha) * alpha**k for k in range(gamma)] + [alpha**gamma]

    def variance(shares: Iterable[float]) -> float:
        shares = list(shares)
        mean = sum(k * s for k, s in enumerate(shares))
        return sum((k - mean) ** 2 * s for k, s in enumerate(shares))

    observed = [n / total for n in rounds]
    independent = variance(law)
    rate = alpha if along is None else along
    return Dispersion(gamma, total, alpha, observed, law, variance(observed) / independent if independent > 1e-12 else None,
                      tau, expected_tokens(rate, gamma), rate)  # fmt: skip


def goodput(tau: float, gamma: int, rows: int, draft_s: float, verify_s: float) -> float:
    """Emitted tokens per second of ``rows`` texts side by side: rows tau / (gamma draft_s + verify_s). Liu et al.

    Args:
        tau: tokens per round and text, bonus included; 1 where gamma is 0.
        draft_s: seconds of a draft step for all rows; ``verify_s`` of verifying gamma + 1 tokens in each.
    """
    return rows * tau / (gamma * draft_s + verify_s)


def goodput_table(
    tau: Mapping[int, float], draft_s: Mapping[int, float], verify_s: Mapping[int, Mapping[int, float]]
) -> dict[int, dict[int, float]]:
    """Goodput by rows, then by gamma; plain decoding (gamma 0) is always among them.

    Args:
        tau: by gamma, measured or ``expected_tokens``; taken to be the same at each number of rows.
        draft_s: by rows. verify_s: by rows, then by gamma; every number of rows needs an entry for gamma 0.
    """
    return {
        rows: {g: goodput(1.0 if g == 0 else tau[g], g, rows, draft_s[rows], s) for g, s in sorted(by_gamma.items()) if g == 0 or g in tau}
        for rows, by_gamma in sorted(verify_s.items())
    }


def pays_until(table: Mapping[int, Mapping[int, float]], margin: float = 1.0) -> int | None:
    """The largest number of rows up to which, at each number measured, some gamma beats plain decoding by the factor ``margin``.

    None where speculation does not pay at the smallest number either.
    """
    last = None
    for rows in sorted(table):
        plain = table[rows][0]
        if not any(speed > margin * plain for g, speed in table[rows].items() if g):
            break
        last = rows
    return last
