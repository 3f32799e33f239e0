"""Shards and manifest: what is written. docs/recording.md has the format in full; ``recording`` reads it."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftstill.distill.packing import decode_falls, encode_falls, encode_hidden, pack_ids
from draftstill.errors import DraftstillError
from draftstill.runfolder import hash_file, save_tensors, write_json

FORMAT = 3
"""What is written. 2 had no ``after``, no ``sha256`` within a shard and no ``table`` of ids; it is read as before."""
READABLE = (2, 3)
KINDS = ("response", "document", "rollout", "replay")
"""Where a sequence comes from; shards hold the place in this list."""
AGAIN = "delete the recording's folder and record again"
_TRIES, _PAUSE_S = 10, 0.5
"""How long another machine's shard may take to show in a shared folder."""


def digest(tokens: Sequence[int] | Tensor) -> int:
    """First 8 bytes of the SHA-256 of the ids as little-endian int32, as a signed little-endian number."""
    flat = np.asarray(tokens, dtype="<i4")
    return int.from_bytes(hashlib.sha256(flat.tobytes()).digest()[:8], "little", signed=True)


def mark_of(about: dict[str, Any]) -> str:
    """What every shard of a recording carries: a hash of the format and of all that the laws were made from, wherever that lies."""
    portable = {key: value for key, value in about.items() if key != "target"}
    return hashlib.sha256(json.dumps([FORMAT, portable], sort_keys=True).encode()).hexdigest()


def write_shard(path: Path, tokens: Sequence[Sequence[int]], starts: Sequence[int], columns: dict[str, Tensor], *, vocab: int | None = None,
                logp_bits: int = 16, hidden_bits: int | None = None, masks: Sequence[Sequence[int] | None] = (),
                kinds: Sequence[str] = (), after: Sequence[int] = (), mark: str = "") -> None:  # fmt: skip
    """Write whole sequences.

    Args:
        starts: first supervised position of each sequence.
        columns: [N, ...] in the order of the concatenated tokens. topk: ids [N, K] by falling probability, uint16 or wider; logp [N, K];
            tail [N]; optionally lse [N], and count [N], kept ids per position (default: K). hidden: hidden [N, H]. text, live: none.
        vocab: decides how wide ids are written; None: uint16 stays, others are packed as those of a large vocabulary.
        logp_bits: 8 or 16 for each log-probability; hidden_bits: 8, 16 (bfloat16) or None (as they are).
        masks: supervised positions of each sequence; None: all from its start on.
        after: the token that was written behind each sequence; -1: none.
        mark: of the recording that the shard belongs to.
    """
    lengths = [len(t) for t in tokens]
    offsets = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
    shard = {
        "tokens": torch.from_numpy(np.concatenate([np.asarray(t, dtype=np.int32) for t in tokens])), "offsets": offsets,
        "start": torch.tensor(list(starts), dtype=torch.int32), "digest": torch.tensor([digest(t) for t in tokens], dtype=torch.int64),
        "kind": torch.tensor([KINDS.index(k) for k in kinds] or [0] * len(tokens), dtype=torch.uint8),
        "after": torch.tensor(list(after) or [-1] * len(tokens), dtype=torch.int32),
    }  # fmt: skip
    if any(m is not None for m in masks):
        supervised = torch.zeros(int(offsets[-1]), dtype=torch.uint8)
        for mask, first, start, end in zip(masks, offsets[:-1].tolist(), starts, offsets[1:].tolist(), strict=True):
            supervised[slice(first + start, end) if mask is None else torch.tensor(list(mask), dtype=torch.int64) + first] = 1
        shard["supervised"] = supervised
    rounding = 0.0
    if "ids" in columns:
        laws, rounding = _pack_laws(columns, offsets, logp_bits, vocab)
    elif not columns:
        laws = {}
    elif hidden_bits == 8:
        codes, scale = encode_hidden(columns["hidden"])
        laws = {"hidden": codes, "scale": scale}
    else:
        laws = {"hidden": columns["hidden"].to(torch.bfloat16) if hidden_bits == 16 else columns["hidden"]}
    # One key only: safetensors writes several in an order that changes from process to process.
    info = json.dumps({"format": FORMAT, "mark": mark, "rounding": rounding, "sha256": checksum(shard | laws)})
    save_tensors(path, {**shard, **laws}, {"draftstill": info})


