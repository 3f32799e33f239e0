"""One teacher-forced pass over what the target wrote: how well each draft's law meets the target's, token by token.

Shape suffixes: T written tokens, V vocabulary, K ids that a draft can propose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from draftstill.decode import Network, Sampling, probabilities

_ROWS = 8
"""Texts of one forward."""
_CHUNK = 64
"""Positions whose laws stand in memory at once."""


@torch.inference_mode()
def forced(target: Network, drafts: Mapping[str, Network], texts: Sequence[tuple[Sequence[int], Sequence[int]]],
           sampling: Sampling) -> list[dict[str, Any]]:  # fmt: skip
    """Figures of each text (prompt ids, written ids), one value per written token.

    Returns:
        for each text: ``entropy`` of the target's law in nats, and ``drafts``: by name ``alpha``: sum min(p, q); ``keep``:
        min(1, q(x)/p(x)) of the written token x; both of the laws as processed, at temperature 0 agreement of the argmaxes and
        whether the draft's is x; ``kl``: KL(p||q) in nats over the ids that the draft can propose, both renormalised there;
        ``outside``: p of all other ids. Entropy, kl and outside are of the laws at temperature 1 as the models give them, so that
        they mean the same at every sampling temperature.
    """
    found: list[dict[str, Any]] = []
    for first in range(0, len(texts), _ROWS):
        group = texts[first : first + _ROWS]
        hidden = {name: _hidden(n, group) for name, n in (("", target), *drafts.items())}
        for row, (prompt, written) in enumerate(group):
            figures: dict[str, Any] = {"entropy": [], "drafts": {n: {"alpha": [], "keep": [], "kl": [], "outside": []} for n in drafts}}
            for at in range(0, len(written), _CHUNK):
                here = slice(len(prompt) - 1 + at, len(prompt) - 1 + min(at + _CHUNK, len(written)))
                x_T = torch.tensor(written[at : at + _CHUNK], device=target.device)
                logits_TV = target.logits(hidden[""][row, here])
                p_TV, raw_TV = probabilities(logits_TV, sampling), logits_TV.float().log_softmax(-1)
                figures["entropy"] += _rounded(-(raw_TV.exp() * raw_TV).nansum(-1))
                for name, draft in drafts.items():
                    for key, value in _compared(p_TV, raw_TV, draft, draft.logits(hidden[name][row, here]), x_T, sampling).items():
                        figures["drafts"][name][key] += _rounded(value)
            found.append(figures)
    return found


def _hidden(network: Network, group: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Tensor:
    """[B, S, H]; padding stands behind each text, where nothing sees it."""
    longest = max(len(p) + len(w) for p, w in group)
    ids = torch.tensor([[*p, *w] + [0] * (longest - len(p) - len(w)) for p, w in group], device=network.device)
    return network.forward(ids, network.new_cache(len(group), longest), [0] * len(group))


def _compared(p_TV: Tensor, raw_TV: Tensor, draft: Network, logits_TK: Tensor, x_T: Tensor, sampling: Sampling) -> dict[str, Tensor]:
    q_TV, ids = probabilities(logits_TK, sampling), draft.head_ids
    own_TK = raw_TV
    if ids is not None:
        q_TV = torch.zeros_like(p_TV).index_copy_(1, ids, q_TV)
        own_TK = raw_TV[:, ids]
    p_x, q_x = (law.gather(1, x_T[:, None])[:, 0] for law in (p_TV, q_TV))
    keep = q_x if sampling.greedy else (q_x / p_x).clamp(max=1.0).nan_to_num(1.0)
    inside = own_TK.exp().sum(-1)
    p_TK = own_TK.log_softmax(-1)
    kl = (p_TK.exp() * (p_TK - logits_TK.float().log_softmax(-1))).nansum(-1)
    return {"alpha": torch.minimum(p_TV, q_TV).sum(-1), "keep": keep, "kl": kl.clamp_min(0), "outside": (1 - inside).clamp_min(0)}


def _rounded(values: Tensor) -> list[float]:
    return [round(v, 6) for v in values.tolist()]
