"""Which gamma of an arm, which arm, which candidate: decisions that look at many figures, and say so in their intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from draftstill.evaluate.arms import PLAIN, Arm
from draftstill.evaluate.assembling import Found, Row, bootstrap, seconds
from draftstill.evaluate.stats import Interval, best_of, paired_ratio, prompts_to_settle
from draftstill.recipe import Recipe

Times = tuple[list[float], list[int]]


def best_rows(recipe: Recipe, found: Found, arms: Mapping[str, Arm], sweep: Sequence[Row]) -> list[Row]:
    """One row for each arm: at its fastest measured gamma, or the fastest predicted one where nothing was timed.

    The interval of a chosen gamma's speed-up holds for all of the arm's gammas at once, so that having chosen costs nothing.
    """
    chosen = []
    for arm in arms.values():
        rows = [r for r in sweep if r["arm"] == arm.name]
        if not rows:
            continue
        best = max(rows, key=_speed)
        if len(rows) > 1:
            measured = {r["swept"]: r["speedup"] for r in rows}
            if found.timed:
                baseline, mine = _times(found, [(arm.name, g) for g in measured])
                sure = best_of(baseline, mine, **bootstrap(recipe))
                best = next(r for r in rows if label(arm.name, r["swept"]) == sure.arm)
                best = {**best, "speedup": sure.speedups[sure.arm].to_json()}
            best = {**best, "gammas": [{"gamma": r["swept"], "speedup": r["speedup"], "predicted": r["predicted"], "tau": r["counts"]["tau"],
                                        "expected": r["counts"]["predicted"], "iid": r["counts"]["iid"]} for r in rows]}  # fmt: skip
        chosen.append(best)
    return chosen


def label(arm: str, gamma: int) -> str:
    return f"{arm}@{gamma}"


def _speed(row: Row) -> float:
    """Measured speed-up, else the one that the counts predict; plain decoding is 1."""
    if row["arm"] == PLAIN:
        return 1.0
    told = row["speedup"] or row["counts"]["predicted"]
    return float(told["estimate"]) if told else 0.0


def _times(found: Found, arms: Sequence[tuple[str, int]]) -> tuple[Times, dict[str, Times]]:
    """Plain decoding's and each arm's (seconds, tokens) by prompt. An arm that was timed beside another plain run than the first is
    put on its footing: multiplied by the ratio of the two."""
    base_s, base_n = seconds(found, PLAIN, 0)[1::2]
    mine = {}
    for arm, gamma in arms:
        plain_s, arm_s, plain_n, arm_n = seconds(found, arm, gamma)
        same = [(b / bn) / (p / pn) for b, bn, p, pn in zip(base_s, base_n, plain_s, plain_n, strict=True)]
        mine[label(arm, gamma)] = ([s * f for s, f in zip(arm_s, same, strict=True)], arm_n)
    return (base_s, base_n), mine


def comparisons(recipe: Recipe, found: Found, best: Sequence[Row]) -> list[dict[str, Any]]:
    """Speed of each arm over that of each earlier one, both at their own gamma, paired by prompt."""
    rows = [r for r in best if r["arm"] != PLAIN]
    if not found.timed:
        return []
    _, times = _times(found, [(r["arm"], r["swept"]) for r in rows])
    out = []
    for n, b in enumerate(rows):
        for a in rows[n + 1 :]:
            fast, slow = times[label(a["arm"], a["swept"])], times[label(b["arm"], b["swept"])]
            ratio = paired_ratio(slow[0], fast[0], slow[1], fast[1], **bootstrap(recipe))
            out.append({"temperature": found.temperature, "a": a["arm"], "b": b["arm"], "ratio": ratio.to_json(),
                        "to_settle": prompts_to_settle(ratio, len(found.timed), recipe.evaluate.confidence)})  # fmt: skip
    return out


def winner(recipe: Recipe, found: Found, sweep: Sequence[Row]) -> dict[str, Any]:
    """The fastest arm at its fastest gamma, if it is faster than plain decoding beyond an interval that holds for all arms and gammas at
    once; ``clear`` if it also beats every other arm beyond theirs, at each of that arm's gammas.

    ``rivals``: arms that it could not be told from, each at the fastest of the gammas where it could not, and ``to_settle``: how
    many timed prompts in all would tell, if their scatter stays what it is (None: no number can be named).
    """
    nobody: dict[str, Any] = {
        "temperature": found.temperature, **dict.fromkeys(("arm", "gamma", "candidate", "speedup", "to_settle")), "clear": True, "rivals": [],
        "compared": 0, "prompts": len(found.timed),
    }  # fmt: skip
    rows = {label(r["arm"], r["swept"]): r for r in sweep if r["arm"] != PLAIN}
    if not rows or not found.timed:
        return nobody
    baseline, times = _times(found, [(r["arm"], r["swept"]) for r in rows.values()])
    sure = best_of(baseline, times, **bootstrap(recipe))
    nobody["compared"] = len(rows)
    best, speedup = rows[sure.arm], sure.speedups[sure.arm]
    if not (speedup.excludes(1.0) and speedup.low > 1.0):
        return {**nobody, "to_settle": prompts_to_settle(speedup, len(found.timed), recipe.evaluate.confidence) if speedup.estimate > 1 else None,
                "fastest": {"arm": best["arm"], "gamma": best["swept"], "speedup": speedup.to_json()}}  # fmt: skip
    rivals = []
    for other in {r["arm"]: None for r in rows.values()}:
        if other == best["arm"]:
            continue
        # Whether it beats plain decoding by itself is another question: an arm that was seldom fast may be the fastest all the same.
        theirs = [k for k, r in rows.items() if r["arm"] == other and not sure.rivals[k].excludes(1.0)]
        if theirs:
            nearest = max(theirs, key=lambda k: sure.speedups[k].estimate)
            ratio: Interval = sure.rivals[nearest]
            rivals.append({"arm": other, "gamma": rows[nearest]["swept"], "ratio": ratio.to_json(),
                           "to_settle": prompts_to_settle(ratio, len(found.timed), recipe.evaluate.confidence)})  # fmt: skip
    needed = [r["to_settle"] for r in rivals]
    return {
        **nobody, "arm": best["arm"], "gamma": best["swept"], "candidate": best["candidate"], "speedup": speedup.to_json(), "clear": not rivals,
        "rivals": rivals, "to_settle": None if None in needed else max(needed, default=None),
    }  # fmt: skip


def best_arm(rows: Sequence[Row]) -> dict[str, Any] | None:
    """The arm with the largest measured speed-up, else predicted; whether it wins is another question."""
    able = [r for r in rows if r["arm"] != PLAIN]
    if not able:
        return None
    r = max(able, key=_speed)
    return {"arm": r["arm"], "gamma": r["swept"], "candidate": r["candidate"], "temperature": r["temperature"], "speedup": r["speedup"],
            "predicted": r["counts"]["predicted"]}  # fmt: skip


def to_publish(rows: Sequence[Row], candidates: Sequence[str]) -> str | None:
    """The trained candidate to publish: whose draft alone is fastest, else whose composite is; the only one where there is one."""
    for kind in ("tuned", "composite"):
        able = [r for r in rows if r["kind"] == kind]
        if able:
            return str(max(able, key=_speed)["candidate"])
    return candidates[0] if len(candidates) == 1 else None
