"""Intervals: definitions on figures done by hand, degenerate data, and coverage against a known truth."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest

from draftstill.evaluate.stats import Best, Interval, best_of, paired_ratio, pooled_ratio, prompts_to_settle

# --- definitions --------------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("n", [5, 16])
def test_pairing_removes_what_both_arms_share(n: int) -> None:
    rng = np.random.default_rng(1)
    slow = rng.uniform(1, 5, n)
    arm = slow / 1.5 * rng.normal(1, 0.01, n)
    tokens = np.full(n, 64)
    paired = paired_ratio(slow, arm, tokens, tokens)
    unpaired = paired_ratio(slow, rng.permutation(arm), tokens, tokens)
    assert paired.high - paired.low < 0.2 * (unpaired.high - unpaired.low)
    assert paired.excludes(1.0) and not paired.excludes(1.5)


@pytest.mark.parametrize("n", [5, 24])
def test_turning_a_ratio_over_turns_its_interval_over(n: int) -> None:
    rng = np.random.default_rng(3)
    a, b, m, k = rng.gamma(9, 1, n), rng.gamma(9, 2, n), rng.integers(10, 60, n), rng.integers(10, 60, n)
    there, back = paired_ratio(a, b, m, k), paired_ratio(b, a, k, m)
    assert (there.estimate, there.low, there.high) == pytest.approx((1 / back.estimate, 1 / back.high, 1 / back.low), rel=0.02)


def test_the_unit_of_time_does_not_matter() -> None:
    rng = np.random.default_rng(4)
    a, b, n = rng.gamma(9, 1, 12), rng.gamma(9, 2, 12), np.full(12, 64)
    one, other = paired_ratio(a, b, n, n), paired_ratio(1000 * a, 1000 * b, n, n)
    assert (one.estimate, one.low, one.high) == pytest.approx((other.estimate, other.low, other.high))


# --- degenerate data ----------------------------------------------------------------------------------------------------------


def test_one_prompt_has_no_interval_and_excludes_nothing() -> None:
    interval = paired_ratio([2], [1], [10], [10])
    assert interval == Interval(pytest.approx(2.0), pytest.approx(2.0), pytest.approx(2.0), "none: one prompt", 1)
    assert not interval.excludes(1.0)


def test_equal_prompts_have_no_interval() -> None:
    assert paired_ratio([2, 2], [1, 1], [10, 10], [10, 10]).method.startswith("none")


@pytest.mark.parametrize("counts", [[9, 12, 7], list(range(5, 25))])
def test_a_self_pair_is_exactly_1_and_says_that_there_is_no_interval(counts: list[int]) -> None:
    interval = pooled_ratio(counts, counts)
    assert interval is not None
    assert (interval.estimate, interval.low, interval.high) == (1.0, 1.0, 1.0) and interval.method.startswith("none")
    assert interval.to_json() == {"estimate": 1.0, "low": 1.0, "high": 1.0, "method": interval.method, "prompts": len(counts)}


@pytest.mark.parametrize("parts", [[9] * 19 + [8], [0] * 19 + [1], [0] * 20, [9, 0] * 10])
def test_an_acceptance_stays_a_share(parts: list[int]) -> None:
    with np.errstate(all="raise"):
        interval = pooled_ratio(parts, [9] * 20)
    assert interval is not None and 0.0 <= interval.low <= interval.estimate <= interval.high <= 1.0
    assert all(math.isfinite(x) for x in (interval.low, interval.high))


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
        lambda: best_of(([1], [1]), {}),
        lambda: best_of(([1, 1], [1, 1]), {"a": ([1], [1])}),
        lambda: best_of(([1, 1], [1, 1]), {"a": ([0, 1], [1, 1])}),
    ],
)
def test_nonsense_is_refused(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError):
        call()


# --- coverage -----------------------------------------------------------------------------------------------------------------

REPEATS, GAMMA, C, V = 1000, 3, 0.2, 1.1
KINDS = {"usual": (6, 4), "good and uneven": (6.8, 1.2), "poor and uneven": (1.5, 3.5)}
"""Kinds of draft: how a prompt's own acceptance varies, as a beta law."""


