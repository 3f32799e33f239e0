"""Shards and manifest: what is written. docs/recording.md has the format in full; ``recording`` reads it."""

from __future__ import annotations

import hashlib
import json
import math
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

FORMAT = 2
KINDS = ("response", "document", "rollout", "replay")
"""Where a sequence comes from; shards hold the place in this list."""
AGAIN = "delete the recording's folder and record again"


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
                kinds: Sequence[str] = (), mark: str = "") -> None:  # fmt: skip
    """Write whole sequences.

    Args:
        starts: first supervised position of each sequence.
        columns: [N, ...] in the order of the concatenated tokens. topk: ids [N, K] by falling probability, uint16 or wider; logp [N, K];
            tail [N]; optionally lse [N], and count [N], kept ids per position (default: K). hidden: hidden [N, H]. text: none.
        vocab: decides how wide ids are written; None: uint16 stays, others take 3 bytes.
        logp_bits: 8 or 16 for each log-probability; hidden_bits: 8, 16 (bfloat16) or None (as they are).
        masks: supervised positions of each sequence; None: all from its start on.
        mark: of the recording that the shard belongs to.
    """
    lengths = [len(t) for t in tokens]
    offsets = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
    shard = {
        "tokens": torch.tensor([t for s in tokens for t in s], dtype=torch.int32), "offsets": offsets,
        "start": torch.tensor(list(starts), dtype=torch.int32), "digest": torch.tensor([digest(t) for t in tokens], dtype=torch.int64),
        "kind": torch.tensor([KINDS.index(k) for k in kinds] or [0] * len(tokens), dtype=torch.uint8),
    }  # fmt: skip
    if any(m is not None for m in masks):
        supervised = torch.zeros(int(offsets[-1]), dtype=torch.uint8)
        for mask, first, start, end in zip(masks, offsets[:-1].tolist(), starts, offsets[1:].tolist(), strict=True):
            supervised[slice(first + start, end) if mask is None else torch.tensor(mask, dtype=torch.int64) + first] = 1
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
    info = json.dumps({"format": FORMAT, "mark": mark, "rounding": rounding})
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
    packed = {"count": count.to(torch.uint8 if K < 256 else torch.int32), "entries": entries, "ids": flat.to(torch.uint16) if narrow else pack_ids(flat),
              "logp": code[used],
              "tail": tail}  # fmt: skip
    return packed | ({"lse": columns["lse"].float()} if "lse" in columns else {}), rounding


def read_info(path: Path) -> dict[str, Any]:
    """What a shard says about itself.

    Raises:
        DraftstillError: it is no whole safetensors file.
    """
    try:
        with safe_open(path, "pt") as file:
            info: dict[str, Any] = json.loads((file.metadata() or {}).get("draftstill", "{}"))
            return info | {"offsets": file.get_tensor("offsets")}
    except (SafetensorError, OSError, ValueError) as error:
        raise DraftstillError(f"the shard {path.name} in {path.parent} is damaged: {error}", mend=AGAIN) from None


def write_manifest(folder: Path, about: dict[str, Any], **more: Any) -> dict[str, Any]:
    """List the shards with sizes and checksums beside what the laws were made from (``about``) and what else is to be told."""
    shards: list[dict[str, Any]] = []
    rounding = 0.0
    for path in sorted(folder.glob("shard-*.safetensors")):
        info = read_info(path)
        offsets, rounding = info["offsets"], max(rounding, info.get("rounding", 0.0))
        shards.append({"file": path.name, "sequences": len(offsets) - 1, "positions": int(offsets[-1]), "bytes": path.stat().st_size,
                       "sha256": hash_file(path)})  # fmt: skip
    total = {k: sum(s[k] for s in shards) for k in ("sequences", "positions", "bytes")}
    manifest = {"format": FORMAT, "mark": mark_of(about), **about, **total, "rounding": rounding, **more, "shards": shards}
    write_json(folder / "manifest.json", manifest)
    return manifest


def bytes_per_position(*, mode: str, top_k: float, vocab: int, hidden: int, logp_bits: int, hidden_bytes: float) -> float:
    """What one position takes where ``top_k`` ids are kept, headers left aside."""
    if mode == "text":
        return 5
    if mode == "hidden":
        return 4 + hidden * hidden_bytes
    width = 2 if vocab <= 1 << 16 else 3
    return 4 + (1 if top_k < 256 else 4) + 8 + min(top_k, vocab) * (width + math.ceil(logp_bits / 8))
