"""Files, encodings and single rows: every row is read or named, and what is text stays text."""

from __future__ import annotations

import gzip
import io
import json
import os
import sys

import pyarrow
import pytest

from draftstill.errors import DraftstillError
from draftstill.readers import FAULTS, Meter, read_rows
from draftstill.recipe import Corpus

LONG = "A sentence that is long enough to be a document of its own. " * 5


def rows_of(source, **corpus):
    return list(read_rows(Corpus(source=str(source), **corpus)))


def texts_of(source, **corpus):
    return [row.text for row in rows_of(source, **corpus)]


def reasons_of(source, **corpus):
    return {row.id: row.reason for row in rows_of(source, **corpus) if row.reason}


def pack(data: bytes, name: str) -> bytes:
    if name.endswith(".gz"):
        return gzip.compress(data)
    return pyarrow.compress(data, codec="zstd", asbytes=True) if name.endswith(".zst") else data


@pytest.mark.parametrize("packing", ["", ".gz", ".zst"])
def test_every_kind_of_file_plain_and_packed(tmp_path, packing):
    rows = [{"text": f"{n} {LONG}"} for n in range(3)]
    files = {
        "a.txt": (LONG, [LONG]),
        "b.md": ("# Title\n" + LONG, ["# Title\n" + LONG]),
        "c.jsonl": ("\n".join(map(json.dumps, rows)), [r["text"] for r in rows]),
        "d.json": (json.dumps(rows), [r["text"] for r in rows]),
        "e.ndjson": (json.dumps(rows[0]) + "\n", [rows[0]["text"]]),
    }
    for name, (content, _) in files.items():
        (tmp_path / (name + packing)).write_bytes(pack(content.encode(), name + packing))
    assert texts_of(tmp_path) == [text for _, wanted in files.values() for text in wanted]


