"""The page's sections on speed: candidates, gamma sweep, where the time goes, prediction, load."""

from __future__ import annotations

from collections.abc import Sequence

from draftstill.evaluate import charts
from draftstill.evaluate.markup import bullets, figure, folded, note, pair, section, small_bounds, table, text
from draftstill.evaluate.reading import (
    Row,
    Score,
    acceptance,
    arms_at,
    best_arm,
    has_interval,
    plain_speed,
    ranked,
    shown_candidate,
    speed,
    swept,
    tau,
    temperatures,
)
from draftstill.evaluate.report import NOTES, with_prefill
from draftstill.evaluate.sentences import comparison_lines, ranking_lines
from draftstill.evaluate.style import PARTS, SERIES
from draftstill.evaluate.wording import (
    ARMS,
    before_and_after,
    bounded,
    confidence,
    leader,
    losslessness,
    measured_or_predicted,
    number,
    outcome,
    share,
    span,
    times,
)

_MOST_ARMS = 8
"""Arms in one chart."""


def series_keys(score: Score) -> dict[str, str]:
    """Colour and marker of each arm: its kind's; further arms of a kind have others."""
    found: dict[str, str] = {}
    spare = [k for k in SERIES if k.startswith("more")]
    for a in score["arms"]:
        if a["arm"] in found:
            continue
        taken = a["kind"] in found.values()
        found[a["arm"]] = spare[sum(v in spare for v in found.values()) % len(spare)] if taken else a["kind"]
    return found


def tiles(score: Score) -> str:
    t = score["winner"]["temperature"]
    arms, led = arms_at(score, t), leader(score)
    best = led[0] if led else best_arm(score)
    found = []
    if best and (interval := led[1] if led else speed(arms[best])):
        bounds = f"; {confidence(score)} interval {span(interval)}" if span(interval) else ""
        found.append(
            (times(interval["estimate"]), f"speed of plain decoding, with {ARMS[best]}, {arms[best]['swept']} guesses a round{bounds}")
        )
    if best and arms[best]["tokens_per_s"]:
        found.append(
            (
                f"{number(plain_speed(score, arms[best]), 1)} → {number(arms[best]['tokens_per_s'], 1)}",
                f"tokens per second, plain → {ARMS[best]}",
            )
        )
    before, after = before_and_after(score)
    if after is not None:
        told = f"{share(before).rstrip('%')} → {share(after)}" if before is not None else share(after)
        found.append((told, "guesses accepted" + (", before → after training" if before is not None else "")))
    ok, _ = losslessness(score)
    greedy = (score.get("audit") or {}).get("greedy_fp32") or {}
    same = (
        f"{greedy['identical']} of {greedy['prompts']} greedy outputs identical in float32"
        if greedy.get("prompts")
        else "no outputs were compared"
    )
    found.append(("not audited" if ok is None else "lossless" if ok else "NOT lossless", same))
    return '<div class="tiles">' + "".join(f'<div class="tile"><b>{text(a)}</b><span>{text(b)}</span></div>' for a, b in found) + "</div>"


def candidates(score: Score) -> str:
    t = score["winner"]["temperature"]
    others = [folded(f"Temperature {x:g}", _arms(score, x)) for x in temperatures(score) if x != t]
    pairs = folded("Every pair of candidates", bullets(comparison_lines(score)))
    compared = score["winner"].get("compared") or 0
    told = note(f"Dot: measured, with its {confidence(score)} interval. Diamond: predicted. Shaded: slower than plain decoding. Acceptance: share of "
                "the draft's guesses that the target kept, on whole texts of all prompts where those were counted."
                + (f" A row's interval holds for all of its gammas, the one above for all {compared} arms and gammas at once." if compared > 1
                   else ""))  # fmt: skip
    return section(f"Candidates, temperature {t:g}", _arms(score, t), bullets(ranking_lines(score)), *others, pairs, told)


