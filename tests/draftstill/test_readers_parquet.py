"""Parquet files: what a cell that Python cannot hold costs, and how much of a file is fetched at once and when."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from draftstill.readers import FAULTS, Meter, Row, read_rows, tables
from draftstill.readers.files import File
from draftstill.readers.records import records
from draftstill.recipe import Corpus


def rows_of(source: Path, **corpus: Any) -> list[Row]:
    return list(read_rows(Corpus(source=str(source), **corpus)))


def of_bytes(*values: bytes) -> pyarrow.Array:
    return pyarrow.array(values, pyarrow.binary()).view(pyarrow.string())


def of_numbers(kind: pyarrow.DataType, *values: int) -> pyarrow.Array:
    return pyarrow.array(values, pyarrow.int32() if kind == pyarrow.date32() else pyarrow.int64()).view(kind)


def inside(column: pyarrow.Array) -> pyarrow.Array:
    return pyarrow.StructArray.from_arrays([column], ["part"])


COLUMNS: dict[str, tuple[Callable[[int], pyarrow.Array], str]] = {
    # a column of so many cells, of which the third is beyond Python, and what is said of it
    "bytes": (lambda n: of_bytes(*[b"\xff" if k == 2 else b"x" for k in range(n)]), "not UTF-8"),
    "bytes in a struct": (lambda n: inside(of_bytes(*[b"\xff" if k == 2 else b"x" for k in range(n)])), "not UTF-8"),
    "a time": (lambda n: of_numbers(pyarrow.timestamp("ms"), *[10**18 if k == 2 else k for k in range(n)]), "bad value"),
    "a day": (lambda n: of_numbers(pyarrow.date32(), *[2**31 - 1 if k == 2 else k for k in range(n)]), "bad value"),
    "a span": (lambda n: of_numbers(pyarrow.duration("s"), *[10**15 if k == 2 else k for k in range(n)]), "bad value"),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_a_cell_that_cannot_be_used_costs_its_row_where_it_is_asked_for(tmp_path: Path, name: str) -> None:
    make, reason = COLUMNS[name]
    count = 300  # more than one batch
    table = pyarrow.table({"text": [f"text {n}" for n in range(count)], "odd": make(count)})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert [row.text for row in rows_of(tmp_path)] == [f"text {n}" for n in range(count)], "nobody asked for that column"
    for asked in (
        {"fields": {"text": "odd"}},
        {"fields": {"text": "text", "group": "odd"}},
        {"fields": {"text": "odd.part"}},
        {"where": {"odd": ("x",)}},
    ):
        rows = rows_of(tmp_path, **asked)
        assert len(rows) == count and rows[2].id == "a.parquet:3"
        assert [row.id for row in rows if row.reason == reason] == ["a.parquet:3"], asked
        assert "odd" in rows[2].detail and reason in FAULTS and not rows[2].lost
        json.dumps([row._asdict() for row in rows])


def test_a_time_zone_that_nobody_knows(tmp_path: Path) -> None:
    zone = pyarrow.array([0, 1], pyarrow.int64()).view(pyarrow.timestamp("ms", tz="Nowhere/City"))
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", "b"], "when": zone}), tmp_path / "a.parquet")
    assert [(row.text, row.reason) for row in rows_of(tmp_path)] == [("a", None), ("b", None)]
    rows = rows_of(tmp_path, fields={"text": "text", "group": "when"})
    assert [row.reason for row in rows] == ["bad value"] * 2 and "when" in rows[0].detail


def test_what_is_damaged_is_still_damaged(tmp_path: Path) -> None:
    table = pyarrow.table({"text": [os.urandom(500).hex() for _ in range(900)]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=300, compression="gzip")
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    middle = len(data) // 2
    data[middle : middle + 90_000] = bytes(90_000)
    (tmp_path / "a.parquet").write_bytes(data)
    *good, last = rows_of(tmp_path)
    assert last.reason == "damaged parquet" and last.lost and len(good) >= 256 and not any(row.reason for row in good)


class Watched(io.BytesIO):
    """Bytes that note how much is read at once, and when they are opened."""

    largest = 0

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        Watched.largest = max(Watched.largest, len(data))
        return data


def test_a_row_group_is_fetched_in_pieces() -> None:
    sink = io.BytesIO()
    text = [os.urandom(600).hex() for _ in range(12_000)]
    pyarrow.parquet.write_table(pyarrow.table({"text": text, "n": list(range(12_000))}), sink, row_group_size=1 << 20, compression="none")
    data = sink.getvalue()
    Watched.largest = 0
    found = [value for _, value in records(File("a.parquet", "parquet", len(data), lambda: Watched(data)), 1 << 20)]
    assert [value["text"] for value in found] == text  # type: ignore[index]
    assert Watched.largest < len(data) / 5


@pytest.mark.parametrize("kind", ["parquet", "mixed"])
def test_a_parquet_file_is_opened_when_it_is_reached(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    opened = list[str]()

    def file(number: int) -> File:
        ending = "jsonl" if kind == "mixed" and number == 3 else "parquet"
        rows = [{"text": f"{number} {k}"} if number < 2 else {"prompt": "Who?", "response": f"{number} {k}"} for k in range(4)]
        sink = io.BytesIO()
        if ending == "parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sink)
        else:
            sink.write("\n".join(map(json.dumps, rows)).encode())
        name = f"{number}.{ending}"
        return File(name, ending, len(sink.getvalue()), lambda: opened.append(name) or io.BytesIO(sink.getvalue()))  # type: ignore[func-returns-value]

    meter = Meter()
    rows = tables.table_rows([file(n) for n in range(4)], Corpus(source="x"), meter)
    first = [next(rows) for _ in range(5)]
    assert [row.id for row in first] == [f"0.parquet:{n}" for n in range(1, 5)] + ["1.parquet:1"]
    assert {name for name in opened if name.endswith("parquet")} == {"0.parquet", "1.parquet"}
    assert len(first + list(rows)) == 16 and sum(meter.guesses.values()) == 4
    assert capsys.readouterr().out.count("read as") == 2
