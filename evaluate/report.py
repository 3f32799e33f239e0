"""The score as Markdown and as the last screen of a run; the page is made in ``html``. Reads ``score.json`` and nothing else."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path

from draftstill.evaluate.circumstances import audit_line, conditions
from draftstill.evaluate.next_steps import next_steps
from draftstill.evaluate.reading import Score, acceptance, arms_at, as_read, ranked, speed, swept, temperatures
from draftstill.evaluate.sentences import comparison_lines, ranking_lines, verdict
from draftstill.evaluate.wording import (
    ARMS,
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
    warnings,
)
from draftstill.runfolder import atomic_write

HEAD = [
    "arm",
    "gamma",
    "token acceptance (timed)",
    "alpha (all texts)",
    "tau (timed)",
    "c",
    "v",
    "predicted speed-up",
    "measured speed-up",
    "tok/s",
]
NOTES = (
    "token acceptance: accepted / proposed draft tokens. alpha: mean over positions of sum min(p, q) on target-written text. "
    "tau: tokens per target pass, its own included. timed: of the timed texts; all texts: of every prompt's whole text, where counted. "
    "c and v: time of a draft step and of a verify pass over a plain target step, measured apart from the arms. "
    "predicted: tau / (draft steps per round x c + v). "
    "measured: plain decode time over speculative decode time, same engine, prompts and token count, "
    "prefill apart; the interval is a paired bootstrap over prompts. Square brackets hold the {confidence} interval."
)


def cell(text: object) -> str:
    """Text for a Markdown table or line: what could open HTML, a link, a new cell or a new line is made inert."""
    out = " ".join(str(text).split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return "".join("\\" + c if c in "\\|`*_[]" else c for c in out)


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *("| " + " | ".join(r) + " |" for r in rows)]


def arm_rows(score: Score, temperature: float) -> list[list[str]]:
    """The cells of the table of all figures; see ``HEAD``."""
    return [
        [ARMS[name], str(a.get("swept", a["gamma"])), bounded(a["acceptance"], a["metrics"].get("token_acceptance"), share), number(a["alpha"], 3),
         number(a["metrics"].get("tau")), number(a["c"], 3), number(a["v"], 3), times(a["predicted"]), measured_or_predicted(a),
         number(a["tokens_per_s"], 1)]
        for name, a in arms_at(score, temperature).items()
    ]  # fmt: skip


def with_prefill(score: Score, temperature: float) -> dict[str, float]:
    """Speed-up of whole requests: long prompts dilute what decoding gains. Point estimates per emitted token."""
    arms = {n: a["metrics"] for n, a in arms_at(score, temperature).items()}
    cost = {n: (m["decode_s"] + m["prefill_s"]) / m["emitted"] for n, m in arms.items() if m.get("emitted") and m.get("prefill_s")}
    return {n: cost["plain"] / s for n, s in cost.items() if n != "plain" and s} if "plain" in cost else {}


def _folded(title: str, lines: list[str]) -> list[str]:
    return ["<details>", f"<summary>{title}</summary>", "", *lines, "", "</details>", ""]


def to_markdown(score: Score) -> str:
    """For a pull request: the verdict, the candidates, the best gamma, losslessness, what to do next; the rest is folded away."""
    score = as_read(score)
    t, led = score["winner"]["temperature"], leader(score)
    arms = arms_at(score, t)
    out = [f"## Score: drafts for {cell(score['target']['name'])}", "", f"**{cell(verdict(score))}**", ""]
    for disturbed in warnings(score):
        out += [f"> **Warning:** {cell(disturbed)}.", ""]
    rows = []
    for name in ranked(score, t):
        a = arms[name]
        mark = "**" if led and led[0] == name and outcome(score) in ("winner", "pays") else ""
        rows.append([f"{mark}{cell(ARMS[name])}{mark}", str(a["swept"] if name != "plain" else "-"), bounded(*acceptance(a), share),
                     measured_or_predicted(a), number(a["tokens_per_s"], 1)])  # fmt: skip
    out += [*table([f"temperature {t:g}", "gamma", "token acceptance", "speed-up", "tokens/s"], rows), ""]
    out += [f"- {cell(line)}." for line in ranking_lines(score)]
    tried = swept(score, led[0], t) if led else []
    if led and len(tried) > 1:
        told = ", ".join(f"{r['swept']}: {bounded(speed(r), None, times)}" for r in tried)
        out.append(
            f"- Best gamma of {cell(ARMS[led[0]])}: {score['winner']['gamma'] or (score['winner'].get('fastest') or {}).get('gamma')} ({told})."
        )
    out += [f"- Losslessness: {cell(audit_line(score)).replace(cell('**FAILED**'), '**FAILED**')}.", "", "What to do next:", ""]
    for step in next_steps(score):
        keys = ", ".join(f"`{re.sub(r'[^A-Za-z0-9_.]', '', key)}`" for key in step.keys)
        out.append(f"- {cell(step.what)}: {cell(step.because)}" + (f" ({keys})" if keys else ""))
    out.append("")
    for degree in temperatures(score):
        out += _folded(f"All figures at temperature {degree:g}", [*table(HEAD, [[cell(x) for x in r] for r in arm_rows(score, degree)]), "",
                       *_limits(score, degree)])  # fmt: skip
    if score["comparisons"]:
        out += _folded("Arms compared with each other", [f"- {cell(line)}" for line in comparison_lines(score)])
    out += _folded("Conditions and words", [*table(["", ""], [[cell(label), cell(text)] for label, text in conditions(score)]), "",
                                            NOTES.format(confidence=confidence(score))])  # fmt: skip
    return "\n".join(out)


def _limits(score: Score, temperature: float) -> list[str]:
    out = []
    for name, a in arms_at(score, temperature).items():
        if a["ceiling"] is not None and a["alpha"] is not None:
            need = "even a perfect draft would lose" if a["break_even"] is None else f"breaks even at alpha {number(a['break_even'], 3)}"
            out.append(
                f"- {cell(ARMS[name])}: {need}; has {number(a['alpha'], 3)}; a draft that is always right would reach {times(a['ceiling'])}"
            )
    if total := with_prefill(score, temperature):
        out.append(f"- prefill included, {', '.join(f'{cell(ARMS[n])} {times(x)}' for n, x in total.items())}")
    return out


_WIDTH, _MOST_ROWS = 80, 10


def to_terminal(score: Score, report_paths: Mapping[str, Path]) -> str:
    """The last screen of a run: at most 80 columns and 24 lines (a path that is longer stays whole)."""
    score = as_read(score)
    t = score["winner"]["temperature"]
    arms, order = arms_at(score, t), ranked(score, t)
    shown = [*order[:_MOST_ROWS], *(n for n in order[_MOST_ROWS:] if n == "plain")]
    lines = textwrap.wrap(verdict(score), _WIDTH)
    head = f"temperature {t:g}"
    lines += ["", f"{head:<25}{'gamma':>5}{'acceptance':>12}{'speed-up':>10}  {confidence(score) + ' interval':<14}{'tokens/s':>10}"]
    for name in shown:
        a = arms[name]
        mark = "*" if name == score["winner"]["arm"] and outcome(score) == "winner" else " "
        estimate = "1.00x" if name == "plain" else times((speed(a) or {}).get("estimate"))
        lines.append(f"{mark}{_clipped(ARMS[name], 24):<24}{'-' if name == 'plain' else a['swept']:>5}{share(acceptance(a)[1]):>12}{estimate:>10}  "
                     f"{span(speed(a)):<14}{number(a['tokens_per_s'], 1):>10}")  # fmt: skip
    if len(shown) < len(order):
        lines.append(f" {len(order) - len(shown)} more in the report")
    passed, _ = losslessness(score)
    greedy = (score.get("audit") or {}).get("greedy_fp32") or {}
    same = f": {greedy['identical']} of {greedy['prompts']} float32 greedy outputs equal plain decoding" if greedy.get("prompts") else ""
    lines += ["", f"Lossless:   {'not audited' if passed is None else f'yes{same}' if passed else 'NO, see the report'}"]
    step = next_steps(score)[0]
    lines += textwrap.wrap(f"Next:       {step.what}: {step.because}", _WIDTH, subsequent_indent=" " * 12, max_lines=3, placeholder=" ...")
    if "html" in report_paths:
        lines.append(f"Report:     {_short(report_paths['html'])}")
    lines += ["Your text:  draftstill recipe new my.yaml    (then name target and text in it)", "            draftstill run my.yaml"]
    return "\n".join(lines)


def _clipped(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


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
