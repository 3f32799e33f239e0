"""Learning rates, phases, and what follows from the measurements so far."""

from __future__ import annotations

import math

import pytest

from draftstill.recipe import Loss, Phase, Switch, Train
from draftstill.train.schedule import learning_rate, part_of, parts, stale, switched


def test_learning_rate_shapes() -> None:
    for name in ("cosine", "linear", "constant"):
        rates = [learning_rate(Train(warmup_steps=10, lr_scheduler_type=name), 1.0, s, 100) for s in range(100)]
        assert all(a < b for a, b in zip(rates[:10], rates[1:11], strict=True)) and rates[0] == pytest.approx(1 / 11)
        assert rates[10] == 1.0 == max(rates)
        assert all(a >= b for a, b in zip(rates[10:], rates[11:], strict=False))
        assert all(r > 0 for r in rates)
        middle, last = rates[55], rates[99]
        assert middle == pytest.approx(1.0 if name == "constant" else 0.5)
        assert last == pytest.approx({"constant": 1.0, "linear": 1 / 90, "cosine": 0.5 * (1 + math.cos(math.pi * 89 / 90))}[name])


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_run_shorter_than_its_warm_up(steps: int) -> None:
    rates = [learning_rate(Train(warmup_steps=10), 1.0, s, steps) for s in range(steps)]
    assert all(0 < r <= 1 for r in rates) and rates[-1] == max(rates)


def test_phases_share_all_steps() -> None:
    for shares, steps in (((2, 1), 18), ((1, 1, 1), 10), ((5, 1), 3), ((1, 1, 1), 1)):
        found = parts(Train(phases=tuple(Phase(share=float(s)) for s in shares)), 1.0, steps)
        assert [part_of(found, s).number for s in range(steps)] == sorted(part_of(found, s).number for s in range(steps))
        assert found[0].first == 0 and found[-1].end == steps and all(a.end == b.first for a, b in zip(found, found[1:], strict=False))
        assert all(abs((p.end - p.first) - steps * s / sum(shares)) <= 1 for p, s in zip(found, shares, strict=True))
    (only,) = parts(Train(), 0.5, 7)
    assert (only.first, only.end, only.peak, only.kinds) == (0, 7, 0.5, ()) and part_of([only], 7) == only


def test_a_switch_goes_by_the_best_so_far() -> None:
    loss = Loss(switch=Switch(to="lk", alpha=0.4))
    curve = [{"alpha_deploy": a} for a in (0.1, 0.4, 0.3)]
    assert [switched(loss, curve[:n]) for n in range(4)] == [False, False, True, True] and not switched(Loss(), curve)


def test_stale_counts_measurements_since_the_best() -> None:
    curve = [{"alpha_deploy": a} for a in (0.1, 0.5, 0.3, 0.5, 0.6)]
    assert [stale(curve[:n]) for n in range(6)] == [0, 0, 0, 1, 2, 0], "no better is not better"
