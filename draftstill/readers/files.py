"""The files of a corpus: which ones are read, and their bytes, plain or unpacked."""

from __future__ import annotations

import contextlib
import fnmatch
import gzip
import io
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from draftstill.errors import DraftstillError
from draftstill.readers.rows import Unusable

SUFFIXES = {
    "text": (".txt", ".text", ".md", ".markdown"),
    "jsonl": (".jsonl", ".ndjson"),
    "json": (".json",),
    "parquet": (".parquet",),
    "ontology": (".obo", ".json", ".sqlite"),
}
"""Kinds of file by name, with .gz or .zst behind it where that makes sense. ``ontology`` is never guessed."""
_PACKED = (".gz", ".zst")
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


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


def folder_files(root: Path, wanted: str, include: Sequence[str], source: str, meter: Meter) -> list[File]:
    """Files of a folder by name, hidden ones and a wheel's own records left out; or the one file that ``root`` is.

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
        return [local_file(root, root.name, kind or wanted, packing)]
    files = []
    for path in sorted((p for p in root.rglob("*") if p.is_file()), key=lambda p: p.relative_to(root).as_posix()):
        # A name may be bytes that are no UTF-8; ids are written as UTF-8.
        name = path.relative_to(root).as_posix().encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        # Hidden folders (.git, .ipynb_checkpoints) and a wheel's own records are not the user's text.
        if any(part.startswith(".") or part.endswith(".dist-info") for part in Path(name).parts):
            continue
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


class _Unpacked(io.RawIOBase):
    """pyarrow's zstd stream as Python's readers want it. pyarrow is here anyway (datasets needs it) and Python has no zstd before 3.14."""

    def __init__(self, raw: IO[bytes]) -> None:
        import pyarrow

        self._stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


@contextlib.contextmanager
def unpacked(file: File, meter: Meter | None = None) -> Iterator[io.BufferedReader]:
    """The file's bytes, unpacked and buffered. ``meter`` follows the position on disk.

    Raises:
        Unusable: the packing is damaged, here or while the caller reads.
    """
    with _open(file) as raw:
        counted = raw if meter is None else io.BufferedReader(_Counted(raw, meter))
        packed: Any = _Unpacked(counted) if file.packing == ".zst" else gzip.GzipFile(fileobj=counted) if file.packing else counted
        try:
            yield io.BufferedReader(packed, 1 << 18)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise Unusable("damaged gzip", str(error)) from None
        except OSError as error:
            if file.packing != ".zst" or error.errno is not None:  # a fault of the disk has a number
                raise
            raise Unusable("damaged zstd", str(error)) from None
    if meter is not None:
        meter.finished(file)


def _open(file: File) -> IO[bytes]:
    try:
        return file.opened()
    except OSError as error:
        raise DraftstillError(f"cannot read {file.name}: {error.strerror or error}", key="corpus.source",
                              mend="make it readable, or leave it out with corpus.include") from None  # fmt: skip


class _Counted(io.RawIOBase):
    """Tells the meter how far a file was read."""

    def __init__(self, raw: IO[bytes], meter: Meter) -> None:
        self._raw, self._meter, self._at = raw, meter, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._raw.read(len(buffer))
        buffer[: len(data)] = data
        self._at += len(data)
        self._meter.at(self._at)
        return len(data)


def utf8_lines(stream: io.BufferedReader, limit: int) -> Iterator[bytes | None]:
    """Lines as UTF-8 with their ends; None for one of more than ``limit`` bytes, which is passed over in pieces. UTF-16 with a byte order
    mark is read as such.

    Lines end at \\n only: ``str.splitlines`` would also cut at U+2028, which JSON allows inside a string.
    """
    if encoding_of(stream) == "utf-16":
        text = io.TextIOWrapper(stream, encoding="utf-16", newline="\n")
        read: Callable[[int], bytes] = lambda size: text.readline(size).encode("utf-8", "surrogatepass")  # noqa: E731
    else:
        read = stream.readline
    while line := read(limit + 1):
        if len(line) <= limit or line.endswith(b"\n"):
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = read(1 << 20)
        yield None


def encoding_of(stream: io.BufferedReader) -> str:
    """By the byte order mark: UTF-16, or UTF-8 with or without one."""
    return "utf-16" if stream.peek(2)[:2] in _UTF16 else "utf-8-sig"


def decoded(data: bytes) -> str:
    """UTF-8, with or without a byte order mark, or UTF-16 with one.

    Raises:
        Unusable: neither.
    """
    try:
        return data.decode("utf-16") if data[:2] in _UTF16 else data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Unusable("not UTF-8", f"byte {error.start}") from None
