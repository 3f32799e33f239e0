"""Rows of JSONL, JSON and parquet files, one at a time and as they stand: what is text stays text.

JSON is read by us, value by value: general loaders fail a whole file on one cut line, turn texts that look like dates into dates, and
give every tool call the arguments of all others.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

from draftstill.readers.files import File, Meter, decoded, encoding_of, unpacked, utf8_lines
from draftstill.readers.rows import Unusable

Record = tuple[str, dict[str, Any] | Unusable]
"""Id, and the row's value or why there is none."""

_LARGEST_OBJECT = 256 << 20
"""A .json file that is one object cannot be read piecewise."""
_PARQUET_ROWS = 256


class _Repeated(ValueError):
    pass


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        raise _Repeated(next(k for k, _ in pairs if k in seen or seen.add(k)))  # type: ignore[func-returns-value]
    return value


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_pairs, parse_constant=_constant)


def parse(text: str) -> Any:
    """A JSON value; a repeated key is an error, since Python would silently take the last.

    Raises:
        Unusable: not JSON.
    """
    try:
        return _DECODER.decode(text)
    except _Repeated as error:
        raise Unusable("repeated key", repr(str(error))) from None
    except (ValueError, RecursionError) as error:
        raise Unusable("bad JSON", str(error)) from None


def records(file: File, limit: int, meter: Meter | None = None) -> Iterator[Record]:
    """Every row of a file; a row of more than ``limit`` bytes is passed over and named."""
    kind = {"jsonl": _lines, "json": _json, "parquet": _parquet}[file.kind]
    number = 0
    try:
        for number, record in enumerate(kind(file, limit, meter), 1):  # noqa: B007 - the number names the row after the last good one
            yield record
    except Unusable as error:  # the file is damaged from here on
        yield f"{file.name}:{number + 1}", error


def _row(name: str, value: Any) -> Record:
    return name, value if isinstance(value, dict) else Unusable("not an object", type(value).__name__)


def _lines(file: File, limit: int, meter: Meter | None) -> Iterator[Record]:
    with unpacked(file, meter) as stream:
        yield from _stream_lines(file.name, stream, limit)


def _stream_lines(name: str, stream: io.BufferedReader, limit: int) -> Iterator[Record]:
    try:
        for number, line in enumerate(utf8_lines(stream, limit), 1):
            if line is None:
                yield f"{name}:{number}", Unusable("too long", f"a row of more than {limit:,} bytes")
            elif line.strip():
                try:
                    yield _row(f"{name}:{number}", parse(decoded(line)))
                except Unusable as error:
                    yield f"{name}:{number}", error
    except UnicodeDecodeError as error:
        raise Unusable("not UTF-8", f"{error.encoding}: {error.reason}") from None


def _json(file: File, limit: int, meter: Meter | None) -> Iterator[Record]:
    with unpacked(file, meter) as stream:
        encoding = encoding_of(stream)
        if stream.peek(64).decode(encoding, "ignore").lstrip()[:1] == "[":
            yield from _array(file.name, io.TextIOWrapper(stream, encoding=encoding), limit)
            return
        data = stream.read(_LARGEST_OBJECT + 1)
        if len(data) > _LARGEST_OBJECT:
            raise Unusable("too long", f"one object of more than {_LARGEST_OBJECT >> 20} MiB; write one row a line, as .jsonl")
    text = decoded(data)
    if not text.strip():
        return
    try:
        yield from _object(file.name, parse(text))
    except Unusable as error:
        if error.reason != "bad JSON" or "\n" not in text.strip():
            raise
        # Many .json files hold one object a line.
        yield from _stream_lines(file.name, io.BufferedReader(io.BytesIO(text.encode("utf-8", "surrogatepass"))), limit)  # type: ignore[arg-type]


def _object(name: str, value: Any) -> Iterator[Record]:
    """One row, or the rows that one object holds: {"data": [row, ...]}, or {"id": row, ...}."""
    if isinstance(value, dict):
        lists = [v for v in value.values() if isinstance(v, list) and v and all(isinstance(r, dict) for r in v)]
        if len(value) == 1 and lists and next(iter(value)) not in ("messages", "conversations", "conversation"):
            yield from (_row(f"{name}:{number}", row) for number, row in enumerate(lists[0], 1))
            return
        if len(value) > 1 and all(isinstance(v, dict) for v in value.values()):
            yield from (_row(f"{name}:{key}", row) for key, row in value.items())
            return
    yield _row(f"{name}:1", value)


def _array(name: str, text: io.TextIOWrapper, limit: int) -> Iterator[Record]:
    """The items of a JSON array, read piecewise. A damaged item ends the file: where the next one begins cannot be known."""
    buffer, number = text.read(1 << 16).lstrip()[1:], 0
    try:
        while True:
            buffer = buffer.lstrip()
            if not buffer or buffer == ",":
                more = text.read(1 << 16)
                if not more:
                    raise Unusable("bad JSON", "the file ends inside its list")
                buffer += more
                continue
            if buffer[0] == "]":
                return
            if buffer[0] == ",":
                buffer = buffer[1:].lstrip()
            number += 1
            value, buffer = _item(buffer, text, limit)
            yield _row(f"{name}:{number}", value)
    except UnicodeDecodeError as error:
        raise Unusable("not UTF-8", f"byte {error.start}") from None


def _item(buffer: str, text: io.TextIOWrapper, limit: int) -> tuple[Any, str]:
    size = 1 << 16
    while True:
        try:
            value, end = _DECODER.raw_decode(buffer)
            if end < len(buffer) or not isinstance(value, int | float):  # a number at the very end may go on
                return value, buffer[end:]
            problem = "the file ends inside its list"
        except _Repeated as error:
            raise Unusable("repeated key", f"{str(error)!r}; the rest of the file was not read") from None
        except (ValueError, RecursionError) as error:
            problem = f"{error}; the rest of the file was not read"
        if len(buffer) > limit:
            raise Unusable("too long", f"an item of more than {limit:,} characters; the rest of the file was not read")
        more = text.read(size)
        if not more:
            raise Unusable("bad JSON", problem)
        buffer, size = buffer + more, 2 * size


def _parquet(file: File, limit: int, meter: Meter | None) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    with file.opened() as raw:
        try:
            for batch in pyarrow.parquet.ParquetFile(raw).iter_batches(batch_size=_PARQUET_ROWS):
                for value in batch.to_pylist():
                    number += 1
                    yield f"{file.name}:{number}", without_nulls(value)
                if meter is not None:
                    meter.at(raw.tell())
        except (pyarrow.ArrowException, OSError) as error:
            raise Unusable("damaged parquet", str(error).splitlines()[0]) from None
    if meter is not None:
        meter.finished(file)


def without_nulls(value: Any) -> Any:
    """Without the keys that are null: columns give every object the keys of all others. A message keeps its ``content``."""
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None or (k == "content" and "role" in value)}
    return [without_nulls(v) for v in value] if isinstance(value, list) else value
