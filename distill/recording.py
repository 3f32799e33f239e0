"""A recording on disk: the target's token distributions along sequences, memory-mapped and random access by sequence.

A folder holds ``manifest.json`` and safetensors shards; docs/recording.md has the format in full. A shard's sequences stand one behind
the other: position t of a sequence holds the law of token t+1 given tokens 0..t, unless nothing is learnt there.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from draftstill.distill.packing import decode_falls, decode_hidden, read_table, spread, unpack_ids
from draftstill.distill.remote import fetch, holds_recording, is_remote
from draftstill.distill.shards import AGAIN, KINDS, READABLE, read_info, write_manifest, write_shard
from draftstill.errors import DraftstillError
from draftstill.runfolder import hash_file, read_json

__all__ = ["Recorded", "Recording", "manifests", "write_manifest", "write_shard"]


_OPEN_SHARDS = 256
"""Shards mapped at once: a process has about 65,000 mappings, and a large recording more shards than that."""


@dataclass(slots=True)
class Recorded:
    """One recorded sequence of N positions; the unused forms' tensors are None, in mode ``live`` all of them."""

    tokens: Tensor
    start: int
    """First supervised position."""
    ids: Tensor | None = None
    """[N, K] by falling probability; -1: unused place."""
    p: Tensor | None = None
    """[N, K], 0 in unused places."""
    tail: Tensor | None = None
    """[N], mass of all ids that were not kept; 1 at a position whose law was not recorded."""
    lse: Tensor | None = None
    """[N], log-normaliser: logit / temperature = log p + lse; 0 at a position whose law was not recorded. None: the laws came from a server,
    which does not tell it."""
    hidden: Tensor | None = None
    mask: Tensor | None = None
    """Supervised positions, bool [N]; None: all from ``start`` on."""
    after: int = -1
    """The token that was written behind the last one; -1: none, or not known."""

    @property
    def written(self) -> Tensor:
        """[N], the token written behind each position, -1 where none was."""
        return torch.nn.functional.pad(self.tokens[1:], (0, 1), value=self.after)

    @property
    def rows(self) -> Tensor:
        """Supervised positions, ascending."""
        return torch.arange(self.start, len(self.tokens)) if self.mask is None else self.mask.nonzero().squeeze(1)


