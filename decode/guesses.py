"""Drafters that need no model: prompt lookup and a bigram table. A new one is a class with ``guess``.

Their tokens are not sampled, so q is one-hot at each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from draftstill.decode.acceptance import Proposal
from draftstill.decode.drafters import Asked, Batch, Offer, Row


class GuessDrafter:
    """What all of them share: turning one row's guess into a proposal."""

    name: ClassVar[Asked]

    def __init__(self, gamma: int, vocab: int, device: torch.device) -> None:
        self.gamma, self.vocab, self.device = gamma, vocab, device

    def guess(self, row: Row) -> Sequence[int]:
        """The tokens that follow the row's text, as many as there are; none where there is no guess."""
        raise NotImplementedError

    def guesses(self, rows: Sequence[Row], limits: Sequence[int]) -> list[list[int]]:
        """Guesses of all rows, none longer than its limit or gamma."""
        found = []
        for row, limit in zip(rows, limits, strict=True):
            tokens = list(self.guess(row)[: max(0, min(limit, self.gamma))]) if limit > 0 else []
            # Never hand on an id outside the vocabulary, whatever the prompt held.
            found.append(tokens[: next((i for i, t in enumerate(tokens) if not 0 <= t < self.vocab), len(tokens))])
        return found

    def reserve(self, rows: int, slots: int, source: int = 0) -> None: ...

    def start(self, first: int, rows: Sequence[Row]) -> None: ...

    def move(self, source: int, to: int, row: Row) -> None: ...

    def propose(self, batch: Batch) -> Offer:
        found = self.guesses(batch.rows, batch.limits)
        asked: list[Asked] = [self.name if f else "none" for f in found]
        width = max(map(len, found))
        if width == 0:
            return Offer(None, asked, 0)
        tokens = torch.tensor([f + [0] * (width - len(f)) for f in found], device=self.device)
        counts = torch.tensor([len(f) for f in found], device=self.device)
        return Offer(Proposal(tokens, counts, certain_B=torch.ones(len(found), dtype=torch.bool, device=self.device)), asked, 0)

    def commit(self, row: Row, asked: Asked, proposed: int, accepted: int) -> None: ...

    def describe(self) -> dict[str, object]:
        return {"drafter": self.name, "gamma": self.gamma}


class LookupDrafter(GuessDrafter):
    """Prompt lookup: where the text's last few tokens stood before, what followed them then.

    The longest match of ``longest`` .. ``shortest`` tokens wins, its most recent place counts.
    """

    name = "lookup"

    def __init__(self, gamma: int, vocab: int, device: torch.device, *, longest: int = 3, shortest: int = 2) -> None:
        super().__init__(gamma, vocab, device)
        self.longest, self.shortest = longest, shortest

    def guess(self, row: Row) -> Sequence[int]:
        tokens, size = row.tokens, len(row.tokens)
        for end in range(max(row.indexed, 1), size):  # a gram that ends at the text's end has no continuation yet
            for n in range(self.shortest, min(self.longest, end) + 1):
                row.grams[tuple(tokens[end - n : end])] = end
        row.indexed = size
        for n in range(min(self.longest, size - 1), self.shortest - 1, -1):
            at = row.grams.get(tuple(tokens[size - n :]))
            if at is not None:
                return tokens[at : at + self.gamma]
        return []

    def describe(self) -> dict[str, object]:
        return {**super().describe(), "longest": self.longest, "shortest": self.shortest}


class BigramDrafter(GuessDrafter):
    """A table with the most frequent successor of each token: the weakest drafter worth the name, and a control.

    Leviathan et al. (arXiv 2211.17192, section 4.1) report 1.25x with one.
    """

    name = "bigram"

    def __init__(self, table_V: Tensor, gamma: int, device: torch.device) -> None:
        super().__init__(gamma, len(table_V), device)
        self.table: list[int] = table_V.tolist()

    def guess(self, row: Row) -> Sequence[int]:
        found: list[int] = []
        last = row.tokens[-1]
        while len(found) < self.gamma and 0 <= last < self.vocab and (last := self.table[last]) >= 0:
            found.append(last)
        return found


def bigram_table(texts: Iterable[Sequence[int]], vocab: int) -> Tensor:
    """For each id its most frequent successor in the texts (of equals the smallest id), -1 where it was never followed; int64 [V]."""
    firsts, seconds = [], []
    for text in texts:
        ids = torch.tensor(text, dtype=torch.int64)
        firsts.append(ids[:-1])
        seconds.append(ids[1:])
    table = torch.full((vocab,), -1, dtype=torch.int64)
    if not firsts:
        return table
    pairs, counts = (torch.cat(firsts) * vocab + torch.cat(seconds)).unique(return_counts=True)
    # Rarest first, of equals the largest id first: what is written last stays.
    order = (counts * (vocab + 1) - pairs % vocab).argsort()
    for pair in pairs[order].tolist():
        table[pair // vocab] = pair % vocab
    return table
