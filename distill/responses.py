"""The responses stage: the target answers prompts at the deployment sampler, in process or at a server. Goes on where it stopped."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from draftstill.corpus import prepare_corpus, stored_documents
from draftstill.distill.dialects import CALLS, REASONING
from draftstill.distill.over_http import OverHttp
from draftstill.distill.prompts import LONGER, Prompt, Refusals, context_of, cut, cut_prompts
from draftstill.distill.ranks import Ranks, ranks
from draftstill.distill.writing import (
    INSTRUCT,
    REFUSED,
    RESPOND,
    TOO_LONG,
    TRUNCATED,
    Engine,
    InProcess,
    Row,
    Window,
    read_rows,
    windows,
    written,
)
from draftstill.errors import DraftstillError
from draftstill.progress import Progress, say
from draftstill.recipe import Recipe
from draftstill.runfolder import RunFolder, Stage, atomic_write, read_json
from draftstill.stages import resolved_device, stages

SIDES = {"train": "train", "heldout": "validation"}
"""Name of a side of the responses and the recording: the corpus split it comes from."""


@dataclass(slots=True)
class _Job:
    """What the stage works with."""

    recipe: Recipe
    corpus: Path
    work: Path
    here: Ranks
    target: Any
    engine: Engine
    refusals: Refusals = field(default_factory=Refusals)
    known: set[str] = field(default_factory=set)
    """Instructions that were invented so far: one that trains must not validate."""

    @property
    def context(self) -> int | None:
        """Tokens that the target's context holds."""
        return context_of(self.target.config)


def respond(recipe: Recipe, run: RunFolder) -> Path:
    """Write responses for training and for held-out validation; returns the stage's folder.

    Raises:
        DraftstillError: too few prompts, a template that is not there, a draft or a server that does not fit or does not answer, the
            recording's among them. What was written stays; the same command goes on.
    """
    here = ranks(resolved_device(recipe))
    stage = stages(recipe, run)["responses"]
    if here.main:
        prepare_corpus(recipe, run)
    here.wait()
    corpus = prepare_corpus(recipe, run)
    _require_adapted(recipe, run)
    done = stage.done
    here.wait()  # before the main process moves anything
    if done:
        return stage.folder
    if here.main:
        from draftstill.distill.recorder import look_ahead

        look_ahead(recipe, run)
        stage.begin()
    here.wait()
    job = _Job(recipe, corpus, stage.work, here, *_engine(recipe, stage.work, here))
    sides: dict[str, list[Window]] = {}
    for side in SIDES:
        prompts = _prompts(job, side)
        sides[side] = windows(job.work, side, prompts, recipe.respond)
    mine = sum(len(w[1]) for side in sides.values() for n, w in enumerate(side) if here.mine(n))
    tokens = 0
    with Progress("respond", mine * recipe.respond.max_new_tokens, "tokens", quiet=not here.main) as progress:

        def tell(new: int) -> None:
            nonlocal tokens
            tokens += new
            progress.update(tokens)

        for found in sides.values():
            written(job.engine, found, here, recipe.respond.max_new_tokens, RESPOND, tell)
    here.wait()
    if here.main:
        _finish(job, stage, sides)
    here.wait()
    return stage.folder


def _require_adapted(recipe: Recipe, run: RunFolder) -> None:
    """Raise where the recipe tunes its target and this was not done: a target that lies there from another recipe would answer in its place."""
    if recipe.adapt is not None and not stages(recipe, run)["adapted"].done:
        raise DraftstillError("the recipe's own target is not there yet", key="adapt", value=str(run.path / "adapted"),
                              mend="make it first: draftstill adapt RECIPE")  # fmt: skip


def _engine(recipe: Recipe, work: Path, here: Ranks) -> tuple[Any, Engine]:
    """The target, with weights where it is decoded here, and who writes."""
    if recipe.respond.server is None:
        from draftstill.decode import load_target

        loaded = load_target(recipe)
        return loaded, InProcess(recipe, loaded)
    from draftstill.distill.targets import describe_target

    described = describe_target(recipe)
    return described, OverHttp(recipe, described, work / f"journal-{here.rank}.jsonl", quiet=not here.main)


