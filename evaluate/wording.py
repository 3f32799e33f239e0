"""What arms are called, how figures are written, and what a score comes to. Pure Python: no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftstill.evaluate.faults import failures
from draftstill.evaluate.reading import Score, acceptance, arms_at, as_read, has_interval, shown_candidate, speed, swept, untrained


class Names(dict[str, str]):
    """What arms are called. ``untuned:NAME`` and ``composite:NAME`` belong to a candidate, ``stock:NAME`` is an existing draft; any
    other name is a candidate's own."""

    def __init__(self, named: Mapping[str, str], untuned: str, composite: str, stock: str) -> None:
        super().__init__(named)
        self._forms = {"untuned": untuned, "composite": composite, "stock": stock}

    def __missing__(self, arm: str) -> str:
        kind, _, candidate = arm.partition(":")
        return self._forms[kind].format(candidate) if candidate and kind in self._forms else arm


ARMS = Names(
    {
        "plain": "plain decoding",
        "untuned": "draft before training",
        "tuned": "draft after training",
        "lookup": "prompt lookup",
        "bigram": "bigram table",
        "composite": "lookup, then tuned draft",
    },
    "{} before training",
    "lookup, then {}",
    "{} (stock draft)",
)
IN_A_SENTENCE = Names(
    {
        "untuned": "the draft before training",
        "tuned": "the tuned draft",
        "lookup": "prompt lookup",
        "bigram": "the bigram table",
        "composite": "lookup with the tuned draft behind it",
    },
    "{} before training",
    "lookup with {} behind it",
    "the stock draft {}",
)
BUSY_CORES = 0.2
"""Above this many cores taken by other processes, timings are called untrustworthy."""
_MOST = 99.0
"""Speed-ups beyond this are the ends of intervals from too few prompts; their digits say nothing."""


def times(x: float | None) -> str:
    """A speed-up: ``1.42x``, or a dash where there is none."""
    return "-" if x is None else f">{_MOST:g}x" if x > _MOST else f"{x:.2f}x"


def factor(x: float | None) -> str:
    """A speed-up without its sign: ``1.42``."""
    return times(x).removesuffix("x")


def share(x: float | None) -> str:
    """A share: ``61.8%``, or a dash where there is none."""
    return "-" if x is None else f"{100 * x:.1f}%"


def number(x: float | None, digits: int = 2) -> str:
    return "-" if x is None else f"{x:.{digits}f}"


def span(interval: Mapping[str, Any] | None, show: Any = factor, joint: str = " to ") -> str:
    """``1.33 to 1.50``; empty where the data allowed no interval."""
    return f"{show(interval['low'])}{joint}{show(interval['high'])}" if interval and has_interval(interval) else ""


def bounded(interval: Mapping[str, Any] | None, value: float | None, show: Any) -> str:
    """``1.42x [1.33x, 1.50x]``."""
    bounds = span(interval, show, ", ")
    return show(interval["estimate"] if interval else value) + (f" [{bounds}]" if bounds else "")


def confidence(score: Score) -> str:
    return f"{100 * score['conditions']['confidence']:g}%"


def wrongs(score: Score) -> list[str]:
    """What the audit found wrong; a self-pair alone, or nothing, was no audit and has found nothing."""
    audit = score.get("audit") or {}
    compared = audit.get("greedy_fp32") or {}
    return failures({**audit, "greedy_fp32": compared if compared.get("prompts") else {"prompts": 1, "identical": 1}})


def losslessness(score: Score) -> tuple[bool | None, str]:
    """Whether the audit passed (None: nothing was audited), and what it found."""
    audit = score.get("audit") or {}
    greedy, pair, sampling, tie, kept = (audit.get(k) or {} for k in ("greedy_fp32", "self_pair", "sampling", "ties", "identities"))
    parts = []
    if greedy.get("prompts"):
        parts.append(
            f"{greedy['identical']} of {greedy['prompts']} greedy outputs in float32 are identical to plain decoding, token by token"
        )
    if tie:
        parts.append(f"in {tie['dtype']} {tie['identical']} of {tie['texts']} are, {tie['tied']} part from it where the target is at a tie, "
                     f"{tie['failed']} elsewhere")  # fmt: skip
    if pair.get("token_acceptance") is not None:
        parts.append(f"a draft equal to its target had {share(pair['token_acceptance'])} of its tokens accepted")
    if sampling and sampling.get("p_value") is None:
        parts.append("sampling was not tested: no token came often enough to be compared")
    elif sampling:
        parts.append(f"{sampling['draws']:,} sampled draws fit exact enumeration with p = {sampling['p_value']:.3g} (chi-squared)")
    if kept:
        parts.append(f"{kept['traces'] - kept['broken']} of {kept['traces']} traces agree with themselves")
    timed = audit.get("greedy_timed") or {}
    if timed.get("identical"):
        # Says what was timed; no fault in a dtype whose near-ties fall either way.
        counts = ", ".join(f"{ARMS[arm]} {n}" for arm, n in timed["identical"].items())
        parts.append(f"of the {timed['prompts']} texts timed at temperature 0 in {timed['dtype']}, as many equal plain decoding: {counts}")
    wrong = wrongs(score)
    if not greedy.get("prompts") and not sampling:
        # A self-pair alone says that the counters are right, not that the output is.
        return (None if not wrong else False), "; ".join(["the output was not compared with plain decoding", *parts])
    return not wrong, "; ".join([*wrong, *parts])


