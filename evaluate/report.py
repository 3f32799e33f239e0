"""The score in words: one sentence, a Markdown page, the last screen of a run. Reads ``score.json`` and nothing else.

The sentence claims the least that the intervals allow. What would make a figure worthless (output that differs from plain
decoding, a neighbour on the machine) is said before the figure or in the same breath.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftstill.runfolder import atomic_write

Score = Mapping[str, Any]

ARMS = {
    "plain": "plain decoding",
    "untuned": "draft before training",
    "tuned": "draft after training",
    "lookup": "prompt lookup",
    "composite": "lookup, then tuned draft",
}
_IN_A_SENTENCE = {
    "untuned": "the draft before training",
    "tuned": "the tuned draft",
    "lookup": "prompt lookup",
    "composite": "lookup with the tuned draft behind it",
}
BUSY_CORES = 0.2
"""Above this many cores taken by other processes, timings are called untrustworthy."""
SAMPLING_ALARM = 0.001
"""A chi-squared p-value below this counts as a failed audit: an exact sampler gets there once in a thousand runs."""


def times(x: float | None) -> str:
    """A speed-up: ``1.42x``, or a dash where there is none."""
    return "-" if x is None else f"{x:.2f}x"


def share(x: float | None) -> str:
    """A share: ``61.8%``, or a dash where there is none."""
    return "-" if x is None else f"{100 * x:.1f}%"


def number(x: float | None, digits: int = 2) -> str:
    return "-" if x is None else f"{x:.{digits}f}"


def has_interval(interval: Mapping[str, Any] | None) -> bool:
    return bool(interval) and not str(interval.get("method", "")).startswith("none")  # type: ignore[union-attr]


def span(interval: Mapping[str, Any] | None, show: Any = number, joint: str = " to ") -> str:
    """``1.33 to 1.50``; empty where the data allowed no interval."""
    return f"{show(interval['low'])}{joint}{show(interval['high'])}" if interval and has_interval(interval) else ""


def confidence(score: Score) -> str:
    return f"{100 * score['conditions']['confidence']:g}%"


def temperatures(score: Score) -> list[float]:
    """Scored temperatures, the deployment's first."""
    deployed = score["winner"]["temperature"]
    return sorted({a["temperature"] for a in score["arms"]}, key=lambda t: (t != deployed, t))


def arms_at(score: Score, temperature: float) -> dict[str, Mapping[str, Any]]:
    """Arms by name at one temperature, in the order of ``ARMS``."""
    found = {a["arm"]: a for a in score["arms"] if a["temperature"] == temperature}
    return {name: found[name] for name in ARMS if name in found}


def losslessness(score: Score) -> tuple[bool | None, str]:
    """Whether the audit passed (None: nothing was audited), and what it found."""
    audit = score.get("audit") or {}
    greedy, pair, sampling = audit.get("greedy_fp32") or {}, audit.get("self_pair") or {}, audit.get("sampling") or {}
    parts, passed = [], True
    if greedy.get("prompts"):
        passed &= greedy["identical"] == greedy["prompts"]
        parts.append(
            f"{greedy['identical']} of {greedy['prompts']} greedy outputs in float32 are identical to plain decoding, token by token"
        )
    if pair.get("token_acceptance") is not None:
        passed &= pair["token_acceptance"] == 1.0
        parts.append(f"a draft equal to its target had {share(pair['token_acceptance'])} of its tokens accepted")
    if sampling.get("p_value") is not None:
        passed &= sampling["p_value"] >= SAMPLING_ALARM
        parts.append(f"{sampling['draws']:,} sampled draws fit exact enumeration with p = {sampling['p_value']:.3g} (chi-squared)")
    timed = audit.get("greedy_timed") or {}
    if timed.get("identical"):
        # Says what was timed; no fault in a dtype whose near-ties fall either way.
        counts = ", ".join(f"{ARMS[arm]} {n}" for arm, n in timed["identical"].items())
        parts.append(f"of the {timed['prompts']} texts timed at temperature 0 in {timed['dtype']}, as many equal plain decoding: {counts}")
    if not greedy.get("prompts") and not sampling:
        # A self-pair alone says that the counters are right, not that the output is.
        return (None if passed else False), "; ".join(["the output was not compared with plain decoding", *parts])
    return passed, "; ".join(parts)


def busy(score: Score) -> str | None:
    """The warning that timings were disturbed, where they were."""
    other = score["conditions"].get("other_cores") or 0.0
    if other <= BUSY_CORES:
        return None
    return f"other processes kept {other:.2f} cores busy during timing, so the speeds are not to be trusted; score again on a quiet machine"


