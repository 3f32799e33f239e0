"""Sources of states: what the recording scores. A source yields texts; whose laws are recorded on them is the scorer's business.

Where a text stops at a limit its law is cut with it, so a source never has to know how the recording is laid out.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftstill.corpus import iter_documents
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
_SPARE = 8
"""Places looked at for each piece that is wanted: a text has several bytes per token, so that most places beyond its end are none."""


@dataclass(frozen=True, slots=True)
class Text:
    """Token ids, and the positions whose next token's law is learnt from."""

    ids: Sequence[int]
    """An ``array``, where texts are many: 4 bytes a token."""
    start: int = 0
    """First supervised position."""
    kind: str = "response"
    """One of ``shards.KINDS``."""
    only: Sequence[int] | None = None
    """Supervised positions, ascending; None: all from ``start`` on."""
    after: int = -1
    """The token that was written behind the last one; -1: none. Its own law is nobody's business, but ``ce`` learns from it, and so where to end."""

    @property
    def supervised(self) -> Sequence[int]:
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
    last = len(text.ids) - 1
    only = range(text.start, max(text.start, last)) if text.only is None else [at for at in text.only if at < last]
    return replace(text, only=only, after=-1)


def cut_off(ids: Sequence[int], length: int, *, ended: bool) -> tuple[array[int], int]:
    """The first ``length`` tokens of a text, and the one behind them (-1: none). A text that ended does so with a token that nobody asks to go on from:
    it is only ever behind."""
    end = min(length, len(ids) - ended)
    return array("i", ids[:end]), ids[end] if end < len(ids) else -1


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
        # Where there are no laws, that the end came is all that tells of it.
        ended = row["finish"] == "eos" and record.mode != "text"
        ids, after = cut_off([*row["prompt"], *row["response"]], record.sequence_length, ended=ended)
        start = row["supervised_from"] if side == "train" else len(row["prompt"]) - 1
        if start < len(ids):
            kept += 1
            yield Text(ids, start, after=after)
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
    recipe = materials.recipe
    wanted, length = recipe.record.document_tokens, recipe.record.sequence_length
    if not wanted:
        return
    first = opening(materials.target.tokenizer)
    taken = 0
    for piece, after in _pieces(materials, wanted, length - len(first), len(first)):
        whole = [*first, *piece]
        end = min(len(whole), wanted - taken)
        if end >= 2:
            yield Text(array("i", whole[:end]), kind="document", after=whole[end] if end < len(whole) else after)
        taken += len(whole)
    if taken < wanted and materials.here.main:
        say(f"  record.document_tokens: the training documents hold {taken:,} tokens, not {wanted:,}")


def _pieces(materials: Materials, wanted: int, step: int, lead: int) -> list[tuple[array[int], int]]:
    """The first pieces by a number that hangs on document and place alone, enough for ``wanted`` tokens with ``lead`` more for each; and what follows
    each one in its document (-1: nothing). Pieces are ``step`` tokens long, the last one of a document at least _SHORTEST.

    Where a document ends is known once it is tokenised, so more places than are wanted are drawn, up to one token per byte, and only the
    documents of those are tokenised. A corpus has no bound; what is held is in proportion to ``wanted``.
    """
    seed, tokenizer = materials.recipe.seed, materials.target.tokenizer
    count = _SPARE * (wanted // (step + lead) + 1)
    while True:
        places = (
            (seed_of(seed, "piece", document.id, at), number, at)
            for number, document in enumerate(iter_documents(materials.corpus, "train"))
            for at in range(0, len(document.text.encode()), step)
        )
        drawn = heapq.nsmallest(count, places)
        of: dict[int, list[int]] = {}
        for _, number, at in drawn:
            of.setdefault(number, []).append(at)
        there: dict[tuple[int, int], tuple[array[int], int]] = {}
        for number, document in enumerate(iter_documents(materials.corpus, "train")):
            if number in of:
                ids = encode(tokenizer, document.text)
                there |= {
                    (number, at): (array("i", ids[at : at + step]), ids[at + step] if at + step < len(ids) else -1)
                    for at in of[number]
                    if min(step, len(ids) - at) >= _SHORTEST
                }
        found, held = [], 0
        for _, number, at in drawn:
            if held < wanted and (number, at) in there:
                found.append(there[number, at])
                held += lead + len(found[-1][0])
        if held >= wanted or len(drawn) < count:
            return found
        count *= 4


def describe(texts: list[Text]) -> dict[str, Any]:
    """Sequences, tokens and supervised positions of each kind."""
    found: dict[str, Any] = {}
    for text in texts:
        row = found.setdefault(text.kind, {"sequences": 0, "tokens": 0, "supervised": 0})
        row["sequences"] += 1
        row["tokens"] += len(text.ids)
        row["supervised"] += len(text.supervised)
    return dict(sorted(found.items()))
