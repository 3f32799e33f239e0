"""``make bench-respond``: tokens per second of ``respond`` beside transformers' ``generate``, in batches of the same size on the same prompts.

How it measures, on the demo's target (SmolLM2-135M-Instruct) in the dtype that draftstill picks for this machine:

- Prompts are passages of the demo's held-out agreements of 16 to 96 tokens each with one of four requests, behind the chat template, so that prompts
  and answers are ragged, as traffic is. Sampling at temperature 0.7, EOS ends a text, as in responding.
- A turn is a window of prompts. ``ours`` is the stage's own engine: rows side by side, waiting prompts take the place of finished ones.
  ``generate`` gets the same prompts in batches of as many rows, in its best order (sorted by length, so that it pads little), padded on the left, with
  its KV cache. Both run twice on the first prompts before the clock starts. Turns alternate, and so does who goes first.
- Counted are written tokens up to EOS and no padding. Prompt reading is in the time of both.
- Rows: in float32, each row of a window is compared with what a batch of one row gives at the same seed. The number of
  rows in a product moves the last bits of the law, so all can be equal only as far as the draw does not hang on them.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from draftstill.cli import config_path
from draftstill.corpus import prepare_corpus, read_documents
from draftstill.decode import Loaded, load_target, set_threads
from draftstill.distill import Prompt, encode
from draftstill.distill.prompts import templated
from draftstill.distill.writing import RESPOND, InProcess, Window
from draftstill.machine import LoadWatch, describe_machine
from draftstill.recipe import Recipe
from draftstill.recipe_io import load_recipe
from draftstill.runfolder import RunFolder, git_state, read_json, versions, write_json
from draftstill.sources import load_model, quiet_transformers
from draftstill.stages import resolved_device, resolved_dtype
from tests.bench.tables import quartiles

GOAL = 3.0
SHORTEST, LONGEST = 16, 96
REQUESTS = (
    "Who is this about? Answer in a few words.",
    "Say this in one short sentence.",
    "What is the reader told to do here?",
    "Carry on with this text.",
)


def make_prompts(recipe: Recipe, target: Loaded, count: int) -> list[Prompt]:
    """Passages of ragged length behind the chat template."""
    rng = random.Random(0)
    documents = read_documents(prepare_corpus(recipe, RunFolder(recipe.run_dir, set_aside=True)), "test")
    pieces: list[Prompt] = []
    for document in documents:
        ids = encode(target.tokenizer, document.text)
        at = 0
        while at + LONGEST < len(ids) and len(pieces) < 4 * count:
            length = rng.randint(SHORTEST, LONGEST)
            text = target.tokenizer.decode(ids[at : at + length])
            pieces.append(
                templated(f"{document.id}@{at}", [{"role": "user", "content": f"{text}\n\n{rng.choice(REQUESTS)}"}], target.tokenizer)
            )
            at += LONGEST
    rng.shuffle(pieces)
    return pieces[:count]


class Generate:
    """transformers on the same prompts."""

    def __init__(self, model: Any, target: Loaded, recipe: Recipe) -> None:
        self.model, self.eos, self.settings = model, list(target.eos), recipe.respond

    def __call__(self, prompts: Sequence[Prompt]) -> int:
        s, written = self.settings, 0
        ordered = sorted(prompts, key=lambda p: len(p.ids))
        for at in range(0, len(ordered), s.batch_size):
            batch = ordered[at : at + s.batch_size]
            width = max(len(p.ids) for p in batch)
            ids = torch.tensor([[self.eos[0]] * (width - len(p.ids)) + p.ids for p in batch], device=self.model.device)
            mask = torch.tensor([[0] * (width - len(p.ids)) + [1] * len(p.ids) for p in batch], device=self.model.device)
            with torch.inference_mode():
                found = self.model.generate(
                    input_ids=ids, attention_mask=mask, do_sample=True, temperature=s.sampler.temperature, top_k=0, top_p=1.0,
                    max_new_tokens=s.max_new_tokens, eos_token_id=self.eos, pad_token_id=self.eos[0],
                )  # fmt: skip
            for row in found[:, width:].tolist():
                written += next((i + 1 for i, t in enumerate(row) if t in self.eos), len(row))
        return written


class Ours:
    """The responses stage's engine."""

    def __init__(self, engine: InProcess, recipe: Recipe, folder: Path) -> None:
        self.engine, self.recipe, self.folder, self.files = engine, recipe, folder, 0

    def __call__(self, prompts: Sequence[Prompt]) -> int:
        written = 0

        def tell(new: int) -> None:
            nonlocal written
            written += new

        self.files += 1
        window: Window = (self.folder / f"train-{self.files:05d}.json", prompts)
        self.engine.write([window], self.recipe.respond.max_new_tokens, RESPOND, tell)
        return written


