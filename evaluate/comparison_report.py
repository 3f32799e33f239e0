"""A comparison of two scores in words: for the terminal and for a pull request."""

from __future__ import annotations

from pathlib import Path

from draftstill.evaluate.comparing import Change, Comparison, compare, shown, subject
from draftstill.evaluate.reading import Score, as_read, load_score
from draftstill.evaluate.report import cell, table
from draftstill.evaluate.wording import bounded, outcome, times
from draftstill.runfolder import atomic_write


def _points(x: float) -> str:
    return f"{100 * x:+.1f}"


def _moved(c: Change) -> str:
    return bounded(c.change, None, _points) + " points" if c.figure == "acceptance" else bounded(c.change, None, times)


def summary(found: Comparison) -> str:
    """The comparison in one sentence."""
    count = lambda reading: sum(c.reading == reading for c in found.changes)  # noqa: E731
    if found.regressed:
        return f"{len(found.regressed)} of {len(found.changes) + found.broken} compared figures regressed beyond their intervals"
    if not found.changes:
        return "nothing could be compared"
    better, alike = count("better"), count("no clear difference")
    return (
        f"nothing regressed: of {len(found.changes)} figures {better} got better beyond their intervals, {alike} show no clear difference"
    )


def as_markdown(found: Comparison, new: Score, old: Score) -> str:
    """For a pull request: what regressed first, then everything."""
    out = [
        f"## Compared with the score of {cell(old['conditions']['date'])}",
        "",
        f"**{cell(summary(found)[0].upper() + summary(found)[1:])}.**",
        "",
    ]
    out += [f"- **{cell(line)}**" for line in found.regressed]
    out += [f"- verdict: {cell(outcome(old))} before, {cell(outcome(new))} now"]
    if found.barred:
        what = "Nothing is compared" if any(d.bars == "everything" for d in found.differences) else "Speed is not compared, only acceptance"
        out.append(f"- {what}: the conditions differ in {cell(', '.join(found.barred))}")
    out += [f"- not scored any more: {cell(name)}" for name in found.missing]
    out.append("")
    loud = lambda reading: reading if reading == "no clear difference" else f"**{reading}**"  # noqa: E731
    rows = [
        [c.figure, cell(subject(c)), shown(c, c.old), shown(c, c.new), _moved(c), loud(c.reading)] for c in _ordered(found)
    ]  # fmt: skip
    if rows:
        out += [*table(["figure", "of", "before", "now", "change", ""], rows), ""]
        out += ["Square brackets: intervals; that of the change holds for all rows at once.", ""]
    if found.differences:
        out += ["<details>", "<summary>Conditions that differ</summary>", "",
                *table(["", "before", "now", "not compared for it"], [[cell(d.what), cell(d.old), cell(d.new), d.bars] for d in found.differences]),
                "", "</details>", ""]  # fmt: skip
    return "\n".join(out)


def _ordered(found: Comparison) -> list[Change]:
    return sorted(found.changes, key=lambda c: ("worse", "better", "no clear difference").index(c.reading))


_MOST_LINES = 12


def as_lines(found: Comparison) -> str:
    """At most 80 columns wide where names allow it."""
    lines = [f"Compared:   {summary(found)}"]
    for d in [d for d in found.differences if d.bars != "nothing"][:_MOST_LINES]:
        lines.append(f"  differs   {d.what}: {d.old} -> {d.new}")
    if found.barred:
        lines.append(
            "  so        nothing is compared"
            if any(d.bars == "everything" for d in found.differences)
            else "  so        speed is not compared"
        )
    told = [c for c in _ordered(found) if c.reading != "no clear difference"]
    for c in told[:_MOST_LINES]:
        lines += [f"  {c.reading:<9} {c.figure} of {subject(c)}", f"            {shown(c, c.old)} -> {shown(c, c.new)}"]
    if len(told) > _MOST_LINES:
        lines.append(f"            and {len(told) - _MOST_LINES} more")
    return "\n".join(lines)


def compare_scores(new: Score, old: Score, folder: Path) -> list[str]:
    """Compare, print, and write ``compare.md`` into ``folder``; returns the regressions, a sentence each.

    Raises:
        DraftstillError: the scores are of different targets.
    """
    found = compare(new, old)
    path = folder / "compare.md"
    atomic_write(path, as_markdown(found, as_read(new), as_read(old)).encode("utf-8", "replace"))
    print("\n" + as_lines(found))
    print(f"            {path}")
    return found.regressed


def old_score(path: Path) -> Score:
    """The score to compare with, read before anything starts: it may be the one that is about to be replaced.

    Raises:
        DraftstillError: see ``load_score``.
    """
    return load_score(path, "--compare")
