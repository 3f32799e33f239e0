"""Damage, and what is none: how much a fault of a file costs, whether it is said, and that a fault of disk or network stops the stage."""

from __future__ import annotations

import functools
import gzip
import io
import json
import os
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from draftstill.corpus import prepare_corpus
from draftstill.errors import DraftstillError
from draftstill.readers import FAULTS, Row, read_rows, streams
from draftstill.readers.files import File
from draftstill.readers.records import records
from draftstill.recipe import Corpus, Recipe, Target
from draftstill.runfolder import RunFolder, read_json


def rows_of(source: Path, **corpus: Any) -> list[Row]:
    return list(read_rows(Corpus(source=str(source), **corpus)))


def texts(count: int, words: int = 80) -> list[dict[str, str]]:
    rng = random.Random(count)
    return [{"text": " ".join(f"w{rng.randrange(9000)}x{n}" for _ in range(words))} for n in range(count)]


def facts_of(home: Path, source: Path, **corpus: Any) -> dict[str, Any]:
    recipe = Recipe(
        run_dir=str(home / "run"), target=Target(source="a/b"), corpus=Corpus(source=str(source), heldout_fraction=0.4, **corpus)
    )
    found: dict[str, Any] = read_json(prepare_corpus(recipe, RunFolder(recipe.run_dir)) / "provenance.json")["facts"]
    return found


# --- .json ------------------------------------------------------------------------------------------------------------------------

GOOD = '{"text": "good"}'
LISTS = [
    # between two good items: one damaged item costs itself
    ("oops", ["bad JSON"], 2), ('{"text": oops}', ["bad JSON"], 2), ('{"text": "a", "text": "b"}', ["repeated key"], 2), ('{"a": [1, }', None, 1),
    ('{"text": "a]}[{,\\" x", }', ["bad JSON"], 2), ('"text"', ["not an object"], 2), ("[[{}], []]", ["not an object"], 2), ("-1.5e3", ["not an object"], 2),
    ("tru", ["bad JSON"], 2), ('{"text": NaN}', ["bad JSON"], 2), ('{"text": 5}', ["not a string"], 2), ("}", ["bad JSON"], 2),
    ('{"n": ' + "1" * 5000 + "}", ["bad JSON"], 2), ('{"text": "x"} {"text": "y"}', [], 4), ("[" * 500 + "]" * 500, ["nested too deeply"], 2),
    ('{"text": "' + "y" * 200_000 + '"}', ["too long"], 2), ('{"text": "' + "y\\\\" * 100_000 + '"}', ["too long"], 2),
    ('{"text": "' + "y" * 200_000 + '", }', ["too long"], 2), ("[" + "1, " * 50_000 + "1]", ["too long"], 2), ('{"text": "\udcff"}', ["not UTF-8"], 2),
    ("\n\t ", [], 2), (GOOD + " ,, " + GOOD, [], 4),
]  # fmt: skip


