"""What to do next, each with the figures and the threshold that decide it. Pure Python: no torch.

Everything is expressed as the factor by which the best speed-up would change, from the measured costs and equation 1 of Leviathan et
al. (arXiv 2211.17192); only the choice among measured gammas needs no formula. The factors rank what to try first; they promise nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftstill.decode.theory import best_gamma, ceiling

PAYS = 1.05
"""Speed-up below which speculation is not worth its memory and its second model."""
OTHER_GAMMA = 1.03
"""Gain from which on another gamma is proposed: less lies within the noise of most timings."""
WORTH = 1.05
"""Gain from which on a change that means training again is proposed."""
REGAINED = 0.25
"""Share of the lost acceptance that more data is supposed to win back."""
SURE_LOST = 0.3
"""Share of the lost acceptance that falls on positions where the target is sure: from there on more training can help."""
RISING = 0.003
"""Gain in alpha over the last third of training from which on the curve is called rising."""
BEHIND = 0.05
"""alpha of a domain below that of all."""
FULL = 0.01
"""Share of rounds without a draft because its context was full."""
OUTSIDE = 0.02
"""The target's mean mass on tokens that a trimmed head cannot propose."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """What the advice needs beside the diagnosis."""

    c: Mapping[int, float]
    """By gamma, draft step over plain target step."""
    v: Mapping[int, float]
    """By gamma, verifying gamma + 1 tokens over a plain target step."""
    speeds: Mapping[int, float]
    """Speed-up by gamma, measured or predicted from counts; gamma 0 need not be among them."""
    curve: Sequence[float] = field(default=())
    """alpha on held-out text at each evaluation of the training, in order."""
    in_use: int | None = None
    """The recipe's gamma; None: that of the diagnosis."""
    curve_of: str = "alpha"
    """What the curve shows."""


def advise(found: Mapping[str, Any], conditions: Conditions) -> list[dict[str, Any]]:
    """All that may be done, the advised first and of those the most worthwhile first.

    Args:
        found: a diagnosis.

    Returns:
        for each: ``what``, ``advised``, ``because`` (a sentence), ``figures``, ``thresholds``, ``worth`` (factor on the speed-up; None where
        there is no estimate) and ``keys`` (of the recipe).
    """
    made = [
        _stop(found, conditions),
        _gamma(found, conditions),
        _shape(found, conditions),
        _data(found, conditions),
        _head(found),
        _context(found),
    ]
    return sorted(made, key=lambda a: (not a["advised"], a["what"] != "do not speculate", -(a["worth"] or 0.0)))


def _entry(what: str, advised: bool, because: str, worth: float | None, keys: Sequence[str], figures: Mapping[str, Any],
           thresholds: Mapping[str, float]) -> dict[str, Any]:  # fmt: skip
    return {"what": what, "advised": advised, "because": because, "worth": worth, "keys": list(keys), "figures": dict(figures),
            "thresholds": dict(thresholds)}  # fmt: skip


def _best(conditions: Conditions) -> tuple[int, float]:
    return max([(0, 1.0), *conditions.speeds.items()], key=lambda pair: (pair[1], -pair[0]))


def _formula(alpha: float, conditions: Conditions, dearer: float = 1.0) -> float:
    """The best speed-up that equation 1 allows at these costs, with draft steps so many times as dear."""
    v = conditions.v
    return best_gamma(
        alpha, {g: dearer * c for g, c in conditions.c.items()}, v, max(g for g in v if all(i in v for i in range(1, g + 1)))
    )[1]


def _stop(found: Mapping[str, Any], conditions: Conditions) -> dict[str, Any]:
    gamma, speed = _best(conditions)
    perfect = max(ceiling(g, conditions.c[g], v) for g, v in conditions.v.items() if g)
    advised = speed < PAYS
    because = (
        f"at these costs even a perfect draft reaches {perfect:.2f}x"
        if perfect < PAYS
        else f"the best of the gammas tried reaches {speed:.2f}x"
        + (f"; below {PAYS:g}x the memory and the second model are not worth it" if advised else f" at gamma {gamma}")
    )
    return _entry("do not speculate", advised, because, None, ["evaluate.gamma"], {"best_gamma": gamma, "best_speedup": speed, "ceiling": perfect,
                  "c": conditions.c[gamma or 1]}, {"pays": PAYS})  # fmt: skip


