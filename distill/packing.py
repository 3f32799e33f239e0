"""How a recorded law becomes bytes: packed ids, log-probabilities of 8 or 16 bits, hidden states of 8 bits.

8-bit log-probabilities. Kept ids stand by falling probability, and a byte c says how far log p falls from one to the next:

    fall(c) = 16 (c/255)^3 nats,   c = 0 for a row's first id

so that neighbours, which lie close, are told apart finely (half a step: .003 nats at a fall of .1, .015 at 1, .06 at 8) and what is off by
more has no mass. The encoder follows what the decoder will know, so errors do not add up along a row. Where the row begins needs no
byte: what is kept has exactly the mass 1 - tail. This is not a renormalised top-K: the tail is there, and stays exact.
Shape suffixes: N positions, K kept ids at most, E kept ids of all rows, H hidden.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

_DEEPEST = 16.0
"""Largest fall of one step in nats; what lies deeper than e^-16 under its neighbour is taken for that."""
FALLS = _DEEPEST * (torch.arange(256, dtype=torch.float64) / 255) ** 3
GROUP = 32
"""Numbers of a hidden state that share a scale."""
_BORDERS = (FALLS[1:] + FALLS[:-1]) / 2


def encode_falls(logp_NK: Tensor) -> Tensor:
    """uint8 [N, K] of log-probabilities that do not rise along a row."""
    falls_NK = (logp_NK[:, :1] - logp_NK).double().T.contiguous()
    codes_KN = torch.zeros(falls_NK.shape, dtype=torch.uint8)
    known = torch.zeros(len(logp_NK), dtype=torch.float64)
    for k in range(1, len(falls_NK)):
        code = torch.bucketize(falls_NK[k] - known, _BORDERS)
        known += FALLS[code]
        codes_KN[k] = code.to(torch.uint8)
    return codes_KN.T.contiguous()


def decode_falls(codes_NK: Tensor, used_NK: Tensor, tail_N: Tensor) -> Tensor:
    """Probabilities float32 [N, K], 0 where not used; each row sums to 1 - tail."""
    shape_NK = FALLS.float()[codes_NK.int()].cumsum(-1).neg_().exp_().mul_(used_NK)
    total_N1 = shape_NK.sum(-1, keepdim=True).clamp_min_(torch.finfo(torch.float32).tiny)
    return shape_NK.mul_((1 - tail_N)[:, None] / total_N1)


def pack_ids(ids_E: Tensor) -> tuple[Tensor, Tensor | None]:
    """Ids of vocabularies above 65,536, and a table where it pays: a bit for each id, lowest first, 1 for those that occur. Then an id is its place
    among them, uint16 [E], while there are no more than 65,536; else three bytes, low byte first, uint8 [E, 3]: none reaches 2^24, and a fourth
    would be lost. A bitmap takes an eighth of a byte per id of the vocabulary, a list of the ids that occur four bytes each."""
    wide = ids_E.to(torch.int64)
    largest = int(wide.max()) if len(wide) else 0
    if largest >= 1 << 24:
        raise ValueError(f"token id {largest} does not fit into 3 bytes")
    occurs = torch.zeros(8 * (largest // 8 + 1), dtype=torch.bool)
    occurs[wide] = True
    if int(occurs.sum()) <= 1 << 16 and len(occurs) // 8 < len(wide):
        place = occurs.cumsum(0) - 1
        return place[wide].to(torch.uint16), torch.from_numpy(np.packbits(occurs.numpy(), bitorder="little"))
    return torch.stack([wide & 255, wide >> 8 & 255, wide >> 16], 1).to(torch.uint8), None


def read_table(table: Tensor) -> Tensor:
    """The ids that a shard's table names, int64, ascending."""
    return torch.from_numpy(np.flatnonzero(np.unpackbits(table.numpy(), bitorder="little")))


def unpack_ids(packed: Tensor, known: Tensor | None = None) -> Tensor:
    """int64 [E]; ``known``: what ``read_table`` gave."""
    if packed.dim() == 1:
        return packed.to(torch.int64) if known is None else known[packed.to(torch.int64)]
    low, middle, high = packed.to(torch.int64).unbind(1)
    return low | middle << 8 | high << 16


def spread(values_E: Tensor, used_NK: Tensor, fill: int = 0) -> Tensor:
    """Packed values back in their rows, [N, K], ``fill`` where a row has none."""
    if len(values_E) == used_NK.numel():
        return values_E.view(used_NK.shape)
    wide = torch.full(used_NK.shape, fill, dtype=values_E.dtype)
    wide[used_NK] = values_E
    return wide


def encode_hidden(hidden_NH: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [N, H] and a scale for each ``GROUP`` neighbouring numbers of a row, float32 [N, ceil(H / GROUP)]: hidden = int8 * scale, off by at
    most half a scale. A few numbers of a state are far larger than the rest; one scale for all of a row would leave the others a few steps."""
    N, H = hidden_NH.shape
    grid_NG = F.pad(hidden_NH.float(), (0, -H % GROUP)).view(N, -1, GROUP)
    scale_NG = grid_NG.abs().amax(-1).div(127).clamp_min(torch.finfo(torch.float32).tiny)
    return (grid_NG / scale_NG[..., None]).round().to(torch.int8).flatten(1)[:, :H].contiguous(), scale_NG


def decode_hidden(codes_NH: Tensor, scale_NG: Tensor) -> Tensor:
    """float32 [N, H]."""
    return codes_NH.float() * scale_NG.repeat_interleave(GROUP, 1)[:, : codes_NH.shape[1]]
