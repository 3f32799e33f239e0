"""The files of a corpus: which ones are read."""

from __future__ import annotations

import fnmatch
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from draftstill.errors import DraftstillError

SUFFIXES = {
    "text": (".txt", ".text", ".md", ".markdown"),
    "jsonl": (".jsonl", ".ndjson"),
    "json": (".json",),
    "parquet": (".parquet",),
    "ontology": (".obo", ".json", ".sqlite"),
}
"""Kinds of file by name, with .gz or .zst behind it where that makes sense. ``ontology`` is never guessed."""
_PACKED = (".gz", ".zst")


@dataclass(frozen=True)
class File:
    """One file to read; ``name`` is its path within the corpus and begins the ids of its rows."""

    name: str
    kind: str
    size: int
    opened: Callable[[], IO[bytes]]
    packing: str = ""

    @property
    def folder(self) -> str:
        return self.name.rpartition("/")[0]


class Meter:
    """How much of the corpus was read, in bytes as they lie on disk, and what was left alone."""

    def __init__(self) -> None:
        self.total = 0
        self.files = 0
        self.others: Counter[str] = Counter()
        """Files of other kinds by the end of their name."""
        self.guesses: dict[str, int] = {}
        """Files by what their rows were taken for."""
        self.revision: str | None = None
        """Commit of a dataset of the Hub."""
        self._before = self._here = 0

    @property
    def done(self) -> int:
        return self._before + self._here

    def at(self, position: int) -> None:
        self._here = position

    def finished(self, file: File) -> None:
        self._before, self._here = self._before + file.size, 0


def kind_of(name: str, wanted: str) -> tuple[str | None, str]:
    """(kind, packing) of a file by its name; the kind is None where it is not read."""
    stem, packing = name.lower(), ""
    for end in _PACKED:
        if stem.endswith(end):
            stem, packing = stem.removesuffix(end), end
    kinds = [k for k in SUFFIXES if k != "ontology"] if wanted == "auto" else [wanted]
    found = next((k for k in kinds if stem.endswith(SUFFIXES[k])), None)
    return (None, packing) if found == "parquet" and packing else (found, packing)


def local_file(path: Path, name: str, kind: str, packing: str) -> File:
    return File(name, kind, path.stat().st_size, lambda: open(path, "rb"), packing)  # noqa: SIM115


def name_of(path: Path) -> str:
    """A path as ids hold it, which are UTF-8: bytes of a name that are none stand escaped."""
    return os.fsencode(path.as_posix()).decode("utf-8", "backslashreplace")


def open_files(root: Path) -> list[tuple[str, Path]]:
    """(name, path) of all files under a folder by name. Hidden ones (.git, .ipynb_checkpoints) and a wheel's own records are not the user's text."""
    found = [(path.relative_to(root), path) for path in root.rglob("*")]
    names = [
        (name_of(inner), path)
        for inner, path in found
        if not any(part.startswith(".") or part.endswith(".dist-info") for part in inner.parts) and path.is_file()
    ]
    return sorted(names)


def folder_files(root: Path, wanted: str, include: Sequence[str], source: str, meter: Meter) -> list[File]:
    """Files of a folder by name, or the one file that ``root`` is.

    Raises:
        DraftstillError: nothing to read.
    """
    if root.is_file():
        kind, packing = kind_of(root.name, wanted)
        if kind is None and wanted == "auto":
            raise DraftstillError("cannot tell the format from the file's name", key="corpus.source", value=source,
                                  mend="set corpus.format to text, jsonl, json or parquet")  # fmt: skip
        if kind is None and wanted == "ontology":
            raise DraftstillError(f"an ontology is read from {', '.join(SUFFIXES[wanted])}", key="corpus.format", value=wanted,
                                  mend="give another file, or another corpus.format")  # fmt: skip
        return [local_file(root, name_of(Path(root.name)), kind or wanted, packing)]
    files = []
    for name, path in open_files(root):
        kind, packing = kind_of(name, wanted)
        if kind is None or not included(name, include):
            meter.others[path.suffix.lower() or "no suffix"] += 1
        else:
            files.append(local_file(path, name, kind, packing))
    if not files:
        ends = ", ".join(
            end for kind, group in SUFFIXES.items() if kind == wanted or (wanted == "auto" and kind != "ontology") for end in group
        )
        if include:
            raise DraftstillError(f"no file in {source} matches and ends in {ends}", key="corpus.include", value=list(include),
                                  mend="patterns are matched against the path within the folder, for example */2024-*.jsonl")  # fmt: skip
        held = ", ".join(f"{count} {end}" for end, count in meter.others.most_common(4))
        raise DraftstillError(f"no file in this folder ends in {ends} (or these with .gz or .zst)" + (f"; it holds {held}" if held else ""),
                              key="corpus.source", value=source,
                              mend="give a folder that holds documents, or set corpus.format")  # fmt: skip
    return files


def included(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
