"""Who guesses: a draft model, prompt lookup, or lookup first and model otherwise. A new drafter is a class of its own.

Shape suffixes: B rows, G proposed tokens, V vocabulary, K kept ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from draftstill.decode.acceptance import Proposal
from draftstill.decode.network import Network, StaticCache, prefill
from draftstill.decode.sampling import Sampling, draw, probabilities, uniforms

Asked = Literal["model", "lookup", "none", "full"]
"""Who proposed for a row; ``full``: nobody, since the draft's context is used up."""


@dataclass(slots=True)
class Row:
    """One text being decoded."""

    tokens: list[int]
    """Prompt and emitted tokens. All but the last are in the target's cache."""
    generator: torch.Generator
    draft_length: int = 0
    """Leading tokens that are in the draft's cache."""
    grams: dict[tuple[int, ...], int] = field(default_factory=dict)
    """Prompt lookup: where the text went on after its last occurrence of these tokens."""
    indexed: int = 0
    """Tokens already in ``grams``."""


class Drafter(Protocol):
    """Proposes tokens for the active rows, which always occupy slots 0 .. B-1."""

    def reserve(self, rows: int, slots: int) -> None:
        """Make room for this many rows of this many positions."""

    def start(self, first: int, rows: Sequence[Row]) -> None:
        """New rows take the slots first, first+1, ..."""

    def move(self, source: int, to: int, row: Row) -> None:
        """A row changes slots."""

    def propose(self, rows: Sequence[Row], limits: Sequence[int], sampling: Sampling) -> tuple[Proposal | None, list[Asked], int]:
        """Up to limits[b] tokens for each row.

        Returns:
            the proposal (None: nobody proposes), who proposed for each row, and how many draft forwards it took.
        """

    def commit(self, row: Row, asked: Asked, accepted: int) -> None:
        """After each round, before the new tokens are appended: ``accepted`` of the row's last proposal stay."""


class ModelDrafter:
    """Tokens sampled from a small model, each from the law q that acceptance is then told."""

    _CATCH_UP = 8
    """Unread tokens beyond this are fed row by row first; all rows then share one narrow forward."""

    def __init__(self, network: Network, gamma: int) -> None:
        self.network, self.gamma = network, gamma
        self.cache: StaticCache | None = None
        self._steps = 0

    def reserve(self, rows: int, slots: int) -> None:
        # Rows that ride along write padding past their end, so the cache is a little longer than any text.
        slots = min(slots, self.network.max_positions) + self._CATCH_UP + self.gamma
        if self.cache is None or self.cache.rows < rows or self.cache.slots < slots:
            self.cache = None  # free the old one first
            self.cache = self.network.new_cache(rows, slots)

    def start(self, first: int, rows: Sequence[Row]) -> None:
        assert self.cache is not None
        # A text that fills the draft's context is never drafted for, so nothing of it is read.
        texts = [r.tokens[:-1] if len(r.tokens) <= self.network.max_positions else [] for r in rows]
        prefill(self.network, self.cache, first, texts)
        for row, text in zip(rows, texts, strict=True):
            row.draft_length = len(text)

    def _feed(self, slot: int, row: Row, upto: int) -> None:
        """Put tokens draft_length .. upto-1 into the cache."""
        assert self.cache is not None
        if upto > row.draft_length:
            ids = torch.tensor([row.tokens[row.draft_length : upto]], device=self.network.device)
            self.network.forward(ids, self.cache.view(slot, 1), [row.draft_length])
            row.draft_length = upto

    def move(self, source: int, to: int, row: Row) -> None:
        assert self.cache is not None
        self.cache.move(source, to, row.draft_length)

    def propose(self, rows: Sequence[Row], limits: Sequence[int], sampling: Sampling) -> tuple[Proposal | None, list[Asked], int]:
        assert self.cache is not None
        network, device = self.network, self.network.device
        room = [network.max_positions - len(r.tokens) + 1 for r in rows]
        counts = [max(0, min(n, self.gamma, space)) for n, space in zip(limits, room, strict=True)]
        asked: list[Asked] = [
            "model" if c else "full" if n > 0 and s <= 0 else "none" for c, n, s in zip(counts, limits, room, strict=True)
        ]
        self._steps = max(counts)
        if self._steps == 0:
            return None, asked, 0
        for slot, (row, count) in enumerate(zip(rows, counts, strict=True)):
            if count and len(row.tokens) - row.draft_length > self._CATCH_UP:
                self._feed(slot, row, len(row.tokens) - 1)
        # A row that does not propose rides along on padding: what it writes lies past its draft_length, so it is garbage.
        pending = [r.tokens[r.draft_length :] if c else [0] for r, c in zip(rows, counts, strict=True)]
        width = max(map(len, pending))
        ids = torch.tensor([p + [0] * (width - len(p)) for p in pending], device=device)
        hidden = network.forward(ids, self.cache, [r.draft_length for r in rows])
        last = torch.tensor([len(p) - 1 for p in pending], device=device)
        hidden = hidden[torch.arange(len(rows), device=device), last]
        ends = [r.draft_length + len(p) for r, p in zip(rows, pending, strict=True)]
        u = None if sampling.greedy else self._noise(rows, counts).to(device)
        tokens: list[Tensor] = []
        laws: list[Tensor] = []
        drawn: list[Tensor] = []
        for i in range(self._steps):
            if i:
                hidden = network.forward(tokens[-1][:, None], self.cache, [e + i - 1 for e in ends])[:, 0]
            logits = network.logits(hidden)
            if u is None:
                picked = logits.argmax(-1)
            else:
                q = probabilities(logits, sampling)
                picked = draw(q, u[:, i])
                laws.append(q)
                drawn.append(q.gather(1, picked[:, None]).squeeze(1))
            tokens.append(picked if network.head_ids is None else network.head_ids[picked])
        for row, count, end in zip(rows, counts, ends, strict=True):
            if count:
                row.draft_length = end
        proposal = Proposal(
            torch.stack(tokens, 1), torch.tensor(counts, device=device),
            torch.stack(drawn, 1) if drawn else None, torch.stack(laws, 1) if laws else None, network.head_ids,
        )  # fmt: skip
        return proposal, asked, self._steps

    def _noise(self, rows: Sequence[Row], counts: Sequence[int]) -> Tensor:
        """[B, gamma] uniforms. A row draws a fixed number, and only when it proposes: its stream never depends on neighbours."""
        nothing = torch.zeros(self.gamma, dtype=torch.float64)
        return torch.stack([uniforms(r.generator, self.gamma) if c else nothing for r, c in zip(rows, counts, strict=True)])

    def commit(self, row: Row, asked: Asked, accepted: int) -> None:
        # The forward for proposed token i put token i-1 into the cache; the last proposed token was never fed.
        if asked == "model":
            row.draft_length += min(accepted, self._steps - 1)