def _pack_laws(columns: dict[str, Tensor], offsets: Tensor, bits: int, vocab: int | None) -> tuple[dict[str, Tensor], float]:
    """The columns of a topk shard, and what rounding can do to alpha at most: the most mass that a row, read again, has
    gained at some of its ids, or lost."""
    ids, logp, tail = columns["ids"], columns["logp"].float(), columns["tail"].float()
    N, K = logp.shape
    count = columns.get("count", torch.full((N,), K))
    used = torch.arange(K) < count[:, None]
    code = encode_falls(logp) if bits == 8 else logp.half()
    read = decode_falls(code, used, tail) if bits == 8 else code.float().exp() * used
    off = read.double() - logp.double().exp() * used
    rounding = max(float(off.clamp_min(0).sum(-1).max()), float(-off.clamp_max(0).sum(-1).min())) if N else 0.0
    entries = torch.cat([torch.zeros(1, dtype=torch.int64), count.to(torch.int64).cumsum(0)])[offsets]
    narrow = ids.dtype == torch.uint16 if vocab is None else vocab <= 1 << 16
    flat = ids.to(torch.int32)[used]  # uint16 cannot be masked
    short, table = (flat.to(torch.uint16), None) if narrow else pack_ids(flat)
    packed = {
        "count": count.to(torch.uint8 if K < 256 else torch.int32),
        "entries": entries,
        "ids": short,
        "logp": code[used],
        "tail": tail,
    }
    more = {"table": table, "lse": columns["lse"].float() if "lse" in columns else None}
    return packed | {name: tensor for name, tensor in more.items() if tensor is not None}, rounding


def checksum(tensors: dict[str, Tensor]) -> str:
    """SHA-256 of names, dtypes, shapes and bytes: what a shard says of itself, so that damage shows before there is a manifest, too."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        found.update(tensor.contiguous().view(torch.uint8).flatten().numpy().data)
    return found.hexdigest()


def read_info(path: Path, *, whole: bool = False) -> dict[str, Any]:
    """What a shard says about itself, with the tensors ``offsets`` and ``digest``.

    Args:
        whole: read all of it and compare its checksum; a shard of format 2 has none.

    Raises:
        DraftstillError: it is no whole safetensors file, or not the one that was written.
    """
    try:
        with safe_open(path, "pt") as file:
            info: dict[str, Any] = json.loads((file.metadata() or {}).get("draftstill", "{}"))
            tensors = {name: file.get_tensor(name) for name in (file.keys() if whole else ("offsets", "digest"))}
    except (SafetensorError, OSError, ValueError) as error:
        raise DraftstillError(f"the shard {path.name} in {path.parent} is damaged: {error}", mend=AGAIN) from None
    if whole and "sha256" in info and checksum(tensors) != info["sha256"]:
        raise DraftstillError(
            f"the shard {path.name} in {path.parent} is damaged: it does not hold what was written (its checksum differs)", mend=AGAIN
        )
    return info | {"offsets": tensors["offsets"], "digest": tensors["digest"]}


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


def write_manifest(folder: Path, about: dict[str, Any], expected: Sequence[int] | None = None, **more: Any) -> dict[str, Any]:
    """List the shards with sizes and checksums beside what the laws were made from (``about``) and what else is to be told.

    Args:
        expected: positions of each shard that there must be; None: whatever lies there.

    Raises:
        DraftstillError: a shard is missing, damaged or of another size, or there is one more, by name.
    """
    paths = sorted(folder.glob("shard-*.safetensors")) if expected is None else _expected(folder, expected)
    shards: list[dict[str, Any]] = []
    rounding = 0.0
    for path in paths:
        info = read_info(path, whole=True)
        offsets, rounding = info["offsets"], max(rounding, info.get("rounding", 0.0))
        shards.append({"file": path.name, "sequences": len(offsets) - 1, "positions": int(offsets[-1]), "bytes": path.stat().st_size,
                       "sha256": hash_file(path)})  # fmt: skip
    for shard, positions in zip(shards, expected or (), strict=expected is not None):
        if shard["positions"] != positions:
            raise DraftstillError(
                f"the shard {shard['file']} in {folder} holds {shard['positions']} positions, not {positions}", mend=AGAIN
            )
    total = {k: sum(s[k] for s in shards) for k in ("sequences", "positions", "bytes")}
    manifest = {"format": FORMAT, "mark": mark_of(about), **about, **total, "rounding": rounding, **more, "shards": shards}
    write_json(folder / "manifest.json", manifest)
    return manifest


def _expected(folder: Path, positions: Sequence[int]) -> list[Path]:
    paths = [folder / shard_name(number) for number in range(len(positions))]
    for path in paths:
        for _ in range(_TRIES):
            if path.exists():
                break
            time.sleep(_PAUSE_S)
        else:
            raise DraftstillError(f"the shard {path.name} is missing from {folder}, though every process says it is done",
                                  mend="run the same command again; run_dir must lie on a file system that all machines share")  # fmt: skip
    if others := sorted({p.name for p in folder.glob("shard-*.safetensors")} - {p.name for p in paths}):
        raise DraftstillError(
            f"{others[0]} in {folder} is none of this recording's {len(paths)} shards", mend="delete it and run the same command again"
        )
    return paths