def _finish(job: _Job, stage: Stage, sides: dict[str, list[Window]]) -> None:
    target, settings = job.target, job.recipe.respond
    rows = {side: list(read_rows(found)) for side, found in sides.items()}
    every = [row for side in rows.values() for row in side]
    kept = {side: sum("dropped" not in r for r in found) for side, found in rows.items()}
    finish, tokens = Counter(r["finish"] for r in every), sum(len(r.get("response", ())) for r in every)
    _refuse_none(job, rows, sides)
    refused = [{"id": r["prompt_id"], "reason": r["finish"], "detail": r["detail"]} for r in every if "detail" in r]
    _list_rejected(job.work, [*job.refusals.rows, *refused])
    for journal in job.work.glob("journal-*.jsonl"):
        journal.unlink()
    kinds = Counter(p.kind for found in sides.values() for _, prompts in found for p in prompts)
    more: dict[str, Any] = {
        "kinds": dict(sorted(kinds.items())),
        "refused": job.refusals.counts(),
        "dropped": len(every) - sum(kept.values()),
    }
    if isinstance(job.engine, OverHttp):
        more["server"] = {**asdict(job.engine.about), "api": job.engine.server.api, "retokenised": sum("retokenised" in r for r in every)}
    if settings.draft:
        more["draft"] = settings.draft.source
    asked = {side: len(found) for side, found in rows.items()}
    stage.finish(prompts=asked, tokens=tokens, finish=dict(finish), sampler=settings.sampler.model_dump(), target=asdict(target.source),
                 eos=list(target.eos), vocab=target.vocab, **more)  # fmt: skip
    say(f"  responses: {kept['train']} for training, {kept['heldout']} held out; finished by {dict(finish)}")
    if more["dropped"]:
        say(f"  {more['dropped']} of them were dropped, not kept")
    if refused:
        say(f"  {len(refused)} prompts were {REFUSED}; the first: {refused[0]['detail']}; listed in {stage.folder / 'rejected.jsonl'}")
    if job.refusals.rows:
        told = ", ".join(f"{count} {reason}" for reason, count in job.refusals.counts().items())
        say(f"  prompts refused: {told}; listed in {stage.folder / 'rejected.jsonl'}")


def _list_rejected(work: Path, rows: list[dict[str, str]]) -> None:
    """Write down what made no prompt or no response, in place of what an earlier attempt wrote."""
    path = work / "rejected.jsonl"
    if rows:
        atomic_write(path, "".join(json.dumps(r, ensure_ascii=True) + "\n" for r in rows))
    else:
        path.unlink(missing_ok=True)


def _refuse_none(job: _Job, rows: dict[str, list[Row]], sides: dict[str, list[Window]]) -> None:
    """Raise where nothing of a side can be learnt from, by what most of it ended."""
    empty = [side for side, found in rows.items() if found and all("dropped" in row for row in found)]
    if not empty:
        return
    settings, finish = job.recipe.respond, Counter(str(row["finish"]) for row in rows[empty[0]])
    commonest, count = finish.most_common(1)[0]
    key: str = "respond.server.url"
    value: object = settings.server.url if settings.server else None
    mend = "look at what this server makes of such prompts, and serve the model that target.source names; the same command asks anew"
    if commonest in TRUNCATED or settings.server is None:
        key, value = "respond.max_new_tokens", settings.max_new_tokens
        mend = "raise it or set respond.truncated: keep, and add --set-aside"
    elif commonest == TOO_LONG:
        key, value = "respond.chat_tokens", settings.chat_tokens
        mend = "lower it (or respond.prompt_tokens) and add --set-aside, or start the server with a longer context"
    elif commonest == CALLS:
        key, value = "respond.server.api", settings.server.api
        mend = "use completions and add --set-aside: over chat a call comes without the text that the target wrote, unless the server gives ids"
    elif commonest == REASONING:
        key, value = "respond.server.api", settings.server.api
        mend = ("use completions and add --set-aside, or start the server so that it leaves the reasoning in the text (vLLM, SGLang: without "
                "--reasoning-parser; llama.cpp: --reasoning-format none): nobody knows how the target wrote what comes beside it")  # fmt: skip
    if settings.server is not None:
        # None of it is worth keeping, and kept it would be taken for what the next server says.
        for path in [*(path for side in empty for path, _ in sides[side]), *job.work.glob("journal-*.jsonl")]:
            path.unlink(missing_ok=True)
    raise DraftstillError(f"no response of the side {empty[0]!r} can be kept: {count} of {finish.total()} ended by {commonest!r}"
                          + (f" ({dict(finish)})" if len(finish) > 1 else ""), key=key, value=value, mend=mend)  # fmt: skip


def _prompts(job: _Job, side: str) -> list[Prompt]:
    recipe, split = job.recipe, SIDES[side]
    key = "respond.prompts" if side == "train" else "respond.heldout_prompts"
    asked = recipe.respond.prompts if side == "train" else recipe.respond.heldout_prompts
    documents, before = stored_documents(job.corpus, split), len(job.refusals.rows)
    prompts = _mixed(job, documents, asked, side) if recipe.respond.shares else cut_prompts(
        documents, asked, recipe.respond, job.target.tokenizer, recipe.seed, context=job.context, refusals=job.refusals
    )  # fmt: skip
    if asked and not prompts:
        if len(job.refusals.rows) > before:
            raise _none_made(job, split, before)
        raise DraftstillError(f"no {split} document is as long as a prompt of {recipe.respond.prompt_tokens} tokens", key="respond.prompt_tokens",
                              value=recipe.respond.prompt_tokens, mend="lower it, or add longer documents")  # fmt: skip
    if len(prompts) < asked and job.here.main:
        say(f"  {key}: the {split} documents hold {len(prompts)} prompts, not {asked}")
    return prompts