class LookupDrafter:
    """Prompt lookup: where the text's last few tokens stood before, what followed them then. Costs no forward.

    The longest match of ``longest`` .. ``shortest`` tokens wins, its most recent place counts.
    """

    def __init__(self, gamma: int, vocab: int, device: torch.device, *, longest: int = 3, shortest: int = 2) -> None:
        self.gamma, self.vocab, self.device = gamma, vocab, device
        self.longest, self.shortest = longest, shortest

    def reserve(self, rows: int, slots: int) -> None: ...

    def start(self, first: int, rows: Sequence[Row]) -> None: ...

    def move(self, source: int, to: int, row: Row) -> None: ...

    def find(self, row: Row) -> list[int]:
        """The tokens that followed the best match; none where there is no match."""
        tokens, size = row.tokens, len(row.tokens)
        for end in range(max(row.indexed, 1), size):  # a gram that ends at the text's end has no continuation yet
            for n in range(self.shortest, min(self.longest, end) + 1):
                row.grams[tuple(tokens[end - n : end])] = end
        row.indexed = size
        for n in range(min(self.longest, size - 1), self.shortest - 1, -1):
            at = row.grams.get(tuple(tokens[size - n :]))
            if at is not None:
                # Never hand on an id outside the vocabulary, whatever the prompt held.
                found = tokens[at : at + self.gamma]
                return found[: next((i for i, t in enumerate(found) if not 0 <= t < self.vocab), len(found))]
        return []

    def propose(self, rows: Sequence[Row], limits: Sequence[int], sampling: Sampling) -> tuple[Proposal | None, list[Asked], int]:
        found = [self.find(r)[: max(0, n)] for r, n in zip(rows, limits, strict=True)]
        asked: list[Asked] = ["lookup" if f else "none" for f in found]
        width = max(map(len, found))
        if width == 0:
            return None, asked, 0
        tokens = torch.tensor([f + [0] * (width - len(f)) for f in found], device=self.device)
        counts = torch.tensor([len(f) for f in found], device=self.device)
        return Proposal(tokens, counts, certain_B=torch.ones(len(rows), dtype=torch.bool, device=self.device)), asked, 0

    def commit(self, row: Row, asked: Asked, accepted: int) -> None: ...


class CompositeDrafter:
    """Lookup where the text repeats itself, the model elsewhere."""

    def __init__(self, lookup: LookupDrafter, model: ModelDrafter) -> None:
        self.lookup, self.model = lookup, model

    def reserve(self, rows: int, slots: int) -> None:
        self.model.reserve(rows, slots)

    def start(self, first: int, rows: Sequence[Row]) -> None:
        self.model.start(first, rows)

    def move(self, source: int, to: int, row: Row) -> None:
        self.model.move(source, to, row)

    def propose(self, rows: Sequence[Row], limits: Sequence[int], sampling: Sampling) -> tuple[Proposal | None, list[Asked], int]:
        first, asked, _ = self.lookup.propose(rows, limits, sampling)
        rest = [0 if a == "lookup" else n for a, n in zip(asked, limits, strict=True)]
        if not any(rest):
            return first, asked, 0
        second, asked_model, steps = self.model.propose(rows, rest, sampling)
        asked = [a if a == "lookup" else m for a, m in zip(asked, asked_model, strict=True)]
        if first is None or second is None:
            return (second if first is None else first), asked, steps
        return _merge(first, second, sampling), asked, steps

    def commit(self, row: Row, asked: Asked, accepted: int) -> None:
        self.model.commit(row, asked, accepted)


def _merge(lookup: Proposal, model: Proposal, sampling: Sampling) -> Proposal:
    """Rows that lookup answered from the one, the others from the other."""
    certain_B = lookup.counts_B > 0
    width = max(lookup.tokens_BG.shape[1], model.tokens_BG.shape[1])
    wide = lambda t, fill=0: torch.nn.functional.pad(t, (0, width - t.shape[1]), value=fill)  # noqa: E731
    tokens_BG = torch.where(certain_B[:, None], wide(lookup.tokens_BG), wide(model.tokens_BG))
    merged = Proposal(tokens_BG, torch.where(certain_B, lookup.counts_B, model.counts_B), certain_B=certain_B, ids_K=model.ids_K)
    if not sampling.greedy:
        assert model.q_drawn_BG is not None and model.q_BGK is not None
        merged.q_drawn_BG = torch.where(certain_B[:, None], 1.0, wide(model.q_drawn_BG, 1))
        merged.q_BGK = torch.nn.functional.pad(model.q_BGK, (0, 0, 0, width - model.q_BGK.shape[1]))
    return merged
