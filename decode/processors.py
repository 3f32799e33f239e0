"""Logits processors for all positions of a speculative block at once. Pure tensor code, static shapes.

Where plain decoding sees one text that grows, a block sees its last state: the law of position i may know the ids before i only.
The arithmetic takes plain numbers or one per row, and gives a row the same bits either way.
Shape suffixes: B rows, T positions of a block, S slots of the text buffer, C columns of the logits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from draftstill.decode.sampling import Sampling

_ONE = 2**52
"""Top-p's masses are integers in units of 1 / _ONE: on a GPU the order of a float sum, and so its last bits, depends on the number of
rows; a sum of integers is exact in any order."""


@dataclass(slots=True)
class Text:
    """What the rows hold. Logits at position i of a block are the law of the token after the first ``length_B + i`` ids.

    Args:
        ids_BS: int64, padded at the end; the ids of the block are already in. What lies past them may be anything.
        length_B: int64, ids before the block's first scored position; at least 1.
        prompt_B: int64, lengths of the prompts.
    """

    ids_BS: Tensor
    length_B: Tensor
    prompt_B: Tensor

    def ends(self, positions: int) -> Tensor:
        """How many ids each position of a block may know, [B, T]."""
        return self.length_B[:, None] + torch.arange(positions, device=self.length_B.device)


def seen(columns_BS: Tensor, ends_BT: Tensor, columns: int) -> Tensor:
    """Which columns stand in the text before each position, bool [B, T, C].

    ``columns_BS`` is the column of each id; ``columns`` (one past the last) where it has none.
    """
    B, S = columns_BS.shape
    at_BS = torch.arange(S, device=columns_BS.device).expand(B, S)
    # One scatter for all positions: what stands first at or past a position's end, garbage included, it has not seen.
    first_BC = at_BS.new_full((B, columns + 1), torch.iinfo(torch.int64).max).scatter_reduce_(1, columns_BS, at_BS, "amin")
    return first_BC[:, None, :columns] < ends_BT[..., None]


def repeated(ids_BS: Tensor, columns_BS: Tensor, ends_BT: Tensor, columns: int, ngram: int | Tensor, longest: int) -> Tensor:
    """Which columns would complete an n-gram that the text before each position holds already, bool [B, T, C].

    Args:
        ngram: n, or [B, 1, 1] with one per row; 0 bans nothing, 1 whatever was seen.
        longest: the largest n.
    """
    B, S = ids_BS.shape
    at_S = torch.arange(S, device=ids_BS.device)
    # hit[b, i, s]: the n-1 ids before slot s are the last n-1 ids before position i.
    hit_BTS = (at_S < ends_BT[..., None]) & (at_S >= ngram - 1)
    if isinstance(ngram, Tensor):
        hit_BTS &= ngram > 0
    for back in range(1, longest):
        last_BT = ids_BS.gather(1, (ends_BT - back).clamp(0, S - 1))
        # The slots that roll() wraps around, s < back, are those without n-1 ids before them.
        hit_BTS &= (ids_BS.roll(back, 1)[:, None] == last_BT[..., None]) | (ngram <= back)
    spare_BTS = torch.where(hit_BTS, columns_BS[:, None], columns)
    banned_BTC = torch.zeros(*ends_BT.shape, columns + 1, dtype=torch.bool, device=ids_BS.device)
    return banned_BTC.scatter_(2, spare_BTS, True)[..., :columns]


@dataclass(slots=True)
class Numbers:
    """A sampling as the arithmetic takes it: Python scalars, or tensors [B, 1, 1] with one entry per row."""

    greedy: Any
    temperature: Any
    kth: Any
    """Index, in descending order, of the last score that top-k keeps."""
    mass: Any
    """top_p in units of 1 / _ONE."""
    log_min_p: Any
    penalty: Any
    ngram: Any
    min_new: Any

    @classmethod
    def of(cls, s: Sampling, columns: int) -> Numbers:
        # A temperature so small that scores would overflow is as good as this one.
        temperature = 1.0 if s.greedy else max(float(s.temperature), 1e-30)
        kth = (min(s.top_k, columns) if s.top_k > 0 and not s.greedy else columns) - 1
        mass = max(1, int(s.top_p * _ONE)) if s.top_p < 1 and not s.greedy else 2 * _ONE
        log_min_p = math.log(s.min_p) if s.min_p > 0 and not s.greedy else -math.inf
        return cls(
            s.greedy, temperature, kth, mass, log_min_p, float(s.repetition_penalty), s.no_repeat_ngram, s.min_new_tokens
        )  # fmt: skip

    @classmethod
    def packed(cls, samplings: Sequence[Sampling], columns: int, device: torch.device | str) -> Numbers:
        rows = [cls.of(s, columns) for s in samplings]
        values = [[getattr(r, f.name) for r in rows] for f in fields(cls)]
        dtypes = [torch.float32 if isinstance(v[0], float) else None for v in values]
        return cls(*(torch.tensor(v, dtype=d, device=device).view(-1, 1, 1) for v, d in zip(values, dtypes, strict=True)))


def one_hot(z: Tensor) -> Tensor:
    return torch.zeros_like(z, dtype=torch.float32).scatter_(-1, z.argmax(-1, keepdim=True), 1.0)


def over(z: Tensor, by: float | Tensor) -> Tensor:
    """z / by with the same bits for a number and for a tensor of it: on a GPU torch multiplies by a number's float32 reciprocal."""
    if not isinstance(by, Tensor):
        return z if by == 1.0 else z / by
    return z * by.reciprocal() if z.is_cuda else z / by


