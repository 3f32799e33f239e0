"""The rounds that speculative decoding takes along a text the target wrote alone: counts for every gamma without decoding again.

Rejection sampling emits x with p(x), and of that by acceptance with min(p(x), q(x)). So a token of a text drawn from p came by
acceptance with probability min(1, q(x)/p(x)), whatever its neighbours: drawn so at each position, text and rounds together have
exactly the law that decoding gives them (Leviathan et al., arXiv 2211.17192, appendix A.1, read backwards). A greedy law is the
same with certainty: accepted where the draft's argmax is the text's token. A guess that is not sampled has q = 1 at its token,
so it is accepted where the text agrees with it. What is counted follows ``Decoder``: the same limits near a text's end, and
nothing behind an end of text.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from draftstill.decode.drafters import Row
from draftstill.decode.trace import Round, Trace

if TYPE_CHECKING:
    from draftstill.decode.guesses import GuessDrafter


def derive(prompt: Sequence[int], written: Sequence[int], keep: Sequence[float] | None, gamma: int, *, most: int, ended: bool, seed: int = 0,
           guesser: GuessDrafter | None = None, context: int | None = None) -> Trace:  # fmt: skip
    """Trace of one text, without times.

    Args:
        prompt, written: ids; ``written`` by plain decoding, its end of text included.
        keep: min(1, q(x)/p(x)) at each written token, both laws processed; None: there is no draft model.
        gamma: tokens that the draft model proposes in a round.
        most: the request's limit of new tokens; ``ended``: whether an end of text came before it.
        seed: decides what was accepted. The uniforms belong to the positions, so that drafts and gammas are compared on the same draws.
        guesser: asked first in each round, as by ``CompositeDrafter``; without ``keep`` it is the only one.
        context: tokens that the draft model can hold.
    """
    draws = random.Random(seed)
    kept = None if keep is None else [draws.random() < k for k in keep]
    row = Row(list(prompt), torch.Generator())
    trace = Trace(len(prompt), list(written), finish="eos" if ended else "length")
    at = 0
    while at < len(written):
        limit, kind, count, right = most - at - 1, "none", 0, 0
        guess = guesser.guesses([row], [min(limit, guesser.gamma)])[0] if guesser is not None and limit > 0 else []
        if guess:
            assert guesser is not None
            kind, count = guesser.name, len(guess)
            right = _leading([g == w for g, w in zip(guess, written[at:], strict=False)])
        elif kept is not None and limit > 0:
            room = limit if context is None else context - len(row.tokens) + 1
            count = max(0, min(gamma, limit, room))
            kind, right = "model" if count else "none", _leading(kept[at : at + count])
            trace.drafting_stopped += room <= 0
        emitted = min(right + 1, len(written) - at)
        steps = count if kind == "model" else 0
        # Behind an end of text that was accepted nothing was judged.
        trace.rounds.append(Round(kind, count if emitted > right else right, right, emitted, draft_steps=steps))  # type: ignore[arg-type]
        row.tokens += written[at : at + emitted]
        at += emitted
    return trace


def _leading(flags: Sequence[bool]) -> int:
    return next((n for n, flag in enumerate(flags) if not flag), len(flags))