def kept(score: Score) -> str:
    """What a passed audit says of the output, in half a sentence; empty where none passed. In a dtype with near-ties a greedy text may part from
    plain decoding's, and a sampled one is another draw: what is kept is the distribution."""
    if losslessness(score)[0] is not True:
        return ""
    audit = score.get("audit") or {}
    greedy, sampling, tie = (audit.get(k) or {} for k in ("greedy_fp32", "sampling", "ties"))
    said = ["the target's distribution is kept"] if sampling.get("p_value") is not None else []
    if tie:
        rest = ", the rest part at ties" if tie["identical"] < tie["texts"] else ""
        said.append(f"{tie['identical']} of {tie['texts']} greedy texts are identical in {tie['dtype']}{rest}")
    elif greedy.get("prompts"):
        said.append(f"{greedy['identical']} of {greedy['prompts']} greedy texts are identical")
    return ", ".join(said)


def busy(score: Score) -> str | None:
    """The warning that timings were disturbed, where they were."""
    other = score["conditions"].get("other_cores") or 0.0
    if other <= BUSY_CORES:
        return None
    return f"other processes kept {other:.2f} cores busy during timing, so the speeds are not to be trusted; score again on a quiet machine"


def mixed(score: Score) -> str | None:
    """The warning that more than one state of Draftstill's own source timed, where several did: an interrupted score went on after an edit."""
    commits = score["conditions"].get("commits") or []
    if len(commits) < 2:
        return None
    told = ", ".join("one that was not noted" if c is None else " ".join(word[:12] for word in c.split()) for c in commits)
    return (f"{len(commits)} states of Draftstill's source timed this score ({told}), so a difference between arms may be one between states; to time "
            "with one, move the run's folders score and score.old-* away and score again")  # fmt: skip


def warnings(score: Score) -> list[str]:
    """All that disturbed the timing."""
    return [told for told in (busy(score), mixed(score)) if told]


def before_and_after(score: Score) -> tuple[float | None, float | None]:
    """Token acceptance of the shown draft before and after training, both at one gamma. Where the score has no such gamma nothing is said of before:
    guess by guess acceptance falls, so two gammas compare as nothing."""
    score, t = as_read(score), score["winner"]["temperature"]
    candidate = shown_candidate(score)
    if candidate is None:
        return None, None
    first, last = untrained(score, candidate, t), arms_at(score, t).get(candidate)
    if first is not None and last is not None:
        same = next((r for r in swept(score, candidate, t) if r["swept"] == first["swept"]), None)
        first, last = (None, last) if same is None else (first, same)
    if first is not None and last is not None and not (first.get("counts") and last.get("counts")):
        first, last = ({**row, "counts": None} for row in (first, last))
    return tuple(None if row is None else acceptance(row)[1] for row in (first, last))  # type: ignore[return-value]


def outcome(score: Score) -> str:
    """One word: ``winner``; ``pays`` (faster, but two candidates are not told apart); ``unclear`` (perhaps faster, or nothing
    was timed); ``none`` (the fastest gains nothing, its interval included); or ``broken`` (the output is not the target's)."""
    score = as_read(score)
    winner = score["winner"]
    speedup = winner.get("speedup") or (winner.get("fastest") or {}).get("speedup")
    if losslessness(score)[0] is False:
        return "broken"
    if speedup is not None and gains_nothing(speedup):
        return "none"
    if speedup is None or winner["arm"] is None or not (has_interval(speedup) and speedup["low"] > 1.0):
        return "unclear"
    return "winner" if winner["clear"] else "pays"


def gains_nothing(speedup: Mapping[str, Any]) -> bool:
    """Whether a speed-up is known to be 1 at most. One prompt says nothing either way."""
    known = has_interval(speedup) or speedup["method"] == "none: all prompts have the same ratio"
    return bool(known and speedup["high"] <= 1.0)


def leader(score: Score) -> tuple[str, dict[str, Any]] | None:
    """The arm that the verdict is about, with its measured speed-up: the winner, else the fastest."""
    winner = as_read(score)["winner"]
    found = winner if winner["arm"] is not None else winner.get("fastest")
    return (found["arm"], found["speedup"]) if found and found["speedup"] else None


def measured_or_predicted(row: Mapping[str, Any]) -> str:
    """The speed-up as a cell; a prediction says that it is one."""
    if row["arm"] == "plain":
        return "1 by definition"
    found = speed(row)
    return bounded(found, None, times) + ("" if row["speedup"] or not found else " predicted")
