"""Batches from a recording. The data cursor is the step alone: (seed, step) names every sequence of every batch."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftstill.distill import Recorded, Recording, Teacher, seed_of


class Order:
    """An endless stream of sequence indices, each epoch in its own order."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed
        self._epoch, self._permutation = -1, torch.empty(0, dtype=torch.int64)

    def take(self, start: int, count: int) -> list[int]:
        """Indices start .. start+count-1 of the stream."""
        return [self._at(i) for i in range(start, start + count)]

    def _at(self, i: int) -> int:
        epoch, place = divmod(i, self.count)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(seed_of(self.seed, "epoch", epoch))
            self._epoch, self._permutation = epoch, torch.randperm(self.count, generator=generator)
        return int(self._permutation[place])


def learnable(recording: Recording, *, chat: bool) -> tuple[list[int], dict[str, int]]:
    """Sequences that there is something to learn from, in order, and how many were refused by reason.

    Args:
        chat: all texts other than documents begin with a chat template, which is not learnt: one whose every position is supervised lost its mask.
    """
    kept, refused = [], {"nothing supervised": 0, "chat text supervised throughout": 0}
    unknown = int(recording.mode == "text")  # without laws nothing is known of what would have followed the last token
    for index in range(len(recording)):
        count = recording.supervised(index)
        if not count:
            refused["nothing supervised"] += 1
        elif chat and count >= recording.length(index) - unknown and recording.kind(index) != "document":
            refused["chat text supervised throughout"] += 1
        else:
            kept.append(index)
    return kept, {reason: count for reason, count in refused.items() if count}


def finite(item: Recorded) -> bool:
    """Whether all numbers at a sequence's supervised positions are."""
    return all(bool(torch.isfinite(x[item.rows]).all()) for x in (item.p, item.tail, item.hidden) if x is not None)


@dataclass(slots=True)
class Batch:
    """Right-padded token ids [B, T], the flat places of the supervised positions among B*T, and the target's law there.

    The N positions stand sequence by sequence, in the order that was asked for.
    """

    ids_BT: Tensor
    rows_N: Tensor
    teacher: Teacher
    place_N: Tensor | None = None
    """Counts the supervised positions of each sequence from 0."""
    reference_N: Tensor | None = None
    """A reference draft's loss, for selective distillation."""
    at_BT: Tensor | None = None
    """Packed rows: each token's position in its own sequence, 0 on padding. A row's sequences do not see each other."""

    @property
    def tokens(self) -> int:
        return len(self.rows_N)

    def to(self, device: torch.device) -> Batch:
        """On a device; the target's head is already there."""
        move = lambda x: None if x is None else x.to(device)  # noqa: E731
        return Batch(self.ids_BT.to(device), self.rows_N.to(device), self.teacher.to(device), move(self.place_N), move(self.reference_N),
                     move(self.at_BT))  # fmt: skip


def place(lengths: Sequence[int], count: int) -> list[tuple[int, int]]:
    """(row, first column) of each sequence in ``count`` rows of about the same length: the longest first, each into the shortest row."""
    rows = [(0, row) for row in range(count)]
    found = [(0, 0)] * len(lengths)
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        filled, row = heapq.heappop(rows)
        found[i] = (row, filled)
        heapq.heappush(rows, (filled + lengths[i], row))
    return found


def pack(lengths: Sequence[int], attention: float) -> list[tuple[int, int]]:
    """``place`` in the number of rows that costs least: rows * width * (1 + attention * width), padding included.

    Args:
        attention: what one more column in a row adds to a token's cost, over the cost of its matrices (``module.attention_share``).
    """
    best: tuple[float, list[tuple[int, int]]] | None = None
    for count in range(len(lengths), 0, -1):
        found = place(lengths, count)
        width = max(first + length for (_, first), length in zip(found, lengths, strict=True))
        cost = count * width * (1 + attention * width)
        if best is None or cost < best[0]:
            best = cost, found
    assert best is not None
    return best[1]


