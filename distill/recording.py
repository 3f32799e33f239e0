"""A recording on disk: the target's token distributions along sequences, memory-mapped and random access by sequence.

A folder holds ``manifest.json`` and safetensors shards. Each shard has, for its S sequences of together N positions,

    tokens   int32 [N]      the text; position t holds the law of token t+1 given tokens 0..t
    offsets  int64 [S+1]    sequence s is positions offsets[s] .. offsets[s+1]-1
    start    int32 [S]      first supervised position of each sequence, counted from its beginning
    topk:    ids int32 or uint16 [N, K] by falling probability, logp float16 [N, K], tail float32 [N] (exact, not renormalised)
    hidden:  hidden [N, H] in the target's dtype, from which the target's own head gives all of p

docs/recording.md has the format in full.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from draftstill.errors import DraftstillError
from draftstill.runfolder import hash_file, read_json, save_tensors, write_json

FORMAT = 1


@dataclass(slots=True)
class Recorded:
    """One recorded sequence of N positions; the unused form's tensors are None."""

    tokens: Tensor
    start: int
    ids: Tensor | None = None
    p: Tensor | None = None
    tail: Tensor | None = None
    hidden: Tensor | None = None


def write_shard(path: Path, tokens: Sequence[Sequence[int]], starts: Sequence[int], columns: dict[str, Tensor]) -> None:
    """Write whole sequences; ``columns`` are [N, ...] in the order of the concatenated tokens."""
    lengths = torch.tensor([0, *(len(t) for t in tokens)], dtype=torch.int64)
    flat = torch.tensor([t for s in tokens for t in s], dtype=torch.int32)
    save_tensors(path, {"tokens": flat, "offsets": lengths.cumsum(0), "start": torch.tensor(list(starts), dtype=torch.int32), **columns})


def write_manifest(folder: Path, about: dict[str, Any]) -> dict[str, Any]:
    """List the shards with sizes and checksums beside what the laws were made from."""
    shards: list[dict[str, Any]] = []
    for path in sorted(folder.glob("shard-*.safetensors")):
        with safe_open(path, "pt") as file:
            offsets = file.get_tensor("offsets")
        shards.append({"file": path.name, "sequences": len(offsets) - 1, "positions": int(offsets[-1]), "bytes": path.stat().st_size,
                       "sha256": hash_file(path)})  # fmt: skip
    total = {k: sum(s[k] for s in shards) for k in ("sequences", "positions", "bytes")}
    manifest = {"format": FORMAT, **about, **total, "shards": shards}
    write_json(folder / "manifest.json", manifest)
    return manifest


class Recording:
    """Read access to a recording.

    Args:
        folder: with manifest.json.
        verify: compare every shard with its checksum first.

    Raises:
        DraftstillError: a missing, damaged or foreign shard, by name.
    """

    def __init__(self, folder: str | Path, *, verify: bool = True) -> None:
        self.folder = Path(folder)
        if not (self.folder / "manifest.json").exists():
            raise DraftstillError(f"{self.folder} holds no recording (no manifest.json)", mend="make one with: draftstill distill RECIPE")
        self.manifest = read_json(self.folder / "manifest.json")
        if self.manifest.get("format") != FORMAT:
            raise DraftstillError(
                f"{self.folder} has recording format {self.manifest.get('format')}; this version reads {FORMAT}", mend="record again"
            )
        self._ends: list[int] = []
        self._files: list[Any] = []
        count = 0
        for shard in self.manifest["shards"]:
            path = self.folder / shard["file"]
            if not path.exists():
                raise DraftstillError(
                    f"the shard {shard['file']} is missing from {self.folder}", mend="delete the recording's folder and record again"
                )
            if path.stat().st_size != shard["bytes"] or (verify and hash_file(path) != shard["sha256"]):
                raise DraftstillError(f"the shard {shard['file']} in {self.folder} is not the one that was recorded (size or checksum differ)",
                                      mend="delete the recording's folder and record again")  # fmt: skip
            count += shard["sequences"]
            self._ends.append(count)
            self._files.append(safe_open(path, "pt"))
        self._offsets = [f.get_tensor("offsets").tolist() for f in self._files]
        self._starts = [f.get_tensor("start").tolist() for f in self._files]

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def mode(self) -> str:
        return self.manifest["mode"]

    def length(self, index: int) -> int:
        """Positions of one sequence."""
        shard, row = self._find(index)
        return self._offsets[shard][row + 1] - self._offsets[shard][row]

    def start(self, index: int) -> int:
        """First supervised position of one sequence."""
        shard, row = self._find(index)
        return self._starts[shard][row]

    def _find(self, index: int) -> tuple[int, int]:
        shard = bisect.bisect_right(self._ends, index)
        return shard, index - (self._ends[shard - 1] if shard else 0)

    def __getitem__(self, index: int) -> Recorded:
        if not 0 <= index < len(self):
            raise IndexError(index)
        shard, row = self._find(index)
        file = self._files[shard]
        part = slice(self._offsets[shard][row], self._offsets[shard][row + 1])
        take = lambda name: file.get_slice(name)[part]  # noqa: E731
        tokens, start = take("tokens").long(), self._starts[shard][row]
        if self.mode == "hidden":
            return Recorded(tokens, start, hidden=take("hidden"))
        return Recorded(tokens, start, take("ids").to(torch.int64), take("logp").float().exp(), take("tail"))

    def token_weights(self, vocab: int) -> Tensor:
        """How often each id stands in the text plus how much recorded probability it has, [vocab] float64."""
        weights = torch.zeros(vocab, dtype=torch.float64)
        for file in self._files:
            weights += torch.bincount(file.get_tensor("tokens").long(), minlength=vocab)[:vocab]
            if self.mode == "topk":
                ids, p = file.get_tensor("ids").to(torch.int64), file.get_tensor("logp").double().exp()
                weights.index_add_(0, ids.flatten(), p.flatten())
        return weights


def inspect(path: Path) -> str:
    """What ``draftstill recording inspect`` prints; verifies every checksum."""
    folders = [p.parent for p in sorted(Path(path).glob("**/manifest.json"))]
    if not folders:
        raise DraftstillError(f"{path} holds no recording (no manifest.json)", mend="give the recording folder of a run")
    return "\n\n".join(_describe(f) for f in folders)


def _describe(folder: Path) -> str:
    recording = Recording(folder)
    m = recording.manifest
    lines = [
        f"{folder}",
        f"  mode        {m['mode']}" + (f", K = {m['top_k']}, temperature {m['temperature']}" if m["mode"] == "topk" else ""),
        f"  target      {m['target']['name']} ({m['dtype']}), {m['vocab']:,} real tokens",
        f"  content     {m['sequences']:,} sequences, {m['positions']:,} positions in {len(m['shards'])} shards",
        f"  size        {m['bytes'] / 2**20:,.1f} MiB, {m['bytes'] / max(1, m['positions']):,.0f} bytes per position",
        "  checksums   all right",
    ]
    if m["mode"] == "topk":
        tails = torch.cat([f.get_tensor("tail") for f in recording._files]).double()
        lines.append(
            f"  tail mass   mean {tails.mean():.4f}, 90th percentile {tails.quantile(0.9) if len(tails) < 1 << 24 else float('nan'):.4f}"
        )
        lines.append(f"  so alpha measured on it is known to within {tails.mean():.4f}, on average, from above")
    return "\n".join(lines)