@pytest.mark.parametrize(("packing", "reason"), [(".gz", "damaged gzip"), (".zst", "damaged zstd")])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "text.txt", "no.jsonl"])
def test_a_damaged_packing_keeps_what_could_be_read(tmp_path, packing, reason, name):
    rng_text = [{"text": f"{n} " + os.urandom(600).hex()} for n in range(800)]
    data = json.dumps(rng_text) if name.endswith(".json") else "\n".join(map(json.dumps, rng_text))
    packed = pack(data.encode(), packing)
    (tmp_path / (name + packing)).write_bytes(b"not packed at all" if name.startswith("no") else packed[: len(packed) * 2 // 3])
    rows = rows_of(tmp_path)
    assert [row.reason for row in rows if row.reason] == [reason]
    assert (len(rows) > 300) == name.startswith("rows")


def test_two_frames_of_zstd_are_one_file(tmp_path):
    one = pack(json.dumps({"text": "first " + LONG}).encode() + b"\n", ".zst")
    (tmp_path / "rows.jsonl.zst").write_bytes(one + pack(json.dumps({"text": "second " + LONG}).encode(), ".zst"))
    assert [t.split()[0] for t in texts_of(tmp_path)] == ["first", "second"]


DATES = ["2024-01-01", "2024-01-01T12:30:00Z", "12:30", "1e5", "007", "NaN", "true", "null", "1.0", ""]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet"])
def test_text_that_looks_like_something_else_stays_text(tmp_path, name):
    rows = [{"prompt": date or "x", "response": date} for date in DATES]
    write_table(tmp_path / name, rows)
    read = rows_of(tmp_path)
    assert [[m["content"] for m in row.messages] for row in read] == [[date or "x", date] for date in DATES]
    assert all(type(m["content"]) is str for row in read for m in row.messages)


def write_table(path, rows):
    if path.suffix == ".parquet":
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=4)
    else:
        path.write_text(json.dumps(rows) if path.suffix == ".json" else "\n".join(map(json.dumps, rows)))


BROKEN = {
    b'{"text": "cut off': "bad JSON",
    b'{"text": "a", "text": "b"}': "repeated key",
    b'{"text": "a", "more": {"k": 1, "k": 1}}': "repeated key",
    b'{"text": NaN}': "bad JSON",
    b"{'text': 'python'}": "bad JSON",
    b"[" * 100_000: "nested too deeply",
    b"[" * 700 + b"]" * 700: "nested too deeply",
    b'{"n": ' + b"1" * 5000 + b"}": "bad JSON",
    b'{"text": "a"} trailing': "bad JSON",
    b"[1, 2]": "not an object",
    b'"text"': "not an object",
    b"null": "not an object",
    b'{"words": "x"}': "missing field",
    b'{"text": 5}': "not a string",
    b'{"text": null}': "not a string",
    b'{"text": ["a"]}': "not a string",
    b'{"text": "\xff"}': "not UTF-8",
}


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_every_broken_row_is_named_and_the_others_are_read(tmp_path, end):
    good = json.dumps({"text": LONG}).encode()
    lines = [good]
    for bad in BROKEN:
        lines += [bad, b"", good]
    (tmp_path / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + end.join(lines))
    rows = rows_of(tmp_path)
    assert [row.reason for row in rows if row.reason] == list(BROKEN.values())
    assert {row.text for row in rows if not row.reason} == {LONG} and len(rows) == 2 * len(BROKEN) + 1
    assert [row.id for row in rows if row.reason] == [f"rows.jsonl:{3 * n + 2}" for n in range(len(BROKEN))]
    assert set(BROKEN.values()) <= FAULTS and all(row.detail for row in rows if row.reason)


def test_a_row_without_end_is_passed_over_in_pieces(tmp_path):
    huge = b'{"text": "' + b"x" * 10_000_000 + b'"}'
    good = json.dumps({"text": LONG}).encode()
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join([good, huge, good, huge]))
    read = rows_of(tmp_path, max_chars=1000)
    assert [row.reason for row in read] == [None, "too long", None, "too long"] and "too long" not in FAULTS
    (tmp_path / "rows.jsonl").unlink()
    (tmp_path / "text.txt").write_bytes(b"x" * 10_000_000)
    assert [row.reason for row in rows_of(tmp_path, max_chars=1000)] == ["too long"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le-bom", "utf-16-be-bom"])
@pytest.mark.parametrize("name", ["rows.jsonl", "text.txt", "rows.json"])
def test_encodings_with_a_mark(tmp_path, encoding, name):
    text = "Grüße \U0001f600 中文 " + LONG
    content = text if name == "text.txt" else json.dumps([{"text": text}] if name.endswith("json") else {"text": text}, ensure_ascii=False)
    mark = {"utf-16-le-bom": b"\xff\xfe", "utf-16-be-bom": b"\xfe\xff"}.get(encoding, b"")
    (tmp_path / name).write_bytes(mark + content.encode(encoding.removesuffix("-bom")))
    assert texts_of(tmp_path) == [text]


def test_utf16_lines_are_rows_and_a_cut_file_is_named(tmp_path):
    data = "\r\n".join(json.dumps({"text": f"{n} {LONG}"}) for n in range(3)).encode("utf-16")
    (tmp_path / "rows.jsonl").write_bytes(data)
    assert [t[0] for t in texts_of(tmp_path)] == ["0", "1", "2"]
    (tmp_path / "rows.jsonl").write_bytes(data[:-3])
    assert [row.reason for row in rows_of(tmp_path)][-1] in ("not UTF-8", "bad JSON") and len(rows_of(tmp_path)) == 3


def test_utf16_without_a_mark_is_not_text(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(json.dumps({"text": LONG}).encode("utf-16-le"))
    assert list(reasons_of(tmp_path).values()) == ["bad JSON"]


def test_line_ends_of_other_systems(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\rthree\n")
    (tmp_path / "b.jsonl").write_bytes(json.dumps({"text": "one\r\ntwo\u2028three"}, ensure_ascii=False).encode() + b"\r\n")
    assert texts_of(tmp_path) == ["one\ntwo\nthree\n", "one\ntwo\u2028three"]


def test_hidden_and_other_files_are_left_alone_and_counted(tmp_path):
    (tmp_path / "a.txt").write_text(LONG)
    for name in (".hidden.txt", ".git/x.txt", "a/.ipynb_checkpoints/x.txt", "p.dist-info/METADATA.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(LONG)
    for name in ("scan.pdf", "b.PDF", "letter.docx", "noend"):
        (tmp_path / name).write_bytes(b"%PDF\x00")
    meter = Meter()
    assert [row.id for row in read_rows(Corpus(source=str(tmp_path)), meter)] == ["a.txt"]
    assert meter.others == {".pdf": 2, ".docx": 1, "no suffix": 1} and meter.files == 1


def test_a_folder_without_text_says_what_it_holds(tmp_path):
    (tmp_path / "scan.pdf").write_bytes(b"%PDF")
    with pytest.raises(DraftstillError, match=r"ends in \.txt.*it holds 1 \.pdf") as caught:
        rows_of(tmp_path)
    assert caught.value.key == "corpus.source"


def test_include_chooses_files(tmp_path):
    for name in ("a/one.txt", "a/two.txt", "b/one.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert texts_of(tmp_path, include=("*/one.txt",)) == ["a/one.txt", "b/one.txt"]
    with pytest.raises(DraftstillError) as caught:
        rows_of(tmp_path, include=("*.jsonl",))
    assert caught.value.key == "corpus.include" and caught.value.mend


def test_names_that_are_no_utf8(tmp_path):
    with open(os.fsencode(tmp_path) + b"/caf\xe9.txt", "w") as file:
        file.write(LONG)
    (row,) = rows_of(tmp_path)
    row.id.encode()


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_an_error_not_a_gap(tmp_path):
    (tmp_path / "a.txt").write_text(LONG)
    (tmp_path / "a.txt").chmod(0)
    with pytest.raises(DraftstillError, match="cannot read a.txt"):
        rows_of(tmp_path)


JSON_FILES = [
    ('[{"text": "a"}, {"text": "b"}]', ["a", "b"], []),
    ('[\n  {"text": "a"}\n,\n{"text": "b"}\n]\n', ["a", "b"], []),
    ("[]", [], []),
    ("  \n ", [], []),
    ('{"text": "a"}', ["a"], []),
    ('{"data": [{"text": "a"}, {"text": "b"}]}', ["a", "b"], []),
    ('{"x": {"text": "a"}, "y": {"text": "b"}}', ["a", "b"], []),
    ('{"text": "a"}\n{"text": "b"}\n', ["a", "b"], []),
    ('{"text": "a"}\n{"text": \n{"text": "b"}\n', ["a", "b"], ["bad JSON"]),
    ('[{"text": "a"}, {"text": "b"', ["a"], ["bad JSON"]),
    ('[{"text": "a"}, oops, {"text": "b"}]', ["a", "b"], ["bad JSON"]),
    ('[{"text": "a"}, {"text": "b"}', ["a", "b"], ["bad JSON"]),
    ('[{"text": "a"}, 7, {"text": "b"}]', ["a", "b"], ["not an object"]),
    ('[{"text": "a"}, {"text": "b", "text": "c"}]', ["a"], ["repeated key"]),
    ('[{"text": "a"}] {"text": "b"}', ["a"], ["rest not read"]),
    ("{", [], ["bad JSON"]),
]


@pytest.mark.parametrize(("content", "texts", "reasons"), JSON_FILES)
def test_json_files(tmp_path, content, texts, reasons):
    (tmp_path / "rows.json").write_text(content)
    rows = rows_of(tmp_path / "rows.json")
    assert [row.text for row in rows if not row.reason] == texts and [row.reason for row in rows if row.reason] == reasons
    assert len({row.id for row in rows}) == len(rows)


def test_a_large_json_list_is_read_piece_by_piece(tmp_path):
    rows = [{"text": f"{n} " + "y" * (200_000 if n == 3 else 5000)} for n in range(60)]
    (tmp_path / "rows.json").write_text(json.dumps(rows, indent=1))
    assert texts_of(tmp_path) == [row["text"] for row in rows]
    assert [row.reason for row in rows_of(tmp_path, max_chars=1000)] == [None] * 3 + ["too long"] + [
        None
    ] * 56  # the limit is 77,536 characters


class _Input:
    def __init__(self, data: bytes, terminal: bool = False):
        self.buffer, self._terminal = io.BytesIO(data), terminal

    def isatty(self):
        return self._terminal


def test_standard_input(monkeypatch):
    data = b"\n".join(json.dumps({"prompt": f"question {n}", "response": "yes"}).encode() for n in range(3))
    monkeypatch.setattr(sys, "stdin", _Input(data + b"\n{"))
    rows = rows_of("-")
    assert [row.id for row in rows] == [f"stdin:{n}" for n in range(1, 5)] and rows[3].reason == "bad JSON"
    assert [m["role"] for m in rows[0].messages] == ["user", "assistant"]
    monkeypatch.setattr(sys, "stdin", _Input(LONG.encode()))
    assert texts_of("-", format="text") == [LONG]
    monkeypatch.setattr(sys, "stdin", _Input(b"", terminal=True))
    with pytest.raises(DraftstillError, match="is a terminal"):
        rows_of("-")
    with pytest.raises(DraftstillError) as caught:
        monkeypatch.setattr(sys, "stdin", _Input(b""))
        rows_of("-", format="parquet")
    assert caught.value.key == "corpus.format"


def test_where_keeps_rows_by_their_fields(tmp_path):
    rows = [{"text": f"{n} {LONG}", "topic": topic} for n, topic in enumerate(["art", "biology", 5, "biology"])] + [{"text": LONG}]
    write_table(tmp_path / "rows.jsonl", rows)
    read = rows_of(tmp_path, where={"topic": ("biology", "5")})
    assert [row.reason for row in read] == ["other topic", None, None, None, "other topic"] and "other topic" not in FAULTS


def test_the_meter_ends_at_the_size_of_the_files(tmp_path):
    for name in ("a.jsonl", "b.jsonl.gz", "c.txt", "d.jsonl.zst"):
        (tmp_path / name).write_bytes(pack(json.dumps({"text": LONG}).encode() * 1, name))
    meter = Meter()
    list(read_rows(Corpus(source=str(tmp_path)), meter))
    assert meter.done == meter.total == sum(p.stat().st_size for p in tmp_path.iterdir())