def training_effect(score: Score, temperature: float) -> str:
    """``training raised token acceptance from 31.4% to 61.8%``, or what is known of it."""
    arms = arms_at(score, temperature)
    before, after = ((arms.get(a) or {"metrics": {}})["metrics"].get("token_acceptance") for a in ("untuned", "tuned"))
    if after is None:
        return "" if before is None else f"the draft as it is has a token acceptance of {share(before)}"
    if before is None:
        return f"the tuned draft has a token acceptance of {share(after)}"
    if share(before) == share(after):
        return f"training left token acceptance at {share(after)}"
    return f"training {'raised' if after > before else 'lowered'} token acceptance from {share(before)} to {share(after)}"


def rivals(score: Score) -> list[str]:
    """Arms that a comparison could not tell from the winner."""
    winner = score["winner"]
    return [c["b"] if c["a"] == winner["arm"] else c["a"] for c in score["comparisons"]
            if c["temperature"] == winner["temperature"] and winner["arm"] in (c["a"], c["b"]) and "plain" not in (c["a"], c["b"])
            and (not has_interval(c["ratio"]) or c["ratio"]["low"] <= 1.0 <= c["ratio"]["high"])]  # fmt: skip


def outcome(score: Score) -> str:
    """One word: ``winner``; ``pays`` (faster, but two candidates are not told apart); ``unclear``; ``none`` (do not speculate); or
    ``broken`` (the output is not the target's)."""
    speedup = score["winner"].get("speedup")
    if losslessness(score)[0] is False:
        return "broken"
    if score["winner"]["arm"] is None or speedup is None or speedup["estimate"] <= 1.0:
        return "none"
    if not (has_interval(speedup) and speedup["low"] > 1.0):
        return "unclear"
    return "winner" if score["winner"]["clear"] else "pays"


def verdict(score: Score) -> str:
    """The report in one sentence: temperature, winner, speed-up with its interval, acceptance before and after training."""
    winner, sure = score["winner"], confidence(score)
    t = f"at temperature {winner['temperature']:g}"
    effect, kind = training_effect(score, winner["temperature"]), outcome(score)

    def measured(interval: Mapping[str, Any] | None, of: str = "the speed of plain decoding") -> str:
        if not interval:
            return "a speed that was not measured"
        bounds = span(interval)
        return f"{times(interval['estimate'])} {of} ({f'{sure} interval {bounds}' if bounds else 'too few prompts for an interval'})"

    if kind == "broken":
        sentence = f"Not lossless, so no speed-up is claimed: {losslessness(score)[1]}"
    elif kind == "none":
        tried = [a for n, a in arms_at(score, winner["temperature"]).items() if n != "plain" and a["speedup"]]
        best = max(tried, key=lambda a: a["speedup"]["estimate"], default=None)
        told = f"; the best of them, {_IN_A_SENTENCE[best['arm']]}, ran at {measured(best['speedup'])}" if best else ""
        sentence = f"Do not speculate {t} on this machine: no candidate is measurably faster than plain decoding{told}"
    elif kind == "pays":
        others = " or ".join(_IN_A_SENTENCE[a] for a in rivals(score)) or "the next candidate"
        ran = f"{_IN_A_SENTENCE[winner['arm']]} ran at {measured(winner['speedup'])}"
        sentence = f"Speculation pays {t}: {ran}; which candidate is best is open, it is not told apart from {others}"
    elif kind == "unclear":
        ran = f"{_IN_A_SENTENCE[winner['arm']]} ran at {measured(winner['speedup'])}"
        sentence = f"No clear winner {t}: {ran}, which does not exclude that it gains nothing"
    else:
        sentence = f"{t.capitalize()}, {_IN_A_SENTENCE[winner['arm']]} decodes at {measured(winner['speedup'])}"
    tail = [effect] if effect and kind != "broken" else []
    if kind in ("winner", "pays", "unclear"):
        tail.append("the output was not audited" if losslessness(score)[0] is None else "the audit found no change of output")
    if disturbed := busy(score):
        tail.append("but " + disturbed)
    return "; ".join([sentence, *tail]) + "."


def cell(text: object) -> str:
    """Text for a Markdown table or line: what could open HTML, a link, a new cell or a new line is made inert."""
    out = " ".join(str(text).split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return "".join("\\" + c if c in "\\|`*_[]" else c for c in out)


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *("| " + " | ".join(r) + " |" for r in rows)]


def bounded(interval: Mapping[str, Any] | None, value: float | None, show: Any) -> str:
    """``1.42x [1.33x, 1.50x]``."""
    bounds = span(interval, show, ", ")
    return show(interval["estimate"] if interval else value) + (f" [{bounds}]" if bounds else "")


