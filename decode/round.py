"""One round as pure functions of tensors with static shapes: the draft block, the verify pass, acceptance.

Nothing here reads a value back to the host. Run eagerly with host positions (lists) it touches no more of the cache than it
must; run with position tensors (``decode.static``) the same functions can be captured in a graph or compiled whole.
Shape suffixes: B rows, W fed tokens, G proposed tokens, G1 = G + 1, K ids that the draft can propose, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from draftstill.decode.acceptance import Proposal, accept_greedy, accept_sampled
from draftstill.decode.network import Network, StaticCache
from draftstill.decode.sampling import Law, Text, argmax, draw

Starts = Sequence[int] | Tensor


def shifted(starts: Starts, by: int) -> Starts:
    """Each row's position, moved on."""
    return starts + by if isinstance(starts, Tensor) else [s + by for s in starts]


def draft_block(network: Network, cache: StaticCache, ids_BW: Tensor, starts: Starts, last_B: Tensor | None, ends: Starts, counts_B: Tensor,
                steps: int, law: Law, u_BG: Tensor | None, text: Text | None = None, *, min_confidence: float = 0.0,
                stop_early: bool = False) -> tuple[Proposal, int]:  # fmt: skip
    """Draft up to ``steps`` tokens for each row, each from the law q that acceptance is then told.

    Args:
        ids_BW: tokens that the draft has not read yet, padded; ``starts`` their positions, ``last_B`` the index of each row's last
            real one (None: W is 1), ``ends`` the position behind it.
        counts_B: tokens worth proposing for each row; rows that ask for fewer ride along.
        u_BG: float64 uniforms; not needed by a greedy law.
        text: the rows' texts, when the law looks at them; the drafted tokens are written behind their lengths.
        min_confidence: a row proposes no more once the draft's largest probability (of its raw law at temperature 1) falls below
            this. The decision is made before the token is drawn: made after it, the output would not follow the target's law.
        stop_early: end the block once no row proposes more. It reads counts_B on the host, so it is for eager rounds.

    Returns:
        the proposal, and how many forwards it took.
    """
    hidden = network.forward(ids_BW, cache, starts)
    B = hidden.shape[0]
    hidden_BH = hidden[:, 0] if last_B is None else hidden[torch.arange(B, device=hidden.device), last_B]
    tokens: list[Tensor] = []
    laws: list[Tensor] = []
    drawn: list[Tensor] = []
    forwards = 0
    for i in range(steps):
        if i:
            hidden_BH = network.forward(tokens[-1][:, None], cache, shifted(ends, i - 1))[:, 0]
        forwards += 1
        logits_BK = network.logits(hidden_BH)
        if min_confidence:
            sure_B = logits_BK.softmax(-1).amax(-1) >= min_confidence
            counts_B = torch.where(sure_B, counts_B, counts_B.clamp_max(i))
            if stop_early and int(counts_B.max()) <= i:
                break
        scores_B1K = law.scores(logits_BK[:, None], None if text is None else replace(text, length_B=text.length_B + i))
        if law.greedy:
            picked_B = argmax(scores_B1K[:, 0])
        else:
            assert u_BG is not None
            q_BK = law.probabilities(scores_B1K)[:, 0]
            picked_B = draw(q_BK, u_BG[:, i])
            laws.append(q_BK)
            drawn.append(q_BK.gather(1, picked_B[:, None])[:, 0])
        tokens.append(picked_B if network.head_ids is None else network.head_ids[picked_B])
        if text is not None:
            text.ids_BS.scatter_(1, (text.length_B + i)[:, None], tokens[-1][:, None])
    tokens_BG = torch.stack(tokens, 1) if tokens else ids_BW.new_zeros(B, 0)
    return Proposal(
        tokens_BG, counts_B.clamp_max(len(tokens)), torch.stack(drawn, 1) if drawn else None, torch.stack(laws, 1) if laws else None, network.head_ids,
    ), forwards  # fmt: skip


def verify(network: Network, cache: StaticCache, ids_BG1: Tensor, starts: Starts, law: Law, text: Text | None = None) -> Tensor:
    """The target's scores [B, G1, V] for the last token and the proposed ones; column i is the law of the token after i accepted ones."""
    logits = network.logits(network.forward(ids_BG1, cache, starts))
    return law.scores(logits, text)


def accept(
    scores_BG1V: Tensor, proposal: Proposal | None, law: Law, u_BG1: Tensor | None, *, simulate: float | None = None
) -> tuple[Tensor, Tensor]:
    """How many proposed tokens stay, and the target's own next token.

    Args:
        u_BG1: float64 uniforms, the last column for the next token; not needed by a greedy law without simulation.
        simulate: keep each proposed token with this probability instead, whatever it is. What is written then means nothing; what
            it costs is real.

    Returns:
        (accepted_B, next_B).
    """
    rows = torch.arange(len(scores_BG1V), device=scores_BG1V.device)
    if law.greedy and (proposal is None or simulate is None):
        best_BG1 = argmax(scores_BG1V)
        return (torch.zeros_like(best_BG1[:, 0]), best_BG1[:, 0]) if proposal is None else accept_greedy(best_BG1, proposal)
    assert u_BG1 is not None
    if proposal is None:
        return torch.zeros_like(rows), law.pick(law.probabilities(scores_BG1V[:, :1])[:, 0], u_BG1[:, -1])
    if simulate is not None:
        G = proposal.tokens_BG.shape[1]
        real_BG = torch.arange(G, device=rows.device) < proposal.counts_B[:, None]
        accepted_B = ((u_BG1[:, :G] < simulate) & real_BG).long().cumprod(1).sum(1)
        scores_BV = scores_BG1V[rows, accepted_B]
        return accepted_B, scores_BV.argmax(-1) if law.greedy else law.pick(law.probabilities(scores_BV[:, None])[:, 0], u_BG1[:, -1])
    p_BG1V = law.probabilities(scores_BG1V)
    accepted_B, rest_BV = accept_sampled(p_BG1V, proposal, u_BG1[:, : p_BG1V.shape[1] - 1])
    return accepted_B, law.pick(rest_BV, u_BG1[:, -1])
