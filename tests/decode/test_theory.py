"""Formulas against the papers and against simulation; predictions from counts."""

from __future__ import annotations

import itertools
import random

import pytest

from draftstill.decode import theory
from draftstill.decode.theory import best_gamma, dispersion, expected_tokens, histogram, oracle_bound, predicted_speedup, tau_from_counts

GRID = list(itertools.product((0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95), (0.01, 0.05, 0.1, 0.2, 0.4)))
# Leviathan et al., table 2 (T5-XXL): gamma, alpha, c, speed-up expected by Theorem 3.8. As printed, to one digit.
TABLE_2 = [(7, 0.75, 0.02, 3.2), (7, 0.80, 0.04, 3.3), (7, 0.82, 0.11, 2.5), (7, 0.62, 0.02, 2.3), (5, 0.68, 0.04, 2.4), (3, 0.71, 0.11, 2.0),
           (5, 0.65, 0.02, 2.4), (5, 0.73, 0.04, 2.6), (3, 0.74, 0.11, 2.0), (5, 0.53, 0.02, 1.9), (3, 0.55, 0.04, 1.8), (3, 0.56, 0.11, 1.6)]  # fmt: skip


@pytest.mark.parametrize(("gamma", "alpha", "c", "speed"), TABLE_2)
def test_the_papers_expected_speedups(gamma: int, alpha: float, c: float, speed: float) -> None:
    assert predicted_speedup(expected_tokens(alpha, gamma), gamma, c) == pytest.approx(speed, abs=0.13)


@pytest.mark.parametrize(("alpha", "c"), GRID)
def test_a_draft_better_than_its_cost_gains_at_least_what_corollary_3_9_says(alpha: float, c: float) -> None:
    gamma, speed = best_gamma(alpha, c)
    if alpha > c:
        assert gamma >= 1 and speed >= (1 + alpha) / (1 + c) - 1e-12
    else:
        assert (gamma, speed) == (0, 1.0)


@pytest.mark.parametrize(("alpha", "c"), GRID)
def test_no_gamma_beats_the_oracle(alpha: float, c: float) -> None:
    _, fixed = best_gamma(alpha, c, most=200)
    assert 1.0 <= oracle_bound(alpha, c) / fixed < 1.65 or alpha <= c


def test_the_oracle_gains_up_to_about_60_percent() -> None:
    assert 1.5 < max(oracle_bound(a, c) / best_gamma(a, c, most=200)[1] for a, c in GRID if a > c) < 1.65
    assert oracle_bound(1.0, 0.0) == float("inf") and oracle_bound(0.0, 0.3) == 1.0 and oracle_bound(1.0, 0.25) == pytest.approx(4.0)


@pytest.mark.parametrize(("alpha", "c"), [(0.6, 0.1), (0.9, 0.3)])
def test_the_oracle_against_a_simulation(alpha: float, c: float) -> None:
    rng, tokens, time = random.Random(0), 0, 0.0
    for _ in range(40_000):
        n = 0
        while rng.random() < alpha:
            n += 1
        tokens, time = tokens + n + 1, time + n * c + 1
    assert tokens / time == pytest.approx(oracle_bound(alpha, c), rel=0.02)


def test_break_even_and_ceiling_meet_the_prediction() -> None:
    for gamma, (alpha, c) in itertools.product((1, 3, 8), GRID):
        assert theory.ceiling(gamma, c) == predicted_speedup(expected_tokens(1.0, gamma), gamma, c)
        even = theory.break_even(gamma, c, 1.2)
        if even is None:
            assert theory.ceiling(gamma, c, 1.2) < 1
        else:
            assert (predicted_speedup(expected_tokens(alpha, gamma), gamma, c, 1.2) >= 1) == (alpha >= even)


# --- from counts --------------------------------------------------------------------------------------------------------------


def simulated(gamma: int, rounds: int, *chances: float, seed: int = 0) -> list[int]:
    """Accepted counts of rounds, each at one of some chances per guess."""
    rng = random.Random(seed)
    found = []
    for _ in range(rounds):
        chance = rng.choice(chances)
        found.append(next((k for k in range(gamma) if rng.random() >= chance), gamma))
    return found