def drafts(rng: np.random.Generator, n: int, a: float, b: float, equal_work: bool) -> tuple[np.ndarray, ...]:
    """proposed, accepted, tokens, plain seconds, speculative seconds, [repeats, prompts] each: prompts differ in acceptance, length and cost."""
    alpha = rng.beta(a, b, (REPEATS, n))
    law = np.stack([alpha**k * (1 - alpha if k < GAMMA else 1) for k in range(GAMMA + 1)], -1)  # of a round's accepted tokens
    rounds = rng.integers(5, 50, (REPEATS, n))
    if equal_work:  # about 60 tokens each, as timing writes them: good prompts have fewer rounds
        rounds = np.maximum(1, np.round(60 / (1 + (law * np.arange(GAMMA + 1)).sum(-1)))).astype(int)
    accepted = rng.multinomial(rounds, law) @ np.arange(GAMMA + 1)
    cost = rng.gamma(25, 1 / 25, (REPEATS, n))
    noise = lambda: rng.gamma(400, 1 / 400, (REPEATS, n))  # noqa: E731
    tokens = accepted + rounds
    return rounds * GAMMA, accepted, tokens, tokens * cost * noise(), rounds * (GAMMA * C + V) * cost * noise()


def moments(a: float, b: float) -> float:
    """Mean accepted tokens of a round, exactly: the sum of the beta law's first GAMMA moments."""
    return sum(math.prod((a + r) / (a + b + r) for r in range(k)) for k in range(1, GAMMA + 1))


def covered(intervals: list[Interval | None], truth: float) -> float:
    return float(np.mean([i is not None and i.low <= truth <= i.high for i in intervals]))


