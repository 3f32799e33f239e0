"""``make bench-distill``: the fused loss against whole logits, TRL's and Liger's chunked losses, in time and peak memory.

How it measures:

- One step: forward KL(p||q), forward and backward, with gradients of the draft's hidden states and head, from the same tensors. Matrix
  products in the dtype that training takes on this machine (``--dtype`` for the other one); everything else in float32.
  ``recorded``: p as 64 ids and a tail. ``hidden``: all of p, from the target's hidden states and head (as large as the draft's).
- Time: all arms in this process, in turns whose order shifts by one each time, after one warm-up turn. Ratios are those of two steps of
  the same turn; shown are median and quartiles. Threads: ``draftstill.decode.set_threads``, for all arms.
- Memory: each arm in a fresh process. Inputs and weights are there, a step of 8 rows has warmed the libraries up, freed memory is given
  back (malloc_trim); then the kernel's high-water mark of resident memory (VmHWM, reset through /proc/self/clear_refs) over one step, less
  what was resident before, less the bytes of the two gradients. So inputs, weights and gradients, which every arm needs, do not count.
- ``products alone``: the step's matrix products on whole matrices and nothing else. No arm can be faster, so eager's time over it bounds
  what can be gained here.
- Before anything is timed, every arm's gradients are compared with those of eager in float32: a difference over 1e-3 of their norm (3e-2
  in bfloat16) ends the run.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from draftstill.decode import set_threads
from draftstill.machine import LoadWatch, cpu_has_bf16, describe_machine
from draftstill.runfolder import git_state, versions, write_json
from tests.bench.distill_peers import EAGER, FORMS, LIGER, OURS, PRODUCTS, TRL, Inputs, Shape, arms, inputs_of, products
from tests.bench.tables import out, quartiles

SHAPES = (Shape(49_152, 576, 1024), Shape(49_152, 1024, 1024), Shape(151_936, 576, 512), Shape(151_936, 1024, 512))
QUICK = (Shape(4_096, 64, 128),)
MEMORY_GOAL, TIME_GOAL = 0.25, 1.5
"""Peak over eager's, at most; eager's time over ours, at least."""


def step(arm: Callable[[Inputs], Tensor | None], x: Inputs) -> float:
    """Seconds of one forward and backward; gradients are left in ``x``."""
    x.zero()
    started = time.perf_counter()
    loss = arm(x)
    if loss is not None:
        loss.backward()
    return time.perf_counter() - started


def check(form: str, x: Inputs) -> dict[str, float]:
    """Every arm's gradients against eager's: the largest relative difference."""
    grads: dict[str, list[Tensor]] = {}
    exact = replace(x, dtype=torch.float32)
    for name, arm, inputs in [("", arms(form)[EAGER], exact), *((n, a, x) for n, a in arms(form).items())]:
        step(arm, inputs)
        assert x.hidden_NH.grad is not None and x.head_VH.grad is not None
        grads[name] = [x.hidden_NH.grad.clone(), x.head_VH.grad.clone()]
    found = {n: max(((a - b).norm() / b.norm()).item() for a, b in zip(g, grads[""], strict=True)) for n, g in grads.items() if n}
    wrong = {n: e for n, e in found.items() if not e < (1e-3 if x.dtype == torch.float32 else 3e-2)}
    if wrong:
        raise SystemExit(f"other gradients than eager's, {form}: {wrong}")
    return found


def timed(shape: Shape, form: str, seconds: float, least: int) -> dict[str, Any]:
    """Turns of all arms until the time is up."""
    x, every = inputs_of(shape, form), {**arms(form), PRODUCTS: products}
    names, differences = list(every), check(form, x)
    taken: dict[str, list[float]] = {name: [] for name in names}
    started = time.monotonic()
    for turn in itertools.count():
        used = time.monotonic() - started
        if turn >= least and used + used / turn > seconds:
            break
        at = turn % len(names)
        for name in names[at:] + names[:at]:
            taken[name].append(step(every[name], x))
    ratios = {n: quartiles([t / o for t, o in zip(taken[n], taken[OURS], strict=True)]) for n in names if n != OURS}
    return {"seconds": {n: quartiles(t) for n, t in taken.items()}, "over_ours": ratios, "gradient_differences": differences}


def _status(key: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key))
    return int(line.split()[1]) * 1024


def peak_of(shape: Shape, form: str, name: str) -> int:
    """Bytes, in this process: see the module's text."""
    set_threads()
    arm, x = arms(form)[name], inputs_of(shape, form)
    few = inputs_of(Shape(shape.V // 64 if shape.V >= 64 * 128 else shape.V, shape.H, 8, shape.dtype), form)
    step(arm, few)
    del few
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    step(arm, x)
    return _status("VmHWM") - before - 4 * shape.H * (shape.V + shape.N)


def peak_in_child(shape: Shape, form: str, name: str) -> int | None:
    """``peak_of`` in a fresh process; None where the kernel's high-water mark cannot be reset."""
    command = [sys.executable, "-m", "tests.bench.distill", "--peak", json.dumps([shape.V, shape.H, shape.N, shape.dtype, form, name])]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "MALLOC_ARENA_MAX": "1"})
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        return None
    return int(done.stdout.split()[-1])


