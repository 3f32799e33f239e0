"""Which gamma, which arm, which candidate: claims hold for all that was looked at, and repeated noise makes no winner."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from draftstill.decode.trace import Round, Trace
from draftstill.evaluate.arms import Arm, arms_of
from draftstill.evaluate.assembling import Found
from draftstill.evaluate.choosing import best_arm, best_rows, comparisons, to_publish, winner
from draftstill.evaluate.stats import paired_ratio
from draftstill.recipe import Recipe

TOKENS = 64


def recipe(**evaluate: Any) -> Recipe:
    return Recipe.model_validate(
        {"run_dir": "x", "target": {"source": "t"}, "corpus": {"source": "c"}, "evaluate": {"bootstrap": 400, **evaluate}}, strict=False
    )


def cell(arm: str, gamma: int, seconds: float, plain_s: float) -> dict[str, Any]:
    trace = Trace(8, [1] * TOKENS, [Round("model" if gamma else "none", 0, 0, 1, verify_s=seconds / TOKENS) for _ in range(TOKENS)])
    return {
        "arm": arm,
        "gamma": gamma,
        "prompt": "p",
        "trace": trace.to_json(),
        "plain_s": plain_s,
        "plain_tokens": TOKENS,
        "other_cores": 0.0,
    }


def timed(
    speeds: dict[tuple[str, int], float],
    prompts: int = 24,
    noise: float = 0.05,
    seed: int = 0,
    drift: dict[tuple[str, int], float] | None = None,
) -> Found:
    """Arms of these true speed-ups; ``drift``: how much slower the machine was when an arm, and its own plain run, were timed."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(prompts):
        base = float(2 * np.exp(rng.normal(0, 0.3)))
        row = {("plain", 0): cell("plain", 0, base, base)}
        for (arm, gamma), speed in speeds.items():
            slow = (drift or {}).get((arm, gamma), 1.0)
            row[arm, gamma] = cell(arm, gamma, base * slow / speed * float(np.exp(rng.normal(0, noise))), base * slow)
        rows.append(row)
    return Found("own", 0.7, [], [], {}, rows)


def rows(found: Found) -> list[dict[str, Any]]:
    made = []
    for arm, gamma in found.timed[0]:
        cells = [r[arm, gamma] for r in found.timed]
        seconds = [sum(x["verify_s"] for x in c["trace"]["rounds"]) for c in cells]
        ratio = paired_ratio([c["plain_s"] for c in cells], seconds, [TOKENS] * len(cells), [TOKENS] * len(cells), resamples=200).to_json()
        counts = {"predicted": {"estimate": 1.0}, "tau": None, "iid": None}
        kind = arm if arm in ("plain", "lookup") else "tuned"
        made.append({"arm": arm, "kind": kind, "candidate": arm if kind == "tuned" else None, "swept": gamma, "temperature": 0.7, "domain": "own",
                     "speedup": None if arm == "plain" else ratio, "predicted": 1.0, "counts": counts})  # fmt: skip
    return made


def arms(found: Found) -> dict[str, Arm]:
    names = dict.fromkeys(name for name, _ in found.timed[0])
    return {n: Arm(n, "tuned", tuple(g for m, g in found.timed[0] if m == n)) for n in names}


def test_a_clear_winner_and_its_gamma() -> None:
    found = timed({("a", 1): 1.2, ("a", 3): 1.5, ("b", 1): 1.1, ("b", 3): 1.2})
    won = winner(recipe(), found, rows(found))
    assert (won["arm"], won["gamma"], won["candidate"], won["clear"], won["rivals"]) == ("a", 3, "a", True, [])
    assert won["speedup"]["low"] < 1.5 < won["speedup"]["high"] and won["compared"] == 4 and won["prompts"] == 24
    best = best_rows(recipe(), found, arms(found), rows(found))
    assert [(r["arm"], r["swept"]) for r in best] == [("plain", 0), ("a", 3), ("b", 3)]
    assert [g["gamma"] for g in best[1]["gammas"]] == [1, 3]
    assert (best_arm(best) or {})["arm"] == "a" and to_publish(best, ["b", "a"]) == "a"


def test_an_interval_pays_for_having_been_chosen() -> None:
    """The winner's interval holds for all arms and gammas at once, so it is wider than that of one arm that was never chosen."""
    speeds = {("a", g): 1.3 for g in range(1, 9)} | {("b", g): 1.3 for g in range(1, 9)}
    found = timed(speeds, noise=0.15)
    won = winner(recipe(), found, rows(found))
    (single,) = [r["speedup"] for r in rows(found) if (r["arm"], r["swept"]) == (won["arm"], won["gamma"])]
    wide = lambda i: np.log(i["high"] / i["low"])  # noqa: E731
    assert wide(won["speedup"]) > 1.2 * wide(single)
    assert won["speedup"]["estimate"] == pytest.approx(single["estimate"])


def test_noise_makes_no_winner() -> None:
    """Eight arms that gain nothing: one in forty of the repeats may call one of them faster, not most."""
    repeats = [timed({(arm, g): 1.0 for arm in "abcd" for g in (1, 2)}, 12, 0.1, seed) for seed in range(24)]
    claimed = sum(winner(recipe(bootstrap=200), f, rows(f))["arm"] is not None for f in repeats)
    alone = sum(any(r["speedup"]["low"] > 1 for r in rows(f) if r["speedup"]) for f in repeats)
    assert claimed <= 2 and alone >= claimed + 3, "each for itself, some arm looks faster in many of them"


