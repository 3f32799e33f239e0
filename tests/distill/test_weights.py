"""Which positions count: filters, prefix confidence, selective distillation."""

from __future__ import annotations

import math

import torch

from draftstill.distill.weights import largest_gaps, prefix_confidence, runs, within

PLACE = torch.cat([torch.arange(5), torch.arange(1), torch.arange(9)])
ALPHA = torch.rand(len(PLACE), generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_filters() -> None:
    assert within(PLACE).sum() == 15
    assert within(PLACE, 2).tolist() == [0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1]
    assert within(PLACE, 1, 3).tolist() == [0, 1, 1, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0]


def test_runs_begin_again_after_a_gap() -> None:
    rows = torch.tensor([4, 5, 6, 9, 10, 11, 12])
    assert runs(rows, torch.tensor([0, 1, 2, 3, 4, 0, 1])).tolist() == [0, 1, 2, 0, 1, 0, 1]
    assert runs(rows[:0], rows[:0]).tolist() == []


def test_prefix_confidence_by_its_definition() -> None:
    for gamma in (1, 2, 4, 20):
        found = prefix_confidence(ALPHA, PLACE, gamma)
        for i, place in enumerate(PLACE.tolist()):
            m = min(gamma, place + 1)
            assert math.isclose(found[i], sum(math.prod(ALPHA[i - d : i].tolist()) for d in range(m)) / m)
    assert (prefix_confidence(ALPHA, PLACE, 1) == 1).all()
    assert (prefix_confidence(torch.ones(15), PLACE, 4) == 1).all()
    assert prefix_confidence(torch.zeros(15), PLACE, 4)[1:5].tolist() == [0.5, torch.tensor(1 / 3).item(), 0.25, 0.25]


def test_prefix_confidence_in_parts() -> None:
    whole = prefix_confidence(ALPHA, PLACE, 4)
    for cut in (1, 2, 7, 14):
        last = prefix_confidence(ALPHA[cut:], PLACE[cut:], 4, ALPHA[max(0, cut - 3) : cut])
        assert torch.allclose(torch.cat([prefix_confidence(ALPHA[:cut], PLACE[:cut], 4), last]), whole)


def test_a_share_of_each_sequence_is_kept() -> None:
    gap = torch.tensor([3, 1, 2, 5, 4, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9.0])
    assert largest_gaps(gap, PLACE, 0.4).tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1, 1]
    assert largest_gaps(gap, PLACE, 1.0).sum() == 15
    assert largest_gaps(torch.zeros(15), PLACE, 0.2).tolist() == [1, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0], "ties: the earlier"
    # The same when the batch is cut between sequences.
    parts = [largest_gaps(gap[s], PLACE[s], 0.4) for s in (slice(0, 5), slice(5, 6), slice(6, 15))]
    assert torch.equal(torch.cat(parts), largest_gaps(gap, PLACE, 0.4))
    assert largest_gaps(gap[:0], PLACE[:0], 0.5).tolist() == []
