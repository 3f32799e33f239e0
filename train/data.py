"""Batches from a recording. The data cursor is the step alone: (seed, step) names every sequence of every batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftstill.distill import Recording, Teacher, seed_of


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


@dataclass(slots=True)
class Batch:
    """Right-padded token ids [B, T], the flat places of the supervised positions among B*T, and the target's law there."""

    ids_BT: Tensor
    rows_N: Tensor
    teacher: Teacher
    place_N: Tensor | None = None
    """Counts the supervised positions of each sequence from 0."""
    reference_N: Tensor | None = None
    """A reference draft's loss, for selective distillation."""

    @property
    def tokens(self) -> int:
        return len(self.rows_N)

    def to(self, device: torch.device) -> Batch:
        """On a device; the target's head is already there."""
        move = lambda x: None if x is None else x.to(device)  # noqa: E731
        return Batch(self.ids_BT.to(device), self.rows_N.to(device), self.teacher.to(device), move(self.place_N), move(self.reference_N))


def supervised(recording: Recording, index: int) -> int:
    """Supervised positions of a sequence."""
    return recording.supervised(index)


def collate(recording: Recording, indices: Sequence[int], head_VH: Tensor | None = None) -> Batch:
    """One batch. Causal attention never looks right, so padding on the right needs no mask."""
    items = [recording[i] for i in indices]
    width = max(len(x.tokens) for x in items)
    ids = torch.zeros(len(items), width, dtype=torch.int64)
    rows = [x.rows for x in items]
    for b, x in enumerate(items):
        ids[b, : len(x.tokens)] = x.tokens
    cut = lambda name: torch.cat([getattr(x, name)[r] for x, r in zip(items, rows, strict=True)])  # noqa: E731
    hidden = recording.mode == "hidden"
    teacher = Teacher(hidden_NH=cut("hidden"), head_VH=head_VH) if hidden else Teacher(cut("ids"), cut("p"), cut("tail"))
    teacher.token_N = torch.cat([torch.nn.functional.pad(x.tokens[1:], (0, 1), value=-1)[r] for x, r in zip(items, rows, strict=True)])
    place = torch.cat([torch.arange(len(r)) for r in rows])
    return Batch(ids, torch.cat([r + b * width for b, r in enumerate(rows)]), teacher, place)


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