class Recording:
    """Read access to a recording.

    Args:
        folder: with manifest.json; an fsspec address is fetched into the cache first.
        verify: compare every shard with its checksum first.
        share: (r, n): of n processes that do so this is number r, and compares every n-th shard.

    Raises:
        DraftstillError: a missing, damaged or foreign shard, by name.
    """

    def __init__(self, folder: str | Path, *, verify: bool = True, share: tuple[int, int] = (0, 1)) -> None:
        self.folder = fetch(str(folder)) if is_remote(folder) else Path(folder)
        if not (self.folder / "manifest.json").exists():
            raise DraftstillError(f"{self.folder} holds no recording (no manifest.json)", mend="make one with: draftstill distill RECIPE")
        self.manifest = read_json(self.folder / "manifest.json")
        if self.manifest.get("format") not in READABLE:
            raise DraftstillError(f"{self.folder} has recording format {self.manifest.get('format')}; this version reads {' and '.join(map(str, READABLE))}",
                                  mend="record again")  # fmt: skip
        self._ends: list[int] = []
        self._offsets: list[list[int]] = []
        self._starts: list[list[int]] = []
        self._mapped: OrderedDict[int, dict[str, Tensor]] = OrderedDict()
        for number, shard in enumerate(self.manifest["shards"]):
            self._check(shard, verify and number % share[1] == share[0])
            columns = self.columns(number)
            self._ends.append((self._ends[-1] if self._ends else 0) + shard["sequences"])
            self._offsets.append(columns["offsets"].tolist())
            self._starts.append(columns["start"].tolist())
            if len(self._starts[-1]) != shard["sequences"] or self._offsets[-1][-1] != shard["positions"]:
                raise DraftstillError(
                    f"the shard {shard['file']} in {self.folder} holds other sequences than its manifest says", mend=AGAIN
                )

    def _check(self, shard: dict[str, Any], verify: bool) -> None:
        path = self.folder / shard["file"]
        if not path.exists():
            raise DraftstillError(f"the shard {shard['file']} is missing from {self.folder}", mend=AGAIN)
        if path.stat().st_size != shard["bytes"] or (verify and hash_file(path) != shard["sha256"]):
            raise DraftstillError(f"the shard {shard['file']} in {self.folder} is not the one that was recorded (size or checksum differ)",
                                  mend=AGAIN)  # fmt: skip
        if (mark := read_info(path).get("mark")) and mark != self.manifest.get("mark"):
            raise DraftstillError(f"the shard {shard['file']} in {self.folder} belongs to another recording (another target, tokenizer, sampler or "
                                  "setting)", mend=AGAIN)  # fmt: skip

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def mode(self) -> str:
        return self.manifest["mode"]

    @property
    def shards(self) -> int:
        return len(self._ends)

    def columns(self, shard: int) -> dict[str, Tensor]:
        """A shard's tensors, the table as the ids that it names; memory-mapped, so that only what is looked at is read."""
        if shard not in self._mapped:
            with safe_open(self.folder / self.manifest["shards"][shard]["file"], "pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
            if "table" in tensors:
                tensors["table"] = read_table(tensors["table"])
            self._mapped[shard] = tensors
            if len(self._mapped) > _OPEN_SHARDS:
                self._mapped.popitem(last=False)
        self._mapped.move_to_end(shard)
        return self._mapped[shard]

    def length(self, index: int) -> int:
        """Positions of one sequence."""
        shard, row = self._find(index)
        return self._offsets[shard][row + 1] - self._offsets[shard][row]

    def start(self, index: int) -> int:
        """First supervised position of one sequence."""
        shard, row = self._find(index)
        return self._starts[shard][row]

    def kind(self, index: int) -> str:
        """Where one sequence comes from."""
        shard, row = self._find(index)
        return KINDS[int(self.columns(shard)["kind"][row])]

    def supervised(self, index: int) -> int:
        """Supervised positions of one sequence."""
        shard, row = self._find(index)
        first, end = self._offsets[shard][row : row + 2]
        mask = self.columns(shard).get("supervised")
        return max(0, end - first - self._starts[shard][row]) if mask is None else int(mask[first:end].sum())

    def _find(self, index: int) -> tuple[int, int]:
        shard = bisect.bisect_right(self._ends, index)
        return shard, index - (self._ends[shard - 1] if shard else 0)

    def __getitem__(self, index: int) -> Recorded:
        if not 0 <= index < len(self):
            raise IndexError(index)
        shard, row = self._find(index)
        columns = self.columns(shard)
        part = slice(self._offsets[shard][row], self._offsets[shard][row + 1])
        mask = columns["supervised"][part].bool() if "supervised" in columns else None
        item = Recorded(columns["tokens"][part].long(), self._starts[shard][row], mask=mask,
                        after=int(columns["after"][row]) if "after" in columns else -1)  # fmt: skip
        if self.mode == "live":
            return item
        if self.mode == "text":
            # The written token is all that is known of the law.
            following = item.written
            item.ids, item.p, item.tail = following[:, None], (following >= 0).float()[:, None], (following < 0).float()
            return item
        if self.mode == "hidden":
            hidden = columns["hidden"][part]
            item.hidden = decode_hidden(hidden, columns["scale"][part]) if "scale" in columns else hidden.clone()
            return item
        first, end = columns["entries"][row : row + 2].tolist()
        item.ids, item.p, item.tail = self._laws(columns, part, slice(first, end))
        item.lse = columns["lse"][part].clone() if "lse" in columns else None
        return item

    def _laws(self, columns: dict[str, Tensor], part: slice, kept: slice) -> tuple[Tensor, Tensor, Tensor]:
        """ids [N, K], p [N, K] and tail [N] of some positions, whose kept ids are ``kept``."""
        tail = columns["tail"][part].clone()
        used = torch.arange(self.manifest["top_k"]) < columns["count"][part].to(torch.int64)[:, None]
        ids, code = spread(unpack_ids(columns["ids"][kept], columns.get("table")), used, -1), spread(columns["logp"][kept], used)
        p = decode_falls(code, used, tail) if code.dtype == torch.uint8 else code.float().exp() * used
        return ids, p, tail

    def token_weights(self, vocab: int) -> Tensor:
        """How often each id stands in the text, the token behind each sequence included (an answer's end is only there), plus how much recorded
        probability it has, [vocab] float64."""
        weights = torch.zeros(vocab, dtype=torch.float64)
        for shard in range(self.shards):
            columns = self.columns(shard)
            written = [columns["tokens"]]
            if "after" in columns:
                written.append(columns["after"][columns["after"] >= 0])
            weights += torch.bincount(torch.cat(written).long(), minlength=vocab)[:vocab]
            if self.mode == "topk":
                ids, p, _ = self._laws(columns, slice(None), slice(None))
                weights.index_add_(0, ids.clamp_min(0).flatten(), p.double().flatten())
        return weights


def manifests(path: str | Path) -> list[Path]:
    """Folders of all recordings at or under ``path``.

    Raises:
        DraftstillError: there is none.
    """
    if is_remote(path):
        at = str(path).rstrip("/")
        folders = [fetch(address) for address in (at, f"{at}/train", f"{at}/heldout") if holds_recording(address)]
    else:
        folders = [p.parent for p in sorted(Path(path).glob("**/manifest.json"))]
    if not folders:
        raise DraftstillError(f"{path} holds no recording (no manifest.json)", mend="give the recording folder of a run")
    return folders
