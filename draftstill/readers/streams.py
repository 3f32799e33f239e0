"""The bytes of a corpus's files, plain or unpacked, and the lines in them. Damage of a file is told from a fault of what it lies on."""

from __future__ import annotations

import contextlib
import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any, TypeVar

from draftstill.errors import DraftstillError
from draftstill.readers.files import File, Meter
from draftstill.readers.rows import Unusable

_UTF16 = (b"\xff\xfe", b"\xfe\xff")
T = TypeVar("T")


class Source(io.RawIOBase):
    """A file's bytes as the disk or the network gives them. A fault of theirs is no damage of the file: it stops the stage, which would
    otherwise end without the rest of the text. Decoders wrap what they meet in errors of their own, so it is kept.

    Raises:
        DraftstillError: whatever goes wrong while the bytes are read.
    """

    def __init__(self, file: File, raw: IO[bytes], meter: Meter | None = None) -> None:
        self._file, self._raw, self._meter, self._at = file, raw, meter, 0
        self._failed: DraftstillError | None = None

    def check(self) -> None:
        """Raise what went wrong, where anything did."""
        if self._failed is not None:
            raise self._failed from None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._raw.seekable()

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._asked(lambda: self._raw.seek(offset, whence))

    def tell(self) -> int:
        return self._raw.tell()

    def readinto(self, buffer: Any) -> int:
        data = self._asked(lambda: self._raw.read(len(buffer)))
        buffer[: len(data)] = data
        self._at += len(data)
        if self._meter is not None:
            self._meter.at(self._at)
        return len(data)

    def close(self) -> None:
        self._raw.close()
        super().close()

    def _asked(self, ask: Callable[[], T]) -> T:
        try:
            return ask()
        except Exception as error:  # a network's libraries have errors of their own
            self._failed = _unread(self._file, error)
            raise self._failed from None


def source(file: File, meter: Meter | None = None) -> Source:
    """The file's bytes as they are stored; ``meter`` follows the position."""
    try:
        return Source(file, file.opened(), meter)
    except Exception as error:
        raise _unread(file, error) from None


def _unread(file: File, error: Exception) -> DraftstillError:
    told = getattr(error, "strerror", None) or next(iter(str(error).splitlines()), "") or type(error).__name__
    ours = isinstance(error, PermissionError | FileNotFoundError | IsADirectoryError)
    mend = (
        "make it readable, or leave it out with corpus.include" if ours else "see to the disk or the network; the same command reads anew"
    )
    return DraftstillError(f"cannot read {file.name}: {told}", key="corpus.source", mend=mend)


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
        DraftstillError: the disk or the network fails.
    """
    with source(file, meter) as raw:
        stored: Any = io.BufferedReader(raw)
        packed: Any = _Unpacked(stored) if file.packing == ".zst" else gzip.GzipFile(fileobj=stored) if file.packing else stored
        try:
            yield io.BufferedReader(packed, 1 << 18)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raw.check()
            raise Unusable("damaged gzip", str(error)) from None
        except OSError as error:
            raw.check()
            if file.packing != ".zst" or error.errno is not None:  # none of the decoder's
                raise
            raise Unusable("damaged zstd", str(error)) from None
    if meter is not None:
        meter.finished(file)


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
