"""Documents and conversations from files of rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from draftstill.progress import say
from draftstill.readers.batches import Answers
from draftstill.readers.conversations import redacted
from draftstill.readers.files import File, Meter
from draftstill.readers.records import Record, records
from draftstill.readers.rows import Row, Unusable, excerpt, names_of, rejected, usable
from draftstill.readers.shapes import ANSWERS, REQUESTS, Shape, explicit, guess
from draftstill.recipe import Corpus
from draftstill.redact import Redactor

_LOOKED_AT = 100
"""Rows of a file that decide what its rows are."""
_BYTES_PER_CHARACTER = 12
"""At most, in JSON: a character beyond the basic plane as two escapes."""


def table_rows(files: Sequence[File], corpus: Corpus, meter: Meter, folder: Path | None = None) -> Iterator[Row]:
    """Every row of the files. A request and its response of a batch are one row; responses wait on the disk of ``folder``."""
    reader = _Reader(corpus, meter, folder)
    # Responses are read before all requests. They stand in JSON, so a parquet file is looked at when it is reached: over the network that fetches a
    # part of it, and max_documents may end the reading before.
    shapes = {file: reader.shape(file) for file in files if file.kind != "parquet"}
    answers = [file for file, shape in shapes.items() if shape is not None and shape.name == ANSWERS]
    for file in answers:
        yield from reader.keep_answers(file)
    for file in files:
        if file not in answers:
            yield from reader.rows(file, shapes[file] if file in shapes else reader.shape(file))
    yield from reader.answers.left()


class _Reader:
    def __init__(self, corpus: Corpus, meter: Meter, folder: Path | None) -> None:
        self.corpus, self.meter, self.answers = corpus, meter, Answers(folder)
        self.limit = _BYTES_PER_CHARACTER * corpus.max_chars + (1 << 16)
        self._said: set[Shape | None] = set()

    def _records(self, file: File, meter: Meter | None = None) -> Iterator[Record]:
        return records(file, self.limit, meter, numbered=bool(self.corpus.redact))

    def shape(self, file: File) -> Shape | None:
        """What the rows of a file are; says it the first time that files are read so."""
        if self.corpus.field_map:
            return explicit(self.corpus.field_map)
        first = list(itertools.islice(self._records(file), _LOOKED_AT))
        values = [(row_id, value) for row_id, value in first if isinstance(value, dict)]
        shape = guess(value for _, value in values)
        if shape is not None and shape.name == ANSWERS and file.kind == "parquet":
            shape = None
        self.meter.guesses[str(shape or "unknown")] = self.meter.guesses.get(str(shape or "unknown"), 0) + 1
        if values and shape not in self._said:
            self._said.add(shape)
            self._say(shape, values)
        return shape

    def _say(self, shape: Shape | None, values: list[tuple[str, dict[str, Any]]]) -> None:
        shown = Redactor(self.corpus.redact).outside
        for row_id, value in values:
            if shape is None:
                say(f"  {shown(row_id)}: unknown fields ({shown(names_of(value))}); say in corpus.fields what they mean")
                return
            try:
                row = shape.row(row_id, value) if shape.name != ANSWERS else Row(row_id, None)
            except Unusable:
                continue
            row = redacted(row, Redactor(self.corpus.redact))
            say(f"  {shown(row_id)} read as {shape}" + ("; corpus.fields overrules this" if shape.name not in (ANSWERS, REQUESTS) else ""))
            for line in [f"{m['role']}: {m.get('content') or '(tool call)'}" for m in row.messages or []][:3] or [row.text or ""]:
                say(f"    {excerpt(line)}" if line else f"    {shown(names_of(value))}")
            return

    def keep_answers(self, file: File) -> Iterator[Row]:
        for row_id, value in self._records(file, self.meter):
            try:
                if isinstance(value, Unusable):
                    raise value
                self.answers.add(file.folder, row_id, value)
            except Unusable as error:
                yield rejected(row_id, error)

    def rows(self, file: File, shape: Shape | None) -> Iterator[Row]:
        for row_id, value in self._records(file, self.meter):
            try:
                if isinstance(value, Unusable):
                    raise value
                yield self._row(file, shape, row_id, value)
            except Unusable as error:
                yield rejected(row_id, error)

    def _row(self, file: File, shape: Shape | None, row_id: str, value: dict[str, Any]) -> Row:
        if shape is None:
            raise Unusable("missing field", f"this row has {names_of(value)}")
        # A request that is left out by choice has its answer all the same.
        answer = self.answers.take(file.folder, row_id, value) if shape.name == REQUESTS else None
        for name, wanted in self.corpus.where.items():
            found = usable(value.get(name))
            if str(found) not in wanted:
                return Row(row_id, None, f"other {name}", excerpt(found))
        return shape.row(row_id, value, answer)
