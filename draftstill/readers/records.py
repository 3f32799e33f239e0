"""Rows of JSONL, JSON and parquet files, one at a time and as they stand: what is text stays text.

JSON is read by us, value by value: general loaders fail a whole file on one cut line, turn texts that look like dates into dates, and
give every tool call the arguments of all others.
"""

from __future__ import annotations

import functools
import io
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from draftstill.readers.files import File, Meter
from draftstill.readers.lists import items
from draftstill.readers.rows import Unusable, excerpt
from draftstill.readers.streams import decoded, encoding_of, source, unpacked, utf8_lines
from draftstill.readers.values import parse

Record = tuple[str, dict[str, Any] | Unusable]
"""Id, and the row's value or why there is none."""

_LARGEST_OBJECT = 256 << 20
"""A .json file that is one object cannot be read piecewise."""
_PARQUET_ROWS = 256
_PARQUET_BYTES = 1 << 18
"""Read at once, or as much as a page has: a file may be one row group, whose columns would be fetched whole."""
_LINES = 8
"""Lines of a .json file that tell whether each of them is a row."""


def records(file: File, limit: int, meter: Meter | None = None, *, numbered: bool = False) -> Iterator[Record]:
    """Every row of a file; a row of more than ``limit`` bytes is passed over and named.

    Args:
        numbered: name no row by its key, where a file has keys: it may be a person's name.
    """
    readers: dict[str, Callable[[File, int, Meter | None], Iterator[Record]]] = {
        "jsonl": _lines,
        "json": functools.partial(_json, numbered=numbered),
        "parquet": _parquet,
    }
    kind = readers[file.kind]
    number = 0
    try:
        for number, record in enumerate(kind(file, limit, meter), 1):  # noqa: B007 - the number names the row after the last good one
            yield record
    except Unusable as error:  # the file is damaged from here on
        yield f"{file.name}:{number + 1}", Unusable(error.reason, error.detail, lost=True)


def _row(name: str, value: Any) -> Record:
    return name, value if isinstance(value, dict | Unusable) else Unusable("not an object", type(value).__name__)


def _lines(file: File, limit: int, meter: Meter | None) -> Iterator[Record]:
    try:
        with unpacked(file, meter) as stream:
            for number, line in enumerate(utf8_lines(stream, limit), 1):
                if line is None:
                    yield f"{file.name}:{number}", Unusable("too long", f"a row of more than {limit:,} bytes")
                elif line.strip():
                    try:
                        yield _row(f"{file.name}:{number}", parse(decoded(line)))
                    except Unusable as error:
                        yield f"{file.name}:{number}", error
    except UnicodeDecodeError as error:
        raise Unusable("not UTF-8", f"{error.encoding}: {error.reason}") from None


def _json(file: File, limit: int, meter: Meter | None, *, numbered: bool) -> Iterator[Record]:
    form = _form(file, limit)
    if form == "lines":
        yield from _lines(file, limit, meter)
        return
    with unpacked(file, meter) as stream:
        if form == "list":
            yield from (_row(f"{file.name}:{number}", value) for number, value in enumerate(items(stream, limit), 1))
            return
        data = stream.read(_LARGEST_OBJECT + 1)
        if len(data) > _LARGEST_OBJECT:
            raise Unusable("too long", f"one object of more than {_LARGEST_OBJECT >> 20} MiB; write one row a line, as .jsonl")
    try:
        text = decoded(data)
        if text.strip():
            yield from _object(file.name, parse(text), numbered)
    except Unusable as error:  # one object is one row
        yield f"{file.name}:1", error


def _form(file: File, limit: int) -> str:
    """``list``, ``lines`` (one object a line: many .json files are JSON Lines) or ``object``, by the first lines."""
    count, whole = 0, list[bool]()
    try:
        with unpacked(file) as stream:
            if _beginning(stream) == "[":
                return "list"
            for line in itertools.islice((x for x in utf8_lines(stream, limit) if x is None or x.strip()), _LINES):
                count += 1
                if line is not None:
                    whole.append(_is_object(line))
    except Unusable:
        count += 1  # damaged further on: what stands before it is read
    except UnicodeDecodeError:
        pass
    return "lines" if count > 1 and whole and (whole[0] or 2 * sum(whole) >= len(whole)) else "object"


def _beginning(stream: io.BufferedReader) -> str:
    """The first character that is no space, where it is among the first ones."""
    return stream.peek(64).decode(encoding_of(stream), "ignore").lstrip()[:1]


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(parse(decoded(line)), dict)
    except Unusable:
        return False


def _object(name: str, value: Any, numbered: bool) -> Iterator[Record]:
    """One row, or the rows that one object holds: {"data": [row, ...]}, or {"id": row, ...}."""
    if isinstance(value, dict):
        lists = [v for v in value.values() if isinstance(v, list) and v and all(isinstance(r, dict) for r in v)]
        if len(value) == 1 and lists and next(iter(value)) not in ("messages", "conversations", "conversation"):
            yield from (_row(f"{name}:{number}", row) for number, row in enumerate(lists[0], 1))
            return
        if len(value) > 1 and all(isinstance(v, dict) for v in value.values()):
            yield from (_row(f"{name}:{number if numbered else _utf8(key)}", row) for number, (key, row) in enumerate(value.items(), 1))
            return
    yield _row(f"{name}:1", value)


def _utf8(key: str) -> str:
    """Half of a surrogate pair, escaped: ids are written as UTF-8."""
    return key.encode("utf-8", "backslashreplace").decode()


def _parquet(file: File, limit: int, meter: Meter | None) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    with source(file) as raw:
        try:
            stored = pyarrow.parquet.ParquetFile(raw, pre_buffer=False, buffer_size=_PARQUET_BYTES)
            for batch in stored.iter_batches(batch_size=_PARQUET_ROWS):
                for value in _values(batch):
                    number += 1
                    yield f"{file.name}:{number}", without_nulls(value)
                if meter is not None:
                    meter.at(raw.tell())
        except (pyarrow.ArrowException, OSError) as error:
            raw.check()
            raise Unusable("damaged parquet", str(error).splitlines()[0]) from None
    if meter is not None:
        meter.finished(file)


def _values(batch: Any) -> list[dict[str, Any]]:
    """The rows of a batch. A cell that Python cannot hold (broken UTF-8, a day beyond its calendar, an unknown time zone) is the reason why."""
    try:
        return list(batch.to_pylist())
    except Exception:  # of Python or of pyarrow, by what the cell is
        return [
            {name: _cell(name, column, n) for name, column in zip(batch.schema.names, batch.columns, strict=True)}
            for n in range(len(batch))
        ]


def _cell(name: str, column: Any, number: int) -> Any:
    try:
        return column[number].as_py()
    except MemoryError:  # no fault of the cell's
        raise
    except Exception as error:
        reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else "bad value"
        return Unusable(reason, f"{excerpt(name)!r}: {excerpt(error) or type(error).__name__}")


def without_nulls(value: Any) -> Any:
    """Without the keys that are null: columns give every object the keys of all others. A message keeps its ``content``."""
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None or (k == "content" and "role" in value)}
    return [without_nulls(v) for v in value] if isinstance(value, list) else value