def warped(z: Tensor, n: Numbers, on: frozenset[str], largest_k: int | None = None) -> Tensor:
    """Law of float32 scores [..., C], or [B, T, C] if each row has its own numbers.

    Settings that are off for a row (temperature 1, kth the last column, ...) leave each of its bits as it is.

    Args:
        on: the settings to compute at all.
        largest_k: no row's own top-k is larger; None if it may be any.
    """
    z = over(z, n.temperature)
    if "top_k" in on:
        # A threshold, as transformers has it: ties with the k-th value all stay.
        z = z.masked_fill(z < _kth(z, n.kth, largest_k), -torch.inf)
    if "top_p" in on:
        ordered, order = torch.sort(z, dim=-1, descending=True, stable=True)
        # A token stays while the mass before it is below top_p: the smallest set that holds top_p.
        before = torch.nn.functional.pad((ordered.softmax(-1) * _ONE).long().cumsum(-1)[..., :-1], (1, 0))
        drop = before >= n.mass
        z = z.masked_fill(torch.empty_like(drop).scatter_(-1, order, drop), -torch.inf)
    if "min_p" in on:
        z = z.masked_fill(z < z.amax(-1, keepdim=True) + n.log_min_p, -torch.inf)
    p = z.softmax(-1)
    if isinstance(n.greedy, Tensor):
        best = z.argmax(-1, keepdim=True)
        p = torch.where(n.greedy, 0.0, p).scatter_(-1, best, torch.where(n.greedy, 1.0, p.gather(-1, best)))
    return p


def _kth(z: Tensor, kth: int | Tensor, largest_k: int | None) -> Tensor:
    """The last score that top-k keeps, [..., 1]."""
    if not isinstance(kth, Tensor):
        return z.topk(kth + 1, -1).values[..., -1:]
    kth_BT1 = kth.expand(*z.shape[:-1], 1)
    if largest_k is None:
        return z.sort(-1, descending=True).values.gather(-1, kth_BT1)
    # Sorting the vocabulary takes 25 times as long as finding the largest 50 (32,000 columns, one thread).
    found = z.topk(largest_k, -1).values.gather(-1, kth_BT1.clamp_max(largest_k - 1))
    return torch.where(kth_BT1 < largest_k, found, -torch.inf)
