"""What a published folder is still worth once loaded back: alpha on the scored texts, and acceptance in a real llama.cpp server."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftstill.corpus import stored_documents
from draftstill.errors import DraftstillError
from draftstill.evaluate.exporter import TargetFacts, load_model_folder
from draftstill.evaluate.gguf_tokens import tokens_of_folder, tokens_of_gguf
from draftstill.evaluate.ggufs import write_gguf
from draftstill.evaluate.serving import own_acceptance, same_start, served_acceptance
from draftstill.evaluate.snippets import llama_command
from draftstill.progress import say
from draftstill.recipe import OWN, Recipe
from draftstill.runfolder import RunFolder, Stage, read_json
from draftstill.stages import published_draft, resolved_device, resolved_dtype, stages

_TEXTS = 4
"""Scored texts on which alpha is measured again: a few hundred positions, one target pass each."""


def published_alpha(recipe: Recipe, run: RunFolder, found: Mapping[str, Stage], folder: Path) -> dict[str, Any] | None:
    """Teacher-forced alpha of the folder on texts that the score's plain arm wrote, beside what the score recorded at the same positions.

    Same dtype, same head (``draft.head_tokens``) and the deployment's sampler; None where the score kept no texts or scored no tuned draft.
    """
    import torch

    from draftstill.decode import Sampling, load_target, make_network
    from draftstill.evaluate.arms import head_ids, kept_head
    from draftstill.evaluate.forced import forced

    name, own, draft = published_draft(recipe, run)
    sampler = recipe.respond.sampler
    cells, place = found["score"].folder / "cells", f"{OWN}/t{sampler.temperature:g}-0000"
    kept = sorted((cells / "laws" / place).glob("*.json"))
    made = [draft.facts()["weights_sha256"], kept_head(own, draft.folder)] if kept else None
    scored = [c for c in map(read_json, kept) if c["made"] == made]
    if not scored:
        return None
    texts, laws = read_json(cells / "texts" / f"{place}.json")["rows"][:_TEXTS], scored[0]["rows"]
    target = load_target(recipe)
    prompts = {p.id: p.ids for p in _prompts(recipe, found, target.tokenizer, recipe.evaluate.prompts)}
    model = load_model_folder(folder, getattr(torch, resolved_dtype(recipe))).to(resolved_device(recipe))
    network = make_network(model, vocab=target.vocab, head_ids=head_ids(own, draft.folder), key="draft.source")
    known = [(n, (prompts[t["prompt"]], t["tokens"])) for n, t in enumerate(texts) if t["prompt"] in prompts]
    if not known:
        return None
    figures = forced(target.network, {name: network}, [t for _, t in known], Sampling(sampler.temperature, sampler.top_k, sampler.top_p))
    now = [a for f in figures for a in f["drafts"][name]["alpha"]]
    then = [a for n, _ in known for a in laws[n]["alpha"]]
    return {"published": sum(now) / len(now), "scored": sum(then) / len(then), "positions": len(now), "temperature": sampler.temperature}


def _prompts(recipe: Recipe, found: Mapping[str, Stage], tokenizer: Any, count: int) -> list[Any]:
    from draftstill.evaluate.domains import held_out

    return held_out(recipe, stored_documents(found["corpus"].folder, "test"), tokenizer, count)


def served_beside_ours(recipe: Recipe, run: RunFolder, folder: Path, target: TargetFacts, gamma: int) -> dict[str, Any]:
    """Greedy acceptance of the published GGUF in a llama.cpp server, and of the published folder in our decoder: same prompts, same gamma.

    Both draft from the whole head. llama.cpp multiplies in its own quantised arithmetic, so near-ties may fall the other way and two texts
    part; the share of equal tokens is reported beside the acceptances.

    Raises:
        DraftstillError: there is no GGUF of the draft or of the target, xllamacpp is absent, or the server did not speculate.
    """
    found = stages(recipe, run)
    files = [folder / f"draft-{kind}.gguf" for kind in ("q8_0", "f16") if (folder / f"draft-{kind}.gguf").exists()]
    if not files:
        raise DraftstillError(
            "there is no GGUF of this draft to serve", key="publish.gguf", mend="set publish.gguf: [q8_0] and publish again"
        )
    prompts = [p.ids for p in _prompts(recipe, found, target.tokenizer, recipe.evaluate.prompts)]
    length = recipe.evaluate.max_new_tokens
    with tempfile.TemporaryDirectory(prefix="draftstill-served-") as temporary:
        given = target.gguf if not target.tuned else None
        theirs = given or _target_gguf(target, Path(temporary) / "target-f16.gguf")
        say(f"  llama.cpp: {len(prompts)} prompts, {length} tokens each, {files[0].name} behind {theirs.name}")
        served = served_acceptance(llama_command(str(theirs), str(files[0]), gamma), prompts, max_new_tokens=length)
    say("  our decoder: the same prompts")
    ours = own_acceptance(recipe, folder, prompts, gamma=gamma, max_new_tokens=length)
    equal = sum(same_start(a, b) for a, b in zip(served["tokens"], ours["tokens"], strict=True))
    return {"server": served["server"], "draft": files[0].name, "gamma": gamma, "prompts": len(prompts), "max_new_tokens": length,
            "drafted": served["drafted"], "accepted": served["accepted"], "acceptance": served["acceptance"], "ours": ours["acceptance"],
            "ours_dtype": ours["dtype"], "tokens_until_texts_part": equal / len(prompts)}  # fmt: skip


def _target_gguf(target: TargetFacts, out: Path) -> Path:
    if target.folder is None:
        raise DraftstillError(
            "there is no GGUF of the target to serve", key="publish.target_gguf", mend="set it to the file that serves the target"
        )
    tokens = tokens_of_gguf(target.gguf) if target.gguf else tokens_of_folder(target.folder)
    write_gguf(target.folder, out, "f16", tokens, name="target")
    return out
