"""Texts that a server will not score: one costs itself, keeps no law, is written down and counted; many end the recording."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from draftstill.distill.shards import shard_name
from draftstill.errors import DraftstillError
from draftstill.runfolder import atomic_write, read_json, write_json


class Unscored(dict[str, Tensor]):
    """Columns of a text without any law, why there is none, and the server's words."""

    def __init__(self, columns: Mapping[str, Tensor], reason: str, detail: str) -> None:
        super().__init__(columns)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True, slots=True)
class Refused:
    """The refused texts of one side, a file for each shard that has some: an attempt that goes on counts those of the ones before.

    Args:
        folder: where the files lie, beside the side's folder of shards.
        texts: of the whole side.
        limit: the largest share of them that may be refused.
    """

    folder: Path
    side: str
    texts: int
    limit: float

    def settle(self, shard: int, found: Mapping[int, Unscored]) -> None:
        """Write down which of a shard's texts were refused, before the shard itself is written.

        Raises:
            DraftstillError: they are too many. The shard is then asked for anew by the next attempt; what was written before stays.
        """
        path = self._path(shard)
        if not found:
            path.unlink(missing_ok=True)  # of an attempt that ended before the shard was there
            return
        before = sum(len(read_json(p)) for p in self._paths() if p != path and self._shard_of(p).exists())
        first = next(iter(found.values()))
        self._check(before + len(found), first.reason, first.detail)
        write_json(path, [{"text": place, "reason": row.reason, "detail": row.detail} for place, row in sorted(found.items())])

    def check(self) -> None:
        """The same of all shards together, once they are there: processes that refuse at the same moment do not see each other.

        Raises:
            DraftstillError: they are too many.
        """
        if rows := self.rows():
            self._check(len(rows), rows[-1]["reason"], rows[-1]["detail"])

    def _check(self, count: int, reason: str, detail: str) -> None:
        if count > self.limit * self.texts:
            raise DraftstillError(
                f"{count:,} of the {self.texts:,} {self.side} texts are {reason} so far; it says: {detail}",
                key="record.max_refused", value=self.limit,
                mend="start the server so that it takes them (a longer context?), or raise the limit, and give the same command again; or lower "
                "record.sequence_length and add --set-aside")  # fmt: skip

    def rows(self) -> list[dict[str, Any]]:
        """shard, text (its place there), reason and detail of each, in the order of the texts."""
        return [{"shard": int(p.stem.rpartition("-")[2]), **row} for p in self._paths() for row in read_json(p)]

    def _path(self, shard: int) -> Path:
        return self.folder / f"refused-{self.side}-{shard:05d}.json"

    def _paths(self) -> list[Path]:
        return sorted(self.folder.glob(f"refused-{self.side}-*.json"))

    def _shard_of(self, path: Path) -> Path:
        return self.folder / self.side / shard_name(int(path.stem.rpartition("-")[2]))


def list_refused(folder: Path, sides: Mapping[str, Refused]) -> dict[str, dict[str, int]]:
    """Write the refused texts of each side to ``rejected.jsonl``, if there are any; returns how many by side and reason."""
    rows = {side: refused.rows() for side, refused in sides.items()}
    lines = [{"id": f"{side}/{shard_name(row['shard'])}#{row['text']}", "reason": row["reason"], "detail": row["detail"]}
             for side, found in rows.items() for row in found]  # fmt: skip
    if lines:
        atomic_write(folder / "rejected.jsonl", "".join(json.dumps(line, ensure_ascii=True) + "\n" for line in lines))
    return {side: dict(Counter(row["reason"] for row in found)) for side, found in rows.items()}
