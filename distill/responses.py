"""The responses stage: the target continues prompts at the deployment sampler. Resumes at the last whole batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from draftstill.corpus import prepare_corpus, read_documents
from draftstill.distill.prompts import Prompt, cut_prompts, seed_of
from draftstill.errors import DraftstillError
from draftstill.progress import Progress, say
from draftstill.recipe import Recipe
from draftstill.runfolder import RunFolder, read_json, write_json
from draftstill.stages import stages

SIDES = {"train": "train", "heldout": "validation"}
"""Name of a side of the responses and the recording: the corpus split it comes from."""


def respond(recipe: Recipe, run: RunFolder) -> Path:
    """Write responses for training and for held-out validation; returns the stage's folder.

    Each batch of ``respond.batch_size`` rows is one file, written when whole: a batch never depends on where an earlier attempt
    stopped, so a resumed run ends with the same bytes.
    """
    stage = stages(recipe, run)["responses"]
    corpus = prepare_corpus(recipe, run)
    if stage.done:
        return stage.folder
    from draftstill.decode import load_target

    work = stage.begin()
    target = load_target(recipe)
    sides = {side: _prompts(recipe, corpus, split, side, target) for side, split in SIDES.items()}
    total = sum(len(p) for p in sides.values())
    finish: Counter[str] = Counter()
    tokens = 0
    with Progress("respond", total * recipe.respond.max_new_tokens, "tokens") as progress:
        for side, prompts in sides.items():
            for number, first in enumerate(range(0, len(prompts), recipe.respond.batch_size)):
                path = work / f"{side}-{number:05d}.json"
                batch = prompts[first : first + recipe.respond.batch_size]
                rows = read_json(path) if path.exists() else _write_batch(recipe, target, batch, path)
                finish.update(r["finish"] for r in rows)
                tokens += sum(len(r["response"]) for r in rows)
                progress.update(tokens)
    counts = {side: len(p) for side, p in sides.items()}
    folder = stage.finish(prompts=counts, tokens=tokens, finish=dict(finish), sampler=recipe.respond.sampler.model_dump(),
                          target=asdict(target.source), eos=list(target.eos), vocab=target.vocab)  # fmt: skip
    say(f"  responses: {counts['train']} for training, {counts['heldout']} held out; finished by {dict(finish)}")
    return folder


def _prompts(recipe: Recipe, corpus: Path, split: str, side: str, target: Any) -> list[Prompt]:
    asked = recipe.respond.prompts if side == "train" else recipe.respond.heldout_prompts
    prompts = cut_prompts(read_documents(corpus, split), asked, recipe.respond, target.tokenizer, recipe.seed)
    key = "respond.prompts" if side == "train" else "respond.heldout_prompts"
    if asked and not prompts:
        raise DraftstillError(f"no {split} document is as long as a prompt of {recipe.respond.prompt_tokens} tokens", key="respond.prompt_tokens",
                              value=recipe.respond.prompt_tokens, mend="lower it, or add longer documents")  # fmt: skip
    if len(prompts) < asked:
        say(f"  {key}: the {split} documents hold {len(prompts)} prompts, not {asked}")
    return prompts


def _write_batch(recipe: Recipe, target: Any, batch: list[Prompt], path: Path) -> list[dict[str, Any]]:
    from draftstill.decode import Decoder, Request, Sampling

    sampler = recipe.respond.sampler
    decoder = Decoder(target.network, sampling=Sampling(sampler.temperature, sampler.top_k, sampler.top_p), eos=target.eos, rows=len(batch))
    traces = decoder.run([Request(p.ids, recipe.respond.max_new_tokens, seed=seed_of(recipe.seed, "respond", p.id)) for p in batch])
    rows = [{"prompt_id": p.id, "prompt": p.ids, "supervised_from": p.supervised_from, "response": t.tokens, "finish": t.finish}
            for p, t in zip(batch, traces, strict=True)]  # fmt: skip
    write_json(path, rows)
    return rows


def read_responses(folder: Path, side: str) -> Iterator[dict[str, Any]]:
    """Rows (prompt_id, prompt, supervised_from, response, finish) of one side, in order."""
    for path in sorted(folder.glob(f"{side}-*.json")):
        yield from read_json(path)
