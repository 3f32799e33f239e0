"""Recordings that lie elsewhere: any fsspec address (s3://, gs://, hf://, memory://). Shards are fetched whole, since only a local
file can be memory-mapped; what was fetched before is not fetched again."""

from __future__ import annotations

import hashlib
import os
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


def send(path: Path, address: str) -> None:
    """Put one file into the folder ``address``, over what lies there. Send the manifest last: a folder without one is no recording."""
    files, root = _filesystem(address)
    files.makedirs(root, exist_ok=True)
    files.put_file(str(path), f"{root}/{path.name}")