def collate(recording: Recording, indices: Sequence[int], head_VH: Tensor | None = None, attention: float | None = None) -> Batch:
    """One batch, a sequence to a row. Causal attention never looks right, so padding on the right needs no mask.

    Args:
        attention: pack several sequences into a row where that is cheaper, by this ``pack`` cost; None: never.

    Of a recording of mode ``live`` the teacher's hidden states are left to whoever asks the target for them (``live.Live.hidden``).
    """
    items = [recording[i] for i in indices]
    lengths = [len(x.tokens) for x in items]
    places = [(b, 0) for b in range(len(items))] if attention is None else pack(lengths, attention)
    height, width = 1 + max(b for b, _ in places), max(first + n for (_, first), n in zip(places, lengths, strict=True))
    ids, at = torch.zeros(height, width, dtype=torch.int64), torch.zeros(height, width, dtype=torch.int64)
    rows = [x.rows for x in items]
    for (b, first), x in zip(places, items, strict=True):
        ids[b, first : first + len(x.tokens)] = x.tokens
        at[b, first : first + len(x.tokens)] = torch.arange(len(x.tokens))
    cut = lambda name: torch.cat([getattr(x, name)[r] for x, r in zip(items, rows, strict=True)])  # noqa: E731
    if recording.mode in ("hidden", "live"):
        teacher = Teacher(hidden_NH=None if recording.mode == "live" else cut("hidden"), head_VH=head_VH)
    else:
        teacher = Teacher(cut("ids"), cut("p"), cut("tail"))
    teacher.token_N = torch.cat([x.written[r] for x, r in zip(items, rows, strict=True)])
    counted = torch.cat([torch.arange(len(r)) for r in rows])
    flat = torch.cat([r + b * width + first for (b, first), r in zip(places, rows, strict=True)])
    return Batch(ids, flat, teacher, counted, at_BT=at if height < len(items) else None)


@dataclass(slots=True)
class Trim:
    """A trimmed training head: the kept ids, and a fresh sample of the others that stands for all of them."""

    rows_V: Tensor
    """Head rows in use."""
    place: Tensor
    """Row of each vocabulary id among the kept; -1 elsewhere."""
    offset_V: Tensor
    """log(R/m) on the m rows sampled from R others, 0 on the kept."""

    def to(self, device: torch.device) -> Trim:
        return Trim(self.rows_V.to(device), self.place.to(device), self.offset_V.to(device))

    def teach(self, teacher: Teacher) -> Teacher:
        """The same law with rows for ids; recorded mass outside the kept rows joins the tail."""
        assert teacher.ids_NK is not None and teacher.p_NK is not None and teacher.tail_N is not None
        ids = torch.where(teacher.ids_NK >= 0, self.place[teacher.ids_NK], -1)
        inside = teacher.p_NK * (ids >= 0)
        return Teacher(ids, inside, teacher.tail_N + (teacher.p_NK - inside).sum(-1))


def trim(ranking: Tensor, keep: int, seed: int, step: int) -> Trim:
    """Keep the ``keep`` most frequent ids; sample a quarter as many of the rest anew for each step.

    The rest must stay in the sum: left out, their logits drift and take a third of q when the whole head is used again
    (measured on the demo pair: alpha .21 with the whole head against .32 without those rows).
    """
    kept, rest = ranking[:keep], ranking[keep:]
    count = min(len(rest), max(1, keep // 4))
    generator = torch.Generator().manual_seed(seed_of(seed, "rest", step))
    sample = rest[torch.randperm(len(rest), generator=generator)[:count]]
    place = torch.full((len(ranking),), -1, dtype=torch.int64)
    place[kept] = torch.arange(keep)
    offset = torch.zeros(keep + count)
    offset[keep:] = torch.log(torch.tensor(len(rest) / count))
    return Trim(torch.cat([kept, sample]), place, offset)
