"""Expected tokens per round along a text."""

from __future__ import annotations

import pytest
import torch

from draftstill.decode.theory import expected_tokens
from draftstill.train.heldout import expected_accepted


@pytest.mark.parametrize("gamma", [1, 2, 5])
def test_tau_is_the_sum_over_rounds_from_each_position(gamma: int) -> None:
    alpha = torch.rand(11, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    total = 0.0
    for start in range(11):
        for accepted in range(1, gamma + 1):
            if start + accepted <= 11:
                total += float(alpha[start : start + accepted].prod())
    assert float(expected_accepted(alpha, gamma)) == pytest.approx(total, rel=1e-12)


def test_at_one_alpha_it_is_the_closed_formula() -> None:
    N = 20_000
    for a in (0.0, 0.4, 1.0):
        tau = 1 + float(expected_accepted(torch.full((N,), a), 4)) / N
        assert tau == pytest.approx(expected_tokens(a, 4), rel=1e-3)


def test_acceptances_that_go_together_are_worth_more_than_their_mean() -> None:
    """What a product of means would miss."""
    runs = torch.tensor([0.9] * 50 + [0.1] * 50, dtype=torch.float64)
    assert 1 + float(expected_accepted(runs, 3)) / 100 > expected_tokens(0.5, 3) + 0.2


def test_short_and_empty_texts() -> None:
    assert float(expected_accepted(torch.tensor([0.5]), 4)) == 0.5 and float(expected_accepted(torch.tensor([]), 4)) == 0.0
