"""Requests and responses of OpenAI's batches."""

from __future__ import annotations

import io
import json
import sys
import tempfile

import pytest

from draftstill.gathering import Gathering
from draftstill.readers import FAULTS, read_rows
from draftstill.recipe import Corpus

TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "find", "arguments": '{"q": "rent"}'}}


def write(path, *rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))


def rows_of(source, **corpus):
    return list(read_rows(Corpus(source=str(source), **corpus)))


def request(name, text="Who?", **body):
    return {
        "custom_id": name,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": [{"role": "user", "content": text}], **body},
    }


def response(name, text="Me.", status=200, **message):
    body = {"choices": [{"index": 0, "message": {"role": "assistant", "content": text, **message}}]}
    return {"id": "r", "custom_id": name, "response": {"status_code": status, "body": body}, "error": None}


@pytest.mark.parametrize("names", [("requests.jsonl", "responses.jsonl"), ("z.jsonl", "a.jsonl")])
def test_batch_requests_and_responses_are_joined(tmp_path, names):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        answers = [response("c", f"third of {folder}"), response("a", f"first of {folder}"), response("b", None, tool_calls=[CALL]),
                   response("d", status=500), {"custom_id": "e", "response": None, "error": {"message": "no"}}, response("x")]  # fmt: skip
        write(tmp_path / folder / names[0], *[request(n, f"{n}?", tools=TOOLS) for n in "abcde"], request("a"), "{")
        write(tmp_path / folder / names[1], *answers, response("a"), '{"cut')
    rows = rows_of(tmp_path)
    kept = [row for row in rows if not row.reason]
    assert [row.messages[-1].get("content") for row in kept] == [
        text for f in ("one", "two") for text in (f"first of {f}", None, f"third of {f}", "d?", "e?")
    ]
    assert kept[1].messages[-1]["tool_calls"] == [CALL] and all(row.tools == TOOLS for row in kept)
    reasons = sorted(row.reason for row in rows if row.reason)
    assert reasons == sorted(
        2 * ["bad JSON", "bad JSON", "failed response", "failed response", "no request", "repeated custom_id", "repeated custom_id"]
    )
    assert set(reasons) <= FAULTS


@pytest.mark.parametrize("names", [("requests.jsonl", "responses.jsonl"), ("z.jsonl", "a.jsonl")])
def test_requests_that_are_left_out_by_choice_have_answers_all_the_same(tmp_path, names):
    asked = [request("a"), {**request("b"), "url": "/v1/embeddings"}, request("c"), {**request("d"), "url": "/v1/embeddings"}]
    write(tmp_path / names[0], *asked)
    write(tmp_path / names[1], *[response(n) for n in "abcd"], response("x"))
    rows = rows_of(tmp_path, where={"url": ("/v1/chat/completions",)})
    assert [row.reason for row in rows] == [None, "other url", None, "other url", "no request"]
    assert [len(row.messages) for row in rows if not row.reason] == [2, 2]
    write(tmp_path / names[0], *asked, asked[1])
    assert [row.reason for row in rows_of(tmp_path, where={"url": ("/v1/chat/completions",)})][4] == "repeated custom_id"


def test_a_parquet_file_of_responses_is_named_and_not_read_as_something_else(tmp_path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([response("a")]), tmp_path / "a.parquet")
    write(tmp_path / "b.jsonl", request("a"))
    assert [(row.id, row.reason) for row in rows_of(tmp_path)] == [("a.parquet:1", "missing field"), ("b.jsonl:1", None)]


class Input:
    def __init__(self, data):
        self.buffer = io.BytesIO(data)

    def isatty(self):
        return False


@pytest.mark.parametrize("kind", ["jsonl", "json", "text", "batch"])
def test_text_that_waits_lies_without_a_name_on_the_run_folders_disk(tmp_path, monkeypatch, kind):
    """The system's folder for temporary files is often its memory, and what has a name outlives a process that is killed."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "work").mkdir()
    rows = [{"text": f"number {n}"} for n in range(3)]
    if kind == "batch":
        write(tmp_path / "docs" / "a.jsonl", *[request(n, f"Who is {n}?") for n in "abc"])
        write(tmp_path / "docs" / "b.jsonl", *map(response, "abc"))
    data = {"jsonl": "\n".join(map(json.dumps, rows)), "json": json.dumps(rows), "text": "number 0"}.get(kind, "")
    monkeypatch.setattr(sys, "stdin", Input(data.encode()))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "not there"))
    corpus = Corpus(source=str(tmp_path / "docs") if kind == "batch" else "-", format="auto" if kind == "batch" else kind, min_chars=1)
    for row in read_rows(corpus, folder=tmp_path / "work"):
        assert row.reason is None and list((tmp_path / "work").iterdir()) == []
    monkeypatch.setattr(sys, "stdin", Input(data.encode()))
    gathered = Gathering(corpus, tmp_path / "work")
    gathered.gather()
    assert len(gathered.ids) == (1 if kind == "text" else 3) and gathered.meter.done == gathered.meter.total
