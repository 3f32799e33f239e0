"""``python -m tests.bench.training --run runs/demo``: tokens per second of the training loop against a bare step, and peak memory.

How it measures:

- loop: ``Job._optimize`` of a run's recipe and recording as ``draftstill train`` runs it: reading and decoding the recording, trimming the
  head, forward, backward, clipping, the non-finite check, AdamW, statistics. Measuring held-out alpha and writing checkpoints come at
  intervals that the recipe sets, and are timed apart.
- bare: the same batch, already collated in memory, through a copy of the draft: forward with the fused loss, backward, AdamW, and nothing else.
- Both in one process, in turns whose order alternates; the ratio is of the two times of the same step, shown as median [quartiles].
  Threads: ``draftstill.decode.set_threads``.
- Memory: the kernel's high-water mark of resident memory (VmHWM) over the loop's steps, reset before them, beside ``train/memory.py``'s bound.
- Packing: the share of padding among the positions that a forward computes, with one sequence to a row and packed, and what packing does to the
  time of a loop step (the same turns).
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from draftstill.cli import config_path
from draftstill.decode import set_threads
from draftstill.machine import LoadWatch, describe_machine
from draftstill.recipe_io import load_recipe
from draftstill.runfolder import git_state, versions, write_json
from draftstill.train.data import collate, pack, trim
from draftstill.train.loop import Job
from draftstill.train.memory import need
from draftstill.train.module import attention_share
from draftstill.train.setup import groups
from tests.bench.tables import out, quartiles

GOAL = 0.85
"""The loop's tokens per second over the bare step's, at least."""


def _status(key: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key))
    return int(line.split()[1]) * 1024


def job_of(recipe_path: Path, run: Path, work: Path, *overrides: str) -> Job:
    recipe = load_recipe(recipe_path, [f"run_dir={run}", *overrides])
    return Job(recipe, run / "recording", work, Accelerator(cpu=recipe.device != "cuda"))


class Bare:
    """Forward, backward and AdamW on batches that are there already."""

    def __init__(self, job: Job) -> None:
        self.job, self.module = job, copy.deepcopy(job.module)
        settings = job.settings
        self.optimizer = torch.optim.AdamW(groups(self.module, settings), lr=job.peak,
                                           betas=(settings.adam_beta1, settings.adam_beta2), fused=True)  # fmt: skip

    def prepared(self, step: int) -> list[Any]:
        job = self.job
        indices, size = job.sequences(step), job.settings.per_device_train_batch_size
        trimmed = job.settings.head_tokens > 0 and step < job.settings.full_head_from * job.steps
        cut = trim(job.ranking, job.settings.head_tokens, job.recipe.seed, step) if trimmed else None
        tokens = sum(job.recording.supervised(i) for i in indices)
        batches = [collate(job.recording, indices[at : at + size], job.target_head, job.attention) for at in range(0, len(indices), size)]
        return [batches, cut, tokens]

    def step(self, prepared: list[Any]) -> float:
        batches, cut, tokens = prepared
        started = time.perf_counter()
        for batch in batches:
            with self.job.accelerator.autocast():
                loss, _ = self.module(batch, cut)
            (loss / tokens).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - started


def timed(job: Job, packed: Job, first: int, steps: int) -> dict[str, Any]:
    """Turns of loop, bare and packed loop over the same steps."""
    bare = Bare(job)
    seconds: dict[str, list[float]] = {"loop": [], "bare": [], "packed": []}
    tokens = []

    def loop_step(which: Job) -> float:
        which.step = step
        started = time.perf_counter()
        which._optimize()
        return time.perf_counter() - started

    for number, step in enumerate(range(first, first + steps + 1)):
        prepared = bare.prepared(step)
        arms = {"loop": lambda: loop_step(job), "bare": lambda p=prepared: bare.step(p), "packed": lambda: loop_step(packed)}
        names = list(arms)
        shift = number % len(names)
        taken = {name: arms[name]() for name in names[shift:] + names[:shift]}
        if number:  # the first warms up
            tokens.append(prepared[2])
            for name, value in taken.items():
                seconds[name].append(value)
    ratio = lambda a, b: quartiles([x / y for x, y in zip(seconds[a], seconds[b], strict=True)])  # noqa: E731
    rates = {n: quartiles([t / s for t, s in zip(tokens, taken, strict=True)]) for n, taken in seconds.items()}
    return {
        "steps": steps,
        "first": first,
        "tokens_per_s": rates,
        "loop_over_bare": ratio("bare", "loop"),
        "packed_over_loop": ratio("loop", "packed"),
    }


def padding(job: Job, attention: float) -> dict[str, float]:
    """Share of a forward's positions that hold no token, over all steps."""
    size, cells, used = job.settings.per_device_train_batch_size, {"rows": 0, "packed": 0}, 0
    for step in range(job.steps):
        indices = job.sequences(step)
        for at in range(0, len(indices), size):
            lengths = [job.recording.length(i) for i in indices[at : at + size]]
            places = pack(lengths, attention)
            width = max(first + n for (_, first), n in zip(places, lengths, strict=True))
            cells["rows"] += len(lengths) * max(lengths)
            cells["packed"] += (1 + max(row for row, _ in places)) * width
            used += sum(lengths)
    return {name: 1 - used / count for name, count in cells.items()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.training", description="The training loop against a bare step; see the module."
    )
    parser.add_argument("--run", type=Path, default=Path("runs/demo"), help="a run folder with a recording")
    parser.add_argument("--recipe", type=Path, default=config_path("demo.yaml"), help="its recipe")
    parser.add_argument("--steps", type=int, default=40, help="timed steps with the trimmed head, and half as many with the whole one")
    parser.add_argument("--out", type=Path, default=Path("runs/bench/training.json"), help="where the JSON goes")
    options = parser.parse_args(argv)
    set_threads()
    watch, started = LoadWatch(), time.monotonic()
    report: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "threads": torch.get_num_threads(), "machine": describe_machine(),
                              "versions": versions(), "git": git_state(), "entries": {}}  # fmt: skip
    with tempfile.TemporaryDirectory() as work:
        job = job_of(options.recipe, options.run, Path(work))
        settings = job.settings
        widest = max(job.recording.length(i) for i in job.kept) * settings.per_device_train_batch_size
        bound = need(job.module.model, settings, job.target_head, widest, job.compute)
        Path("/proc/self/clear_refs").write_text("5")
        for job.step in range(4):
            job._optimize()
        report["memory"] = {"peak": _status("VmHWM"), "bound": bound.total, "positions": widest}
        packed = job_of(options.recipe, options.run, Path(work), "train.packing=true")
        report["padding"] = padding(job, attention_share(job.draft.model.config))
        plans = {"trimmed head": (0, options.steps)} if settings.head_tokens else {}
        plans["whole head"] = (round(settings.full_head_from * job.steps) if settings.head_tokens else 0, max(2, options.steps // 2))
        for name, (first, steps) in plans.items():
            report["entries"][name] = timed(job, packed, first, steps)
        begun = time.perf_counter()
        job._measure()
        job._save_checkpoint()
        report["apart"] = {"measure_and_checkpoint_s": time.perf_counter() - begun}
    report |= {"other_cores": watch.other_cores(), "seconds": round(time.monotonic() - started, 1)}
    write_json(options.out, report)
    show(report)
    out.print(f"All in {options.out}", soft_wrap=True)
    return 0


def show(report: dict[str, Any]) -> None:
    for name, entry in report["entries"].items():
        rates, spread = entry["tokens_per_s"], lambda q: f"{q['median']:.2f} \\[{q['q1']:.2f}, {q['q3']:.2f}]"
        out.print(f"\n[bold]{name}[/bold], {entry['steps']} steps")
        out.print("tokens/s: " + ", ".join(f"{n} {q['median']:,.0f}" for n, q in rates.items()))
        share = entry["loop_over_bare"]["median"]
        out.print(f"  {'pass' if share >= GOAL else 'MISS'}  loop / bare: {spread(entry['loop_over_bare'])} (goal >= {GOAL})")
        out.print(f"  packed / loop: {spread(entry['packed_over_loop'])}")
    memory, pad = report["memory"], report["padding"]
    out.print(
        f"\npeak memory {memory['peak'] / 2**30:.2f} GiB; bound before the start {memory['bound'] / 2**30:.2f} GiB for {memory['positions']:,} positions"
    )
    out.print(f"padding: {pad['rows']:.1%} of positions, packed {pad['packed']:.1%}")
    machine, git = report["machine"], report["git"] or {"commit": "none", "dirty": False}
    out.print(f"{machine['cpu']}, {report['threads']} threads, {report['other_cores']:.2f} cores taken by others")
    out.print(
        f"commit {git['commit'][:12]}{' with uncommitted changes' if git['dirty'] else ''}, {report['date']}, {report['seconds']:.0f} s"
    )
    if report["other_cores"] > 0.1:
        out.print("[bold]Other processes were busy: do not quote these figures.[/bold]")


if __name__ == "__main__":
    sys.exit(main())
