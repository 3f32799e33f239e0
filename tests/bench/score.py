"""``make bench-score``: does the score keep its promises on the demo's pair, and its budget?

It takes the corpus, responses, recording and draft of a finished demo run (``--run``, untouched: they are copied), trains two more
candidates for a few steps if ``--candidates 3``, and

1. scores them: temperatures 0 and .7, gammas 1, 2, 4 and 8, 40 prompts of 128 tokens; the wall time is to stay under 15 minutes on
   2 cores, counts on all prompts, timings on ``--timing-prompts`` of them with ``--timing-tokens`` tokens;
2. prints, for each gamma of the tuned draft, the speed-up predicted from counts, the measured one, the gap between them, and the error
   of the formula that takes positions as independent;
3. decodes the timed prompts anew with the best gamma, beside plain decoding in turns, and says whether the speed-up lies in the
   interval that the score stated.

Exit code 1 if a promise is broken. Run it on a quiet machine; what other processes took is printed.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftstill.cli import config_path
from draftstill.decode import Request, Sampling
from draftstill.distill import seed_of
from draftstill.evaluate.arms import PLAIN, open_bench
from draftstill.evaluate.domains import domains
from draftstill.evaluate.report import to_terminal
from draftstill.evaluate.scoring import score
from draftstill.machine import LoadWatch
from draftstill.recipe import Recipe
from draftstill.recipe_io import load_recipe
from draftstill.runfolder import RunFolder, read_json, write_json
from draftstill.stages import candidate_recipes, draft_stage, stages

_BUDGET_S = 15 * 60
_GAP = 0.05
_REUSED = ("corpus", "responses", "recording")


def recipe_of(options: argparse.Namespace) -> Recipe:
    overrides = [f"run_dir={options.out}", "evaluate.gammas=[1,2,4,8]", "evaluate.prompts=40", "evaluate.max_new_tokens=128",
                 f"evaluate.timing_prompts={options.timing_prompts}", f"evaluate.timing_tokens={options.timing_tokens}",
                 "evaluate.candidates=[untuned,tuned,lookup,bigram]", *options.override]  # fmt: skip
    if options.candidates == 3:
        # Two that differ in their start and in how long they train; short, because how good they are is not asked here.
        few = "train: {max_steps: 20, eval_steps: 20}"
        overrides.append(
            f"train.candidates={{two-layers: {{}}, one-layer: {{draft: {{layers: [0]}}, {few}}}, three-layers: {{draft: {{layers: [0, 1, 2]}}, {few}}}}}"
        )
    return load_recipe(config_path("demo.yaml"), overrides)


def borrow(recipe: Recipe, source: Path) -> None:
    """The finished stages of a demo run, whatever version made it; its draft becomes that of the first candidate."""
    names = {name: name for name in _REUSED} | {"draft": draft_stage(next(iter(candidate_recipes(recipe))))}
    for name, here in names.items():
        stage = stages(recipe, RunFolder(recipe.run_dir))[here]
        if not stage.folder.exists():
            shutil.copytree(source / name, stage.folder)
            made = read_json(stage.folder / "provenance.json")
            write_json(stage.folder / "provenance.json", {**made, "fingerprint": stage.fingerprint, "inputs": stage.inputs})


def gammas(result: dict[str, Any], arm: str) -> list[dict[str, Any]]:
    """Rows of an arm on the run's own text."""
    return [r for r in result["sweep"] if r["arm"] == arm and r["domain"] == "own"]


def table(rows: Sequence[dict[str, Any]]) -> float:
    """Print them; returns the largest gap between predicted and measured."""
    print("temperature  gamma    tau  predicted  measured  interval        gap   i.i.d.  its error   all prompts")
    worst = 0.0
    for r in rows:
        measured, everywhere, even = r["speedup"], r["counts"]["predicted"]["estimate"], r["counts"]["iid"]["predicted"]
        gap = measured["estimate"] / r["predicted"] - 1
        worst = max(worst, abs(gap))
        print(f"{r['temperature']:>11g} {r['swept']:>6} {r['metrics']['tau']:>6.2f} {r['predicted']:>9.3f}x {measured['estimate']:>8.3f}x  "
              f"{measured['low']:.2f} to {measured['high']:.2f} {gap:>+8.1%} {even:>7.3f}x {even / everywhere - 1:>+9.1%} {everywhere:>12.3f}x")  # fmt: skip
    return worst