@pytest.mark.parametrize("pad", [0, 65_530])
@pytest.mark.parametrize(("item", "reasons", "kept"), LISTS)
def test_a_damaged_item_of_a_list_costs_itself(tmp_path: Path, item: str, reasons: list[str] | None, kept: int, pad: int) -> None:
    content = f"[{' ' * pad}{GOOD},{item},{GOOD}]"
    (tmp_path / "rows.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    rows = rows_of(tmp_path, max_chars=1000)
    if reasons is None:  # a bracket is missing: where the next item begins cannot be known
        assert rows[-1].reason == "bad JSON" and rows[-1].lost
    else:
        assert [row.reason for row in rows if row.reason] == reasons and not any(row.lost for row in rows)
    assert sum(not row.reason for row in rows) == kept and len({row.id for row in rows}) == len(rows)


@pytest.mark.parametrize(("content", "kept", "reason"), [
    (f"[{GOOD}, {GOOD}", 2, "bad JSON"), (f"[{GOOD}, {GOOD[:-3]}", 1, "bad JSON"), (f"[{GOOD}, ", 1, "bad JSON"), ("[", 0, "bad JSON"),
    (f"[{GOOD}] {GOOD}", 1, "rest not read"), (f"[{GOOD}]]", 1, "rest not read"), (f"[{GOOD}][{GOOD}]", 1, "rest not read"),
    ("[" + '{"text": "' + "z" * 300_000, 0, "bad JSON"),
])  # fmt: skip
def test_a_list_whose_rest_is_lost(tmp_path: Path, content: str, kept: int, reason: str) -> None:
    (tmp_path / "rows.json").write_text(content)
    rows = rows_of(tmp_path, max_chars=1000)
    assert [row.reason for row in rows] == [None] * kept + [reason] and rows[-1].lost and reason in FAULTS
    (tmp_path / "rows.json").write_text(f"[{GOOD}] \n\t\r\n ")
    assert [row.reason for row in rows_of(tmp_path)] == [None]


def test_a_list_is_read_alike_in_any_pieces(tmp_path: Path) -> None:
    """Values with every kind of sign in their strings, of lengths around the size of a piece."""
    rng = random.Random(3)
    values = [{"text": "".join(rng.choices('ab\\"[]{},:\n \u00e9\U0001f600', k=rng.choice([3, 900, 65_000, 70_000])))} for _ in range(12)]
    for ascii_only, indent in ((True, None), (False, 1)):
        (tmp_path / "rows.json").write_text(json.dumps(values, ensure_ascii=ascii_only, indent=indent), encoding="utf-8")
        assert [row.text for row in rows_of(tmp_path)] == [v["text"] for v in values]


def test_a_list_takes_time_by_its_length(tmp_path: Path) -> None:
    """Many small items in one piece, and many damaged ones, are not copied or read again for each other."""

    class Counting(io.BytesIO):
        read_bytes = 0

        def read(self, size: int | None = -1) -> bytes:
            data = super().read(size)
            Counting.read_bytes += len(data)
            return data

    items = [GOOD if n % 3 else "oops" for n in range(30_000)]
    data = ("[" + ",".join(items) + "]").encode()
    found = [r for _, r in records(File("x.json", "json", len(data), lambda: Counting(data)), 100_000)]
    assert len(found) == len(items) and sum(isinstance(r, dict) for r in found) == sum(i == GOOD for i in items)
    assert Counting.read_bytes < 2 * len(data) + (1 << 20)


def lines_file(path: Path, count: int, first: str | None = None) -> None:
    rows = [json.dumps(r) for r in texts(count, 300)]
    path.write_text("\n".join(([first] if first is not None else []) + rows) + "\n")


@pytest.mark.parametrize(("first", "reason"), [(None, None), ('{"text": ', "bad JSON"), ('{"text": "' + "x" * 200_000 + '"}', "too long"),
                                               ('{"a": 1, "a": 2}', "repeated key"), ('{"text": "\udcff"}', "not UTF-8")])  # fmt: skip
def test_json_lines_by_another_name_are_read_by_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str | None, reason: str | None
) -> None:
    from draftstill.readers import records as module

    monkeypatch.setattr(module, "_LARGEST_OBJECT", 1000)
    (tmp_path / "rows.json").write_bytes(
        "\n".join(([first] if first else []) + [json.dumps(r) for r in texts(50)]).encode("utf-8", "surrogateescape")
    )
    rows = rows_of(tmp_path, max_chars=1000)
    assert [row.reason for row in rows] == ([reason] if reason else []) + [None] * 50


def test_json_lines_by_another_name_take_little_memory(tmp_path: Path) -> None:
    lines_file(tmp_path / "rows.json", 1500)
    tracemalloc.start()
    assert sum(1 for row in read_rows(Corpus(source=str(tmp_path))) if not row.reason) == 1500
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < (tmp_path / "rows.json").stat().st_size / 2


@pytest.mark.parametrize("value", [{"data": [{"text": "a"}, {"text": "b"}]}, {"x": {"text": "a"}, "y": {"text": "b"}}])
@pytest.mark.parametrize("indent", [None, 0, 2])
def test_one_object_over_many_lines_is_one_object(tmp_path: Path, value: Any, indent: int | None) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(value, indent=indent))
    assert [row.text for row in rows_of(tmp_path)] == ["a", "b"]