def _gamma(found: Mapping[str, Any], conditions: Conditions) -> dict[str, Any]:
    now = found["gamma"] if conditions.in_use is None else conditions.in_use
    best, fastest = _best(conditions)
    tried = sorted(conditions.speeds)
    speed = conditions.speeds.get(now)
    worth = None if speed is None else fastest / speed
    advised = best not in (0, now) and (worth is None or worth >= OTHER_GAMMA)
    if best in (0, now):
        because = f"gamma {now} is the only one tried" if len(tried) < 2 else f"no gamma tried is faster than {now}"
    else:
        because = f"gamma {best} reaches {fastest:.2f}x, the recipe's {now} " + ("was not tried" if speed is None else f"{speed:.2f}x")
    # The best may lie beyond what was tried: where the last step up still gained, there may be more.
    if len(tried) > 1 and best == tried[-1] and fastest >= OTHER_GAMMA * conditions.speeds[tried[-2]]:
        advised, because = True, f"{because}; {best} is the largest that was tried, so try larger ones"
    return _entry("another gamma", advised, because, worth, ["evaluate.gamma", "evaluate.gammas"], {"gamma": now, "speedup": speed, "best_gamma": best,
                  "best_speedup": fastest, "tried": tried}, {"gain": OTHER_GAMMA})  # fmt: skip


def _shape(found: Mapping[str, Any], conditions: Conditions) -> dict[str, Any]:
    """Half the cost at the same alpha, and what a draft of twice the cost would have to be worth."""
    alpha = found["alpha"]
    now = _formula(alpha, conditions)
    cheaper = _formula(alpha, conditions, 0.5) / now
    needed = next((a / 100 for a in range(round(100 * alpha), 101) if _formula(a / 100, conditions, 2.0) >= now), None)
    larger = (
        "a draft of twice the cost could not make up for it"
        if needed is None
        else f"one of twice the cost is faster from alpha {needed:.2f} on"
    )
    because = f"at the same alpha a draft of half the cost would be {cheaper:.2f} times as fast; {larger}"
    figures = {
        "alpha": alpha,
        "c": conditions.c[found["gamma"]],
        "formula_now": now,
        "formula_half_c": now * cheaper,
        "alpha_needed_at_twice_c": needed,
    }
    return _entry("another shape", cheaper >= WORTH, because, cheaper, ["draft.layers", "draft.head_tokens"], figures, {"gain": WORTH})


def _data(found: Mapping[str, Any], conditions: Conditions) -> dict[str, Any]:
    alpha = found["alpha"]
    better = alpha + REGAINED * (1 - alpha)
    worth = _formula(better, conditions) / _formula(alpha, conditions)
    sure = found["sure"]["lost"] or 0.0
    curve = list(conditions.curve)
    rise = curve[-1] - curve[-1 - max(1, len(curve) // 3)] if len(curve) > 1 else None
    behind = [d["name"] for d in found["domain"] if d["alpha"] <= alpha - BEHIND]
    signs = []
    if sure >= SURE_LOST:
        signs.append(f"{sure:.0%} of the lost acceptance falls where the target is sure")
    if rise is not None and rise >= RISING:
        signs.append(f"{conditions.curve_of} rose by {rise:.3f} in the last third of training")
    if behind:
        signs.append(f"alpha lags behind in {', '.join(behind)}")
    advised = worth >= WORTH and bool(signs)
    none = "the acceptance is lost where the target itself is undecided, and training has levelled off"
    because = "; ".join([*(signs or [none]), f"a quarter of the lost acceptance is worth a factor of {worth:.2f}"])
    return _entry("more data", advised, because, worth, ["respond.prompts", "record.document_tokens", "train.max_steps"],
                  {"alpha": alpha, "alpha_then": better, "lost_where_sure": sure, "rise": rise, "domains_behind": behind},
                  {"gain": WORTH, "lost_where_sure": SURE_LOST, "rise": RISING, "domain_behind": BEHIND})  # fmt: skip


def _head(found: Mapping[str, Any]) -> dict[str, Any]:
    outside = found["outside"] or 0.0
    because = (
        f"{outside:.1%} of the target's probability lies on tokens that the draft cannot propose"
        if outside
        else "the draft can propose every token"
    )
    return _entry("more head tokens", outside >= OUTSIDE, because, None, ["draft.head_tokens"], {"outside": outside}, {"outside": OUTSIDE})


def _context(found: Mapping[str, Any]) -> dict[str, Any]:
    share = found["context"]["share"] or 0.0
    because = (
        f"{share:.1%} of the rounds ran without a draft because its context was full"
        if share
        else "no round was without a draft for want of context"
    )
    return _entry("a longer draft context", share >= FULL, because, None, ["draft.source"], {"share": share, "rounds": found["context"]["rounds"]},
                  {"share": FULL})  # fmt: skip
