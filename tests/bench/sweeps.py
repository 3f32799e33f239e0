"""What benchmarks that train several drafts and score them have in common: their stages one by one, and the table."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from draftstill.distill import record
from draftstill.evaluate.scoring import score
from draftstill.progress import duration, say
from draftstill.recipe import OWN, Recipe
from draftstill.recipe_io import load_recipe
from draftstill.runfolder import RunFolder, atomic_write, read_json
from draftstill.stages import candidate_recipes, draft_stage, failure, stages
from draftstill.train import adapt, train_all

STOPS = ("recording", "training")
"""Stages behind which a run can be broken off; the same command goes on."""
DEPLOYED = 0.7
"""The temperature that recordings and drafts are made for."""
RESPONSES_LAST = [{"share": 0.7}, {"share": 0.3, "kinds": ["response"]}]
"""Phases: everything, then the target's own text, which is what a draft has to guess."""


def borrow(lender: Path, borrower: Path, *names: str) -> None:
    """Copy finished stages between run folders, where they are not there yet; the stages themselves refuse what other inputs made."""
    for name in names:
        there, here = lender / name, borrower / name
        if (there / "provenance.json").exists() and not here.exists():
            copy = here.with_name(f".{name}.copy")
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(there, copy)
            copy.rename(here)


def written(path: Path, value: dict[str, Any]) -> Recipe:
    """The recipe ``value``, written to ``path`` and read from there."""
    atomic_write(path, yaml.safe_dump(value, sort_keys=False))
    return load_recipe(path)


def made(recipe: Recipe, stop: str | None = None) -> dict[str, Any] | None:
    """All stages of a recipe up to the score; its score and what else a report holds. None: stopped behind the stage ``stop``."""
    run, started = RunFolder(recipe.run_dir), time.monotonic()
    at = lambda what: say(f"== {what} (at {duration(time.monotonic() - started)} of this call)")  # noqa: E731
    with run.lock():
        if recipe.adapt is not None:
            adapt(recipe, run)
            at("tuned")
        record(recipe, run)
        at("recorded")
        if stop == STOPS[0]:
            return None
        train_all(recipe, run)
        at("trained")
        if stop == STOPS[1]:
            return None
        result = score(recipe, run)
        at("scored")
    found = stages(recipe, run)
    drafts = {n: found[draft_stage(n)] for n in candidate_recipes(recipe)}
    facts = {n: stage.facts() for n, stage in drafts.items() if stage.done}
    # The score's own conditions: a finished folder that is read again was not measured by this call.
    conditions = result["conditions"]
    wall = {name: read_json(stage.folder / "provenance.json")["seconds"] for name, stage in found.items() if stage.done}
    return {
        "score": result, "train_seconds": {n: f["train_seconds"] for n, f in facts.items()}, "tokens": {n: f["tokens"] for n, f in facts.items()},
        "failed": {n: failure(stage) for n, stage in drafts.items() if not stage.done}, "curves": {n: f["curve"] for n, f in facts.items()},
        "wall_s": wall, **{name: conditions[name] for name in ("other_cores", "machine", "versions", "git", "date")},
    }  # fmt: skip


def table(report: dict[str, Any], temperature: float, *, by_prediction: bool = False) -> str:
    """Markdown: each arm at the gamma that measured best, or ``by_prediction`` is best (where few prompts are timed); the fastest by prediction first."""
    result = report["score"]
    lines = [
        "| arm | trained | tokens seen | gamma | alpha | tau | c | v | predicted | measured |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    rows = _rows(result["sweep" if by_prediction else "arms"], temperature)
    if by_prediction:
        rows = [max((r for r in rows if r["arm"] == arm), key=_predicted) for arm in dict.fromkeys(r["arm"] for r in rows)]
    for r in sorted(rows, key=_predicted, reverse=True):
        own = r["candidate"]
        trained, tokens = "-", "-"
        if own in report["tokens"]:
            trained, tokens = f"{report['train_seconds'][own] / 60:.0f} min", f"{report['tokens'][own]:,}"
        alpha = "-" if r["alpha"] is None else f"{r['alpha']:.3f}"
        lines.append(f"| {r['arm']} | {trained} | {tokens} | {r['swept']} | {alpha} | {r['counts']['metrics']['tau']:.2f} | {r['c']:.3f} | {r['v']:.3f} | "
                     f"{_times(r['counts']['predicted'])} | {_times(r['speedup'])} |")  # fmt: skip
    lines += [f"\n{name} is not there: {why}" for name, why in report["failed"].items()]
    return "\n".join(lines) + "\n"


def _predicted(row: dict[str, Any]) -> float:
    return float(row["counts"]["predicted"]["estimate"])


def _rows(rows: Sequence[dict[str, Any]], temperature: float) -> list[dict[str, Any]]:
    """Those of every arm but plain decoding, on the text that the drafts are made for."""
    return [r for r in rows if r["temperature"] == temperature and r["domain"] == OWN and r["arm"] != "plain"]


def fastest(report: dict[str, Any], temperature: float, *kinds: str) -> dict[str, Any] | None:
    """The row of the arm of some kinds that measured fastest at its best gamma."""
    rows = [r for r in _rows(report["score"]["arms"], temperature) if r["kind"] in kinds and r["speedup"]]
    return max(rows, key=lambda r: r["speedup"]["estimate"], default=None)


def over(report: dict[str, Any], temperature: float, kinds: Sequence[str], rivals: Sequence[str]) -> dict[str, Any] | None:
    """The speed of the fastest arm of some kinds over that of the fastest of others, paired by prompt, as the score measured it."""
    ours, theirs = fastest(report, temperature, *kinds), fastest(report, temperature, *rivals)
    if ours is None or theirs is None:
        return None
    for found in report["score"]["comparisons"]:
        if found["temperature"] == temperature and (found["a"], found["b"]) == (ours["arm"], theirs["arm"]):
            return dict(found["ratio"])
        if found["temperature"] == temperature and (found["a"], found["b"]) == (theirs["arm"], ours["arm"]):
            r = found["ratio"]
            return {**r, "estimate": 1 / r["estimate"], "low": 1 / r["high"], "high": 1 / r["low"]}
    return None


def judged(goals: dict[str, tuple[dict[str, Any] | None, float]], end: str = "estimate") -> list[str]:
    """A line for each goal: what was measured with its interval, and what the figure (or its lower ``end``) should reach."""
    word = {"estimate": "pass", "low": "pass, by the lower end"}[end]
    return [
        f"{word if value is not None and value[end] >= goal else 'MISS'}  {what}: {_times(value)} (goal {goal}x)"
        for what, (value, goal) in goals.items()
    ]


def _times(interval: dict[str, Any] | None) -> str:
    return "-" if interval is None else f"{interval['estimate']:.2f}x [{interval['low']:.2f}, {interval['high']:.2f}]"