def _none_made(job: _Job, split: str, since: int) -> DraftstillError:
    """The fault of a side without a prompt, by what most of it was refused for since then; all that was refused is written down."""
    from draftstill.distill.synthetic import NO_INSTRUCTION

    settings = job.recipe.respond
    if job.here.main:
        _list_rejected(job.work, job.refusals.rows)
    reason, told = job.refusals.told(since)
    key, mend = "corpus.source", "look at the conversations and at the target's chat template"
    value: object = job.recipe.corpus.source
    if reason == LONGER:
        key, value = "respond.chat_tokens", settings.chat_tokens
        mend = "raise it, as far as the target's context goes, or give shorter ones"
    elif reason in NO_INSTRUCTION:
        key, value, mend = "respond.shares", dict(settings.shares), "ask in other words (respond.synthetic.ask), or leave synthetic out"
    return DraftstillError(f"no prompt could be made of the {split} documents: {told}", key=key, value=value,
                           mend=f"{mend}; all of them are in {job.work / 'rejected.jsonl'}")  # fmt: skip


def _mixed(job: _Job, documents: list[Any], asked: int, side: str) -> list[Prompt]:
    """Prompts by ``respond.shares``; what one kind lacks no other makes up for, so that the shares hold as far as they can.

    Raises:
        DraftstillError: there is nothing to make a kind from.
    """
    from draftstill.distill.chats import real_prompts
    from draftstill.distill.synthetic import synthetic_prompts

    settings, tokenizer, seed = job.recipe.respond, job.target.tokenizer, job.recipe.seed
    chats, texts = [d for d in documents if d.messages], [d for d in documents if not d.messages]
    counts = split_counts(asked, {str(k): v for k, v in settings.shares.items()})
    made: dict[str, list[Prompt]] = {}
    for kind, count in sorted(counts.items()):  # cut, real, synthetic: what needs no decoding is made, and refused, before what does
        source = chats if kind == "real" else texts if kind == "cut" else texts or chats
        if count and not source:
            what = "no conversation" if kind == "real" else "no document"
            raise DraftstillError(f"the {SIDES[side]} split holds {what} to make {kind} prompts from", key="respond.shares", value=dict(settings.shares),
                                  mend=f"leave {kind} out")  # fmt: skip
        if kind == "real" and count:
            made[kind] = real_prompts(source, count, settings, tokenizer, seed, job.context, job.refusals)
        elif kind == "cut":
            made[kind] = cut(source, count, settings, tokenizer, seed, job.context)
        elif count:
            made[kind] = synthetic_prompts(source, count, settings, tokenizer, seed, _writer(job), f"instructions-{side}", job.refusals,
                                           job.known, job.context)  # fmt: skip
    return [prompt for kind in counts for prompt in made.get(kind, ())]


def split_counts(count: int, shares: dict[str, float]) -> dict[str, int]:
    """Whole numbers in these shares that add up to ``count``: the largest remainders are rounded up."""
    exact = {kind: count * share / sum(shares.values()) for kind, share in shares.items()}
    found = {kind: int(value) for kind, value in exact.items()}
    for kind in sorted(exact, key=lambda k: found[k] - exact[k])[: count - sum(found.values())]:
        found[kind] += 1
    return found


def _writer(job: _Job) -> Callable[[str, list[Prompt], int], list[dict[str, Any]]]:
    """For instructions: the same engine, every process of the launch its share, then all of them read all."""

    def write(stem: str, prompts: list[Prompt], length: int) -> list[dict[str, Any]]:
        found = windows(job.work, stem, prompts, job.recipe.respond)
        mine = sum(len(w[1]) for n, w in enumerate(found) if job.here.mine(n))
        tokens = 0
        with Progress("invent instructions", mine * length, "tokens", quiet=not job.here.main) as progress:

            def tell(new: int) -> None:
                nonlocal tokens
                tokens += new
                progress.update(tokens)

            written(job.engine, found, job.here, length, INSTRUCT, tell)
        job.here.wait()
        return list(read_rows(found))

    return write


def read_responses(folder: Path, side: str) -> Iterator[dict[str, Any]]:
    """Rows (prompt_id, prompt, supervised_from, response, finish) of one side that were kept, in order."""
    for path in sorted(folder.glob(f"{side}-*.json")):
        yield from (row for row in read_json(path) if "dropped" not in row)