def _arms(score: Score, t: float) -> str:
    arms, keys = arms_at(score, t), series_keys(score)
    found = [speed(a) for a in arms.values()]
    estimates = [f["estimate"] for f in found if f] + [a["predicted"] for a in arms.values() if a["predicted"]]
    scale = charts.speed_scale(estimates, [f[k] for f in found if f for k in ("low", "high")])
    led = leader(score) if outcome(score) in ("winner", "pays") and t == score["winner"]["temperature"] else None
    rows = []
    for name in ranked(score, t):
        a = arms[name]
        bar = charts.speed_bar(scale, keys[name], speed(a), a["predicted"], has_interval(speed(a)))
        shown = [text(ARMS[name]), text("-" if name == "plain" else a["swept"]), bar, small_bounds(measured_or_predicted(a)), text(times(a["predicted"])),
                 small_bounds(bounded(*acceptance(a), share)), text(number(a["tokens_per_s"], 1))]  # fmt: skip
        rows.append((led is not None and name == led[0], shown))
    head = ["candidate", "gamma", charts.speed_axis(scale), "speed-up", "predicted", "acceptance", "tokens/s"]
    return table(head, rows, drawn=2)


def sweep(score: Score) -> str:
    """Measured and predicted speed-up by gamma, of every arm that was tried at several."""
    at = {t: [(arm, rows) for arm in arms_at(score, t) if len(rows := swept(score, arm, t)) > 1] for t in temperatures(score)}
    if not any(at.values()):
        return ""
    t = score["winner"]["temperature"]
    figures = [_sweep_chart(arm, rows) for arm, rows in at[t]]
    tables = [folded(f"Figures at temperature {x:g}", _sweep_table(rows)) for x, rows in at.items() if rows]
    diagnosis = score["diagnosis"].get(shown_candidate(score)) or {}
    spread = diagnosis.get("dispersion")
    why = ""
    if spread and spread["variance_ratio"] is not None and spread["error"] is not None:
        why = (f"Accepted guesses per round scatter {spread['variance_ratio']:.2f} times as much as independent positions would; "
               f"the formula misses the tokens per round by {spread['error']:+.1%}.")  # fmt: skip
    told = (
        "Dashed line at 1: plain decoding. Measured: with intervals. Predicted: from the accepted counts of the same rounds and from step times taken "
        "apart; the gap is the engine's overhead. Formula: equation 1 of Leviathan et al. from the mean alpha, as if all positions were equally easy. "
        "Acceptance and tau: of whole texts of all prompts where those were counted. "
    )
    return section("How many guesses a round (gamma)", pair(*figures), *tables, note(told + why))


def _sweep_chart(arm: str, rows: Sequence[Row]) -> str:
    places = [r["swept"] for r in rows]
    measured = [(r["swept"], r["speedup"]) for r in rows if r["speedup"]]
    counts = {r["swept"]: r.get("counts") or {} for r in rows}
    predicted = {r["swept"]: r["predicted"] or (counts[r["swept"]].get("predicted") or {}).get("estimate") for r in rows}
    formula = {g: (c.get("iid") or {}).get("predicted") for g, c in counts.items()}
    series = [
        charts.Series("composite", "predicted", [(g, y) for g, y in predicted.items() if y is not None], "dash"),
        charts.Series("untuned", "formula", [(g, y) for g, y in formula.items() if y is not None], "dots"),
        charts.Series("tuned", "measured", [(g, s["estimate"]) for g, s in measured],
                      bounds=[(s["low"], s["high"]) if has_interval(s) else None for _, s in measured]),
    ]  # fmt: skip
    series = [s for s in series if s.points]
    if not series:
        return ""
    values = [y for s in series for _, y in s.points]
    most = 2.0 * max(values)
    ends = [e for s in series for b in s.bounds if b for e in b if e < most]
    low, high = min([1.0, *values, *ends]), max([1.0, *values, *ends])
    room = 0.06 * (high - low) + 0.02
    best = max((r for r in rows if speed(r)), key=lambda r: speed(r)["estimate"], default=None)  # type: ignore[index]
    chart = charts.lines(
        series,
        "gamma",
        "speed-up",
        places=places,
        y_span=(max(0.0, low - room), high + room),
        show=lambda v: f"{v:g}x",
        tell=times,
        rule=(1.0, ""),
    )
    return figure(ARMS[arm] + (f": fastest at gamma {best['swept']}" if best else ""), chart)


