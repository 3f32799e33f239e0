"""Near duplicates: documents that share much of their wording must not stand on both sides of a split.

Word 5-grams, MinHash, locality-sensitive hashing, and union-find. Everything is deterministic: words are hashed with
BLAKE2b (never ``hash()``, which changes from process to process) and n-grams are combined from word hashes in numpy.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

SHINGLE_WORDS = 5
PERMUTATIONS = 128
"""Standard error of an estimated similarity of .5 is sqrt(.25 / 128) = .044."""

# Scripts written without spaces count by character, or a whole paragraph would be one word.
_CJK = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff"
_WORD = re.compile(rf"[^\W{_CJK}]+|[{_CJK}]")
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd, so multiplying is a bijection modulo 2**64
_BATCH = 1 << 16  # n-grams per MinHash update: bounds memory at 65,536 * 128 * 8 bytes = 64 MiB for any document length


class Shingler:
    """Hashes of the distinct word n-grams of texts; remembers word hashes, since a corpus repeats its words."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def _word_hash(self, word: str) -> int:
        value = self._known.get(word)
        if value is None:
            value = self._known[word] = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")
        return value

    def __call__(self, text: str, words: int = SHINGLE_WORDS) -> np.ndarray:
        """Sorted distinct uint32 hashes of the text's lower-cased word n-grams (one n-gram where the text is shorter)."""
        hashes = np.fromiter((self._word_hash(w) for w in _WORD.findall(text.lower())), dtype=np.uint64)
        words = min(words, len(hashes))
        mixed = np.zeros(max(len(hashes) - words + 1, 0) if words else 0, dtype=np.uint64)
        for offset in range(words):
            mixed = mixed * _MULTIPLIER + hashes[offset : len(hashes) - words + 1 + offset]
            mixed ^= mixed >> np.uint64(29)
        return np.unique(((mixed * _MULTIPLIER) >> np.uint64(32)).astype(np.uint32))


class Groups:
    """Union-find over document indices; a group is named by its lowest index."""

    def __init__(self, count: int) -> None:
        self._parent = list(range(count))

    def find(self, item: int) -> int:
        while self._parent[item] != item:
            self._parent[item] = self._parent[self._parent[item]]
            item = self._parent[item]
        return item

    def join(self, one: int, other: int) -> None:
        low, high = sorted((self.find(one), self.find(other)))
        self._parent[high] = low

    def roots(self) -> list[int]:
        return [self.find(i) for i in range(len(self._parent))]


def _minhash(shingles: np.ndarray, permutations: Any) -> Any:
    from datasketch import MinHash

    # The n-grams are hashed already. One set of permutations serves all documents; drawing it anew would cost more than using it.
    sketch = MinHash(num_perm=PERMUTATIONS, hashfunc=int) if permutations is None else permutations.copy()
    for start in range(0, len(shingles), _BATCH):
        sketch.update_batch(shingles[start : start + _BATCH].tolist())
    return sketch


def _bands(threshold: float) -> tuple[int, int]:
    """(bands, rows) that propose 99 % of the pairs at exactly the threshold, and more above it, with the fewest needless ones.

    datasketch's own choice balances both errors and proposes 87 % at .5; here a missed pair is a leak, a needless one a comparison.
    """
    for rows in range(PERMUTATIONS // 2, 1, -1):
        bands = PERMUTATIONS // rows
        if 1 - (1 - threshold**rows) ** bands >= 0.99:
            return bands, rows
    return PERMUTATIONS, 1


def near_duplicates(
    texts: Sequence[str], threshold: float, on_progress: Callable[[int], None] | None = None
) -> list[tuple[int, int, float]]:
    """Pairs (i, j, similarity), i < j, whose estimated Jaccard similarity of word 5-grams is at least ``threshold``.

    LSH proposes pairs and the MinHash estimate decides. Containment (a short text inside a long one) is not similarity and is
    not found.
    """
    from datasketch import MinHash, MinHashLSH

    index = MinHashLSH(num_perm=PERMUTATIONS, params=_bands(threshold))
    shingler, empty = Shingler(), MinHash(num_perm=PERMUTATIONS, hashfunc=int)
    sketches: list[Any] = []
    pairs: list[tuple[int, int, float]] = []
    for number, text in enumerate(texts):
        sketch = _minhash(shingler(text), empty)
        for other in sorted(index.query(sketch)):
            similarity = float(sketch.jaccard(sketches[other]))
            if similarity >= threshold:
                pairs.append((other, number, similarity))
        index.insert(number, sketch)
        sketches.append(sketch)
        if on_progress is not None:
            on_progress(number + 1)
    return pairs


def group_documents(families: Sequence[str | None], pairs: Iterable[tuple[int, int, float]]) -> list[int]:
    """For each document the lowest index of its group: near duplicates, and members of one family, share a group."""
    groups = Groups(len(families))
    for one, other, _ in pairs:
        groups.join(one, other)
    first: dict[str, int] = {}
    for number, family in enumerate(families):
        if family is not None:
            groups.join(first.setdefault(family, number), number)
    return groups.roots()


def seen_share(known: Iterable[str], new: Iterable[str], words: int = 13) -> float:
    """Share of the distinct word 13-grams of ``new`` that stand in ``known`` too: how much wording crosses the split."""
    shingler = Shingler()
    gather = lambda texts: np.unique(np.concatenate([np.zeros(0, np.uint32), *(shingler(t, words) for t in texts)]))  # noqa: E731
    old, fresh = gather(known), gather(new)
    return float(np.isin(fresh, old, assume_unique=True).mean()) if len(fresh) else 0.0
