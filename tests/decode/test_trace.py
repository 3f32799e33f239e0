"""Metrics on hand-written traces; formulas against the paper."""

from __future__ import annotations

import pytest

from draftstill.decode import theory
from draftstill.decode.trace import Round, Trace, check, metrics


def trace(*pairs, cut=False):
    t = Trace(4)
    for d, a in pairs:
        t.rounds.append(Round("model", d, a, a + 1, draft_steps=d, draft_s=0.5 * d, verify_s=1.0))
    t.tokens = [0] * sum(r.emitted for r in t.rounds)
    return t


def test_every_metric_on_a_known_trace():
    t = trace((3, 3), (3, 0), (3, 1), (2, 2))
    check([t])
    m = metrics([t])
    assert m["token_acceptance"] == pytest.approx(6 / 11)
    assert (m["tau_without_bonus"], m["tau"]) == (pytest.approx(1.5), pytest.approx(2.5))
    assert m["acceptance_at"] == pytest.approx([3 / 4, 2 / 3, 1.0])
    assert m["acceptance_at_unconditional"] == pytest.approx([3 / 4, 2 / 4, 1 / 3])
    assert m["draft_step_s"] == 0.5 and m["bonus"] == 4 and m["tokens_per_s"] == pytest.approx(10 / (5.5 + 4))


def test_sums_before_ratios():
    a, b = trace((4, 4)), trace(*[(1, 0)] * 9)
    assert metrics([a, b])["token_acceptance"] == pytest.approx(4 / 13)


def test_nothing_proposed_is_null():
    assert metrics([trace((0, 0), (0, 0))])["token_acceptance"] is None
    assert metrics([])["tau"] is None


def test_marks_say_who_wrote_each_token():
    assert trace((2, 1), (2, 2), (0, 0)).marks() == ["accepted", "corrected", "accepted", "accepted", "bonus", "plain"]


@pytest.mark.parametrize("bad", [Round("model", 1, 2, 3), Round("model", 3, 1, 3), Round("model", 0, 0, 0)])
def test_impossible_rounds_are_caught(bad):
    t = Trace(1, tokens=[0] * bad.emitted, rounds=[bad])
    with pytest.raises(AssertionError):
        check([t])


# Leviathan et al., table 1 (c = 0): alpha, gamma, operations, speed
TABLE = [
    (0.6, 2, 1.53, 1.96),
    (0.7, 3, 1.58, 2.53),
    (0.8, 2, 1.23, 2.44),
    (0.8, 5, 1.63, 3.69),
    (0.9, 2, 1.11, 2.71),
    (0.9, 10, 1.60, 6.86),
]


@pytest.mark.parametrize("alpha,gamma,operations,speed", TABLE)
def test_paper_table(alpha, gamma, operations, speed):
    assert theory.predicted_speedup(theory.expected_tokens(alpha, gamma), gamma, 0.0) == pytest.approx(speed, abs=0.006)
    assert theory.operations_factor(alpha, gamma, 0.0) == pytest.approx(operations, abs=0.006)


def test_break_even_is_where_the_prediction_is_one():
    for gamma, c, v in ((1, 0.2, 1.0), (3, 0.17, 1.1), (6, 0.05, 1.3)):
        alpha = theory.break_even(gamma, c, v)
        assert theory.predicted_speedup(theory.expected_tokens(alpha, gamma), gamma, c, v) == pytest.approx(1.0, abs=1e-6)
    assert theory.break_even(2, 1.0, 2.0) is None
    assert theory.best_gamma(0.1, 0.5)[0] == 0
    assert theory.best_gamma(0.8, 0.05) == (8, pytest.approx(3.09, abs=0.01))
