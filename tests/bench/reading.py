"""Read a large chat log in which one row in a hundred is broken: memory, speed, and that nothing is lost.

    python -m tests.bench.reading [--megabytes 200] [--folder FOLDER] [--json PATH]

The log is generated, the same bytes for the same size. The corpus stage reads it in a process of its own, whose peak memory the kernel
reports (VmHWM). Every broken row must stand in the reject file with its reason, every other row in documents.jsonl.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

GOAL_MIB = 1024
_SHARE = 100
"""One row in so many is broken."""
_LONG_ROWS, _LONG_CHARACTERS = 2, 10_000_000

out = Console(width=80, highlight=False, soft_wrap=False)


def _user(content: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "Yes."}]}


def _text(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


BROKEN: list[tuple[str, Callable[[dict[str, Any]], bytes]]] = [
    ("bad JSON", lambda row: _text(row)[:-20]),
    ("bad JSON", lambda row: b"ERROR 502 upstream timed out"),
    ("bad JSON", lambda row: b'{"score": NaN, ' + _text(row)[1:]),
    ("repeated key", lambda row: b'{"messages": [], ' + _text(row)[1:]),
    ("not an object", lambda row: b"[" + _text(row) + b"]"),
    ("not UTF-8", lambda row: _text(row).replace(b" ", b" \xe9 ", 1)),
    ("lone surrogate", lambda row: json.dumps(_user("half \ud83d of a pair " + row["messages"][0]["content"])).encode()),
    ("NUL character", lambda row: _text(_user("binary \0 data " + row["messages"][0]["content"]))),
    ("empty conversation", lambda row: _text({"messages": []})),
    ("null content", lambda row: _text(_user(None))),
    ("empty turn", lambda row: _text(_user("  "))),
    ("unknown role", lambda row: _text({"messages": [{"role": "narrator", "content": "x"}]})),
    ("no user turn", lambda row: _text({"messages": row["messages"][2:3]})),
    ("not a string", lambda row: _text(_user(20240101))),
    ("bad messages", lambda row: _text({"messages": {"role": "user"}})),
    ("missing field", lambda row: _text({"conversation": row["messages"]})),
    ("bad tools", lambda row: _text({**row, "tools": "find"})),
    ("not only text", lambda row: _text(_user([{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}]))),
]  # fmt: skip
"""Reason, and how a good row becomes a broken one of this kind."""


def rows(size: int, seed: int = 0) -> Iterator[tuple[bytes, str | None]]:
    """Lines of a log of about ``size`` bytes, each with the reason why it is to be rejected, or None."""
    rng = random.Random(seed)
    vocabulary = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 10))) for _ in range(20_000)]
    cumulated = list(itertools.accumulate(1 / (n + 10) for n in range(len(vocabulary))))

    def words(count: int) -> str:
        return " ".join(rng.choices(vocabulary, cum_weights=cumulated, k=count))

    written, number, long_rows = 0, 0, 0
    while written < size:
        number += 1
        turns = []
        for _ in range(rng.randint(1, 3)):
            turns += [
                {"role": "user", "content": f"{words(rng.randint(5, 60))} ({number})"},
                {"role": "assistant", "content": words(rng.randint(20, 120))},
            ]
        row, reason = {"messages": [{"role": "system", "content": "You answer questions about orders. Be brief."}, *turns]}, None
        if number % 7 == 0:
            row["tools"] = [{"type": "function", "function": {"name": f"find_{number % 5}", "parameters": {"type": "object"}}}]
        if number % _SHARE == 0:
            reason, broken = BROKEN[number // _SHARE % len(BROKEN)]
            line = broken(row)
        elif long_rows < _LONG_ROWS and written > size * (long_rows + 1) / (_LONG_ROWS + 2):
            long_rows += 1
            line, reason = _text(_user("long " * (_LONG_CHARACTERS // 5))), "too long"
        else:
            line = _text(row)
        written += len(line) + 1
        yield line, reason


def write_log(path: Path, size: int) -> tuple[int, dict[str, str]]:
    """Write the log; returns the number of its rows and the reasons by the id of the row."""
    broken, number = {}, 0
    with open(path, "wb") as file:
        for number, (line, reason) in enumerate(rows(size), 1):  # noqa: B007 - the last number is the count
            file.write(line + b"\n")
            if reason is not None:
                broken[f"{path.name}:{number}"] = reason
    return number, broken


_READ = """
import json, sys, time
from draftstill.corpus import prepare_corpus
from draftstill.recipe import Corpus, Recipe, Target
from draftstill.runfolder import RunFolder
start = time.monotonic()
recipe = Recipe(run_dir=sys.argv[2], target=Target(source="a/b"), corpus=Corpus(source=sys.argv[1]))
prepare_corpus(recipe, RunFolder(recipe.run_dir))
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
json.dump({"seconds": time.monotonic() - start, "cpu_seconds": time.process_time(), "peak_mib": int(peak.split()[1]) / 1024}, open(sys.argv[3], "w"))
"""


def measure(log: Path, folder: Path) -> dict[str, Any]:
    """Seconds, CPU seconds and peak memory in MiB of the corpus stage in a process of its own."""
    result = folder / "measured.json"
    subprocess.run([sys.executable, "-c", _READ, str(log), str(folder / "run"), str(result)], check=True)
    return json.loads(result.read_text())


def check(run: Path, log: Path, count: int, broken: dict[str, str]) -> dict[str, Any]:
    """What became of every row.

    Raises:
        SystemExit: a row was lost, or rejected for another reason.
    """
    with open(run / "corpus" / "rejected.jsonl", encoding="utf-8") as file:
        rejected = {r["id"]: r["reason"] for r in map(json.loads, file)}
    with open(run / "corpus" / "documents.jsonl", encoding="utf-8") as file:
        kept = {json.loads(line)["id"] for line in file}
    every = {f"{log.name}:{n}" for n in range(1, count + 1)}
    if rejected != broken or kept != every - set(broken):
        wrong = {k: (broken.get(k), rejected.get(k)) for k in broken.keys() | rejected.keys() if broken.get(k) != rejected.get(k)}
        raise SystemExit(f"rows were lost or misnamed: {list(wrong.items())[:5]}, {len(every - set(broken) - kept)} good rows missing")
    return {"rows": count, "kept": len(kept), "rejected": dict(sorted(Counter(rejected.values()).items()))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--folder", type=Path, help="where log and results go (default: a temporary folder)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="draftstill-reading-") as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / "log.jsonl"
        count, broken = write_log(log, options.megabytes * 1_000_000)
        figures = {"megabytes": log.stat().st_size / 1e6, **measure(log, folder), **check(folder / "run", log, count, broken)}
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_row("log", f"{figures['megabytes']:.0f} MB, {figures['rows']:,} rows")
    table.add_row("kept", f"{figures['kept']:,} rows, all that are whole")
    table.add_row("rejected", f"{sum(figures['rejected'].values()):,} rows of {len(figures['rejected'])} kinds, each named with its reason")
    table.add_row("peak memory", f"{figures['peak_mib']:,.0f} MiB (goal: under {GOAL_MIB:,})")
    speed = figures["megabytes"] / figures["cpu_seconds"]
    table.add_row("time", f"{figures['seconds']:.0f} s; {figures['cpu_seconds']:.0f} s of CPU ({speed:.1f} MB/s)")
    out.print(table)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    if figures["peak_mib"] > GOAL_MIB:
        raise SystemExit("the memory goal was missed")


if __name__ == "__main__":
    main()
