"""How much of the target's text and probability a draft with a trimmed vocabulary can reach at all."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from draftstill.decode import Sampling, probabilities
from draftstill.distill import Recording

RANKING = "token_ranking.safetensors"
"""In the draft stage's folder: ids by falling frequency, and the coverage of each length of that list."""
_ROWS = 64
"""Positions per block of whole laws, as for held-out alpha."""


@torch.inference_mode()
def coverage(recording: Recording, ranking: Tensor, target_head_VH: Tensor, deploy: Sampling) -> dict[str, Tensor]:
    """Coverage of the first 1, 2, ... ids of a ranking: float32 [V] each.

    ``tokens``: the share of written tokens among those ids. ``mass``: the share of the target's probability at the deployment's sampler;
    what lies outside counts as rejected, so it bounds alpha from above.

    Args:
        recording: held out. In ``hidden`` mode laws are whole; of a served or black-box target what was recorded stands for them.
        ranking: all ids, the most frequent first.
        target_head_VH: the target's head over the real tokens.
    """
    vocab = len(ranking)
    written, mass = torch.zeros(vocab, dtype=torch.float64), torch.zeros(vocab, dtype=torch.float64, device=target_head_VH.device)
    for index in range(len(recording)):
        item = recording[index]
        rows = item.rows
        behind = item.written[rows]
        written += torch.bincount(behind[behind >= 0], minlength=vocab)[:vocab]
        if item.hidden is None:
            assert item.ids is not None and item.p is not None
            mass.index_add_(0, item.ids[rows].clamp_min(0).flatten().to(mass.device), item.p[rows].double().flatten().to(mass.device))
            continue
        hidden_NH = item.hidden[rows].to(target_head_VH)
        for at in range(0, len(hidden_NH), _ROWS):
            mass += probabilities((hidden_NH[at : at + _ROWS] @ target_head_VH.T).float(), deploy).double().sum(0)
    up_to = lambda counts: (counts[ranking].cumsum(0) / counts.sum().clamp_min(1e-9)).float()  # noqa: E731
    return {"tokens": up_to(written), "mass": up_to(mass.cpu())}


def coverage_table(found: dict[str, Tensor], *more: int) -> list[dict[str, float]]:
    """Rows for reports: sizes by powers of two from 1,024 on, and those asked for (0: all ids).

    Args:
        found: as ``coverage`` returns it.
    """
    vocab = len(found["mass"])
    sizes = sorted({*(1 << n for n in range(10, vocab.bit_length()) if 1 << n < vocab), *(min(n, vocab) for n in more if n), vocab})
    return [{"head_tokens": n, **{name: round(float(share[n - 1]), 5) for name, share in found.items()}} for n in sizes]


def covered(folder: Path, head_tokens: int) -> dict[str, float] | None:
    """Coverage of a trimmed vocabulary of that size (0: all ids), from a finished draft stage; None where an older stage has none."""
    stored = load_file(folder / RANKING)
    if "mass" not in stored:
        return None
    return {name: float(stored[name][head_tokens - 1]) for name in ("tokens", "mass")}