def arm_rows(score: Score, temperature: float) -> list[list[str]]:
    """The cells of the candidates' table; see ``HEAD``."""
    return [
        [ARMS[name], str(a["gamma"]), bounded(a["acceptance"], a["metrics"].get("token_acceptance"), share), number(a["alpha"], 3),
         number(a["metrics"].get("tau")), number(a["c"], 3), number(a["v"], 3), times(a["predicted"]),
         "1 by definition" if name == "plain" else bounded(a["speedup"], None, times), number(a["tokens_per_s"], 1)]
        for name, a in arms_at(score, temperature).items()
    ]  # fmt: skip


HEAD = ["arm", "gamma", "token acceptance", "alpha", "tau", "c", "v", "predicted speed-up", "measured speed-up", "tok/s"]


def with_prefill(score: Score, temperature: float) -> dict[str, float]:
    """Speed-up of whole requests: long prompts dilute what decoding gains. Point estimates per emitted token."""
    arms = {n: a["metrics"] for n, a in arms_at(score, temperature).items()}
    cost = {n: (m["decode_s"] + m["prefill_s"]) / m["emitted"] for n, m in arms.items() if m.get("emitted") and m.get("prefill_s")}
    return {n: cost["plain"] / s for n, s in cost.items() if n != "plain" and s} if "plain" in cost else {}


def comparison_lines(score: Score) -> list[str]:
    lines = []
    deployed = score["winner"]["temperature"]
    for c in sorted(score["comparisons"], key=lambda c: (c["temperature"] != deployed, c["temperature"])):
        r = c["ratio"]
        told = has_interval(r) and not r["low"] <= 1.0 <= r["high"]
        reading = "no clear difference" if not told else "faster" if r["estimate"] > 1 else "slower"
        lines.append(f"at temperature {c['temperature']:g}, {ARMS[c['a']]} against {ARMS[c['b']]}: {bounded(r, None, times)}, {reading}")
    return lines


def conditions(score: Score) -> list[tuple[str, str]]:
    """What the figures hold for, as label and text."""
    c, t, d, k = score["conditions"], score["target"], score["draft"], score["corpus"]
    m, git = c["machine"], c.get("git")
    docs = k["documents"]
    return [
        ("target", f"{t['name']}, {t['parameters']:,} parameters, {t['layers']} layers, {t['dtype']}"),
        ("draft", f"{d['name']}, {d['parameters']:,} parameters" + (f", target layers {', '.join(map(str, d['layers']))}" if d["layers"] else "")
         + (f", drafts from the {d['head_tokens']:,} most frequent ids" if d["head_tokens"] else "")),
        ("training", f"{d['trained_tokens']:,} tokens in {d['train_seconds']:,.0f} s, loss {d['loss']}"),
        ("corpus", f"{k['source']}: {docs['train']:,} documents to train, {docs['validation']:,} to validate, {docs['test']:,} for this score; "
         f"{k['recorded_tokens']:,} tokens recorded"),
        ("prompts", f"{c['prompts']} held-out, {c['max_new_tokens']} new tokens each, EOS ignored so that all arms do the same work"
         + (f" ({share(c['past_eos'])} of plain decoding's tokens stand behind one)" if c.get("past_eos") is not None else "")),
        ("sampler", f"temperatures {', '.join(f'{x:g}' for x in c['temperatures'])}, top_k {c['top_k']}, top_p {c['top_p']:g}, seed {c['seed']}"),
        ("machine", f"{m['cpu']}, {m['cores']} cores, {m['memory_gib']} GiB, {m['system']}, flags {' '.join(m['cpu_flags']) or 'none'}"),
        ("running", f"{c['device']}, {c['dtype']}, {how_run(c)}, {c['threads']} threads, OMP_WAIT_POLICY {m['omp_wait_policy']}, "
         f"{c['other_cores']:.2f} cores taken by other processes"),
        ("versions", ", ".join(f"{n} {v}" for n, v in c["versions"].items())),
        ("source", f"commit {git['commit']}{' with changes' if git['dirty'] else ''}" if git else "not a git checkout"),
        ("command", c["command"]),
        ("date", c["date"]),
    ]  # fmt: skip


def how_run(conditions: dict[str, Any]) -> str:
    """The rounds' backend, with the reason where it is not what was asked for."""
    reason = f" (fell back: {conditions['fallback']})" if conditions.get("fallback") else ""
    laid = conditions.get("packed")  # None on a device, where there is nothing to lay out
    weights = "" if laid is None else ", weights laid out for the CPU's kernels" if laid else ", weights as loaded"
    return f"{conditions['backend']} rounds{reason}{weights}, batch {conditions['rows']}"


