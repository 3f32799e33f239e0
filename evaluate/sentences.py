"""The verdict and the ranking as sentences. Pure Python: no torch.

They claim the least that the intervals allow. What would make a figure worthless (output that differs from plain decoding, a neighbour on
the machine) is said before the figure or in the same breath.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftstill.evaluate.reading import Score, as_read, partial_of, swept, told_apart
from draftstill.evaluate.wording import (
    ARMS,
    IN_A_SENTENCE,
    before_and_after,
    bounded,
    busy,
    confidence,
    factor,
    kept,
    leader,
    outcome,
    share,
    span,
    times,
    wrongs,
)


def settling(count: int | None, timed: int | None) -> str:
    """How many timed prompts would tell; empty where no number can be named."""
    return "" if count is None or timed is None or count <= timed else f"{count:,} timed prompts would tell, where {timed:,} were timed"


def headline(score: Score) -> str:
    """The verdict for a reader who knows none of the words: what happened, in one plain sentence."""
    score = as_read(score)
    name = _short(score["target"]["name"])
    kind, led = outcome(score), leader(score)
    if kind == "broken":
        return f"Do not use this: what comes out is not what {name} alone would write."
    if led is None:
        return f"Not measured: nothing was timed beside plain decoding of {name}."
    if kind == "none":
        return f"Do not speculate: nothing that was tried makes {name} faster on this machine."
    arm, speedup = led
    if kind == "unclear":
        return f"Not proven: {name} ran at {factor(speedup['estimate'])} times its speed with {IN_A_SENTENCE[arm]}, but that may be chance."
    told = kept(score)
    same = f"and {told.partition(', ')[0]}" if told else "but whether it writes the same was not checked"
    return f"{name} is {factor(speedup['estimate'])} times as fast with {IN_A_SENTENCE[arm]}, {same}."


def _short(name: str, most: int = 60) -> str:
    return name if len(name) <= most else "…" + name[1 - most :]


def training_effect(score: Score) -> str:
    """``training raised token acceptance from 31.4% to 61.8%``, or what is known of it."""
    before, after = before_and_after(score)
    if after is None:
        return "" if before is None else f"the draft as it is has a token acceptance of {share(before)}"
    if before is None:
        return f"the tuned draft has a token acceptance of {share(after)}"
    if share(before) == share(after):
        return f"training left token acceptance at {share(after)}"
    return f"training {'raised' if after > before else 'lowered'} token acceptance from {share(before)} to {share(after)}"


def verdict(score: Score) -> str:
    """The score in one sentence: temperature, winner, speed-up with its interval, acceptance before and after training."""
    score = as_read(score)
    winner, sure = score["winner"], confidence(score)
    t = f"at temperature {winner['temperature']:g}"
    effect, kind, led = training_effect(score), outcome(score), leader(score)

    def measured(interval: Mapping[str, Any]) -> str:
        bounds = span(interval)
        return f"{times(interval['estimate'])} the speed of plain decoding ({f'{sure} interval {bounds}' if bounds else 'too few prompts for an interval'})"

    if kind == "broken":
        sentence = f"Not lossless, so no speed-up is claimed: {'; '.join(wrongs(score))}"
    elif led is None:
        sentence = f"Not measured {t}: nothing was timed beside plain decoding"
    elif kind == "none":
        told = f"; the best of them, {IN_A_SENTENCE[led[0]]}, ran at {measured(led[1])}"
        sentence = f"Do not speculate {t} on this machine: no candidate is measurably faster than plain decoding{told}"
    else:
        ran = f"{IN_A_SENTENCE[led[0]]} ran at {measured(led[1])}"
        more = settling(winner.get("to_settle"), winner.get("prompts"))
        if kind == "pays":
            others = " or ".join(IN_A_SENTENCE[r["arm"]] for r in winner["rivals"]) or "the next candidate"
            sentence = f"Speculation pays {t}: {ran}; which candidate is best is open, it is not told apart from {others}"
        elif kind == "unclear":
            sentence = (
                f"No clear winner {t}: {ran}, which does not exclude that it gains {'nothing' if led[1]['estimate'] > 1 else 'something'}"
            )
        else:
            sentence, more = f"{t.capitalize()}, {IN_A_SENTENCE[led[0]]} decodes at {measured(led[1])}", ""
        sentence += f" ({more})" if more else ""
    if partial := partial_of(score):
        sentence = f"Not finished, {partial[0]} of {partial[1]} prompts timed so far. {sentence}"
    tail = [best_gamma(score)] if kind in ("winner", "pays") else []
    tail += [effect] if kind != "broken" else []
    if kind in ("winner", "pays", "unclear"):
        told = kept(score)
        tail.append(f"by the audit {told}" if told else "the output was not audited")
    if disturbed := busy(score):
        tail.append("but " + disturbed)
    return "; ".join([sentence, *(x for x in tail if x)]) + "."


def best_gamma(score: Score) -> str:
    """``its best gamma is 2 of 1, 2, 4``; empty where only one was tried or nothing leads."""
    score, led = as_read(score), leader(score)
    if led is None:
        return ""
    tried = swept(score, led[0], score["winner"]["temperature"])
    gamma = score["winner"]["gamma"] or (score["winner"].get("fastest") or {}).get("gamma")
    return f"its best gamma is {gamma} of {', '.join(str(r['swept']) for r in tried)}" if len(tried) > 1 else ""


def comparison_lines(score: Score) -> list[str]:
    """Every pair of arms, the deployment's temperature first."""
    lines, deployed = [], score["winner"]["temperature"]
    for c in sorted(score["comparisons"], key=lambda c: (c["temperature"] != deployed, c["temperature"])):
        r = c["ratio"]
        reading = "no clear difference" if not told_apart(r) else "faster" if r["estimate"] > 1 else "slower"
        lines.append(f"at temperature {c['temperature']:g}, {ARMS[c['a']]} against {ARMS[c['b']]}: {bounded(r, None, times)}, {reading}")
    return lines


def ranking_lines(score: Score) -> list[str]:
    """Who is best, who might be, and how many prompts would tell."""
    score = as_read(score)
    winner, led = score["winner"], leader(score)
    if led is None:
        return []
    name, kind = IN_A_SENTENCE[led[0]], outcome(score)
    if winner["arm"] is None:
        more = settling(winner.get("to_settle"), winner.get("prompts")) if kind == "unclear" else ""
        return [f"No clear winner: {name} is the fastest at {bounded(led[1], None, times)}, and is not told apart from plain decoding"
                + (f"; {more}" if more else "")]  # fmt: skip
    if winner["clear"]:
        return [
            f"{name[0].upper()}{name[1:]} is the clear winner: faster than plain decoding and than every other candidate, beyond the intervals"
        ]
    lines = []
    for r in winner["rivals"]:
        more = settling(r["to_settle"], winner["prompts"]) or ("" if r["to_settle"] else "how many prompts would tell cannot be said")
        lines.append(f"No clear winner: {name} is {bounded(r['ratio'], None, times)} the speed of {IN_A_SENTENCE[r['arm']]}, which does not tell them apart"
                     + (f"; {more}" if more else ""))  # fmt: skip
    return lines
