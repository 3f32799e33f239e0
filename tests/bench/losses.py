"""``make bench-losses``: what each loss makes of the demo's draft, with the same data, the same steps and several training orders.

How it measures:

- The recording is the demo's (``--run``, made or gone on with where it is not whole). Each draft starts from the same pruned layers; a seed decides the
  order of the training text and the sampled rest of a trimmed head, nothing else, so losses are paired by seed.
- ``ce`` asks for the whole head; the others train as the recipe says, on a small head first. What is compared is the draft after the last step.
- alpha and top-1 agreement: exact, on held-out text that the target wrote; at temperature 1 of the whole head, at the deployment's of the
  ids that the recipe drafts from. tau: tokens per round
  of the decoder at gamma 4 and the deployment's temperature over the held-out prompts, from the head that the recipe drafts with.
- Each (loss, seed) is a file under ``--out``; given again, the command goes on where it stopped.
- Shown: mean over seeds, and the mean difference to ``lk`` with its range over seeds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.table import Table

from draftstill.cli import config_path
from draftstill.decode import Decoder, Loaded, ModelDrafter, Request, Sampling, load_target, make_network, set_threads
from draftstill.decode.trace import metrics
from draftstill.distill import record, seed_of
from draftstill.distill.responses import read_responses
from draftstill.machine import describe_machine
from draftstill.recipe import Recipe
from draftstill.recipe_io import load_recipe
from draftstill.runfolder import RunFolder, git_state, read_json, versions, write_json
from draftstill.stages import resolved_dtype, stages, trains_in_bf16
from draftstill.train import Job
from tests.bench.pairs import cast
from tests.bench.tables import out

LOSSES = ("lk", "forward_kl", "reverse_kl", "jsd", "tvd", "nla", "ce")
"""The first is what the others are compared with."""
FIGURES = ("alpha", "alpha_deploy", "top1", "tau")
GAMMA = 4


def recipe_of(base: Recipe, loss: str, seed: int, steps: int) -> Recipe:
    """The demo's recipe with another loss, order and number of steps."""
    changes: dict[str, Any] = {"loss": base.train.loss.model_copy(update={"name": loss, "mix": {}}), "max_steps": steps,
                               "eval_steps": steps, "save_steps": steps}  # fmt: skip
    if loss == "ce":
        changes["head_tokens"] = 0
    return base.model_copy(update={"seed": seed, "train": base.train.model_copy(update=changes)})


def trained(recipe: Recipe, recorded: Path, work: Path) -> Job:
    """A draft after its last step."""
    work.mkdir(parents=True, exist_ok=True)
    job = Job(recipe, recorded, work, Accelerator(mixed_precision="bf16" if trains_in_bf16(recipe) else "no", cpu=True))
    job.run()
    return job


def tau_of(recipe: Recipe, job: Job, target: Loaded, rows: list[dict[str, Any]], tokens: int) -> float:
    """Tokens per round at the deployment's sampler."""
    sampler = recipe.respond.sampler
    kept = job.ranking[: recipe.draft.head_tokens].sort().values if recipe.draft.head_tokens else None
    network = make_network(cast(job.module.model, resolved_dtype(recipe), "cpu"), vocab=target.vocab, head_ids=kept)
    decoder = Decoder(target.network, ModelDrafter(network, GAMMA), sampling=Sampling(sampler.temperature, sampler.top_k, sampler.top_p),
                      eos=target.eos, rows=16)  # fmt: skip
    return metrics(decoder.run([Request(r["prompt"], tokens, seed=seed_of("losses", r["prompt_id"])) for r in rows]))["tau"]


def measure(
    base: Recipe, loss: str, seed: int, steps: int, target: Loaded, found: dict[str, Path], tokens: int, work: Path
) -> dict[str, Any]:
    recipe = recipe_of(base, loss, seed, steps)
    started = time.monotonic()
    job = trained(recipe, found["recording"], work)
    seconds = time.monotonic() - started
    last = job.curve[-1]
    rows = list(read_responses(found["responses"], "heldout"))
    return {"loss": loss, "seed": seed, "steps": steps, "tokens": job.tokens, "seconds": seconds,
            "alpha": last["alpha"], "alpha_deploy": last["alpha_deploy"], "top1": last["top1"],
            "tau": tau_of(recipe, job, target, rows, tokens), "start": job.curve[0]}  # fmt: skip


def show(cells: list[dict[str, Any]], temperature: float) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for n, column in enumerate(
        ("loss", "alpha, T = 1", f"T = {temperature:g}", "top-1", "tau", f"T = {temperature:g} less lk's", "tau less lk's")
    ):
        table.add_column(column, justify="right" if n else "left")
    by = {(c["loss"], c["seed"]): c for c in cells}
    for loss in LOSSES:
        seeds = [s for n, s in by if n == loss and (LOSSES[0], s) in by]
        if not seeds:
            continue
        means = [f"{statistics.fmean(by[loss, s][f] for s in seeds):.3f}" for f in FIGURES]
        apart = []
        for f in ("alpha_deploy", "tau"):
            d = [by[loss, s][f] - by[LOSSES[0], s][f] for s in seeds]
            apart.append("-" if loss == LOSSES[0] else f"{statistics.fmean(d):+.3f} [{min(d):+.3f}, {max(d):+.3f}]")
        table.add_row(loss, *means, *apart)
    out.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=Path("runs/demo"), help="run folder with the demo's recording")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-losses"), help="folder for the cells and losses.json")
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps of each draft")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=list(LOSSES))
    parser.add_argument("--quick", action="store_true", help="2 steps, 1 seed, 8 tokens: does it run?")
    asked = parser.parse_args()
    steps, seeds, tokens = (2, 1, 8) if asked.quick else (asked.steps, asked.seeds, 96)
    set_threads()
    base = load_recipe(config_path("demo.yaml"), [f"run_dir={asked.run}"])
    run = RunFolder(asked.run)
    record(base, run)
    found = {name: stage.folder for name, stage in stages(base, run).items()}
    target = load_target(base)
    cells = []
    for seed in range(seeds):
        for loss in asked.losses:
            path = asked.out / f"{loss}-{seed}-{steps}.json"
            if not path.exists():
                work = asked.out / f"{loss}-{seed}-{steps}.partial"
                cell = measure(base, loss, seed, steps, target, found, tokens, work)
                path.parent.mkdir(parents=True, exist_ok=True)
                write_json(path, cell)
            cells.append(read_json(path))
            print({k: round(v, 4) if isinstance(v, float) else v for k, v in cells[-1].items() if k != "start"}, flush=True)
    conditions = {"machine": describe_machine(), "threads": torch.get_num_threads(), "versions": versions(), "git": git_state(),
                  "command": " ".join(["python -m tests.bench.losses", *sys.argv[1:]]), "date": time.strftime("%Y-%m-%d", time.gmtime())}  # fmt: skip
    write_json(asked.out / "losses.json", {"cells": cells, "conditions": conditions})
    show(cells, base.respond.sampler.temperature)
    out.print(
        f"Means over {seeds} orders of the same text, {steps} steps; in brackets the range over orders. All in {asked.out / 'losses.json'}"
    )


if __name__ == "__main__":
    main()