@pytest.mark.parametrize("n", [16, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_intervals_cover_the_truth(kind: str, n: int) -> None:
    a, b = KINDS[kind]
    proposed, accepted, tokens, plain, arm = drafts(np.random.default_rng(n), n, a, b, equal_work=False)
    expected = moments(a, b)
    acceptance = [pooled_ratio(accepted[r], proposed[r], resamples=400, seed=r) for r in range(REPEATS)]
    assert 0.93 <= covered(acceptance, expected / GAMMA) <= 0.97
    speed: list[Interval | None] = [paired_ratio(plain[r], arm[r], tokens[r], tokens[r], resamples=400, seed=r) for r in range(REPEATS)]
    assert 0.93 <= covered(speed, (1 + expected) / (GAMMA * C + V)) <= 0.97


def test_intervals_cover_the_truth_when_all_texts_are_equally_long() -> None:
    rng = np.random.default_rng(7)
    many = drafts(rng, 400, 6, 4, equal_work=True)
    proposed, accepted, tokens, plain, arm = drafts(rng, 16, 6, 4, equal_work=True)
    acceptance = [pooled_ratio(accepted[r], proposed[r], resamples=400, seed=r) for r in range(REPEATS)]
    assert 0.93 <= covered(acceptance, many[1].sum() / many[0].sum()) <= 0.97
    speed: list[Interval | None] = [paired_ratio(plain[r], arm[r], tokens[r], tokens[r], resamples=400, seed=r) for r in range(REPEATS)]
    assert 0.93 <= covered(speed, many[3].sum() / many[4].sum()) <= 0.97


def test_an_interval_over_rounds_would_not_cover() -> None:
    """What the coverage test is worth: rounds taken for independent give intervals that are far too narrow."""
    a, b = KINDS["usual"]
    proposed, accepted, *_ = drafts(np.random.default_rng(1), 16, a, b, equal_work=False)
    share = accepted.sum(1) / proposed.sum(1)
    half = 1.96 * np.sqrt(share * (1 - share) / proposed.sum(1))
    assert np.mean(np.abs(share - moments(a, b) / GAMMA) < half) < 0.8


# --- how many prompts, and the best of several ------------------------------------------------------------------------------


def test_prompts_to_settle_grows_with_the_square_of_the_distance() -> None:
    near, far = (Interval(e, e / 1.2, e * 1.2, "bootstrap-t") for e in (1.05, 1.10))
    few, many = (prompts_to_settle(i, 40, 0.95) for i in (far, near))
    assert few is not None and many is not None and 40 < few < many
    assert many / few == pytest.approx((math.log(1.10) / math.log(1.05)) ** 2, rel=0.05)
    # Half width log 1.2 at 40 prompts; it shrinks with the root of their number.
    assert few == pytest.approx(40 * (math.log(1.2) / math.log(1.10)) ** 2, rel=0.05)
    slower = Interval(1 / 1.10, 1 / 1.10 / 1.2, 1 / 1.10 * 1.2, "bootstrap-t")
    assert prompts_to_settle(slower, 40, 0.95) == few


def test_prompts_to_settle_where_there_is_nothing_to_settle() -> None:
    assert prompts_to_settle(Interval(1.4, 1.3, 1.5, "bootstrap-t"), 16, 0.95) == 16
    assert prompts_to_settle(Interval(1.0, 0.9, 1.1, "bootstrap-t"), 16, 0.95) is None
    assert prompts_to_settle(Interval(1.0000001, 0.9, 1.1, "bootstrap-t"), 16, 0.95) is None
    assert prompts_to_settle(Interval(1.4, 1.4, 1.4, "none: one prompt"), 1, 0.95) is None


def test_the_number_named_settles_it() -> None:
    """On new data with so many prompts, the interval excludes 1 in most runs."""
    rng = np.random.default_rng(0)

    def measure(n: int, seed: int) -> Interval:
        base = rng.gamma(25, 0.04, n)
        return paired_ratio(base, base / 1.06 * rng.gamma(30, 1 / 30, n), np.full(n, 64), np.full(n, 64), resamples=300, seed=seed)

    first = next(i for i in (measure(16, s) for s in range(99)) if not i.excludes(1.0) and 1.05 < i.estimate < 1.07)
    wanted = prompts_to_settle(first, 16, 0.95)
    assert wanted is not None and wanted > 16
    assert 0.2 < np.mean([measure(wanted, s).excludes(1.0) for s in range(100)]) < 0.95
    assert np.mean([measure(16, s).excludes(1.0) for s in range(100)]) < np.mean([measure(2 * wanted, s).excludes(1.0) for s in range(100)])


def clear(best: Best) -> bool:
    return all(r.excludes(1.0) for r in best.rivals.values())


def equal_arms(
    rng: np.random.Generator, n: int, arms: int
) -> tuple[tuple[np.ndarray, np.ndarray], dict[str, tuple[np.ndarray, np.ndarray]]]:
    base, tokens = rng.gamma(25, 0.04, n), np.full(n, 64)
    return (base * rng.gamma(100, 0.01, n), tokens), {str(k): (base / 1.2 * rng.gamma(40, 1 / 40, n), tokens) for k in range(arms)}


@pytest.mark.parametrize("n", [5, 16])
def test_the_best_of_equal_arms_is_not_called_clear(n: int) -> None:
    rng = np.random.default_rng(0)
    simultaneous = alone = held = 0
    for seed in range(300):
        baseline, arms = equal_arms(rng, n, 6)
        best = best_of(baseline, arms, resamples=300, seed=seed)
        simultaneous += clear(best)
        held += best.speedups[best.arm].low <= 1.2
        naive = [paired_ratio(arms[o][0], arms[best.arm][0], arms[o][1], arms[best.arm][1], resamples=300) for o in arms if o != best.arm]
        alone += naive[0].excludes(1.0) or naive[1].excludes(1.0)
    assert simultaneous <= 0.05 * 300, "the family-wise error is bounded"
    assert alone > 0.06 * 300, "which single intervals do not do"
    assert held >= 0.95 * 300, "the best arm's interval holds although it was picked"


def test_the_fastest_in_truth_is_seldom_ruled_out_and_many_arms_hide_no_clear_one() -> None:
    """What comparisons with the best promise. Bounds for all 136 pairs of 17 arms would be twice as wide as those for 16 comparisons."""
    rng = np.random.default_rng(3)
    lost = found = 0
    for seed in range(200):
        baseline, arms = equal_arms(rng, 12, 16)
        for name in list(arms)[2:]:
            arms[name] = (arms[name][0] * 1.35, arms[name][1])
        best = best_of(baseline, arms, resamples=300, seed=seed)
        ruled_out = {name for name, r in best.rivals.items() if r.low > 1.0}
        lost += "0" in ruled_out
        found += len(ruled_out - {"0", "1"}) / 14
    assert lost <= 0.05 * 200 and found > 0.7 * 200, (lost, found)


def test_the_best_of_different_arms_is_found() -> None:
    rng = np.random.default_rng(1)
    baseline, arms = equal_arms(rng, 24, 3)
    arms["1"] = (arms["1"][0] / 1.5, arms["1"][1])
    best = best_of(baseline, arms)
    assert best.arm == "1" and clear(best) and best.speedups["1"].low > 1.5 and set(best.rivals) == {"0", "2"}
    assert best.rivals["0"].estimate == pytest.approx(best.speedups["1"].estimate / best.speedups["0"].estimate)
    for name, (seconds, tokens) in arms.items():
        one = paired_ratio(baseline[0], seconds, baseline[1], tokens)
        assert best.speedups[name].estimate == pytest.approx(one.estimate)
        assert best.speedups[name].low < one.low < one.high < best.speedups[name].high, "simultaneous intervals are wider"


def test_the_order_of_the_arms_does_not_matter() -> None:
    baseline, arms = equal_arms(np.random.default_rng(2), 16, 4)
    one, other = best_of(baseline, arms), best_of(baseline, dict(reversed(arms.items())))
    assert one.arm == other.arm and clear(one) == clear(other)
    for name, interval in one.rivals.items():
        assert (interval.low, interval.high) == pytest.approx((other.rivals[name].low, other.rivals[name].high))


def test_one_arm_or_one_prompt() -> None:
    baseline, arms = equal_arms(np.random.default_rng(2), 16, 1)
    alone = best_of(baseline, arms)
    assert clear(alone) and not alone.rivals
    one = best_of(([2.0], [10]), {"a": ([1.0], [10]), "b": ([1.5], [10])})
    assert one.arm == "a" and not clear(one) and one.speedups["a"].method.startswith("none")


def test_an_interval_tells_how_many_prompts_it_is_of() -> None:
    for n in (1, 3, 9):
        baseline, arms = equal_arms(np.random.default_rng(n), n, 2)
        one = paired_ratio(baseline[0], arms["0"][0], baseline[1], arms["0"][1])
        best = best_of(baseline, arms, resamples=200)
        found = [one, *best.speedups.values(), *best.rivals.values()]
        assert {i.prompts for i in found} == {n} == {i.to_json()["prompts"] for i in found}
    accepted = pooled_ratio([1, 2, 0, 3], [2, 3, 0, 4])
    assert accepted is not None and accepted.prompts == 3, "one proposed nothing"


def test_the_pure_part_imports_without_torch() -> None:
    code = "import sys, draftstill.evaluate, draftstill.evaluate.stats, draftstill.evaluate.report, draftstill.evaluate.html; " \
           "import draftstill.evaluate.publishing, draftstill.evaluate.card; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"  # fmt: skip
    subprocess.run([sys.executable, "-c", code], check=True)