def test_counts_cut_at_a_smaller_gamma() -> None:
    rounds = histogram([3, 0, 1, 2, 3], 3)
    assert rounds == (1, 1, 1, 2)
    assert [tau_from_counts(rounds, g) for g in range(4)] == pytest.approx([1.0, 1.8, 2.4, 2.8])
    with pytest.raises(ValueError, match="gamma 4"):
        tau_from_counts(rounds, 4)
    with pytest.raises(ValueError):
        tau_from_counts((0, 0), 1)


def test_independent_acceptance_is_predicted_from_its_counts_at_every_gamma() -> None:
    rounds = histogram(simulated(8, 20_000, 0.7), 8)
    for gamma in range(9):
        assert tau_from_counts(rounds, gamma) == pytest.approx(expected_tokens(0.7, gamma), rel=0.02)
    found = dispersion(rounds)
    assert found.alpha == pytest.approx(0.7, abs=0.01) and found.variance_ratio == pytest.approx(1.0, abs=0.03)
    assert found.observed == pytest.approx(found.independent, abs=0.01) and sum(found.independent) == pytest.approx(1.0)


def test_uneven_acceptance_shows_as_dispersion_and_makes_the_formula_promise_too_much() -> None:
    easy, hard, gamma = 0.95, 0.25, 6
    counts = simulated(gamma, 20_000, easy, hard)
    # The mean over positions: a round of an easy stretch covers more of the text than one of a hard stretch.
    covers = [expected_tokens(chance, gamma) for chance in (easy, hard)]
    along = (covers[0] * easy + covers[1] * hard) / sum(covers)
    found = dispersion(histogram(counts, gamma), along)
    assert found.variance_ratio is not None and found.variance_ratio > 1.3
    assert found.tau == pytest.approx(1 + sum(counts) / len(counts)) and found.along == along
    assert found.to_json()["error"] == found.tau_independent / found.tau - 1 > 0.1


def test_a_perfect_and_a_hopeless_draft_have_no_dispersion() -> None:
    assert dispersion((0, 0, 5)).variance_ratio is None and dispersion((0, 0, 5)).alpha == 1.0
    assert dispersion((5, 0, 0)).variance_ratio is None and dispersion((5, 0, 0)).alpha == 0.0


# --- goodput ------------------------------------------------------------------------------------------------------------------


def test_goodput_is_emitted_tokens_over_the_time_of_a_round() -> None:
    # Liu et al.: sum over requests of (1 - a^(k+1)) / (1 - a), over draft time and verify time.
    assert theory.goodput(expected_tokens(0.5, 3), 3, 4, 0.01, 0.045) == pytest.approx(4 * 1.875 / 0.075)
    assert theory.goodput(1.0, 0, 1, 9.9, 0.02) == pytest.approx(50.0)


def test_goodput_says_until_where_speculation_pays() -> None:
    tau = {g: expected_tokens(0.7, g) for g in range(1, 5)}
    # A pass costs the same until 8 tokens are in it, and in proportion to them from there on.
    verify = {rows: {g: 0.02 * max(1.0, rows * (g + 1) / 8) for g in range(5)} for rows in (1, 2, 4, 8, 16)}
    table = theory.goodput_table(tau, dict.fromkeys(verify, 0.002), verify)
    assert all(0 in by_gamma for by_gamma in table.values())
    assert theory.pays_until(table) == 4
    assert max(table[1], key=table[1].__getitem__) > max(table[4], key=table[4].__getitem__) > 0
    assert theory.pays_until(table, margin=10.0) is None


def test_a_gamma_without_tau_is_left_out_and_plain_needs_none() -> None:
    table = theory.goodput_table({2: 2.0}, {1: 0.1}, {1: {0: 1.0, 1: 1.0, 2: 1.0}})
    assert table == {1: {0: pytest.approx(1.0), 2: pytest.approx(2.0 / 1.2)}}
