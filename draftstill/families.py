"""Which documents share something, and so must stand on one side of the split."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence

import numpy as np

_KEY = 16
"""Bytes of a hash that tell shared things apart: two among billions would not meet."""
_COMMONPLACE = 16
"""A prompt that so many different ones go on from is a form of greeting, or an example that stands before every question."""


class Families:
    """Mentions of shared things by documents, which are numbered in order. A mention takes 24 bytes of memory.

    Documents with one name (of a conversation, a customer) belong together, and those with one prompt. A conversation whose prompt goes on from
    the whole prompt of another one belongs to it, too: a log that writes down each request with all that went before it holds one
    conversation in many rows. Where very many go on from the same prompt, it is no conversation of theirs.
    """

    def __init__(self) -> None:
        self._names, self._prompts, self._earlier = _Mentions(), _Mentions(), _Mentions()
        self.commonplace = 0
        """Prompts that too many others go on from; known once ``pairs`` was read."""

    def name(self, member: int, name: str) -> None:
        self._names.add(member, hashlib.sha256(name.encode("utf-8", "backslashreplace")).digest()[:_KEY])

    def prompts(self, member: int, keys: Sequence[bytes]) -> None:
        """Hashes of all prompts in a conversation, each going on from the one before; the last one is its whole prompt."""
        for key in keys[:-1]:
            self._earlier.add(member, key)
        for key in keys[-1:]:
            self._prompts.add(member, key)

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Pairs of documents that connect each family."""
        yield from self._names.connected()
        yield from self._prompts.connected()
        yield from self._continued()

    def _continued(self) -> Iterator[tuple[int, int]]:
        """Each conversation with the one that it goes on from last."""
        keys, members = self._prompts.arrays()
        earlier, by = self._earlier.arrays()
        if not len(keys) or not len(earlier):
            return
        whole, first, label = np.unique(keys, return_index=True, return_inverse=True)
        at = np.searchsorted(whole, earlier).clip(max=len(whole) - 1)
        known = whole[at] == earlier
        at, by = at[known], by[known]
        last = np.flatnonzero(np.append(by[1:] != by[:-1], True)[: len(by)])  # a document's mentions stand in order
        parent, child = at[last], by[last]
        edges = np.unique(np.stack([parent, label[np.searchsorted(members, child)]], axis=1), axis=0)
        followers = np.bincount(edges[:, 0], minlength=len(whole))
        self.commonplace = int((followers > _COMMONPLACE).sum())
        kept = followers[parent] <= _COMMONPLACE
        yield from zip(members[first[parent[kept]]].tolist(), child[kept].tolist(), strict=True)


class _Mentions:
    def __init__(self) -> None:
        self._keys, self._members = bytearray(), array("q")

    def add(self, member: int, key: bytes) -> None:
        self._keys += key
        self._members.append(member)

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Keys and members, in the order of their mention."""
        if not self._members:
            return np.empty(0, f"S{_KEY}"), np.empty(0, np.int64)
        return np.frombuffer(self._keys, dtype=f"S{_KEY}"), np.frombuffer(self._members, dtype=np.int64)

    def connected(self) -> Iterator[tuple[int, int]]:
        """Neighbours among the members that have a key in common."""
        keys, members = self.arrays()
        order = np.argsort(keys, kind="stable")
        same = np.flatnonzero(keys[order[1:]] == keys[order[:-1]])
        yield from zip(members[order[same]].tolist(), members[order[same + 1]].tolist(), strict=True)
