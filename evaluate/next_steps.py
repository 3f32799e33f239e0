"""What to do next, in the order of importance: the table that the reports end with. Pure Python: no torch."""

from __future__ import annotations

from dataclasses import dataclass

from draftstill.evaluate.reading import Score, as_read, shown_candidate
from draftstill.evaluate.sentences import settling
from draftstill.evaluate.wording import ARMS, busy, leader, outcome, times, wrongs


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to do."""

    what: str
    because: str
    keys: tuple[str, ...] = ()
    """Of the recipe."""


def next_steps(score: Score) -> list[Step]:
    """What to do now; never empty."""
    score = as_read(score)
    kind = outcome(score)
    if kind == "broken":
        return [Step("use none of these drafts", "; ".join(wrongs(score)))]
    steps = []
    if disturbed := busy(score):
        steps.append(Step("score again on a quiet machine", disturbed.partition(";")[0], ("evaluate",)))
    winner = score["winner"]
    more = settling(winner.get("to_settle"), winner.get("prompts"))
    if kind in ("unclear", "pays") and more:
        because = f"so many would tell, if they scatter as the {winner['prompts']:,} timed so far"
        steps.append(Step(f"time {winner['to_settle']:,} prompts", because, ("evaluate.prompts", "evaluate.timing_prompts")))
    advised = _advised(score)
    # A draft that is not worth its memory says nothing against an arm that does without it.
    if kind == "winner" and not (winner["arm"] == shown_candidate(score) and any(s.what.startswith("do not") for s in advised)):
        steps.append(_serve(score))
    steps += _load(score) + advised
    if not steps and kind in ("none", "unclear"):
        told = "plain decoding is the fastest that was measured" if kind == "none" else "nothing is proven to be faster"
        steps.append(Step("serve the target as it is", told))
    return steps or [_serve(score)]


def _serve(score: Score) -> Step:
    led = leader(score)
    assert led is not None
    gamma = score["winner"]["gamma"]
    told = f", {gamma} tokens a round" if gamma else ""
    return Step(f"serve with {ARMS[led[0]]}{told}", f"it is the fastest measured, {times(led[1]['estimate'])}", ("evaluate.gamma",))


def _load(score: Score) -> list[Step]:
    load = score.get("load")
    if not load:
        return []
    stops, sizes = load["stops_paying_at"], [b["rows"] for b in load["batches"]]
    if stops is None:
        return [Step(f"speculate up to {max(sizes)} requests at once", "with so many it still gained beyond its interval")]
    goodput = ", or let gamma follow goodput" if load.get("adaptive_never_slower") else ""
    if stops == min(sizes):
        return [
            Step(
                f"decode plainly under load{goodput}",
                f"a fixed gamma gained nothing beyond its interval at {stops} requests at once, nor at more",
            )
        ]
    return [
        Step(f"decode plainly from {stops} requests at once on{goodput}", "from there on a fixed gamma gained nothing beyond its interval")
    ]


def _advised(score: Score) -> list[Step]:
    """From the diagnosis of the shown candidate, the most worthwhile first."""
    name = shown_candidate(score)
    found = score["diagnosis"].get(name) or {}
    steps = []
    for a in found.get("advice", ()):
        if a["advised"]:
            stop = a["what"] == "do not speculate"
            what = f"do not speculate with this draft alone ({name})" if stop and outcome(score) in ("winner", "pays") else a["what"]
            steps.append(Step(what, a["because"], tuple(a["keys"])))
    return steps
