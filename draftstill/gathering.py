"""One pass over the rows of a corpus: what is kept goes to disk, what is not is named, and little stays in memory."""

from __future__ import annotations

import hashlib
import json
import tempfile
from array import array
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO, Any

from draftstill.dedupe import Sketches
from draftstill.families import Families
from draftstill.progress import Progress
from draftstill.readers import CUT, FAULTS, Meter, Row, compared, prompt_keys, read_rows, redacted
from draftstill.recipe import Corpus
from draftstill.redact import Redactor

_DIGEST = 16
"""Bytes of a SHA-256 that tell documents apart: two among billions would not meet."""


class Gathering:
    """The kept rows of a corpus, and what is known of the others.

    Files have no name: they are gone when the process is, and a stopped attempt leaves nothing behind.

    Args:
        folder: on the disk that is to hold them.
        without: content (``content_digest``) that is rejected as the training's.
    """

    def __init__(self, corpus: Corpus, folder: Path, without: Collection[bytes] = ()) -> None:
        self.corpus, self.read, self._folder, self._without = corpus, 0, folder, without
        self.reasons: Counter[str] = Counter()
        self.first_fault: Row | None = None
        self.lost: list[Row] = []
        """Rows behind which the rest of a file could not be read."""
        self.ids: list[str] = []
        self.families = Families()
        """What kept documents share: the name of a conversation, a prompt. A row that is the copy of a kept one joins what both belong to."""
        self.digests: list[bytes] = []
        """SHA-256 of each kept document's content, cut to 16 bytes; of the text, or of messages and tools."""
        self.lengths = array("q")
        """Characters of each kept document."""
        self.conversations = self.turns = self.with_tools = 0
        self.meter, self.redactor, self.sketches = Meter(), Redactor(corpus.redact), Sketches(folder)
        self._details, self._ids = Redactor(corpus.redact), Redactor(corpus.redact)
        self._kept, self._rejected = tempfile.TemporaryFile(dir=folder), tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._first: dict[bytes, int] = {}
        self._names: set[str] = set()

    @property
    def faults(self) -> dict[str, int]:
        """Faults of the input by reason; the other reasons are choices of the recipe."""
        return {reason: count for reason, count in sorted(self.reasons.items()) if reason in FAULTS}

    def gather(self) -> None:
        """Read everything, or up to ``corpus.max_documents`` kept rows."""
        with Progress("read", 0, "MB") as progress:
            for row in read_rows(self.corpus, self.meter, self._folder):
                self.read += 1
                self._take(row)
                progress.total = self.meter.total / 1e6
                progress.update(self.meter.done / 1e6, f"{len(self.ids):,} kept")
                if len(self.ids) == self.corpus.max_documents:
                    break
        if self.read != len(self.ids) + self.reasons.total():
            raise AssertionError("a row was neither kept nor rejected")

    def _take(self, row: Row) -> None:
        row = row._replace(id=self._ids.outside(row.id))  # a file may be named by an address
        if row.reason is None:
            row = row._replace(text=(row.text or "").strip())
            row = self._too_long(row) or self._checked(redacted(row, self.redactor))
        if row.reason is None:
            self._keep(row)
            return
        row = row._replace(detail=self._told(row.detail))
        self.reasons[row.reason or ""] += 1
        if self.first_fault is None and row.reason in FAULTS:
            self.first_fault = row
        if row.lost:
            self.lost.append(row)
        self._rejected.write(_line({"id": row.id, "reason": row.reason, "detail": row.detail}))

    def _told(self, detail: str) -> str:
        """A detail quotes the row, which was not redacted. An excerpt's last word may be half of what has a form when it is whole."""
        if not self.corpus.redact:
            return detail
        cut = detail.endswith(CUT)
        text = str(self._details.replace(detail, beside=detail)[0])
        return text.removesuffix(CUT).rpartition(" ")[0] + CUT if cut else text

    def _too_long(self, row: Row) -> Row | None:
        """The rejected row; None where it is not too long. Redaction goes through all of a text, so this comes before it, and after it again."""
        length = len(row.text or "")
        return Row(row.id, None, "too long", f"{length:,} characters") if length > self.corpus.max_chars else None

    def _checked(self, row: Row) -> Row:
        text = row.text or ""
        reject = lambda reason, detail="": Row(row.id, None, reason, detail)  # noqa: E731
        if not text:
            return reject("empty")
        if row.messages is None and len(text) < self.corpus.min_chars:
            return reject("too short", f"{len(text)} characters")
        if (long := self._too_long(row)) is not None:
            return long
        if "\0" in text:
            return reject("NUL character", f"at character {text.index(chr(0))}: binary data, or UTF-16 without a byte order mark")
        try:
            digest = content_digest(text, row.messages, row.tools)
        except UnicodeEncodeError:
            return reject("lone surrogate", "half of a UTF-16 pair, which no UTF-8 file can hold")
        if digest in self._without:
            return reject("trained on")
        if (first := self._first.get(digest)) is not None:
            if row.family is not None:
                self.families.name(first, row.family)
            return reject("exact duplicate", f"of {self.ids[first]}")
        if row.id in self._names:
            return reject("repeated id", "another row has this id; give each file a name of its own")
        self._names.add(row.id)
        self._first[digest] = len(self.ids)
        self.digests.append(digest)
        return row

    def _keep(self, row: Row) -> None:
        text, number = row.text or "", len(self.ids)
        self.ids.append(row.id)
        self.lengths.append(len(text))
        self.sketches.add(text if row.messages is None else compared(row.messages))
        if row.family is not None:
            self.families.name(number, row.family)
        if row.messages is not None:
            self.families.prompts(number, list(prompt_keys(row.messages)))
            self.conversations += 1
            self.turns += len(row.messages)
            self.with_tools += row.tools is not None or any("tool_calls" in m for m in row.messages)
        content = {"text": text, "messages": row.messages, "tools": row.tools}
        self._kept.write(_line({name: value for name, value in content.items() if value is not None}))

    def kept(self) -> Iterator[bytes]:
        """The content of each kept row in order: a line of JSON with ``text`` and, of a conversation, ``messages`` and ``tools``."""
        self._kept.seek(0)
        yield from self._kept

    def rejected(self) -> IO[bytes]:
        """The list of rejected rows as JSONL, from its beginning."""
        self._rejected.seek(0)
        return self._rejected


def content_digest(text: str, messages: list[dict[str, Any]] | None, tools: list[dict[str, Any]] | None) -> bytes:
    """What makes a document or conversation the same as another, in 16 bytes.

    Raises:
        UnicodeEncodeError: a lone surrogate.
    """
    content = json.dumps([messages, tools] if messages else text, ensure_ascii=False, sort_keys=True)
    return hashlib.sha256(content.encode()).digest()[:_DIGEST]


def _line(value: dict[str, Any]) -> bytes:
    # A rejected row's detail may quote half of a surrogate pair.
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


def compared_text(line: bytes) -> str:
    """What of a kept row is compared with others."""
    row = json.loads(line)
    return compared(row["messages"]) if "messages" in row else row["text"]
