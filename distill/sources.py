"""Sources of states: what the recording scores. A source yields texts; whose laws are recorded on them is the scorer's business.

Where a text stops at a limit its law is cut with it, so a source never has to know how the recording is laid out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftstill.corpus import read_documents
from draftstill.distill.prompts import encode, opening, seed_of
from draftstill.distill.responses import read_responses
from draftstill.errors import DraftstillError
from draftstill.progress import say
from draftstill.recipe import Recipe

if TYPE_CHECKING:
    from draftstill.decode import Loaded
    from draftstill.distill.ranks import Ranks
    from draftstill.distill.targets import Described

_SHORTEST = 32
"""Tokens of a document piece worth a row of its own."""


@dataclass(frozen=True, slots=True)
class Text:
    """Token ids, and the positions whose next token's law is learnt from."""

    ids: list[int]
    start: int = 0
    """First supervised position."""
    kind: str = "response"
    """One of ``shards.KINDS``."""
    only: tuple[int, ...] | None = None
    """Supervised positions, ascending; None: all from ``start`` on."""

    @property
    def supervised(self) -> range | tuple[int, ...]:
        return range(self.start, len(self.ids)) if self.only is None else self.only


@dataclass(frozen=True, slots=True)
class Materials:
    """What sources draw from."""

    recipe: Recipe
    target: Loaded | Described
    corpus: Path
    responses: Path
    work: Path
    """Where a source may keep what took long to make, batch by batch."""
    here: Ranks


Source = Callable[[Materials], Iterator[Text]]
"""From materials to texts: always the same ones, in the same order, in every process of a launch."""


def gather(materials: Materials) -> list[Text]:
    """The training texts of all sources in their stated shares, in an order that depends on the seed alone."""
    from draftstill.distill.replay import rejections, rollouts

    sources: tuple[Source, ...] = (responses, documents, rollouts, rejections)
    texts = [text for source in sources for text in source(materials)]
    recipe = materials.recipe
    if not texts:
        raise DraftstillError("there is nothing to record for training", key="record.document_tokens", value=recipe.record.document_tokens,
                              mend="set respond.prompts or record.document_tokens above 0")  # fmt: skip
    if recipe.record.mode == "text":
        texts = [t for text in texts if (t := as_written(text)).supervised]
    mixed = [texts[i] for i in sorted(range(len(texts)), key=lambda i: seed_of(recipe.seed, "sequence", i))]
    return bucketed(in_shares(mixed, {str(kind): share for kind, share in recipe.record.shares.items()}), recipe.record.shard_sequences)


def held_out(materials: Materials) -> list[Text]:
    """The texts on which a draft is measured."""
    texts = responses(materials, "heldout")
    return [t for text in texts if (t := as_written(text)).supervised] if materials.recipe.record.mode == "text" else list(texts)


def as_written(text: Text) -> Text:
    """Supervised where the next token was written, for want of a law: not at the end."""
    return replace(text, only=tuple(at for at in text.supervised if at + 1 < len(text.ids)))


def in_shares(texts: list[Text], shares: dict[str, float]) -> list[Text]:
    """As much of each kind as its share of all supervised positions allows; the scarcest kind decides how much there is in all.

    Raises:
        DraftstillError: a share of a kind that there is no text of, or no share for a kind that there is.
    """
    if not shares:
        return texts
    there: dict[str, int] = {}
    for text in texts:
        there[text.kind] = there.get(text.kind, 0) + len(text.supervised)
    shares = {kind: share / sum(shares.values()) for kind, share in shares.items()}
    for kind in shares.keys() - there.keys():
        raise DraftstillError(
            f"there is no text of the kind {kind!r}", key="record.shares", value=shares, mend="leave it out, or give its source more"
        )
    for kind in there.keys() - shares.keys():
        raise DraftstillError(f"no share is given for texts of the kind {kind!r}", key="record.shares", value=shares, mend="give it one")
    whole = min(there[kind] / share for kind, share in shares.items())
    left = {kind: share * whole for kind, share in shares.items()}
    kept = []
    for text in texts:
        if left[text.kind] > 0:
            kept.append(text)
            left[text.kind] -= len(text.supervised)
    return kept


def bucketed(texts: list[Text], per_shard: int, window: int = 16) -> list[Text]:
    """Texts of similar length side by side within windows of ``window`` shards, so that batches hold little padding and shards stay independent.
    The training draws sequences in an order of its own."""
    step = per_shard * window
    return [t for at in range(0, len(texts), step) for t in sorted(texts[at : at + step], key=lambda t: len(t.ids))]


def responses(materials: Materials, side: str = "train") -> Iterator[Text]:
    """Prompt and response as one text. The held-out side is supervised on what the target wrote alone: alpha is measured there.

    Raises:
        DraftstillError: the whole of every response lies behind record.sequence_length.
    """
    record, behind, kept = materials.recipe.record, 0, 0
    for row in read_responses(materials.responses, side):
        ids = [*row["prompt"], *row["response"]]
        if row["finish"] == "eos" and record.mode != "text":
            ids.pop()  # nobody asks what follows the end; where there are no laws, that it came is all that tells of it
        start = row["supervised_from"] if side == "train" else len(row["prompt"]) - 1
        ids = ids[: record.sequence_length]
        if start < len(ids):
            kept += 1
            yield Text(ids, start)
        else:
            behind += 1
    if behind:
        told = f"{behind} of {behind + kept} {side} prompts alone are longer than a scored sequence, so that nothing of their answers is recorded"
        mend = "raise it above respond.chat_tokens + respond.max_new_tokens"
        if not kept:
            raise DraftstillError(told, key="record.sequence_length", value=record.sequence_length, mend=mend)
        if materials.here.main:
            say(f"  record.sequence_length {record.sequence_length}: {told}; {mend}")


def documents(materials: Materials) -> Iterator[Text]:
    """Pieces of training documents, in an order that takes from everywhere, until document_tokens are reached."""
    recipe, tokenizer = materials.recipe, materials.target.tokenizer
    wanted, length = recipe.record.document_tokens, recipe.record.sequence_length
    if not wanted:
        return
    first = opening(tokenizer)
    pieces: list[tuple[int, list[int]]] = []
    for document in read_documents(materials.corpus, "train"):
        ids = encode(tokenizer, document.text)
        step = length - len(first)
        for at in range(0, len(ids), step):
            if len(piece := ids[at : at + step]) >= _SHORTEST:
                pieces.append((seed_of(recipe.seed, "piece", document.id, at), [*first, *piece]))
    pieces.sort(key=lambda p: p[0])
    taken = 0
    for _, piece in pieces:
        if taken >= wanted:
            break
        if len(text := piece[: wanted - taken]) >= 2:
            yield Text(text, kind="document")
        taken += len(piece)
    if taken < wanted and materials.here.main:
        say(f"  record.document_tokens: the training documents hold {taken:,} tokens, not {wanted:,}")


def describe(texts: list[Text]) -> dict[str, Any]:
    """Sequences, tokens and supervised positions of each kind."""
    found: dict[str, Any] = {}
    for text in texts:
        row = found.setdefault(text.kind, {"sequences": 0, "tokens": 0, "supervised": 0})
        row["sequences"] += 1
        row["tokens"] += len(text.ids)
        row["supervised"] += len(text.supervised)
    return dict(sorted(found.items()))
