"""Bytes of a recording: what ``plan`` foretells and what the recording's pilot says both come from here. docs/recording.md has the format."""

from __future__ import annotations

import math
from collections.abc import Mapping

from draftstill.recipe import Record


def bytes_per_position(*, mode: str, top_k: int, vocab: int | None, hidden: int, logp_bits: int, hidden_bytes: float, shard_positions: float,
                       kept: float | None = None) -> float:  # fmt: skip
    """What one position takes, headers left aside.

    Args:
        vocab: real tokens; None: not known, and taken for many.
        shard_positions: in one shard. Above 65,536 tokens a shard has a table of the ids that occur, a bit for each of the vocabulary.
        kept: ids of a law, in the mean; None: all of top_k.
    """
    if mode in ("text", "live"):
        return 5
    if mode == "hidden":
        return 4 + hidden * hidden_bytes
    count = top_k if kept is None else kept
    if vocab is None:
        table = 1.0  # over three bytes there is none
    else:
        count = min(count, vocab)
        table = 0.0 if vocab <= 1 << 16 else min(1.0, vocab / 8 / max(1.0, count * shard_positions))
    return 4 + (1 if top_k < 256 else 4) + 8 + count * (2 + table + math.ceil(logp_bits / 8))


def recording_bytes(settings: Record, modes: Mapping[str, str], sides: Mapping[str, tuple[int, int]], *, vocab: int | None, hidden: int,
                    dtype_bytes: int, kept: float | None = None) -> float:  # fmt: skip
    """Of all sides together.

    Args:
        modes: of each side; ``hidden`` or ``topk`` where the recipe's is ``auto``.
        sides: sequences and positions of each.
        hidden: the target's width.
        dtype_bytes: of a number of the target's.
        kept: ids of a law, in the mean; None: all of record.top_k.
    """
    total = 0.0
    for side, (sequences, positions) in sides.items():
        # The held-out side is kept as the target computes it.
        bits = settings.hidden_bits if side == "train" else None
        each = bytes_per_position(
            mode=modes[side], top_k=settings.top_k, vocab=vocab, hidden=hidden, logp_bits=settings.logp_bits, kept=kept,
            hidden_bytes={None: float(dtype_bytes), 8: 1.125, 16: 2.0}[bits],
            shard_positions=min(sequences, settings.shard_sequences) * positions / max(1, sequences))  # fmt: skip
        total += positions * each
    return total
