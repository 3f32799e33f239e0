"""Closed formulas of speculative decoding. Pure Python: no torch.

Source: Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding" (arXiv 2211.17192).
alpha: acceptance per token in [0, 1]; gamma: tokens proposed per round; c: draft step time over plain target step time;
v: time to verify gamma + 1 tokens over plain target step time (the paper takes v = 1).
"""

from __future__ import annotations

from collections.abc import Mapping


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


def best_gamma(alpha: float, c: float, v: float | Mapping[int, float] = 1.0, most: int = 16) -> tuple[int, float]:
    """The gamma in 0..most with the largest i.i.d. prediction, and that prediction; 0 means: do not speculate.

    v is the cost of a verify pass with gamma >= 1, one number or measured by gamma; plain decoding costs 1. Of equals the
    smaller gamma: it wastes less.
    """
    cost = (lambda g: v[g]) if isinstance(v, Mapping) else (lambda g: v)
    options = [(1.0, 0)] + [(predicted_speedup(expected_tokens(alpha, g), g, c, cost(g)), -g) for g in range(1, most + 1)]
    speed, negative = max(options)
    return -negative, speed
