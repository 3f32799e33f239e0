"""The page's section on load: throughput by requests at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftstill.evaluate import charts
from draftstill.evaluate.markup import bullets, figure, note, pair, section, table, text
from draftstill.evaluate.reading import Score
from draftstill.evaluate.wording import ARMS, BUSY_CORES, bounded, number, times

_LINES = {"plain": "plain", "fixed": "tuned", "adaptive": "composite"}
"""Of a load measurement: colour and marker."""


def load(score: Score) -> str:
    found = score.get("load")
    if not found or not found["batches"]:
        return ""
    batches = found["batches"]
    names = {"plain": ARMS["plain"], "fixed": f"{ARMS[found['fixed']['arm']]}, gamma {found['fixed']['swept']}"}
    if found.get("adaptive"):
        names["adaptive"] = f"{ARMS[found['adaptive']['arm']]}, gamma by goodput"
    series = [
        charts.Series(_LINES[arm], label, [(b["rows"], b["arms"][arm]["tokens_per_s"]) for b in batches if arm in b["arms"]])
        for arm, label in names.items()
    ]
    top = 1.08 * max(y for s in series for _, y in s.points)
    chart = charts.lines(series, "requests at once", "tokens per second", places=[b["rows"] for b in batches], y_span=(0.0, top),
                         show=charts.short, tell=lambda v: f"{v:.1f} tokens/s")  # fmt: skip
    head = ["at once", "plain tok/s"] + [x for arm in names if arm != "plain" for x in (f"{arm} tok/s", "speed-up", "mean gamma")]
    figures = table(head, [(False, [text(b["rows"]), *(text(x) for arm in names for x in _cells(b, arm))]) for b in batches], tight=True)
    return section(
        "Under load",
        bullets(_said(found)),
        pair(figure("Tokens per second by requests at once", chart)),
        figures,
        note(f"Closed loop: the next request enters when one ends. Temperature {found['temperature']:g}, {found['new_tokens']} tokens each, "
             f"prefill counted in; intervals are over {found['blocks']} repetitions."),
    )  # fmt: skip


def _said(found: Mapping[str, Any]) -> list[str]:
    stops, largest = found["stops_paying_at"], max(b["rows"] for b in found["batches"])
    said = [f"Speculation at a fixed gamma stops paying at {stops} requests at once: from there on it gained nothing beyond its interval."
            if stops is not None else f"Speculation still paid at {largest} requests at once, the most that was measured."]  # fmt: skip
    if found.get("adaptive_never_slower") is not None:
        slower = ", ".join(map(str, found["adaptive_slower_at"]))
        lows = [b["arms"]["adaptive"]["ratio"]["low"] for b in found["batches"] if "adaptive" in b["arms"]]
        told = f" (lowest bound {times(min(lows))})" if lows else ""
        said.append("With gamma chosen by goodput it was " + (
            f"at no batch slower than plain decoding beyond the interval{told}." if found["adaptive_never_slower"]
            else f"slower than plain decoding beyond the interval at {slower} requests at once{told}."))  # fmt: skip
    known = [(b["other_cores"], b["rows"]) for b in found["batches"] if b.get("other_cores") is not None]
    if known:
        most, rows = max(known)
        said.append(f"Other processes took up to {number(most)} cores meanwhile, at {rows} requests at once"
                    + (": these figures are not to be trusted." if most > BUSY_CORES else "."))  # fmt: skip
    return said


def _cells(batch: Mapping[str, Any], name: str) -> list[str]:
    arm = batch["arms"].get(name)
    if name == "plain":
        return [number(arm["tokens_per_s"], 1)]
    return (
        ["-", "-", "-"] if arm is None else [number(arm["tokens_per_s"], 1), bounded(arm["ratio"], None, times), number(arm["mean_gamma"])]
    )
