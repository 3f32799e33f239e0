"""Near duplicates: documents that share much of their wording must not stand on both sides of a split.

Word 5-grams, MinHash, locality-sensitive hashing, and union-find. Everything is deterministic: words are hashed with
BLAKE2b (never ``hash()``, which changes from process to process) and n-grams are combined from word hashes in numpy.
Signatures lie on disk and are compared band by band, so that a corpus of millions of rows takes tens of bytes of memory for each.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

SHINGLE_WORDS = 5
PERMUTATIONS = 128
"""Standard error of an estimated similarity of .5 is sqrt(.25 / 128) = .044."""

# Scripts written without spaces count by character, or a whole paragraph would be one word.
_CJK = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff"
_WORD = re.compile(rf"[^\W{_CJK}]+|[{_CJK}]")
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd, so multiplying is a bijection modulo 2**64
_REMEMBERED = 1 << 20  # words; a log with an id in every row would fill the memory
_BATCH = 1 << 16  # n-grams per MinHash update: bounds memory at 65,536 * 128 * 8 bytes = 64 MiB for any document length
_BANDS_AT_ONCE = 6  # 8 bytes a text and band
_BLOCK = 1 << 14  # signatures read at once: 8 MiB
_CROWDED, _COMPARED = 1024, 32
_NOTHING = np.uint32(0xFFFFFFFF)


class _WordHashes(dict[str, int]):
    """Hash of a word, looked up where it was seen before: a corpus repeats its words."""

    def __missing__(self, word: str) -> int:
        if len(self) >= _REMEMBERED:
            self.clear()
        value = self[word] = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")
        return value


class Shingler:
    """Hashes of the word n-grams of texts."""

    def __init__(self) -> None:
        self._known = _WordHashes()

    def __call__(self, text: str, words: int = SHINGLE_WORDS) -> np.ndarray:
        """uint64 hashes of the text's lower-cased word n-grams in order (one n-gram where the text is shorter)."""
        found = _WORD.findall(text.lower())
        hashes = np.fromiter(map(self._known.__getitem__, found), dtype=np.uint64, count=len(found))
        words = min(words, len(hashes))
        mixed = np.zeros(max(len(hashes) - words + 1, 0) if words else 0, dtype=np.uint64)
        for offset in range(words):
            mixed = mixed * _MULTIPLIER + hashes[offset : len(hashes) - words + 1 + offset]
            mixed ^= mixed >> np.uint64(29)
        return mixed * _MULTIPLIER


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
    narrow = shingles >> np.uint64(32)  # datasketch permutes 32 bits
    for start in range(0, len(narrow), _BATCH):
        sketch.update_batch(narrow[start : start + _BATCH].tolist())
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