def _sweep_table(arms: Sequence[tuple[str, Sequence[Row]]]) -> str:
    rows = []
    for arm, own in arms:
        fastest = max((r for r in own if speed(r)), key=lambda r: speed(r)["estimate"], default=None)  # type: ignore[index]
        for r in own:
            measured, formula = (r["speedup"] or {}).get("estimate"), ((r.get("counts") or {}).get("iid") or {}).get("predicted")
            told = (ARMS[arm], r["swept"], measured_or_predicted(r), times(r["predicted"]), _off(r["predicted"], measured), times(formula),
                    _off(formula, measured), bounded(*acceptance(r), share), number(tau(r)))  # fmt: skip
            rows.append((r is fastest, [text(x) for x in told]))
    head = ["candidate", "gamma", "measured", "predicted", "off by", "formula", "off by", "acceptance", "tau"]
    return table(head, rows, tight=True)


def _off(told: float | None, measured: float | None) -> str:
    return f"{100 * (told / measured - 1):+.1f}%" if told and measured else "-"


def time_split(score: Score) -> str:
    t = score["winner"]["temperature"]
    arms = arms_at(score, t)
    chosen = [n for n in ranked(score, t) if arms[n]["metrics"].get("emitted")]
    chosen = [n for i, n in enumerate(chosen) if i < _MOST_ARMS or n == "plain"]
    split = [(ARMS[n], [(part, 1000 * arms[n]["metrics"][f"{part}_s"] / arms[n]["metrics"]["emitted"]) for part in PARTS]) for n in chosen]
    return figure(f"Where the time goes, temperature {t:g}", charts.stacked(split, "ms"),
                  "Milliseconds per token of output. A draft pays when the verify part shrinks by more than the draft part adds.")  # fmt: skip


def why(score: Score) -> str:
    """Predicted and measured, break-even and ceiling."""
    keys, rows = series_keys(score), []
    for t in temperatures(score):
        for name, a in arms_at(score, t).items():
            if name == "plain":
                continue
            measured = (a["speedup"] or {}).get("estimate")
            gap = f"{100 * (measured / a['predicted'] - 1):+.1f}%" if measured and a["predicted"] else "-"
            bar = charts.alpha_bar(keys[name], a["alpha"], a["break_even"]) if a["alpha"] is not None and a["ceiling"] is not None else ""
            need = number(a["break_even"], 3) if a["break_even"] is not None else "none" if a["ceiling"] is not None else "-"
            rows.append((False, [text(f"{ARMS[name]}, {t:g}"), bar, *(text(x) for x in (
                number(a["alpha"], 3), need, str(a["swept"]), number(a["metrics"].get("tau")), number(a["c"], 3), number(a["v"], 3), times(a["ceiling"]),
                times(a["predicted"]), times(measured), gap))]))  # fmt: skip
    if not rows:
        return ""
    head = [
        "candidate, temperature",
        "alpha, break-even",
        "alpha",
        "needed",
        "gamma",
        "tau",
        "c",
        "v",
        "ceiling",
        "predicted",
        "measured",
        "gap",
    ]
    total = "; ".join(f"{ARMS[n]} {times(x)}" for n, x in with_prefill(score, score["winner"]["temperature"]).items())
    told = (
        "Here tau is of the timed texts, as measured and predicted are; alpha of every prompt's whole text, where counted. "
        f"{NOTES.format(confidence=confidence(score))} ceiling: the speed-up of a draft that is always right. gap: measured over predicted; what the "
        "formula does not see. needed: the break-even alpha, below which this draft loses (shaded side of the tick); none: even a perfect draft would."
    )
    told += f" With the prompt's prefill counted in, speed-ups are {total}." if total else ""
    return section("Why: break-even, ceiling, predicted and measured", table(head, rows, drawn=1, tight=True), note(told))
