"""States that a draft leads to: its own texts, and the places where the decoder rejected it. Both are scored by the target."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from draftstill.corpus import stored_documents
from draftstill.decode.trace import Trace
from draftstill.distill.prompts import Prompt, context_of, cut_prompts, seed_of
from draftstill.distill.responses import read_responses
from draftstill.distill.sources import Materials, Text, cut_off
from draftstill.errors import DraftstillError
from draftstill.progress import Progress, say
from draftstill.recipe import Recipe
from draftstill.runfolder import read_json, write_json


def rollouts(materials: Materials) -> Iterator[Text]:
    """Student rollouts: the draft continues training prompts at the deployment's sampler; supervised like responses."""
    for prompt, row in _written(materials, "rollout", materials.recipe.record.rollouts):
        ids, after = _text(prompt, row, materials.recipe)
        if prompt.supervised_from < len(ids):
            yield Text(ids, prompt.supervised_from, "rollout", after=after)


def rejections(materials: Materials) -> Iterator[Text]:
    """Rejection replay: target and draft decode training prompts together, and only the laws where a proposed token was rejected are learnt from."""
    for prompt, row in _written(materials, "replay", materials.recipe.record.replays):
        ids, after = _text(prompt, row, materials.recipe)
        only = tuple(at for at in row["rejected"] if at < len(ids))
        if only:
            end = only[-1] + 1
            yield Text(ids[:end], only[0], "replay", only, after=ids[end] if end < len(ids) else after)


def rejected(trace: Trace) -> list[int]:
    """Positions of prompt and text whose law overruled the draft: each one before a token that the target set in place of a proposed one."""
    return [trace.prompt_tokens + at - 1 for at, mark in enumerate(trace.marks()) if mark == "corrected"]


def _text(prompt: Prompt, row: dict[str, Any], recipe: Recipe) -> tuple[array[int], int]:
    return cut_off([*prompt.ids, *row["tokens"]], recipe.record.sequence_length, ended=row["finish"] == "eos")


def _written(materials: Materials, kind: str, count: int) -> Iterator[tuple[Prompt, dict[str, Any]]]:
    """Prompts and what was written to them. Batch by batch on disk, like responses; the processes of a launch share the batches out."""
    if not count:
        return
    recipe, target, here = materials.recipe, materials.target, materials.here
    prompts = _prompts(materials, count)
    if len(prompts) < count and here.main:
        key = "record.rollouts" if kind == "rollout" else "record.replays"
        say(f"  {key}: there are {len(prompts)} training prompts, not {count}")
    size = recipe.respond.batch_size
    batches = [(prompts[at : at + size], materials.work / f"{kind}-{n:05d}.json") for n, at in enumerate(range(0, len(prompts), size))]
    mine = [b for n, b in enumerate(batches) if here.mine(n) and not b[1].exists()]
    if mine:
        decoder = _decoder(recipe, target, kind, max(len(p.ids) for p in prompts))
        with Progress(kind, len(mine), "batches", quiet=not here.main) as progress:
            for done, (batch, path) in enumerate(mine, 1):
                write_json(path, _decode(decoder, batch, recipe, kind))
                progress.update(done)
    here.wait()
    for batch, path in batches:
        yield from zip(batch, read_json(path), strict=True)


def _prompts(materials: Materials, count: int) -> list[Prompt]:
    """The first training prompts of the responses; where the recipe asks for no responses, those that they would begin with."""
    recipe = materials.recipe
    if recipe.respond.prompts:
        rows = islice(read_responses(materials.responses, "train"), count)
        return [Prompt(row["prompt_id"], row["prompt"], row["supervised_from"]) for row in rows]
    target = materials.target
    return cut_prompts(stored_documents(materials.corpus, "train"), count, recipe.respond, target.tokenizer, recipe.seed,
                       context=context_of(target.config))  # fmt: skip


def _decode(decoder: Any, prompts: Sequence[Prompt], recipe: Recipe, kind: str) -> list[dict[str, Any]]:
    from draftstill.decode import Request

    requests = [Request(p.ids, recipe.respond.max_new_tokens, seed=seed_of(recipe.seed, kind, p.id)) for p in prompts]
    return [{"tokens": t.tokens, "finish": t.finish, "rejected": rejected(t)} for t in decoder.run(requests)]


def _decoder(recipe: Recipe, target: Any, kind: str, longest: int) -> Any:
    """``longest``: tokens of the longest prompt, which a draft that writes by itself must hold; beside a target it may stop guessing."""
    from draftstill.decode import Decoder, ModelDrafter, Sampling, load_draft

    assert recipe.record.draft is not None  # the recipe's own check
    draft, s = load_draft(recipe.record.draft, "record.draft.source", target, recipe).network, recipe.respond.sampler
    settings = {
        "sampling": Sampling(**s.model_dump()),
        "eos": target.eos,
        "rows": recipe.respond.batch_size,
        "backend": "eager",
    }
    if kind == "rollout":
        if longest >= draft.max_positions:
            raise DraftstillError(
                f"a prompt has {longest} tokens, and the context of the draft that is to continue it holds {draft.max_positions}",
                key="record.draft.source", value=recipe.record.draft.source,
                mend="take a draft with a longer context, lower respond.prompt_tokens or respond.chat_tokens, or set record.rollouts: 0",
            )  # fmt: skip
        return Decoder(draft, **settings)
    return Decoder(target.network, ModelDrafter(draft, recipe.record.replay_gamma), **settings)
