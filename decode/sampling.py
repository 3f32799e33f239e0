"""The law that tokens are drawn from, and the drawing. Float32 probabilities, float64 inverse transform.

Shape suffixes: N independent rows, B rows with settings of their own, T positions of a block, V vocabulary, K kept ids, C columns of
the logits (V, or K of a trimmed draft).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from draftstill.decode.processors import Numbers, Text, one_hot, over, repeated, seen, warped
from draftstill.decode.steady import draw_steadily
from draftstill.errors import DraftstillError

__all__ = ["Law", "Sampling", "Text", "argmax", "draw", "probabilities", "uniforms"]

_TEXT = frozenset({"repetition_penalty", "no_repeat_ngram", "min_new_tokens"})


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one text is sampled; the defaults change nothing, temperature 0 is greedy.

    Names and order as in transformers: logit bias (its ``sequence_bias`` of single tokens), repetition penalty, no repeated n-gram, no EOS
    among the first ``min_new_tokens``, then temperature, top-k, top-p, min-p. The first four act on greedy texts, too.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    no_repeat_ngram: int = 0
    min_new_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        ids = [i for i, _ in self.logit_bias]
        for key, right, mend in (
            ("temperature", 0 <= self.temperature < math.inf, "a finite number of at least 0; 0 is greedy"),
            ("top_k", self.top_k >= 0, "a count of tokens; 0 keeps all"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1; 1 keeps all"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1; 0 keeps all"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "a finite number above 0; 1 is no penalty"),
            ("no_repeat_ngram", self.no_repeat_ngram >= 0, "a count of tokens; 0 bans nothing"),
            ("min_new_tokens", self.min_new_tokens >= 0, "a count of tokens; 0 bans nothing"),
            ("logit_bias", all(i >= 0 for i in ids) and len(set(ids)) == len(ids), "token ids of at least 0, each once"),
            ("logit_bias", all(v < math.inf for _, v in self.logit_bias), "finite values, or -inf to ban a token"),
        ):
            if not right:
                raise DraftstillError("a setting that no text can be sampled with", key=key, value=getattr(self, key), mend=mend)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def needs_text(self) -> bool:
        """Whether the law depends on the text other than through the logits."""
        return not _TEXT.isdisjoint(self.features)

    @property
    def features(self) -> frozenset[str]:
        """The settings that change something, by name; ``temperature`` stands for sampling at all."""
        on = {
            "temperature": True, "top_k": self.top_k > 0, "top_p": self.top_p < 1, "min_p": self.min_p > 0,
        } if not self.greedy else {}  # fmt: skip
        on |= {
            "repetition_penalty": self.repetition_penalty != 1, "no_repeat_ngram": self.no_repeat_ngram > 0,
            "min_new_tokens": self.min_new_tokens > 0, "logit_bias": len(self.logit_bias) > 0,
        }  # fmt: skip
        return frozenset(name for name, active in on.items() if active)


def probabilities(logits_NV: Tensor, sampling: Sampling) -> Tensor:
    """Law of each row, float32 [..., V], by temperature, top-k, top-p and min-p; greedy rows are one-hot at the (first) argmax.

    What looks at the text or names tokens is ``Law.scores``'s.
    """
    if sampling.greedy:
        return one_hot(logits_NV)
    return warped(logits_NV.float(), Numbers.of(sampling, logits_NV.shape[-1]), sampling.features)


class Law:
    """Samplings of B rows, arranged for computation; build it with ``Law.of``.

    Each row gets, to the bit, what a batch of its own setting gives it. No host reads, so a law compiles whole and can be captured in
    a CUDA graph; ``set`` then changes its rows in place.

    Attributes:
        features: settings that some row uses, by name: they decide which operations run.
        greedy: no row samples; argmax of the scores is then all there is to do.
        needs_text: ``scores`` must be told the text.
        steady: ``pick`` draws so that the rounding of the law hardly ever gives another token; it takes longer.
        uniform: the one sampling of all rows, computed with plain numbers; None in the form that has one number per row.
    """

    def __init__(self, samplings: Sequence[Sampling], vocab: int, device: torch.device | str, eos: Iterable[int], ids_K: Tensor | None,
                 packed: bool, features: Iterable[str], longest_ngram: int, largest_top_k: int | None, steady: bool) -> None:  # fmt: skip
        first = samplings[0]
        self.steady = steady
        self.uniform = first if not packed and all(s == first for s in samplings) else None
        spare = features if self.uniform is None else ()
        self.features: frozenset[str] = frozenset(spare).union(*(s.features for s in samplings))
        self.greedy, self.needs_text = "temperature" not in self.features, not _TEXT.isdisjoint(self.features)
        self.longest_ngram = max(longest_ngram, *(s.no_repeat_ngram for s in samplings))
        any_k = packed and largest_top_k is None
        self.largest_top_k = None if any_k else max(1, largest_top_k or 0, *(s.top_k for s in samplings))
        self.vocab, self._device = vocab, device
        self.columns = vocab if ids_K is None else len(ids_K)
        self._column_of: dict[int, int] | None = None
        self._column_V1: Tensor | None = None
        if ids_K is not None and not self.features.isdisjoint({"logit_bias", "min_new_tokens"}):
            self._column_of = {i: c for c, i in enumerate(ids_K.tolist())}
        if ids_K is not None and self.needs_text:
            # The column of each id of the text; the spare one past the last where it has none.
            self._column_V1 = torch.full((vocab + 1,), self.columns, device=device)
            self._column_V1[ids_K.to(device)] = torch.arange(self.columns, device=device)
        self._eos_C = self._placed([(i, 1.0) for i in eos]) > 0 if "min_new_tokens" in self.features else None
        one = self.uniform is not None
        self._numbers = Numbers.of(first, self.columns) if one else Numbers.packed(samplings, self.columns, device)
        self._bias: Tensor | None = None
        if "logit_bias" in self.features:
            self._bias = torch.stack([self._bias_of(s) for s in ([first] if one else samplings)])[:, None]

    @classmethod
    def of(cls, samplings: Sequence[Sampling], *, vocab: int, device: torch.device | str, eos: Iterable[int] = (),
           ids_K: Tensor | None = None, packed: bool = False, features: Iterable[str] = (), longest_ngram: int = 0,
           largest_top_k: int | None = None, steady: bool = False) -> Law:  # fmt: skip
        """
        Args:
            samplings: one per row.
            vocab: number of real ids.
            eos: ids that ``min_new_tokens`` holds back.
            ids_K: ascending ids, where the logits have one column per kept id only.
            packed: one number per row even if all rows are alike, so that ``set`` can change them.
            features, longest_ngram, largest_top_k: what ``set`` may bring beyond what the samplings use. None is any top_k if packed,
                at the price of a sort.
            steady: see the class.

        Raises:
            DraftstillError: a biased id lies outside the vocabulary.
        """
        return cls(samplings, vocab, device, eos, ids_K, packed, features, longest_ngram, largest_top_k, steady)

    def fits(self, sampling: Sampling) -> bool:
        """Whether ``set`` can take it: the operations it needs are there."""
        small_k = self.largest_top_k is None or sampling.greedy or sampling.top_k <= self.largest_top_k
        return self.uniform is None and sampling.features <= self.features and sampling.no_repeat_ngram <= self.longest_ngram and small_k

    def set(self, row: int, sampling: Sampling) -> None:
        """Give a row another sampling, in place. Only in the form with one number per row, and only one that ``fits``."""
        if not self.fits(sampling):
            raise AssertionError(f"this law has no room for {sampling}")
        bias_C = self._bias_of(sampling) if sampling.logit_bias else 0.0  # refuses before anything is changed
        new = Numbers.of(sampling, self.columns)
        for f in fields(Numbers):
            getattr(self._numbers, f.name)[row] = getattr(new, f.name)
        if self._bias is not None:
            self._bias[row, 0] = bias_C

    def pick(self, weights_NV: Tensor, u_N: Tensor) -> Tensor:
        """The token that a text goes on with; see ``draw``."""
        return (draw_steadily if self.steady else draw)(weights_NV, u_N)

    def rows(self, select: slice) -> Law:
        """The law of some rows; shares memory, so that ``set`` on either is seen by both."""
        if self.uniform is not None:
            return self
        part = copy.copy(self)
        part._numbers = Numbers(*(getattr(self._numbers, f.name)[select] for f in fields(Numbers)))
        part._bias = None if self._bias is None else self._bias[select]
        return part

    def _bias_of(self, sampling: Sampling) -> Tensor:
        beyond = [i for i, _ in sampling.logit_bias if i >= self.vocab]
        if beyond:
            raise DraftstillError("a token id outside the vocabulary", key="logit_bias", value=beyond[0], mend=f"ids below {self.vocab}")
        return self._placed(sampling.logit_bias)

    def _placed(self, pairs: Sequence[tuple[int, float]]) -> Tensor:
        """Values at their ids' columns, float32 [C]; an id without a column is left out."""
        where = [(i if i < self.vocab else None) if self._column_of is None else self._column_of.get(i) for i, _ in pairs]
        at = {c: v for c, (_, v) in zip(where, pairs, strict=True) if c is not None}
        values_C = torch.zeros(self.columns, dtype=torch.float32, device=self._device)
        if at:
            values_C[torch.tensor([*at], device=self._device)] = torch.tensor([*at.values()], dtype=torch.float32, device=self._device)
        return values_C

    def scores(self, logits_BTC: Tensor, text: Text | None = None) -> Tensor:
        """Logits after logit bias, repetition penalty, n-gram and EOS bans, float32; the logits themselves where no row has any.

        Where all tokens of a position are banned, its law is the first column for certain, which is what argmax makes of it (and
        transformers when greedy; when sampling it fails).

        Args:
            text: must be there if ``needs_text``.
        """
        on, n = self.features, self._numbers
        if on.isdisjoint(_TEXT) and self._bias is None:
            return logits_BTC
        z, C = logits_BTC.float(), self.columns
        if self._bias is not None:
            z = z + self._bias
        banned_BTC = None
        if self.needs_text:
            assert text is not None, "these settings look at the text"
            ends_BT = text.ends(z.shape[1])
            columns_BS = torch.where((text.ids_BS >= 0) & (text.ids_BS < self.vocab), text.ids_BS, self.vocab)
            if self._column_V1 is not None:
                columns_BS = self._column_V1[columns_BS]
            if "repetition_penalty" in on:
                z = torch.where(seen(columns_BS, ends_BT, C), torch.where(z < 0, z * n.penalty, over(z, n.penalty)), z)
            if "no_repeat_ngram" in on:
                banned_BTC = repeated(text.ids_BS, columns_BS, ends_BT, C, n.ngram, self.longest_ngram)
            if self._eos_C is not None:
                early_BTC = ((ends_BT - text.prompt_B[:, None])[..., None] < n.min_new) & self._eos_C
                banned_BTC = early_BTC if banned_BTC is None else banned_BTC | early_BTC
            if banned_BTC is not None:
                z = z.masked_fill(banned_BTC, -torch.inf)
        if not self.greedy and (banned_BTC is not None or self._bias is not None):
            none_left_BT1 = z.amax(-1, keepdim=True) == -torch.inf
            z = z.masked_fill(none_left_BT1 & (torch.arange(C, device=z.device) == 0), 0.0)
        return z

    def probabilities(self, scores_BTC: Tensor) -> Tensor:
        """Law of each position, float32, from ``scores``: one-hot at the (first) argmax for greedy rows, else as ``probabilities``."""
        if self.greedy:
            return one_hot(scores_BTC)
        largest_k = None if self.largest_top_k is None else min(self.largest_top_k, self.columns)
        return warped(scores_BTC.float(), self._numbers, self.features, largest_k)