NOTES = (
    "token acceptance: accepted / proposed draft tokens. alpha: mean over positions of sum min(p, q) on target-written text. "
    "tau: tokens per target pass, its own included. c and v: time of a draft step and of a verify pass over a plain target step, "
    "measured apart from the arms. predicted: tau / (draft steps per round x c + v). "
    "measured: plain decode time over speculative decode time, same engine, prompts and token count, "
    "prefill apart; the interval is a paired bootstrap over prompts. Square brackets hold the {confidence} interval."
)


def to_markdown(score: Score) -> str:
    """The whole score as Markdown."""
    passed, audit = losslessness(score)
    out = [f"# Score: drafts for {cell(score['target']['name'])}", "", f"**{cell(verdict(score))}**", ""]
    if disturbed := busy(score):
        out += [f"> **Warning:** {disturbed}.", ""]
    for t in temperatures(score):
        out += [
            f"## Temperature {t:g}{' (deployment)' if t == score['winner']['temperature'] else ''}",
            "",
            *table(HEAD, arm_rows(score, t)),
            "",
        ]
        for name, a in arms_at(score, t).items():
            if a["c"] is not None and a["alpha"] is not None:
                need = (
                    "even a perfect draft would lose" if a["break_even"] is None else f"breaks even at alpha {number(a['break_even'], 3)}"
                )
                out.append(
                    f"- {ARMS[name]}: {need}; has {number(a['alpha'], 3)}; a draft that is always right would reach {times(a['ceiling'])}"
                )
        if total := with_prefill(score, t):
            out.append(f"- prefill included, {', '.join(f'{ARMS[n]} {times(x)}' for n, x in total.items())}")
        out.append("")
    out += [
        NOTES.format(confidence=confidence(score)),
        "",
        "## Compared with each other",
        "",
        *(f"- {line}" for line in comparison_lines(score)),
        "",
    ]
    out += ["## Losslessness", "", f"{'Not audited' if passed is None else 'Passed' if passed else '**FAILED**'}: {audit}.", ""]
    out += ["## Conditions", "", *table(["", ""], [[label, cell(text)] for label, text in conditions(score)]), ""]
    return "\n".join(out)


def to_terminal(score: Score, report_paths: Mapping[str, Path]) -> str:
    """The last screen of a run: at most 80 columns and 20 lines (a path that is longer stays whole)."""
    t = score["winner"]["temperature"]
    lines = textwrap.wrap(verdict(score), 80)
    lines += ["", f"{f'temperature {t:g}':<26}{'acceptance':>10}  {'speed-up':>8}  {confidence(score) + ' interval':<14}{'tokens/s':>9}"]
    for name, a in arms_at(score, t).items():
        mark = "*" if name == score["winner"]["arm"] and outcome(score) == "winner" else " "
        accepted = share(a["metrics"].get("token_acceptance"))
        speed = "1.00x" if name == "plain" else times((a["speedup"] or {}).get("estimate"))
        lines.append(f"{mark}{ARMS[name]:<25}{accepted:>10}  {speed:>8}  {span(a['speedup']):<14}{number(a['tokens_per_s'], 1):>9}")
    passed, _ = losslessness(score)
    greedy = (score.get("audit") or {}).get("greedy_fp32") or {}
    same = f": {greedy['identical']} of {greedy['prompts']} float32 greedy outputs equal plain decoding" if greedy.get("prompts") else ""
    lines += ["", f"Lossless:   {'not audited' if passed is None else f'yes{same}' if passed else 'NO, see the report'}"]
    if "html" in report_paths:
        lines.append(f"Report:     {_short(report_paths['html'])}")
    lines += ["Your text:  draftstill recipe new my.yaml    (then name target and text in it)", "            draftstill run my.yaml"]
    return "\n".join(lines)


def _short(path: Path) -> str:
    relative = os.path.relpath(path)
    return relative if not relative.startswith("..") else str(path)


def write_reports(score: Score, folder: str | Path) -> dict[str, Path]:
    """Write ``report.md`` and ``report.html`` into ``folder``; returns their paths by kind (``markdown``, ``html``)."""
    from draftstill.evaluate.html import page

    paths = {"markdown": Path(folder) / "report.md", "html": Path(folder) / "report.html"}
    for path, text in ((paths["markdown"], to_markdown(score)), (paths["html"], page(score))):
        # A token can be half a character; what cannot be encoded becomes a question mark, not a crash after hours of work.
        atomic_write(path, text.encode("utf-8", "replace"))
    return paths