class Sketches:
    """MinHash signatures of texts in the order they are added, on disk."""

    def __init__(self, folder: str | Path | None = None) -> None:
        from datasketch import MinHash

        self.count = 0
        self.crowded = 0
        """Buckets that were too large to compare all of their pairs."""
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - nameless: gone when the process is
        self._shingler, self._empty = Shingler(), MinHash(num_perm=PERMUTATIONS, hashfunc=int)

    def add(self, text: str) -> None:
        self._file.write(_minhash(self._shingler(text), self._empty).hashvalues.astype(np.uint32).tobytes())
        self.count += 1

    def near_duplicates(self, threshold: float, on_progress: Callable[[int, int], None] | None = None) -> list[tuple[int, int, float]]:
        """Pairs (i, j, similarity), i < j, whose estimated Jaccard similarity of word 5-grams is at least ``threshold``: not all of them, but
        enough to join everything that a chain of such pairs connects.

        LSH proposes pairs and the MinHash estimate decides. Containment (a short text inside a long one) is not similarity and is
        not found. Texts without a word resemble nothing. ``on_progress`` is told (bands done, bands).
        """
        groups, pairs = Groups(self.count), list[tuple[int, int, float]]()
        bands, rows = _bands(threshold)
        for first in range(0, bands, _BANDS_AT_ONCE):
            for number, keys in enumerate(self._keys(first, min(bands, first + _BANDS_AT_ONCE), rows), first + 1):
                for members in _buckets(keys):
                    pairs += self._similar(members, threshold, groups)
                if on_progress is not None:
                    on_progress(number, bands)
        return pairs

    def _keys(self, first: int, last: int, rows: int) -> np.ndarray:
        """Hashes of some bands, [bands, texts]; texts without a word have hashes of their own."""
        keys = np.empty((last - first, self.count), dtype=np.uint64)
        self._file.seek(0)
        for at in range(0, self.count, _BLOCK):
            block = np.frombuffer(self._file.read(_BLOCK * 4 * PERMUTATIONS), dtype=np.uint32).reshape(-1, PERMUTATIONS)
            wordless = np.flatnonzero((block == _NOTHING).all(axis=1))
            for band in range(first, last):
                mixed = np.zeros(len(block), dtype=np.uint64)
                for column in range(band * rows, (band + 1) * rows):
                    mixed = (mixed ^ block[:, column].astype(np.uint64)) * _MULTIPLIER
                    mixed ^= mixed >> np.uint64(31)
                mixed[wordless] = (wordless + at).astype(np.uint64) * _MULTIPLIER
                keys[band - first, at : at + len(block)] = mixed
        return keys

    def _signatures(self, members: list[int]) -> np.ndarray:
        size, made = 4 * PERMUTATIONS, np.empty((len(members), PERMUTATIONS), dtype=np.uint32)
        for row, member in enumerate(members):
            self._file.seek(member * size)
            made[row] = np.frombuffer(self._file.read(size), dtype=np.uint32)
        return made

    def _similar(self, members: np.ndarray, threshold: float, groups: Groups) -> Iterator[tuple[int, int, float]]:
        """Pairs of one bucket that join two groups.

        In a crowded bucket only the first members are compared with all: its texts share a phrase that half the corpus has, and texts that
        share more meet in other bands, too.
        """
        roots = np.fromiter((groups.find(m) for m in members.tolist()), dtype=np.int64)
        if (roots == roots[0]).all():
            return
        compared = len(members)
        if len(members) > _CROWDED:
            self.crowded, compared = self.crowded + 1, _COMPARED
        heads = list[int]()  # the bucket's first members, which stand before each later block and join it to those before
        for block in range(0, len(members), _BLOCK):
            part = heads + members[block : block + _BLOCK].tolist()
            root = np.fromiter((groups.find(m) for m in part), dtype=np.int64) if heads else roots[:_BLOCK]
            signatures = self._signatures(part)
            for at in range(min(len(heads) + compared, len(part))):
                others = at + 1 + np.flatnonzero(root[at + 1 :] != root[at])
                similarities = (signatures[others] == signatures[at]).mean(axis=1)
                for other, similarity in zip(others.tolist(), similarities.tolist(), strict=True):
                    if similarity >= threshold and root[other] != root[at]:
                        groups.join(part[at], part[other])
                        root[(root == root[at]) | (root == root[other])] = min(root[at], root[other])
                        yield part[at], part[other], similarity
            heads = heads or part[:_COMPARED]


def _buckets(keys: np.ndarray) -> Iterator[np.ndarray]:
    """Groups of two or more indices with equal keys, each ascending."""
    order = np.argsort(keys, kind="stable")
    ends = np.flatnonzero(np.diff(keys[order])) + 1
    starts, stops = np.concatenate([[0], ends]), np.concatenate([ends, [len(keys)]])
    for start, stop in zip(starts[stops - starts > 1], stops[stops - starts > 1], strict=True):
        yield order[start:stop]


def group_documents(count: int, families: Iterable[tuple[int, int]], pairs: Iterable[tuple[int, int, float]]) -> list[int]:
    """For each of ``count`` documents the lowest index of its group: near duplicates, and members of one family, share a group.

    Args:
        families: pairs of documents that connect each family.
        pairs: near duplicates, with their similarity.
    """
    groups = Groups(count)
    for one, other in families:
        groups.join(one, other)
    for one, other, _ in pairs:
        groups.join(one, other)
    return groups.roots()


def seen_shares(known: Iterable[str], new: Mapping[str, Iterable[str]], words: int = 13) -> dict[str, float]:
    """For each named set of new texts the share of its distinct word 13-grams that stand in the known texts, too: how much wording crosses
    the split. In memory are the n-grams of the new texts only."""
    shingler = Shingler()
    fresh = {name: _distinct(shingler(text, words) for text in texts) for name, texts in new.items()}
    seen = {name: np.zeros(len(grams), dtype=bool) for name, grams in fresh.items()}
    for batch in _batches(shingler(text, words) for text in known):
        for name, grams in fresh.items():
            at = np.searchsorted(grams, batch)
            at = at[at < len(grams)] if len(grams) else at[:0]
            inside = batch[: len(at)]  # both ascend, so what lies past the end comes last
            seen[name][at[grams[at] == inside]] = True
    return {name: float(found.mean()) if len(found) else 0.0 for name, found in seen.items()}


def _batches(arrays: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Distinct values of many small arrays, a few hundred thousand at a time."""
    waiting, size = list[np.ndarray](), 0
    for array in arrays:
        waiting.append(array)
        size += len(array)
        if size >= _BATCH * 8:
            yield np.unique(np.concatenate(waiting))
            waiting, size = [], 0
    if waiting:
        yield np.unique(np.concatenate(waiting))


def _distinct(arrays: Iterable[np.ndarray]) -> np.ndarray:
    made = list(_batches(arrays))
    return np.unique(np.concatenate(made)) if made else np.zeros(0, np.uint64)