def test_no_clear_winner_says_how_many_prompts_would_tell() -> None:
    found = timed({("a", 2): 1.34, ("b", 2): 1.30, ("lookup", 6): 0.9}, noise=0.1)
    won = winner(recipe(), found, rows(found))
    assert won["arm"] in ("a", "b") and not won["clear"] and len(won["rivals"]) == 1, (
        "lookup is told apart: it is slower beyond the interval"
    )
    assert won["to_settle"] is None or won["to_settle"] > 24
    again = timed({("a", 2): 1.34, ("b", 2): 1.30}, prompts=24, noise=0.02)
    assert winner(recipe(), again, rows(again))["clear"]


def test_every_arm_that_is_not_told_apart_is_a_rival() -> None:
    """Also one that is not proven to beat plain decoding, and one of which only a slower gamma scatters too much to tell."""
    found = timed({("a", 2): 1.4, ("wild", 2): 1.3}, noise=0.02)
    rng = np.random.default_rng(1)
    for row in found.timed:
        wild = row["wild", 2]
        row["wild", 2] = cell("wild", 2, wild["plain_s"] / 1.1 * float(np.exp(rng.normal(-0.32, 0.8))), wild["plain_s"])
    sure = {r["arm"]: r["speedup"] for r in rows(found)}
    won = winner(recipe(), found, rows(found))
    assert sure["wild"]["low"] < 1.0 and won["arm"] in ("a", "wild")
    if won["arm"] == "a":
        assert not won["clear"] and [r["arm"] for r in won["rivals"]] == ["wild"]
    several = timed({("a", 2): 1.5, ("b", 1): 1.2, ("b", 3): 1.15}, noise=0.01)
    for row in several.timed:
        base = row["b", 3]["plain_s"]
        row["b", 3] = cell("b", 3, base / 1.1 * float(np.exp(rng.normal(-0.32, 0.8))), base)
    won = winner(recipe(), several, rows(several))
    assert won["arm"] == "a" and [(r["arm"], r["gamma"]) for r in won["rivals"]] == [("b", 3)] and not won["clear"]


def test_nothing_is_faster() -> None:
    found = timed({("a", 2): 0.8, ("lookup", 6): 0.95})
    won = winner(recipe(), found, rows(found))
    assert won["arm"] is won["speedup"] is None and won["clear"] and won["fastest"]["arm"] == "lookup"


def test_an_arm_timed_at_a_slower_hour_is_compared_fairly() -> None:
    """Taken over from an earlier score: machine and plain decoding were half as fast then."""
    speeds = {("a", 2): 1.5, ("b", 2): 1.2}
    slow = timed(speeds, drift={("a", 2): 2.0})
    won = winner(recipe(), slow, rows(slow))
    assert (won["arm"], won["clear"]) == ("a", True)
    (pair,) = comparisons(recipe(), slow, [r for r in rows(slow) if r["arm"] != "plain"])
    assert (pair["a"], pair["b"]) == ("b", "a") and pair["ratio"]["estimate"] == pytest.approx(1.2 / 1.5, rel=0.05)


def test_without_timings_the_prediction_chooses() -> None:
    found = Found("own", 0.7, [], [], {}, [])
    made = [{"arm": n, "kind": "tuned", "candidate": n, "swept": 2, "temperature": 0.7, "speedup": None, "predicted": None,
             "counts": {"predicted": {"estimate": x}, "tau": None, "iid": None}} for n, x in (("a", 1.1), ("b", 1.3))]  # fmt: skip
    assert winner(recipe(), found, made)["arm"] is None
    assert to_publish(made, ["a", "b"]) == "b" and (best_arm(made) or {})["arm"] == "b"


def test_names_of_arms() -> None:
    own = {"a": recipe(), "b": recipe()}
    every = recipe(candidates=("untuned", "tuned", "lookup", "bigram", "composite"), gammas=(0, 4, 1))
    found = arms_of(every, own)
    assert list(found) == ["plain", "untuned", "a", "b", "lookup", "bigram", "composite:a", "composite:b"]
    assert found["a"].gammas == (1, 4) and found["untuned"].gammas == (4,) and found["lookup"].gammas == (6,)
    own["b"] = Recipe.model_validate({**recipe().model_dump(), "draft": {"layers": (1,)}}, strict=False)
    assert [n for n in arms_of(every, own) if "untuned" in n] == ["untuned:a", "untuned:b"]
    assert list(arms_of(every, {"tuned": recipe()})) == ["plain", "untuned", "tuned", "lookup", "bigram", "composite"]


@pytest.mark.parametrize(
    ("gammas", "gamma", "untuned"), [((), 3, 3), ((1, 2, 4, 8), 3, 2), ((1, 2, 4, 8), 7, 8), ((0, 5), 3, 5), ((2, 3), 3, 3)]
)
def test_the_draft_before_training_is_scored_at_a_gamma_of_the_trained_one(gammas: tuple[int, ...], gamma: int, untuned: int) -> None:
    found = arms_of(recipe(candidates=("untuned", "tuned"), gammas=gammas, gamma=gamma))
    assert found["untuned"].gammas == (untuned,) and untuned in found["tuned"].gammas