def equal_rows(recipe: Recipe, prompts: Sequence[Prompt], folder: Path) -> dict[str, int]:
    """How many rows of a float32 window equal their own batch of one."""
    exact = load_target(recipe, dtype="float32")
    texts = []
    for name, rows in (("wide", recipe.respond.batch_size), ("narrow", 1)):
        own = recipe.model_copy(update={"respond": recipe.respond.model_copy(update={"batch_size": rows})})
        InProcess(own, exact).write([(folder / f"{name}.json", prompts)], recipe.respond.max_new_tokens, RESPOND, lambda _: None)
        texts.append([row["response"] for row in read_json(folder / f"{name}.json")])
    return {"rows": len(prompts), "equal": sum(a == b for a, b in zip(*texts, strict=True))}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.respond", description="Responding beside generate; see the module.")
    parser.add_argument("--quick", action="store_true", help="few prompts and tokens: checks that the benchmark runs")
    parser.add_argument("--rows", type=int, help="rows side by side (default 16)")
    parser.add_argument("--turns", type=int, help="windows for each side (default 5)")
    parser.add_argument("--window", type=int, default=4, help="batches per window")
    parser.add_argument("--new-tokens", type=int, help="longest answer (default 256)")
    parser.add_argument("--draft", type=Path, help="a trained draft of the demo's target, for an arm that speculates")
    parser.add_argument("--dtype", help="default: what draftstill picks here")
    parser.add_argument("--out", type=Path, default=Path("runs/bench/respond.json"), help="where the JSON goes")
    options = parser.parse_args(argv)
    set_threads()
    rows, turns = options.rows or (4 if options.quick else 16), options.turns or (2 if options.quick else 5)
    length = options.new_tokens or (16 if options.quick else 256)
    recipe = load_recipe(config_path("demo.yaml"), [
        f"run_dir={options.out.parent / 'decode-corpus'}", f"respond.batch_size={rows}", f"respond.max_new_tokens={length}"])  # fmt: skip
    dtype = options.dtype or resolved_dtype(recipe)
    watch = LoadWatch()
    with quiet_transformers(), tempfile.TemporaryDirectory() as temporary:
        target = load_target(recipe, dtype=dtype)
        size = rows * options.window
        prompts = make_prompts(recipe, target, size * turns + rows)
        peer = Generate(load_model(target.source, dtype, resolved_device(recipe)), target, recipe)
        arms: dict[str, Any] = {"ours": Ours(InProcess(recipe, target), recipe, Path(temporary)), "generate": peer}
        if options.draft:
            fast = load_recipe(config_path("demo.yaml"), [f"run_dir={recipe.run_dir}", f"respond.batch_size={rows}", f"respond.max_new_tokens={length}",
                                                          f"respond.draft.source={options.draft}", "respond.draft_gamma=2"])  # fmt: skip
            (Path(temporary) / "fast").mkdir()
            arms["ours, with a draft"] = Ours(InProcess(fast, target), fast, Path(temporary) / "fast")
        for arm in arms.values():
            arm(prompts[:rows])
        rates: dict[str, list[float]] = {name: [] for name in arms}
        counts: dict[str, int] = dict.fromkeys(arms, 0)
        for turn in range(turns):
            window = prompts[rows + turn * size : rows + (turn + 1) * size]
            for name in sorted(arms, reverse=bool(turn % 2)):
                started = time.perf_counter()
                written = arms[name](window)
                rates[name].append(written / (time.perf_counter() - started))
                counts[name] += written
        peers = rates["generate"]
        ratios = {
            name: quartiles([a / b for a, b in zip(found, peers, strict=True)]) for name, found in rates.items() if name != "generate"
        }
        rows_equal = equal_rows(recipe, prompts[: min(len(prompts), 2 * rows)], Path(temporary))
    lengths = quartiles([float(len(p.ids)) for p in prompts])
    print(f"\n{target.source.name}, {dtype}, {rows} rows, windows of {size} prompts ({lengths['q1']:.0f} to {lengths['q3']:.0f} tokens in the middle half), "
          f"up to {length} new tokens, {turns} turns")  # fmt: skip
    for name, values in rates.items():
        q = quartiles(values)
        mean = counts[name] / (turns * size)
        print(f"  {name:<20}{q['median']:>8.1f} tok/s [{q['q1']:.1f}, {q['q3']:.1f}], {mean:.1f} tokens a row")
    for name, ratio in ratios.items():
        verdict = "met" if ratio["median"] >= GOAL else "NOT MET"
        print(f"  {name} over generate: {ratio['median']:.2f} [{ratio['q1']:.2f}, {ratio['q3']:.2f}]; at least {GOAL:g}: {verdict}")
    print(f"  float32 rows equal to a batch of one: {rows_equal['equal']} of {rows_equal['rows']}")
    others = watch.other_cores()
    report = {"rates": rates, "ratios": ratios, "rows_equal": rows_equal, "tokens": counts, "median": {n: statistics.median(v) for n, v in rates.items()},
              "rows": rows, "window": size, "new_tokens": length, "prompt_tokens": lengths, "dtype": dtype, "quick": options.quick,
              "machine": describe_machine(), "versions": versions(), "git": git_state(), "other_cores": others,
              "threads": torch.get_num_threads(), "date": time.strftime("%Y-%m-%d")}  # fmt: skip
    write_json(options.out, report)
    print(f"\n{describe_machine()['cpu']}, {torch.get_num_threads()} threads, {others:.2f} cores taken by others; JSON in {options.out}")
    if others > 0.1:
        print("Other processes were busy: do not quote these figures.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