def show(entries: Sequence[dict[str, Any]]) -> None:
    for form in FORMS:
        out.print(f"\n[bold]Forward KL, {form}[/bold]")
        table = Table(box=None, padding=(0, 2, 0, 0))
        for n, column in enumerate(("V", "H", "N", "", "s", "/ ours", "peak MiB", "of eager's")):
            table.add_column(column, justify="left" if n == 3 else "right", no_wrap=True)
        for e in (e for e in entries if e["form"] == form):
            for n, (name, q) in enumerate(e["seconds"].items()):
                ratio = e["over_ours"].get(name)
                spread = f"{ratio['median']:.2f} \\[{ratio['q1']:.2f}, {ratio['q3']:.2f}]" if ratio else ""
                peak, whole = e["peak_bytes"].get(name), e["peak_bytes"][EAGER]
                memory = ["?", "?"] if peak is None or whole is None else [f"{peak / 2**20:,.0f}", f"{peak / whole:.2f}"]
                where = [f"{e['shape'][k]:,}" if n == 0 else "" for k in ("V", "H", "N")]
                table.add_row(*where, name, f"{q['median']:.3f}", spread, *memory)
        out.print(table)
    out.print("/ ours: their time over ours in the same turn, median \\[quartiles].\nPeak: beyond inputs, weights and gradients.")


def goals(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for e in entries:
        where = f"V {e['shape']['V']:,}, H {e['shape']['H']:,}, {e['form']}, {e['shape']['dtype']}"
        speed, peaks = e["over_ours"][EAGER]["median"], e["peak_bytes"]
        most = e["seconds"][EAGER]["median"] / e["seconds"][PRODUCTS]["median"]
        found.append(
            {
                "goal": f"eager / ours, time; {where}",
                "bound": f">= {TIME_GOAL}, products alone {most:.2f}",
                "measured": speed,
                "passed": speed >= TIME_GOAL,
            }
        )
        if peaks[OURS] is not None and peaks[EAGER] is not None:
            share = peaks[OURS] / peaks[EAGER]
            found.append(
                {"goal": f"ours / eager, peak; {where}", "bound": f"<= {MEMORY_GOAL}", "measured": share, "passed": share <= MEMORY_GOAL}
            )
    return found


def conditions(report: dict[str, Any]) -> None:
    machine, git, others = report["machine"], report["git"] or {"commit": "none", "dirty": False}, report["other_cores"]
    out.print(f"\n{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {' '.join(machine['cpu_flags'])}")
    out.print(f"{report['threads']} threads, OMP_WAIT_POLICY {machine['omp_wait_policy']}, {others:.2f} cores taken by others")
    out.print(", ".join(f"{name} {report['versions'][name]}" for name in ("python", "torch", "trl", "liger-kernel")))
    dirty = " with uncommitted changes" if git["dirty"] else ""
    out.print(f"commit {git['commit'][:12]}{dirty}, {report['date']}, {report['seconds']:.0f} s")
    if others > 0.1:
        out.print("[bold]Other processes were busy: do not quote these figures.[/bold]")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.distill", description="The fused loss against its peers; see the module.")
    parser.add_argument("--quick", action="store_true", help="a small shape: checks that the benchmark runs")
    parser.add_argument("--seconds", type=float, default=240, help="time for all turns together (each table gets at least three)")
    parser.add_argument("--out", type=Path, default=Path("runs/bench/distill.json"), help="where the JSON goes")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16" if cpu_has_bf16() else "float32",
                        help="of the matrix products; default: as training on this machine")  # fmt: skip
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.peak:
        V, H, N, dtype, form, name = json.loads(options.peak)
        print(peak_of(Shape(V, H, N, dtype), form, name))
        return 0
    missing = [module for module in ("trl", "liger_kernel") if importlib.util.find_spec(module) is None]
    if missing and not options.quick:
        print(f"{' and '.join(missing)} not there: run `make bench-distill`, which fetches them into .venv-bench", file=sys.stderr)
        return 1
    set_threads()
    peers = {
        n: importlib.metadata.version(n) if m not in missing else "not there" for n, m in (("trl", "trl"), ("liger-kernel", "liger_kernel"))
    }
    report: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"), "quick": options.quick, "threads": torch.get_num_threads(), "machine": describe_machine(),
        "versions": {**versions(), **peers}, "git": git_state(), "peers": [TRL, LIGER], "entries": [],
    }  # fmt: skip
    shapes = [replace(s, dtype=options.dtype) for s in (QUICK if options.quick else SHAPES)]
    watch, started = LoadWatch(), time.monotonic()
    size = {(s, f): s.V * s.H * s.N * len(arms(f)) for s in shapes for f in FORMS}
    for (shape, form), part in size.items():
        seconds = 2.0 if options.quick else options.seconds * part / sum(size.values())
        report["entries"].append({"shape": vars(shape), "form": form, **timed(shape, form, seconds, 3)})
    report["other_cores"] = watch.other_cores()  # of the timings: children would count as others
    for entry in report["entries"]:
        entry["peak_bytes"] = {name: peak_in_child(Shape(**entry["shape"]), entry["form"], name) for name in arms(entry["form"])}
    report |= {"seconds": round(time.monotonic() - started, 1), "goals": goals(report["entries"])}
    write_json(options.out, report)
    show(report["entries"])
    conditions(report)
    if options.quick:
        out.print("The goals are for the full shapes.")
    for g in report["goals"] if not options.quick else ():
        out.print(f"  {'pass' if g['passed'] else 'MISS'}  {g['goal']}: {g['measured']:.2f} (goal {g['bound']})", soft_wrap=True)
    out.print(f"All in {options.out}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
