"""The cache of what was fetched or converted: entries are whole or absent, and one process makes each."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from draftstill.errors import DraftstillError


def cache_dir() -> Path:
    """``$XDG_CACHE_HOME/draftstill`` or ``~/.cache/draftstill``. Everything in it can be deleted and is made again."""
    # The XDG specification says to ignore a relative path.
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "draftstill"


def cached(entry: Path, make: Callable[[Path], None]) -> Path:
    """The folder ``entry``; where it is absent, ``make`` fills a temporary folder that is then renamed into place.

    Ranks of one launch ask at the same time: the first one works under a lock and the others wait for its result.
    """
    if entry.is_dir():
        return entry
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with _lock(entry.with_name(f".{entry.name}.lock")):
            if entry.is_dir():
                return entry
            work = Path(tempfile.mkdtemp(prefix=f".{entry.name[:40]}.", dir=entry.parent))
            try:
                make(work)
                work.chmod(0o755)  # mkdtemp makes 0700, which a shared cache cannot use
                os.replace(work, entry)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise DraftstillError(f"cannot write the cache: {error.strerror or error}", value=str(entry),
                              mend="free some space, or point XDG_CACHE_HOME at a folder that can be written") from error  # fmt: skip
    return entry


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
