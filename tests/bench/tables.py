"""What ``make bench-decode`` prints: tables of 80 columns, conditions, goals."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.bench.peers import ASSISTED, DYNAMIC, FLASHSPEC, PLAIN, SPECULATIVE, STATIC

GOALS = {DYNAMIC: 1.3, STATIC: 1.3, ASSISTED: 2.0, FLASHSPEC: 1.0}
"""How much faster ours should be; the last: strictly."""
PREDICTED_GOAL = 0.95

out = Console(width=80, highlight=False, soft_wrap=False)


def quartiles(values: Sequence[float]) -> dict[str, Any]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {"median": middle, "q1": low, "q3": high, "n": len(values)}


def _spread(q: dict[str, Any]) -> str:
    return f"{q['median']:.2f} [{q['q1']:.2f}, {q['q3']:.2f}]"


def _table(entry: dict[str, Any], what: str, *columns: str, gap: int = 2) -> Table:
    out.print(f"\n[bold]{entry['pair']}; {entry['dtype']}[/bold]\n{what}", soft_wrap=True)
    table = Table(box=None, padding=(0, gap, 0, 0))
    for n, column in enumerate(columns):
        table.add_column(column, justify="right" if n else "left", no_wrap=True)
    return table


def show_single(entry: dict[str, Any]) -> None:
    """Batch 1: every arm's speed, and how much faster ours is."""
    result = entry["single"]
    turns = result["arms"][PLAIN]["tokens_per_s"]["n"]
    what = (f"1 row, {entry['prompt_tokens']} + {entry['new_tokens']} tokens, turns: {turns}; gamma {entry['gamma']}: "
            f"acceptance {result['token_acceptance']:.1%}, tau {result['tau']:.2f}")  # fmt: skip
    table = _table(entry, what, "", "\ntok/s", "end to\nend", "", "faster,\ndecode only", "faster,\nend to end", gap=1)
    for name, row in result["arms"].items():
        speeds = [f"{row[key]['median']:.1f}" for key in ("tokens_per_s", "end_to_end_tokens_per_s")]
        over = [(ours.removeprefix("ours, "), *(_spread(q[key]) for key in ("decode", "end_to_end"))) for ours, q in row["over"].items()]
        for n, cells in enumerate(over or [("", "", "")]):
            table.add_row(*((name, *speeds) if n == 0 else ("", "", "")), *cells)
    out.print(table)
    shares = ", ".join(f"{share:.1%}" for share in result["accounted"].values())
    out.print(
        "Ratios: median \\[quartiles]; of ours named in the middle over a peer, or of\nthis arm over our plain decoding. "
        f"Memory limit of plain decoding: {result['memory_limit_tokens_per_s']:.1f}\ntok/s. Share of our calls' time that traces account for: {shares}"
    )


def show_batches(entry: dict[str, Any]) -> None:
    """Several rows: speeds, speed-up, prediction."""
    what = f"gamma {entry['gamma']}; tok/s are decode-only, of all rows together"
    columns = ("tok/s\ngenerate", "ours\nplain", "ours\nspec.", "plain /\ngenerate", "spec. /\nplain", "\nc", "\nv", "pre-\ndicted")
    table = _table(entry, what, "\nrows", *columns, "meas. /\npredicted", gap=1)
    for line in entry["batches"]:
        rate = {name: f"{q['median']:.1f}" for name, q in line["tokens_per_s"].items()}
        table.add_row(
            str(line["rows"]), rate[DYNAMIC], rate[PLAIN], rate[SPECULATIVE], f"{line['plain_over_generate']['median']:.2f}",
            f"{line['speedup']['median']:.2f}", f"{line['c']:.3f}", f"{line['v']:.2f}", f"{line['predicted']['median']:.2f}",
            f"{line['measured_over_predicted']['median']:.3f}",
        )  # fmt: skip
    out.print(table)
    out.print(
        "meas. / predicted: over the rounds in which all rows are busy. Assisted\ngeneration and flashspec's fast path take one row only."
    )


def show_conditions(report: dict[str, Any]) -> None:
    machine, git, others = report["machine"], report["git"] or {"commit": "none", "dirty": False}, report["other_cores"]
    out.print(f"\n{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {' '.join(machine['cpu_flags'])}")
    if "gpu" in report:
        out.print(report["gpu"])
    out.print(f"{report['threads']} threads, OMP_WAIT_POLICY {machine['omp_wait_policy']}, {others:.2f} cores taken by others")
    out.print(", ".join(f"{name} {report['versions'][name]}" for name in ("python", "torch", "transformers", "flashspec")))
    out.print(
        f"commit {git['commit'][:12]}{' with uncommitted changes' if git['dirty'] else ''}, {report['date']}, {report['seconds']:.0f} s"
    )
    if others > 0.1:
        out.print("[bold]Other processes were busy: do not quote these figures.[/bold]")


def goals(report: dict[str, Any]) -> list[dict[str, Any]]:
    """What was hoped for beside what was measured."""
    found = []
    for entry in report["pairs"]:
        where = {"pair": entry["pair"], "dtype": entry["dtype"]}
        for name, least in GOALS.items():
            for ours, q in entry["single"]["arms"][name]["over"].items():
                value = q["decode"]["median"]
                passed = value > least if name == FLASHSPEC else value >= least
                found.append({**where, "goal": f"{ours} / {name}", "least": least, "measured": value, "passed": passed})
        share = min(entry["single"]["accounted"].values())
        found.append({**where, "goal": "time accounted for", "least": PREDICTED_GOAL, "measured": share, "passed": share >= PREDICTED_GOAL})
        for line in entry["batches"]:
            value = line["measured_over_predicted"]["median"]
            found.append({**where, "goal": f"measured / predicted, {line['rows']} rows", "least": PREDICTED_GOAL, "measured": value,
                          "passed": value >= PREDICTED_GOAL})  # fmt: skip
    return found


def show_goals(found: Sequence[dict[str, Any]]) -> None:
    above = None
    for g in found:
        if (g["pair"], g["dtype"]) != above:
            above = (g["pair"], g["dtype"])
            out.print(f"\n{g['pair']}; {g['dtype']}", soft_wrap=True)
        bound = ">" if g["goal"].endswith(FLASHSPEC) else ">="
        out.print(f"  {'pass' if g['passed'] else 'MISS'}  {g['goal']}: {g['measured']:.3f} (goal {bound} {g['least']})")