def again(recipe: Recipe, run: RunFolder, result: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """The best tuned arm's row, and its speed-up decoded anew."""
    t = recipe.respond.sampler.temperature
    row = next(r for r in result["arms"] if r["arm"] == result["publish"] and r["temperature"] == t)
    found = stages(recipe, run)
    bench = open_bench(recipe, {n: found[draft_stage(n)].folder for n in candidate_recipes(recipe)})
    prompts = domains(recipe, run, found, bench.target.tokenizer)[0].prompts[: recipe.evaluate.timed_prompts]
    sampler = recipe.respond.sampler
    law = Sampling(t, sampler.top_k, sampler.top_p)
    decoders = {PLAIN: bench.decoder(PLAIN, law), row["arm"]: bench.decoder(row["arm"], law, gamma=row["swept"])}
    taken = dict.fromkeys(decoders, 0.0)
    for number, prompt in enumerate([prompts[0], *prompts]):
        order = list(decoders)[:: 1 if number % 2 else -1]
        for name in order:
            request = Request(prompt.ids, recipe.evaluate.timed_tokens, seed=seed_of(recipe.seed, "score", prompt.id), ignore_eos=True)
            (trace,) = decoders[name].run([request])
            if number:  # the first one warms up
                taken[name] += trace.decode_s
    return row, taken[PLAIN] / taken[row["arm"]]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.score", description="The score's promises on the demo's pair; see the module."
    )
    parser.add_argument("--run", type=Path, required=True, help="a finished run of configs/demo.yaml")
    parser.add_argument("--out", type=Path, default=Path("runs/bench/score"), help="run folder of this benchmark")
    parser.add_argument("--candidates", type=int, choices=(1, 3), default=3)
    parser.add_argument("--timing-prompts", type=int, default=10)
    parser.add_argument("--timing-tokens", type=int, default=64)
    parser.add_argument("override", nargs="*", help="SECTION.KEY=VALUE of the recipe")
    options = parser.parse_args(argv)
    recipe = recipe_of(options)
    borrow(recipe, options.run)
    run, watch = RunFolder(recipe.run_dir), LoadWatch()
    from draftstill.train import train_all

    train_all(recipe, run)
    started = time.monotonic()
    result = score(recipe, run)
    seconds = time.monotonic() - started
    print(to_terminal(result, {}))
    worst = 0.0
    for name in result["drafts"]:
        print(f"\n{name}")
        gap = table(gammas(result, name))
        worst = max(worst, gap if name == result["publish"] else 0.0)
    row, anew = again(recipe, run, result)
    stated = row["speedup"]
    inside = stated["low"] <= anew <= stated["high"]
    promises = {
        f"score in {seconds:.0f} s, at most {_BUDGET_S} s": seconds <= _BUDGET_S,
        f"largest gap of {result['publish']} between predicted and measured {worst:.1%}, at most {_GAP:.0%}": worst <= _GAP,
        f"best gamma {row['swept']} decoded anew {anew:.3f}x, stated {stated['low']:.3f} to {stated['high']:.3f}": inside,
    }
    print()
    for promise, kept in promises.items():
        print(f"{'kept  ' if kept else 'BROKEN'} {promise}")
    print(f"other processes took {watch.other_cores():.2f} cores; warm-up of the engines {result['conditions']['warm_up_s']:.1f} s")
    write_json(
        Path(recipe.run_dir) / "bench.json",
        {"seconds": seconds, "again": anew, "promises": promises, "conditions": result["conditions"], "sweep": result["sweep"]},
    )
    return 0 if all(promises.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
