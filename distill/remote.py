"""Recordings that lie elsewhere: any fsspec address (s3://, gs://, hf://, memory://). Shards are fetched whole, since only a local
file can be memory-mapped; what was fetched before is not fetched again."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from draftstill.cache import cache_dir
from draftstill.errors import DraftstillError
from draftstill.runfolder import atomic_write, read_json


def is_remote(path: str | Path) -> bool:
    return "://" in str(path)


def _filesystem(address: str) -> tuple[Any, str]:
    import fsspec

    try:
        return fsspec.core.url_to_fs(address.rstrip("/"))
    except (ImportError, ValueError) as error:
        raise DraftstillError(
            f"cannot open {address}: {error}", mend="install what its scheme needs (s3fs, gcsfs, ...), or copy it here"
        ) from None


def holds_recording(address: str) -> bool:
    """Whether a manifest lies at ``address`` itself."""
    files, root = _filesystem(address)
    return bool(files.exists(f"{root}/manifest.json"))


def fetch(address: str) -> Path:
    """A local folder with the manifest and all shards of the recording at ``address``. Another recording there is another folder here."""
    files, root = _filesystem(address)
    if not files.exists(f"{root}/manifest.json"):
        raise DraftstillError(f"{address} holds no recording (no manifest.json)", mend="give the address of a folder that has one")
    manifest: bytes = files.cat_file(f"{root}/manifest.json")
    folder = cache_dir() / "recordings" / hashlib.sha256(address.rstrip("/").encode() + b"\0" + manifest).hexdigest()[:24]
    atomic_write(folder / "manifest.json", manifest)
    for shard in read_json(folder / "manifest.json").get("shards", []):
        local = folder / Path(shard["file"]).name
        if not local.exists() or local.stat().st_size != shard["bytes"]:
            if not files.exists(f"{root}/{local.name}"):
                raise DraftstillError(f"the shard {local.name} is missing from {address}", mend="copy the recording there again")
            part = local.with_name(f".{local.name}.{os.getpid()}.tmp")
            try:
                files.get_file(f"{root}/{local.name}", str(part))
                os.replace(part, local)
            finally:
                part.unlink(missing_ok=True)
    return folder


def probe(address: str) -> None:
    """Write a small object to ``address`` and delete it.

    Raises:
        DraftstillError: that does not work, whatever the reason.
    """
    with _reached(address):
        files, root = _filesystem(address)
        files.makedirs(root, exist_ok=True)
        files.pipe_file(f"{root}/.draftstill-{os.getpid()}", b"written by draftstill to see whether it can\n")
        files.rm(f"{root}/.draftstill-{os.getpid()}")


def mirror(folder: Path, address: str) -> int:
    """Copy a recording to the folder ``address`` and return how many files were sent: not those that are there already. The manifest goes last,
    and one of another recording first: a folder without one is no recording.

    Raises:
        DraftstillError: the address cannot be written to.
    """
    manifest = (folder / "manifest.json").read_bytes()
    with _reached(address):
        files, root = _filesystem(address)
        files.invalidate_cache()
        files.makedirs(root, exist_ok=True)
        listed = f"{root}/manifest.json"
        if files.exists(listed):
            if files.cat_file(listed) == manifest:
                return 0
            files.rm(listed)
        missing = [p for s in json.loads(manifest)["shards"] if not _there(p := folder / s["file"], files, f"{root}/{s['file']}")]
        for path in [*missing, folder / "manifest.json"]:
            files.put_file(str(path), f"{root}/{path.name}")
    return len(missing) + 1


def _there(path: Path, files: Any, place: str) -> bool:
    """Whether a shard lies there already: its size and its header, which holds a checksum of the tensors."""
    if not files.exists(place) or files.size(place) != path.stat().st_size:
        return False
    with open(path, "rb") as file:
        head = file.read(8)
        head += file.read(int.from_bytes(head, "little"))
    return bool(files.cat_file(place, start=0, end=len(head)) == head)


@contextmanager
def _reached(address: str) -> Iterator[None]:
    """Whatever a file system raises, as the fault of record.mirror."""
    try:
        yield
    except Exception as error:
        problem = error.problem if isinstance(error, DraftstillError) else f"{type(error).__name__}: {error}"
        raise DraftstillError(f"nothing can be written there ({problem})", key="record.mirror", value=address,
                              mend="mend the address or the access to it and run the same command again, or leave record.mirror out") from None  # fmt: skip