def draw(weights_NV: Tensor, u_N: Tensor) -> Tensor:
    """Inverse-transform sample of each row, proportional to its non-negative weights.

    Args:
        weights_NV: need not sum to 1; each row must have a positive entry.
        u_N: float64 uniforms in [0, 1).

    Returns:
        ids [N]; an entry of weight 0 is never drawn.
    """
    cdf = weights_NV.cumsum(-1, dtype=torch.float64)
    total = cdf[..., -1:].contiguous()
    picked = torch.searchsorted(cdf, u_N.unsqueeze(-1) * total, right=True)
    # u * total can round up to total: the last id with weight is then the right one.
    last = torch.searchsorted(cdf, total)
    return torch.minimum(picked, last).squeeze(-1)


_WIDE, _BLOCK = 1 << 14, 128
"""Columns from which on ``argmax`` goes by blocks on a CPU: 49,152 take .02 ms instead of .05, and 80 rows of them .24 instead of 1.7."""


def argmax(z: Tensor) -> Tensor:
    """The first largest entry along the last dimension, as ``torch.argmax``; on a CPU by blocks, since only amax is vectorised there."""
    if z.is_cuda or z.shape[-1] < _WIDE or z.shape[-1] % _BLOCK:
        return z.argmax(-1)
    blocks = z.unflatten(-1, (-1, _BLOCK))
    best = blocks.amax(-1).argmax(-1, keepdim=True)
    inside = blocks.gather(-2, best[..., None].expand(*best.shape, _BLOCK)).squeeze(-2).argmax(-1)
    return best.squeeze(-1) * _BLOCK + inside


def uniforms(generator: torch.Generator, count: int) -> Tensor:
    """Float64 uniforms in [0, 1) of one row's own stream; the global RNG is left alone."""
    return torch.rand(count, generator=generator, dtype=torch.float64)
