"""The responses stage: the target continues prompts at the deployment sampler. Resumes at the last whole batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from draftstill.corpus import prepare_corpus, read_documents
from draftstill.distill.prompts import Prompt, cut_prompts, seed_of
from draftstill.distill.ranks import ranks
from draftstill.errors import DraftstillError
from draftstill.progress import Progress, say
from draftstill.recipe import Recipe
from draftstill.runfolder import RunFolder, Stage, read_json, write_json
from draftstill.stages import resolved_device, stages

SIDES = {"train": "train", "heldout": "validation"}
"""Name of a side of the responses and the recording: the corpus split it comes from."""


def respond(recipe: Recipe, run: RunFolder) -> Path:
    """Write responses for training and for held-out validation; returns the stage's folder.

    Each batch of ``respond.batch_size`` rows is one file, written when whole: a batch never depends on where an earlier attempt
    stopped, so a resumed run ends with the same bytes. The processes of a launch share the batches out.
    """
    here = ranks(resolved_device(recipe))
    stage = stages(recipe, run)["responses"]
    if here.main:
        prepare_corpus(recipe, run)
    here.wait()
    corpus = prepare_corpus(recipe, run)
    done = stage.done
    here.wait()  # before the main process moves anything
    if done:
        return stage.folder
    from draftstill.decode import load_target

    if here.main:
        stage.begin()
    here.wait()
    work = stage.work
    target = load_target(recipe)
    sides = {side: _prompts(recipe, corpus, split, side, target) for side, split in SIDES.items()}
    size = recipe.respond.batch_size
    batches = [(prompts[first : first + size], work / f"{side}-{number:05d}.json")
               for side, prompts in sides.items() for number, first in enumerate(range(0, len(prompts), size))]  # fmt: skip
    mine = [b for n, b in enumerate(batches) if here.mine(n)]
    tokens = 0
    with Progress("respond", sum(len(b) for b, _ in mine) * recipe.respond.max_new_tokens, "tokens", quiet=not here.main) as progress:
        for batch, path in mine:
            rows = read_json(path) if path.exists() else _write_batch(recipe, target, batch, path)
            tokens += sum(len(r["response"]) for r in rows)
            progress.update(tokens)
    here.wait()
    if here.main:
        _finish(recipe, stage, target, sides)
    here.wait()
    return stage.folder


def _finish(recipe: Recipe, stage: Stage, target: Any, sides: dict[str, list[Prompt]]) -> None:
    rows = [row for side in SIDES for row in read_responses(stage.work, side)]
    finish = Counter(r["finish"] for r in rows)
    tokens = sum(len(r["response"]) for r in rows)
    counts = {side: len(p) for side, p in sides.items()}
    stage.finish(prompts=counts, tokens=tokens, finish=dict(finish), sampler=recipe.respond.sampler.model_dump(),
                 target=asdict(target.source), eos=list(target.eos), vocab=target.vocab)  # fmt: skip
    say(f"  responses: {counts['train']} for training, {counts['heldout']} held out; finished by {dict(finish)}")


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
