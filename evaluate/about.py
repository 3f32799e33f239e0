"""What a score holds for: target, drafts, corpus, machine, settings; and the per-token view of a few texts."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from draftstill.evaluate.arms import PLAIN, Bench
from draftstill.evaluate.assembling import Found, trace_of
from draftstill.machine import cores, describe_machine
from draftstill.recipe import Recipe
from draftstill.runfolder import Stage, git_state, read_json, versions
from draftstill.stages import resolved_device, resolved_dtype, served_target


def about_target(bench: Bench) -> dict[str, Any]:
    loaded, config = bench.target, bench.target.config
    return {"name": loaded.source.name, "source": served_target(bench.recipe).source, "licence": loaded.source.licence, "parameters": loaded.network.parameters,
            "layers": config.num_hidden_layers, "hidden_size": config.hidden_size, "vocab_size": config.vocab_size,
            "dtype": resolved_dtype(bench.recipe)}  # fmt: skip


def about_draft(recipe: Recipe, stage: Stage) -> dict[str, Any]:
    """A trained candidate; ``recipe`` is its own."""
    facts = stage.facts()
    layers = list(facts.get("layers", recipe.draft.layers)) if recipe.draft.pruned else []
    return {"name": facts["name"], "parameters": facts["parameters"], "layers": layers, "head_tokens": recipe.draft.head_tokens,
            "trained_tokens": facts["tokens"], "train_seconds": facts["train_seconds"], "loss": recipe.train.loss.label,
            "weights_sha256": facts["weights_sha256"]}  # fmt: skip


def about_corpus(recipe: Recipe, found: Mapping[str, Stage]) -> dict[str, Any]:
    corpus, responses, recording = (found[n].facts() for n in ("corpus", "responses", "recording"))
    heldout = read_json(found["recording"].folder / "heldout" / "manifest.json")["mode"]
    return {"source": recipe.corpus.source, "documents": {k: v["documents"] for k, v in corpus["splits"].items()},
            "recording": {"mode": recording["mode"], "heldout_mode": heldout},
            "recorded_tokens": recording["sizes"]["train"]["positions"], "response_tokens": responses["tokens"],
            "response_finish": responses["finish"]}  # fmt: skip


def accelerator(device: torch.device) -> str | None:
    """Name of the GPU; None on a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def conditions(recipe: Recipe, found: Sequence[Found], warm_up_s: float, gamma: int) -> dict[str, Any]:
    """``gamma``: that of the published candidate at the deployment's temperature."""
    settings, sampler = recipe.evaluate, recipe.respond.sampler
    cells = [cell for f in found for row in f.timed for cell in row.values()]
    engine = next((c["trace"]["engine"] for c in cells if c["arm"] == PLAIN), {"backend": "none"})
    texts = [t for f in found if f.domain == found[0].domain and f.temperature == found[0].temperature for t in f.texts]
    return {
        "rows": 1, "backend": engine["backend"], **{k: engine[k] for k in ("packed", "fallback") if k in engine},
        "date": time.strftime("%Y-%m-%d", time.gmtime()), "machine": describe_machine(), "threads": torch.get_num_threads() or cores(),
        "device": resolved_device(recipe), "dtype": resolved_dtype(recipe), "versions": versions(), "git": git_state(),
        "commits": commits(cells), "gamma": gamma,
        "gammas": list(settings.swept), "lookup_gamma": settings.lookup_gamma, "max_new_tokens": settings.max_new_tokens,
        "timing_tokens": settings.timed_tokens, "prompts": len(texts), "timed_prompts": len(found[0].timed), "seed": recipe.seed,
        "temperatures": list(settings.temperatures), "top_k": sampler.top_k, "top_p": sampler.top_p,
        "other_cores": round(statistics.fmean(c["other_cores"] for c in cells), 3) if cells else 0.0, "confidence": settings.confidence,
        "warm_up_s": round(warm_up_s, 2), "command": " ".join(["draftstill", *sys.argv[1:]]),
    }  # fmt: skip


def commits(cells: Sequence[Mapping[str, Any]]) -> list[str | None]:
    """The states of the source that timed, each once; None for timings without one: outside of a checkout, or older than this note."""
    states = [cell.get("git") for cell in cells]
    return sorted({None if s is None else s["commit"] + (" with changes" if s["dirty"] else "") for s in states}, key=str)


def past_eos(bench: Bench, found: Sequence[Found]) -> float | None:
    """Share of plain decoding's timed tokens that stand behind an end of text: timing runs on to a fixed length."""
    total = behind = 0
    for tokens in (row[PLAIN, 0]["trace"]["tokens"] for f in found for row in f.timed):
        end = next((i for i, t in enumerate(tokens) if t in bench.target.eos), len(tokens))
        total, behind = total + len(tokens), behind + max(0, len(tokens) - end - 1)
    return round(behind / total, 4) if total else None


def greedy_timed(recipe: Recipe, found: Sequence[Found]) -> dict[str, Any] | None:
    """How many temperature-0 texts of the timing itself, in its dtype, equal plain decoding's. In bfloat16 near-ties may fall either way.

    Of an arm that was timed at several gammas, the texts that do so at all of them.
    """
    greedy = next((f for f in found if f.temperature == 0 and f.timed), None)
    if greedy is None:
        return None
    same: dict[str, int] = {}
    for arm in dict.fromkeys(name for name, _ in greedy.timed[0] if name != PLAIN):
        texts = [[c["trace"]["tokens"] for (name, _), c in row.items() if name == arm] for row in greedy.timed]
        same[arm] = sum(all(t == row[PLAIN, 0]["trace"]["tokens"] for t in mine) for mine, row in zip(texts, greedy.timed, strict=True))
    return {"dtype": resolved_dtype(recipe), "prompts": len(greedy.timed), "identical": same}


def examples(bench: Bench, found: Found, arm: str, gamma: int, most: int = 3) -> list[dict[str, Any]]:
    """The per-token view of a few texts; neighbours of one kind are decoded together, so that split characters stay whole."""
    tokenizer, out = bench.target.tokenizer, []
    for prompt, row in list(zip(found.prompts, found.timed, strict=False))[:most]:
        trace = trace_of(row[arm, gamma])
        runs: list[tuple[str, list[int]]] = []
        for token, mark in zip(trace.tokens, trace.marks(), strict=True):
            if runs and runs[-1][0] == mark == "accepted":
                runs[-1][1].append(token)
            else:
                runs.append((mark, [token]))
        pieces = [{"text": tokenizer.decode(ids), "kind": kind} for kind, ids in runs]
        out.append({"prompt_id": prompt.id, "prompt": tokenizer.decode(prompt.ids), "arm": arm, "gamma": gamma, "temperature": found.temperature,
                    "pieces": pieces})  # fmt: skip
    return out
