"""What a target is tuned on: documents and conversations as token ids, cut to length and packed side by side.

Shape suffixes: B sequences, T positions, N learnt positions.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftstill.corpus import Document
from draftstill.distill import Teacher, chat_turn, encode, seed_of


@dataclass(frozen=True, slots=True)
class Piece:
    """Token ids, and which of them are learnt."""

    ids: list[int]
    learnt: list[bool]

    @property
    def count(self) -> int:
        return sum(self.learnt)


@dataclass(slots=True)
class Lesson:
    """A batch of packed sequences. Positions begin anew with each piece, by which attention keeps pieces apart."""

    ids_BT: Tensor
    positions_BT: Tensor
    rows_N: Tensor
    """Flat places, among B*T, of the positions whose next token is learnt."""
    token_N: Tensor

    def teacher(self) -> Teacher:
        """For the loss ``ce``: nothing but the written tokens is known."""
        count, device = len(self.token_N), self.token_N.device
        return Teacher(torch.full((count, 1), -1, device=device), torch.zeros(count, 1, device=device), torch.ones(count, device=device),
                       token_N=self.token_N)  # fmt: skip

    def to(self, device: torch.device) -> Lesson:
        return Lesson(*(x.to(device) for x in (self.ids_BT, self.positions_BT, self.rows_N, self.token_N)))


def pieces(documents: Iterable[Document], tokenizer: Any, length: int, seed: int, *, limit: int | None = None, ends: bool = True,
           refused: list[str] | None = None) -> list[Piece]:  # fmt: skip
    """Pieces of at most ``length`` tokens in an order that takes from everywhere, until ``limit`` tokens are reached. In memory are those alone:
    what they are follows from the names of the documents, not from the order in which they come.

    Args:
        ends: let a document end with the tokenizer's EOS, so that the end is learnt, too.
        refused: filled with the ids of conversations that the chat template does not take.
    """
    # The last place of the order stands at the top, so that it leaves first.
    found: list[tuple[int, int, Piece]] = []
    taken = number = 0
    for document in documents:
        try:
            whole = _whole(document, tokenizer, ends)
        except Exception:
            # A template is foreign code. Of a plain document nothing is refused.
            if refused is None or not document.messages:
                raise
            refused.append(document.id)
            continue
        for at in range(0, len(whole.ids) - 1, length - 1):  # a piece begins with the last token of the one before: none goes unlearnt
            piece = Piece(whole.ids[at : at + length], [False, *whole.learnt[at + 1 : at + length]])
            if piece.count:
                heapq.heappush(found, (-seed_of(seed, "lesson", document.id, at), -number, piece))
                taken, number = taken + len(piece.ids), number + 1
        while limit is not None and found and taken - len(found[0][2].ids) >= limit:
            taken -= len(heapq.heappop(found)[2].ids)
    return [piece for _, _, piece in sorted(found, key=lambda entry: entry[:2], reverse=True)]


def _whole(document: Document, tokenizer: Any, ends: bool) -> Piece:
    if document.messages and getattr(tokenizer, "chat_template", None):
        return _conversation(document, tokenizer)
    ids = list(tokenizer(document.text)["input_ids"])  # with the BOS, where the tokenizer sets one
    eos = tokenizer.eos_token_id
    if ends and eos is not None and ids[-1:] != [eos]:
        ids.append(eos)
    return Piece(ids, [True] * len(ids))


def _conversation(document: Document, tokenizer: Any) -> Piece:
    """The chat template's text. Learnt is what the model writes there; all of it where a template rewrites earlier turns."""
    messages = [chat_turn(m) for m in document.messages or ()]

    def text(upto: int, prompt: bool) -> str:
        return str(tokenizer.apply_chat_template(messages[:upto], tools=document.tools, add_generation_prompt=prompt, tokenize=False))

    ids: list[int] = []
    learnt: list[bool] = []
    whole, done = text(len(messages), False), 0
    for turn, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        before, after = text(turn, True), text(turn + 1, False)
        if not (whole.startswith(after) and after.startswith(before) and len(before) >= done):
            ids = encode(tokenizer, whole)
            return Piece(ids, [True] * len(ids))
        for part, learn in ((whole[done : len(before)], False), (whole[len(before) : len(after)], True)):
            found = encode(tokenizer, part)
            ids, learnt, done = [*ids, *found], [*learnt, *[learn] * len(found)], len(after)
    return Piece(ids, learnt)


def packed(found: Sequence[Piece], length: int) -> list[list[Piece]]:
    """Sequences of whole pieces, in order, each filled while the next piece fits."""
    rows: list[list[Piece]] = []
    room = 0
    for piece in found:
        if len(piece.ids) > room:
            rows.append([])
            room = length
        rows[-1].append(piece)
        room -= len(piece.ids)
    return rows


def lesson(rows: Sequence[Sequence[Piece]]) -> Lesson:
    """One batch, padded on the right: causal attention never looks there."""
    width = max(sum(len(p.ids) for p in row) for row in rows)
    ids, positions = torch.zeros(len(rows), width, dtype=torch.int64), torch.zeros(len(rows), width, dtype=torch.int64)
    places: list[int] = []
    tokens: list[int] = []
    for b, row in enumerate(rows):
        at = 0
        for piece in row:
            end = at + len(piece.ids)
            ids[b, at:end], positions[b, at:end] = torch.tensor(piece.ids), torch.arange(len(piece.ids))
            learnt = [i for i in range(1, len(piece.ids)) if piece.learnt[i]]
            places += [b * width + at + i - 1 for i in learnt]
            tokens += [piece.ids[i] for i in learnt]
            at = end
        positions[b, at:] = torch.arange(width - at)
    return Lesson(ids, positions, torch.tensor(places), torch.tensor(tokens))


def in_batches(rows: Sequence[list[Piece]], size: int) -> Iterator[Lesson]:
    for at in range(0, len(rows), size):
        yield lesson(rows[at : at + size])