# --- nesting ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [100, 200, 500, 700, 950, 5000])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_deep_nesting_is_named_and_no_traceback(tmp_path: Path, depth: int, name: str) -> None:
    good = '{"messages": [{"role": "user", "content": "Who?"}]}'
    deep = '{"messages": [{"role": "user", "content": "Who?", "meta": ' + '{"a": [' * (depth // 2) + "]}" * (depth // 2) + "}]}"
    content = [good, deep, good]
    (tmp_path / name).write_text("\n".join(content) if name.endswith("l") else f"[{','.join(content)}]")
    corpus = Corpus(source=str(tmp_path), redact=("email",))
    rows = list(read_rows(corpus))
    assert [row.reason for row in rows] == [None, None if depth == 100 else "nested too deeply", None]
    assert "nested too deeply" in FAULTS


def test_deep_json_in_a_string(tmp_path: Path) -> None:
    deep = "[" * 700 + "]" * 700
    (tmp_path / "rows.jsonl").write_text(
        "\n".join(map(json.dumps, [{"messages": deep}, {"messages": [{"role": "user", "content": "x"}], "tools": deep}]))
    )
    assert [row.reason for row in rows_of(tmp_path)] == ["nested too deeply", "bad tools"]


# --- the rest is lost -------------------------------------------------------------------------------------------------------------


def damaged(folder: Path, kind: str) -> Path:
    """A file with some readable rows, then damage."""
    rows = [json.dumps({"text": f"{n} {os.urandom(1500).hex()}"}) for n in range(400)]  # more than a buffer holds
    packed = {"gz": gzip.compress, "zst": lambda d: pyarrow.compress(d, codec="zstd", asbytes=True)}
    path = folder / f"rows.{'json' if kind == 'json' else 'jsonl'}{'' if kind in ('json', 'utf-16') else f'.{kind}'}"
    folder.mkdir(exist_ok=True)
    if kind == "json":
        path.write_text("[" + ",".join(rows))
    elif kind == "utf-16":
        path.write_bytes("\n".join(rows).encode("utf-16")[:-1])
    else:
        data = packed[kind]("\n".join(rows).encode())
        path.write_bytes(data[: len(data) * 2 // 3])
    return path


@pytest.mark.parametrize("kind", ["gz", "zst", "json", "utf-16"])
def test_a_lost_rest_is_refused_unless_the_recipe_takes_it(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    source = damaged(tmp_path / "docs", kind)
    with pytest.raises(DraftstillError, match="the rest of 1 file cannot be read") as caught:
        facts_of(tmp_path, source)
    assert caught.value.key == "corpus.damaged" and caught.value.mend and "rows.json" in str(caught.value)
    capsys.readouterr()
    facts = facts_of(tmp_path, source, damaged="keep")  # in the same folder
    assert facts["kept"] > 30 and len(facts["damaged"]) == 1 and "DAMAGED: " in capsys.readouterr().out


def test_a_document_or_an_object_that_is_damaged_is_one_row(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    for n, row in enumerate(texts(20)):
        (docs / f"{n}.json").write_text(json.dumps(row))
    (docs / "cut.json").write_text('{"text": "cut')
    (docs / "cut.txt.gz").write_bytes(gzip.compress(os.urandom(5000))[:3000])
    facts = facts_of(tmp_path, docs)
    assert facts["rejected"] == {"bad JSON": 1, "damaged gzip": 1} and "damaged" not in facts


# --- disk and network -------------------------------------------------------------------------------------------------------------


class _Failing(io.BytesIO):
    """Bytes that end in an error: of the disk, of the network, of a library of its own."""

    def __init__(self, data: bytes, error: Exception) -> None:
        super().__init__(data)
        self._good, self._error = len(data) // 2, error

    def read(self, size: int | None = -1) -> bytes:
        if self.tell() + (size or 0) > self._good:
            raise self._error
        return super().read(size)


ERRORS = [
    OSError(5, "Input/output error"),
    OSError("stale file handle"),
    ConnectionResetError(104, "reset"),
    TimeoutError("timed out"),
    RuntimeError("session closed"),
]


@functools.cache
def stored(name: str) -> bytes:
    rows = texts(300, 60)
    if name.endswith(".parquet"):
        sink = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sink, row_group_size=30)
        return sink.getvalue()
    lines = "[" + ",".join(map(json.dumps, rows)) + "]" if ".json." in name or name.endswith(".json") else "\n".join(map(json.dumps, rows))
    data = lines.encode()
    return (
        gzip.compress(data)
        if name.endswith(".gz")
        else pyarrow.compress(data, codec="zstd", asbytes=True)
        if name.endswith(".zst")
        else data
    )


NAMES = ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.json", "a.json.zst", "a.parquet", "a.txt", "a.txt.gz", "a.txt.zst"]
FAULTY = [(name, ERRORS[n % len(ERRORS)]) for n, name in enumerate(NAMES)] + [
    (name, e) for name in ("a.jsonl.zst", "a.parquet") for e in ERRORS
]


@pytest.mark.parametrize(("name", "error"), FAULTY, ids=lambda x: x if isinstance(x, str) else type(x).__name__)
def test_a_fault_of_disk_or_network_stops_the_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: Exception) -> None:
    (tmp_path / name).write_bytes(stored(name))
    real = streams.Source
    monkeypatch.setattr(streams, "Source", lambda file, raw, meter=None: real(file, _Failing(raw.read(), error), meter))
    with pytest.raises(DraftstillError, match=f"cannot read {name}") as caught:
        rows_of(tmp_path, max_chars=10_000_000)
    assert caught.value.key == "corpus.source" and "the same command reads anew" in str(caught.value.mend)


def test_a_network_that_is_not_there_stops_the_stage(tmp_path: Path) -> None:
    def opened() -> Any:
        raise RuntimeError("no route to host")

    with pytest.raises(DraftstillError, match="no route to host"):
        list(records(File("a.parquet", "parquet", 5, opened), 1000))
    with pytest.raises(DraftstillError, match="no route to host"):
        list(records(File("a.jsonl", "jsonl", 5, opened, ".gz"), 1000))
