"""A round on device state: two bodies of static shapes, the draft block and verify + accept + commit.

All rows of the cache take part in each; a free slot computes garbage that nobody reads. Neither body reads a value back to the host.
Shape suffixes: R slots, G most proposed tokens, g proposed tokens of one program, N uniforms per row, K ids that the draft can propose.
"""

from __future__ import annotations

import copy
import weakref
from typing import TYPE_CHECKING

import torch

from draftstill.decode.acceptance import Proposal
from draftstill.decode.network import StaticCache
from draftstill.decode.programs import parts
from draftstill.decode.round import accept, draft_block, verify
from draftstill.decode.sampling import Law, Text

if TYPE_CHECKING:
    from draftstill.decode.engine import Decoder


class DeviceRound:
    """Texts, lengths, limits, noise and proposals of all slots, and the bodies that work on them."""

    def __init__(self, decoder: Decoder, cache: StaticCache) -> None:
        found = parts(decoder.drafter)
        assert found is not None
        self.decoder, self.cache = decoder, cache
        self.guesser, self.model = found
        # Weak: an outgrown cache is freed before its successor is made.
        self._draft_cache = None if self.model is None or self.model.cache is None else weakref.ref(self.model.cache)
        device = self.device = decoder.target.device
        R, G = cache.rows, decoder.gamma
        kept = None if self.model is None else self.model.network.head_ids
        whole = lambda *shape: torch.zeros(shape, dtype=torch.int64, device=device)  # noqa: E731
        self.text = Text(whole(R, cache.slots + G + 1), whole(R) + 1, whole(R))
        self.gamma = 0 if self.model is None else min(G, self.model.gamma)
        """Most tokens drafted by the model; guesses may be longer."""
        self.limit_R, self.cap_R = whole(R), whole(R) + self.gamma
        self.u_RN = torch.zeros(R, 2 * G + 1, dtype=torch.float64, device=device)
        self.guess_RG, self.guesses_R = whole(R, G), whole(R)
        self.proposal = Proposal(whole(R, G), whole(R), ids_K=kept)
        self.report_R = whole(R, 3 + G)

    def fits(self, cache: StaticCache) -> bool:
        """Whether the buffers of the programs are still those of the caches."""
        return cache is self.cache and (self._draft_cache is None or (self.model is not None and self.model.cache is self._draft_cache()))

    def draft(self, g: int, window: int, law: Law) -> None:
        """The draft block of every row, into the proposal's buffers. The first step reads the last two tokens: after a wholly accepted
        block the draft has not read the last but one, and otherwise reading it again changes nothing."""
        assert self.model is not None and self.model.cache is not None
        network, text = self.model.network, self.text
        cache = _narrow(self.model.cache, window)
        # Rows past the draft's context propose nothing; they compute inside it.
        ends_R = text.length_B.clamp_max(cache.slots - g)
        start_R = (ends_R - 2).clamp_min(0)
        ids_R2 = text.ids_BS.gather(1, start_R[:, None] + torch.arange(2, device=self.device))
        room_R = torch.minimum(self.limit_R - text.length_B - 1, network.max_positions + 1 - text.length_B)
        counts_R = torch.minimum(self.cap_R, room_R).clamp(0, g)
        made, _ = draft_block(
            network, cache, ids_R2, start_R, ends_R - 1 - start_R, ends_R, counts_R, g, law, self.u_RN, text if law.needs_text else None,
            min_confidence=self.model.min_confidence,
        )  # fmt: skip
        kept = self.proposal
        kept.tokens_BG[:, :g] = made.tokens_BG
        kept.counts_B.copy_(made.counts_B)
        if made.q_BGK is not None and made.q_drawn_BG is not None:
            assert kept.q_BGK is not None and kept.q_drawn_BG is not None
            kept.q_BGK[:, :g] = made.q_BGK
            kept.q_drawn_BG[:, :g] = made.q_drawn_BG

    def verify(self, g: int, window: int, law: Law) -> None:
        """Verify, accept, and move every row on; what happened goes into the report."""
        text, G = self.text, self.decoder.gamma
        length_R = text.length_B
        ids_RG1 = text.ids_BS.gather(1, (length_R - 1)[:, None])
        proposal = self._offered(g, law) if g else None
        if proposal is not None:
            ids_RG1 = torch.cat([ids_RG1, proposal.tokens_BG], 1)
            text.ids_BS.scatter_(1, length_R[:, None] + torch.arange(g, device=self.device), proposal.tokens_BG)
        cache = _narrow(self.cache, window)
        # Slots whose text has ended may stand anywhere; they compute inside the window, too.
        start_R = (length_R - 1).clamp_max(cache.slots - g - 1)
        scores = verify(self.decoder.target, cache, ids_RG1, start_R, law, text if law.needs_text else None)
        accepted_R, next_R = accept(scores, proposal, law, self.u_RN[:, G:], simulate=self.decoder.simulate)
        text.ids_BS.scatter_(1, (length_R + accepted_R)[:, None], next_R[:, None])
        self.report_R[:, 0], self.report_R[:, 1] = accepted_R, next_R
        self.report_R[:, 2] = 0 if proposal is None else proposal.counts_B
        if proposal is not None:
            self.report_R[:, 3 : 3 + g] = proposal.tokens_BG
        length_R.add_(torch.where(length_R < self.limit_R, accepted_R + 1, 0))

    def _offered(self, g: int, law: Law) -> Proposal:
        """What the model drafted and the guesser guessed, merged row by row."""
        made = self.proposal
        tokens, counts = made.tokens_BG[:, :g], made.counts_B
        drawn, q = (
            (None, None) if law.greedy or made.q_BGK is None or made.q_drawn_BG is None else (made.q_drawn_BG[:, :g], made.q_BGK[:, :g])
        )
        certain = None
        if self.guesser is not None:
            certain = self.guesses_R > 0
            tokens = torch.where(certain[:, None], self.guess_RG[:, :g], tokens)
            counts = torch.where(certain, self.guesses_R, counts)
            drawn = None if drawn is None else torch.where(certain[:, None], 1.0, drawn)
        return Proposal(tokens, counts, drawn, q, made.ids_K, certain)


def _narrow(cache: StaticCache, slots: int) -> StaticCache:
    """The first ``slots`` slots of a cache, sharing memory."""
    part = copy.copy(cache)
    part.slots = min(slots, cache.slots)
    part.keys = [k[:, :, : part.slots] for k in cache.keys]
    part.values = [v[:, :, : part.slots] for v in cache.values]
    return part
