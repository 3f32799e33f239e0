"""What is said can be said anywhere: no text ends the run because a terminal cannot show it."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from draftstill.progress import Progress, say
from tests.draftstill.corpora import prepare, prose, recipe_for

TEXTS = ["plain", "caf\u00e9 \u4e2d\u6587 \U0001f600", "half \ud83d of a pair", "\udcff"]


def terminal(monkeypatch: pytest.MonkeyPatch, encoding: str) -> io.BytesIO:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding, write_through=True))
    return written


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1", "cp1252", "utf-16"])
@pytest.mark.parametrize("text", TEXTS)
def test_a_text_that_the_terminal_cannot_hold_is_escaped(monkeypatch: pytest.MonkeyPatch, encoding: str, text: str) -> None:
    written = terminal(monkeypatch, encoding)
    say(text)
    assert written.getvalue().decode(encoding) == text.encode(encoding, "backslashreplace").decode(encoding) + "\n"


@pytest.mark.parametrize("live", [False, True])
def test_a_label_and_a_note_are_escaped(monkeypatch: pytest.MonkeyPatch, live: bool) -> None:
    written = terminal(monkeypatch, "ascii")
    monkeypatch.setattr("draftstill.progress.is_live", lambda: live)
    times = iter(range(0, 1000, 60))
    with Progress("caf\u00e9", 10, clock=lambda: next(times)) as progress:
        progress.update(5, "half \ud83d")
    assert b"caf\\xe9" in written.getvalue() and b"half \\ud83d" in written.getvalue()


def test_an_output_without_an_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    say("caf\u00e9")
    assert sys.stdout.getvalue() == "caf\u00e9\n"  # type: ignore[attr-defined]


SHOWN = {
    "a turn": {"prompt": "hi \ud83d there", "response": "yes ok"},
    "a field": {"hi \ud83d": 1},
    "a text": {"text": "hi \ud83d " + prose(3)},
    "another script": {"prompt": "caf\u00e9 \u4e2d", "response": "yes ok"},
}


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("name", SHOWN)
def test_the_row_shown_ends_no_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, encoding: str) -> None:
    good = [{**{key: prose(n, 40) for key in SHOWN[name]}} for n in range(20)]
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.jsonl").write_text("\n".join(map(json.dumps, [SHOWN[name], *good])))
    (tmp_path / "docs" / "b.jsonl").write_text("\n".join(json.dumps({"text": prose(n + 100)}) for n in range(30)))
    written = terminal(monkeypatch, encoding)
    _, facts, _ = prepare(recipe_for(tmp_path, tmp_path / "docs"))
    assert facts["read"] == 51 and facts["kept"] >= 30 and "a.jsonl:1" in written.getvalue().decode(encoding)


def test_what_is_said_during_a_step_stands_on_a_line_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("draftstill.progress.is_live", lambda: True)
    times = iter(range(0, 1000, 60))
    with Progress("read", 10, clock=lambda: next(times)) as progress:
        say("before")
        progress.update(5)
        say("during")
        say("and once more")
        progress.update(6)
    say("after")
    lines = capsys.readouterr().out.split("\n")
    assert [line.rpartition("\r\x1b[2K")[2] for line in lines] == [
        "before",
        "during",
        "and once more",
        lines[3].rpartition("\r\x1b[2K")[2],
        "after",
        "",
    ]
    assert "read: 6" in lines[3] and lines[2] == "and once more" and lines[4] == "after"
