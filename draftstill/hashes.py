"""SHA-256 of files and folders; of large files remembered: every command asks what its inputs are, and a log of gigabytes takes seconds to hash."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path

from draftstill.cache import cache_dir
from draftstill.runfolder import hash_file, write_json

_LARGE = 64 << 20
_WORTH_IT = 4 << 20
"""Smaller files are hashed as fast as the note is found."""
_SETTLED_NS = 2_000_000_000
"""A file changed so recently may change again without its times telling: some file systems count in two seconds."""


def remembered_hash(path: Path) -> str:
    """SHA-256 of a file's bytes, from the cache where size, inode and both times are those of the last look.

    The time of the inode's change cannot be set back by the usual tools, as the time of modification can.
    """
    before = os.stat(path)
    if before.st_size < _WORTH_IT:
        return hash_file(path)
    state = [before.st_size, before.st_ino, before.st_mtime_ns, before.st_ctime_ns]
    note = cache_dir() / "hashes" / f"{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # absent or damaged: hash again
        known = json.loads(note.read_text())
        if known["state"] == state:
            return str(known["sha256"])
    found = hash_file(path)
    after = os.stat(path)
    settled = time.time_ns() - max(after.st_mtime_ns, after.st_ctime_ns) > _SETTLED_NS
    if settled and [after.st_size, after.st_ino, after.st_mtime_ns, after.st_ctime_ns] == state:
        with contextlib.suppress(OSError):  # a cache that cannot be written costs time, nothing else
            write_json(note, {"state": state, "sha256": found})
    return found


def hash_files(files: Iterable[tuple[str, Path]], *, whole: bool) -> str:
    """One SHA-256 over names and contents of files, whose order does not matter.

    Large files count by size and their first and last MiB, so that asking about a 16 GB model stays quick; with ``whole`` by all their bytes,
    as a log must that is edited in the middle.
    """
    digest = hashlib.sha256()
    for name, path in sorted(files, key=lambda file: file[1]):
        size = path.stat().st_size
        digest.update(os.fsencode(name) + f"\0{size}\0".encode())
        if whole or size <= _LARGE:
            digest.update(remembered_hash(path).encode())
        else:
            with open(path, "rb") as handle:
                digest.update(handle.read(1 << 20))
                handle.seek(-(1 << 20), os.SEEK_END)
                digest.update(handle.read())
    return digest.hexdigest()
