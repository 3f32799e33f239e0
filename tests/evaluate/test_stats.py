"""Intervals: definitions on figures done by hand, degenerate data, and coverage against a known truth."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from draftstill.evaluate.stats import Interval, paired_ratio, pooled_ratio


def test_speedup_is_the_ratio_of_pooled_seconds_per_token() -> None:
    # 6 s / 30 tokens over 2 s / 20 tokens; the mean of per-prompt ratios would be 1.75.
    interval = paired_ratio([2, 4], [1, 1], [10, 20], [10, 10])
    assert interval.estimate == pytest.approx(2.0)


def test_acceptance_is_pooled_and_ignores_prompts_without_proposals() -> None:
    with_empty = pooled_ratio([1, 8, 3, 0, 0], [10, 10, 10, 0, 0])
    assert with_empty is not None and with_empty.estimate == pytest.approx(0.4)
    assert with_empty == pooled_ratio([1, 8, 3], [10, 10, 10])
    assert with_empty.low < 0.4 < with_empty.high


def test_nothing_proposed_has_no_acceptance() -> None:
    assert pooled_ratio([0, 0], [0, 0]) is None


def test_pairing_removes_what_both_arms_share() -> None:
    rng = np.random.default_rng(1)
    slow = rng.uniform(1, 5, 16)
    arm = slow / 1.5 * rng.normal(1, 0.01, 16)
    tokens = np.full(16, 64)
    paired = paired_ratio(slow, arm, tokens, tokens)
    unpaired = paired_ratio(slow, rng.permutation(arm), tokens, tokens)
    assert paired.high - paired.low < 0.2 * (unpaired.high - unpaired.low)
    assert paired.excludes(1.0) and not paired.excludes(1.5)


def test_one_prompt_has_no_interval_and_excludes_nothing() -> None:
    interval = paired_ratio([2], [1], [10], [10])
    assert interval == Interval(2.0, 2.0, 2.0, "none: one prompt")
    assert not interval.excludes(1.0)


def test_equal_prompts_have_no_interval() -> None:
    assert paired_ratio([2, 2], [1, 1], [10, 10], [10, 10]).method.startswith("none")


def test_a_self_pair_falls_back_and_says_so() -> None:
    # Every resample of accepted = proposed is exactly 1, so BCa's jackknife has no spread.
    interval = pooled_ratio([9, 12, 7], [9, 12, 7])
    assert interval is not None
    assert (interval.estimate, interval.low, interval.high) == (1.0, 1.0, 1.0)
    assert interval.method.startswith("percentile")
    assert interval.to_json() == {"estimate": 1.0, "low": 1.0, "high": 1.0, "method": interval.method}


def test_few_prompts_give_a_wider_interval_than_the_plain_bootstrap() -> None:
    from scipy.stats import bootstrap

    rng = np.random.default_rng(5)
    whole, part = np.full(6, 100), rng.integers(30, 80, 6)
    plain = bootstrap(
        (part, whole), lambda a, b, axis: a.sum(axis) / b.sum(axis), paired=True, vectorized=True, rng=np.random.default_rng(0)
    )
    ours = pooled_ratio(part, whole)
    assert ours is not None and ours.low < plain.confidence_interval.low and ours.high > plain.confidence_interval.high


def test_the_seed_decides() -> None:
    rng = np.random.default_rng(2)
    values = (rng.uniform(1, 4, 16), rng.uniform(1, 2, 16), np.full(16, 8), np.full(16, 8))
    assert paired_ratio(*values, seed=3) == paired_ratio(*values, seed=3)
    assert paired_ratio(*values, seed=3) != paired_ratio(*values, seed=4)


@pytest.mark.parametrize(
    "call",
    [
        lambda: paired_ratio([1, 2], [1], [1, 1], [1, 1]),
        lambda: paired_ratio([], [], [], []),
        lambda: paired_ratio([0, 1], [1, 1], [1, 1], [1, 1]),
        lambda: paired_ratio([float("nan"), 1], [1, 1], [1, 1], [1, 1]),
        lambda: pooled_ratio([-1], [2]),
    ],
)
def test_nonsense_is_refused(call) -> None:
    with pytest.raises(ValueError):
        call()


def test_speedup_intervals_cover_the_truth() -> None:
    # Prompt lengths of time vary by a shared factor; the arm's own noise is 15 % per prompt. Truth: 1.4.
    rng = np.random.default_rng(0)
    hits, runs = 0, 300
    for n in range(runs):
        base = rng.gamma(9, 0.1, 16)
        arm = base / 1.4 * rng.gamma(1 / 0.15**2, 0.15**2, 16)
        base *= rng.gamma(1 / 0.05**2, 0.05**2, 16)
        tokens = np.full(16, 64)
        interval = paired_ratio(base, arm, tokens, tokens, resamples=500, seed=n)
        hits += interval.low <= 1.4 <= interval.high
    assert 0.90 <= hits / runs <= 0.98


def test_acceptance_intervals_cover_the_truth_when_prompts_differ() -> None:
    # Acceptance differs between prompts (beta, mean .6), proposals too: an interval over tokens would be far too narrow.
    rng = np.random.default_rng(0)
    hits, runs = 0, 300
    for n in range(runs):
        proposed = rng.integers(40, 90, 16)
        accepted = rng.binomial(proposed, rng.beta(6, 4, 16))
        interval = pooled_ratio(accepted, proposed, resamples=500, seed=n)
        assert interval is not None
        hits += interval.low <= 0.6 <= interval.high
    assert 0.90 <= hits / runs <= 0.98


def test_the_pure_part_imports_without_torch() -> None:
    code = "import sys, draftstill.evaluate, draftstill.evaluate.stats, draftstill.evaluate.report, draftstill.evaluate.html; " \
           "import draftstill.evaluate.publishing, draftstill.evaluate.card; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"  # fmt: skip
    subprocess.run([sys.executable, "-c", code], check=True)
