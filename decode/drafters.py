"""Who guesses: the protocol, a draft model, and guesses first with a model otherwise. Drafters without a model: ``guesses``.

Shape suffixes: B rows, G proposed tokens, V vocabulary, K kept ids.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from draftstill.decode.acceptance import Proposal
from draftstill.decode.adaptive import FixedGamma, GammaPolicy, Judged
from draftstill.decode.network import Network, StaticCache, batches, prefill
from draftstill.decode.round import draft_block
from draftstill.decode.sampling import Law, Sampling, Text
from draftstill.decode.trace import Round

if TYPE_CHECKING:
    from draftstill.decode.guesses import GuessDrafter

Asked = Literal["model", "lookup", "bigram", "none", "idle", "full"]
"""Who proposed for a row. Nobody: ``none`` (no guess, or no room in the text), ``idle`` (the policy chose 0), ``full`` (the
draft's context is used up)."""
PROPOSERS = ("model", "lookup", "bigram")


@dataclass(slots=True)
class Row:
    """One text being decoded."""

    tokens: list[int]
    """Prompt and emitted tokens; of an encoder-decoder, start and emitted tokens. All but the last are in the target's cache."""
    generator: torch.Generator
    sampling: Sampling = field(default_factory=lambda: Sampling(0.0))
    source: list[int] = field(default_factory=list)
    """What an encoder reads."""
    prompt_length: int = 0
    draft_length: int = 0
    """Leading tokens that are in the draft's cache."""
    history: Judged = field(default_factory=Judged)
    grams: dict[tuple[int, ...], int] = field(default_factory=dict)
    """Prompt lookup: where the text went on after its last occurrence of these tokens."""
    indexed: int = 0
    """Tokens already in ``grams``."""


@dataclass(slots=True)
class Batch:
    """What a drafter is asked: tokens for the active rows, which always occupy slots 0 .. B-1."""

    rows: Sequence[Row]
    limits: Sequence[int]
    """Most tokens worth proposing for each row; not above the decoder's gamma."""
    law: Callable[[Tensor | None], Law]
    """The rows' law over all ids (None) or over a draft's kept ids."""
    u_BG: Tensor | None = None
    """Float64 uniforms from each row's own stream, gamma of them."""
    text: Text | None = None
    """The rows' texts, if a law looks at them; drafted tokens are written behind them."""


@dataclass(slots=True)
class Offer:
    """What a drafter answers."""

    proposal: Proposal | None
    """None: nobody proposes."""
    asked: list[Asked]
    steps: int
    """Draft forwards that it took."""


class Drafter(Protocol):
    """Proposes tokens."""

    gamma: int
    """Most tokens it proposes in a round."""

    def reserve(self, rows: int, slots: int, source: int = 0) -> None:
        """Make room for this many rows of this many positions."""

    def start(self, first: int, rows: Sequence[Row]) -> None:
        """New rows take the slots first, first+1, ..."""

    def move(self, source: int, to: int, row: Row) -> None:
        """A row changes slots."""

    def propose(self, batch: Batch) -> Offer:
        """Up to limits[b] tokens for each row."""

    def commit(self, row: Row, asked: Asked, proposed: int, accepted: int) -> None:
        """After each round, before the new tokens are appended: ``accepted`` of the row's ``proposed`` tokens stay."""

    def describe(self) -> dict[str, object]:
        """For the trace: what it is and its options."""


class ModelDrafter:
    """Tokens sampled from a small model, each from the law q that acceptance is then told.

    Args:
        gamma: tokens per round; with a ``policy``, its own largest.
        policy: chooses gamma row by row.
        min_confidence: stop a row's block once the draft's largest probability falls below this; 0 never stops.
    """

    _CATCH_UP = 8
    """Unread tokens beyond this are read beforehand; all rows then share one narrow forward."""

    def __init__(self, network: Network, gamma: int, *, policy: GammaPolicy | None = None, min_confidence: float = 0.0) -> None:
        self.network, self.policy = network, policy or FixedGamma(gamma)
        self.gamma, self.min_confidence = self.policy.most, min_confidence
        self.cache: StaticCache | None = None
        self.steps = 0
        """Forwards of the last block."""

    def reserve(self, rows: int, slots: int, source: int = 0) -> None:
        # Rows that ride along write padding past their end, so the cache is a little longer than any text.
        slots = min(slots, self.network.max_positions) + self._CATCH_UP + self.gamma
        if not has_room(self.cache, rows, slots, source):
            self.cache = None  # free the old one first
            self.cache = self.network.new_cache(rows, slots, source)

    def start(self, first: int, rows: Sequence[Row]) -> None:
        assert self.cache is not None
        if self.network.encoder:
            self.network.read(self.cache, first, [r.source for r in rows])
        # A text that fills the draft's context is never drafted for, so nothing of it is read; nor yet one that the policy leaves alone.
        reads = [len(r.tokens) <= self.network.max_positions and self.policy.choose(r.history) > 0 for r in rows]
        texts = [r.tokens[:-1] if now else [] for r, now in zip(rows, reads, strict=True)]
        prefill(self.network, self.cache, first, texts)
        for row, text in zip(rows, texts, strict=True):
            row.draft_length = len(text)

    def catch_up(self, slot: int, row: Row, unread: int) -> None:
        """If more than so many tokens are not in the cache yet, read all but the last."""
        if len(row.tokens) - row.draft_length > unread:
            self._read(slot, [row])

    def _read(self, first: int, rows: Sequence[Row]) -> None:
        """All but the last token of the rows in these neighbouring slots, together."""
        assert self.cache is not None
        for at, group, width in batches([r.tokens[r.draft_length : -1] for r in rows]):
            some = rows[at : at + len(group)]
            # A row that missed less begins further back, on what it has read: behind its end there may be no room for padding.
            starts = [max(0, len(r.tokens) - 1 - width) for r in some]
            known = [r.tokens[s : min(s + width, len(r.tokens) - 1)] for r, s in zip(some, starts, strict=True)]
            ids = torch.tensor([k + [0] * (width - len(k)) for k in known], device=self.network.device)
            self.network.forward(ids, self.cache.view(first + at, len(some)), starts)
            for row in some:
                row.draft_length = len(row.tokens) - 1

    def move(self, source: int, to: int, row: Row) -> None:
        assert self.cache is not None
        self.cache.move(source, to, row.draft_length)

    def caps(self, rows: Sequence[Row], limits: Sequence[int]) -> tuple[list[int], list[Asked]]:
        """Tokens to draft for each row, and who is asked."""
        counts: list[int] = []
        asked: list[Asked] = []
        for row, limit in zip(rows, limits, strict=True):
            room = self.network.max_positions - len(row.tokens) + 1
            count = max(0, min(limit, room))
            if count:
                count = min(count, self.policy.choose(row.history))
            counts.append(count)
            asked.append("model" if count else "none" if limit <= 0 else "full" if room <= 0 else "idle")
        return counts, asked

    def propose(self, batch: Batch) -> Offer:
        assert self.cache is not None
        network, device, rows = self.network, self.network.device, batch.rows
        counts, asked = self.caps(rows, batch.limits)
        steps, self.steps = max(counts), 0
        if steps == 0:
            return Offer(None, asked, 0)
        behind = [
            s
            for s, (row, count) in enumerate(zip(rows, counts, strict=True))
            if count and len(row.tokens) - row.draft_length > self._CATCH_UP
        ]
        for _, run in itertools.groupby(enumerate(behind), lambda place: place[1] - place[0]):
            slots = [slot for _, slot in run]
            self._read(slots[0], rows[slots[0] : slots[-1] + 1])
        # A row that does not propose rides along on padding: what it writes lies past its draft_length, so it is garbage.
        pending = [r.tokens[r.draft_length :] if c else [0] for r, c in zip(rows, counts, strict=True)]
        width = max(map(len, pending))
        ids = torch.tensor([p + [0] * (width - len(p)) for p in pending], device=device)
        last = torch.tensor([len(p) - 1 for p in pending], device=device) if width > 1 else None
        ends = [r.draft_length + len(p) for r, p in zip(rows, pending, strict=True)]
        proposal, self.steps = draft_block(
            network, self.cache, ids, [r.draft_length for r in rows], last, ends, torch.tensor(counts, device=device), steps,
            batch.law(network.head_ids), batch.u_BG, batch.text, min_confidence=self.min_confidence, stop_early=True,
        )  # fmt: skip
        for row, count, end in zip(rows, counts, ends, strict=True):
            if count:
                row.draft_length = end
        return Offer(proposal if proposal.tokens_BG.shape[1] else None, asked, self.steps)

    def commit(self, row: Row, asked: Asked, proposed: int, accepted: int) -> None:
        if asked in ("model", "idle"):
            self.policy.learn(row.history, proposed, accepted)
        # The forward for proposed token i put token i-1 into the cache; the last proposed token was never fed.
        if asked == "model":
            row.draft_length += min(accepted, self.steps - 1)

    def describe(self) -> dict[str, object]:
        return {"drafter": "model", **self.policy.describe(), "min_confidence": self.min_confidence}


class CompositeDrafter:
    """A guess where there is one (prompt lookup where the text repeats itself), the model elsewhere."""

    def __init__(self, guesser: GuessDrafter, model: ModelDrafter) -> None:
        self.guesser, self.model = guesser, model
        self.gamma = max(guesser.gamma, model.gamma)

    def reserve(self, rows: int, slots: int, source: int = 0) -> None:
        self.model.reserve(rows, slots)

    def start(self, first: int, rows: Sequence[Row]) -> None:
        self.model.start(first, rows)

    def move(self, source: int, to: int, row: Row) -> None:
        self.model.move(source, to, row)

    def propose(self, batch: Batch) -> Offer:
        first = self.guesser.propose(batch)
        rest = [0 if a == self.guesser.name else n for a, n in zip(first.asked, batch.limits, strict=True)]
        if not any(rest):
            return first
        second = self.model.propose(replace(batch, limits=rest))
        asked = [a if a == self.guesser.name else m for a, m in zip(first.asked, second.asked, strict=True)]
        if first.proposal is None or second.proposal is None:
            return Offer(second.proposal if first.proposal is None else first.proposal, asked, second.steps)
        return Offer(merge(first.proposal, second.proposal), asked, second.steps)

    def commit(self, row: Row, asked: Asked, proposed: int, accepted: int) -> None:
        self.model.commit(row, asked, proposed, accepted)

    def describe(self) -> dict[str, object]:
        return {"drafter": "composite", "first": self.guesser.describe(), "otherwise": self.model.describe()}


def merge(guess: Proposal, model: Proposal) -> Proposal:
    """Rows with a guess from the one, the others from the other."""
    certain_B = guess.counts_B > 0
    width = max(guess.tokens_BG.shape[1], model.tokens_BG.shape[1])

    def wide(t: Tensor, fill: float = 0) -> Tensor:
        return F.pad(t, (0, width - t.shape[1]), value=fill)

    tokens_BG = torch.where(certain_B[:, None], wide(guess.tokens_BG), wide(model.tokens_BG))
    merged = Proposal(tokens_BG, torch.where(certain_B, guess.counts_B, model.counts_B), certain_B=certain_B, ids_K=model.ids_K)
    if model.q_drawn_BG is not None and model.q_BGK is not None:  # None: a greedy law asks for no q
        merged.q_drawn_BG = torch.where(certain_B[:, None], 1.0, wide(model.q_drawn_BG, 1))
        merged.q_BGK = F.pad(model.q_BGK, (0, 0, 0, width - model.q_BGK.shape[1]))
    return merged


def has_room(cache: StaticCache | None, rows: int, slots: int, source: int) -> bool:
    """Whether a cache is large enough; ``source`` matters to encoder-decoders only."""
    return cache is not None and cache.rows >= rows and cache.slots >= slots and getattr(cache, "source", source) >= source


def share_time(rounds: Sequence[Round], asked: Sequence[Asked], steps: int, seconds: Sequence[float]) -> None:
    """Give each row its share of a round's time: drafting to those that asked the model (all, if none did), the rest evenly.

    Args:
        steps: draft forwards of the round, wasted ones included.
        seconds: draft, verify, sample, host.
    """
    drafting = [a == "model" for a in asked]
    if not any(drafting):
        drafting = [True] * len(rounds)
    draft_s, *rest = seconds
    for r, mine in zip(rounds, drafting, strict=True):
        r.verify_s, r.sample_s, r.host_s = (t / len(rounds) for t in rest)
        r.draft_s, r.draft_steps = (draft_s / sum(drafting), steps) if mine else (0.0, 0)
