"""Definitions of ontology terms, as text "name: definition".

Three kinds of file: OBO 1.4 (``[Term]`` stanzas with ``name:`` and ``def:``), the Gene Ontology's SQLite file of Debian's r-bioc-go.db
(table ``go_term``), and JSON objects {id: {label, description, deprecated}} as cellxgene-ontology-guide has them.
"""

from __future__ import annotations

import html
import itertools
import re
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

from draftstill.readers.files import File, Meter
from draftstill.readers.records import records
from draftstill.readers.rows import Row, Unusable, document, rejected
from draftstill.readers.streams import decoded, unpacked, utf8_lines
from draftstill.recipe import Corpus

_TAG = re.compile(r"</?[a-zA-Z][^<>]*>")
_DEFINITION = re.compile(r'def: "((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(r"\\(.)")
_LONGEST_LINE = 1 << 20


class _Term(NamedTuple):
    id: str
    name: str | None
    definition: str | None
    deprecated: bool


def ontology_rows(files: list[File], corpus: Corpus, meter: Meter) -> Iterator[Row]:
    """One row for each ``terms_per_document`` consecutive terms with a definition, and one for each term left out."""
    for file in files:
        waiting: list[_Term] = []
        for item in _terms(file, corpus, meter):
            if isinstance(item, Row):
                yield item
            elif item.deprecated or (item.name or "").startswith("obsolete"):
                yield Row(f"{file.name}:{item.id}", None, "deprecated")
            elif not item.name or not item.definition:
                yield Row(f"{file.name}:{item.id}", None, "no definition", item.name or "")
            else:
                waiting.append(item)
                if len(waiting) == corpus.terms_per_document:
                    yield _joined(file, waiting)
                    waiting = []
        if waiting:
            yield _joined(file, waiting)


def _joined(file: File, terms: list[_Term]) -> Row:
    return document(f"{file.name}:{terms[0].id}", "\n\n".join(f"{t.name}: {clean(t.definition or '')}" for t in terms))


def clean(text: str) -> str:
    """Without HTML: ChEBI's names have tags and entities."""
    return html.unescape(_TAG.sub("", text)).strip()


def _terms(file: File, corpus: Corpus, meter: Meter) -> Iterator[_Term | Row]:
    read = {".obo": _obo, ".json": _json, ".sqlite": _go}
    suffix = next(end for end in read if file.name.lower().removesuffix(file.packing).endswith(end))
    try:
        yield from read[suffix](file, corpus, meter)
    except Unusable as error:
        yield rejected(file.name, Unusable(error.reason, error.detail, lost=True))


def _obo(file: File, corpus: Corpus, meter: Meter) -> Iterator[_Term | Row]:
    values: dict[str, str] = {}
    is_term = False
    with unpacked(file, meter) as stream:
        for line in itertools.chain(utf8_lines(stream, _LONGEST_LINE), [b"["]):
            text = "" if line is None else decoded(line).rstrip("\r\n")
            if text.startswith("["):
                if is_term and "id" in values:
                    yield _obo_term(values)
                values, is_term = {}, text.strip() == "[Term]"
            elif is_term:
                name, _, value = text.partition(": ")
                values.setdefault(name, value if name != "def" else text)


def _obo_term(values: dict[str, str]) -> _Term:
    found = _DEFINITION.match(values.get("def", ""))
    definition = _ESCAPE.sub(lambda m: {"n": "\n", "t": "\t", "W": " "}.get(m[1], m[1]), found[1]) if found else None
    return _Term(values["id"], values.get("name"), definition, values.get("is_obsolete", "").startswith("true"))


def _json(file: File, corpus: Corpus, meter: Meter) -> Iterator[_Term | Row]:
    for row_id, value in records(File(file.name, "json", file.size, file.opened, file.packing), corpus.max_chars, meter):
        if isinstance(value, Unusable):
            yield rejected(row_id, value)
            continue
        name, definition = value.get("label"), value.get("description")
        if "label" not in value:
            yield rejected(row_id, Unusable("missing field", "'label': this object is no term"))
        else:
            yield _Term(row_id.removeprefix(f"{file.name}:"), name if isinstance(name, str) else None,
                        definition if isinstance(definition, str) else None, bool(value.get("deprecated")))  # fmt: skip


def _go(file: File, corpus: Corpus, meter: Meter) -> Iterator[_Term | Row]:
    # sqlite opens paths only; a packed or remote file is unpacked beside the other temporary ones.
    with tempfile.NamedTemporaryFile(suffix=".sqlite") as copy:
        with unpacked(file, meter) as stream:
            shutil.copyfileobj(stream, copy)
        copy.flush()
        try:
            base = sqlite3.connect(f"file:{copy.name}?mode=ro", uri=True)
            try:
                for term_id, name, definition in base.execute("select go_id, term, definition from go_term order by go_id"):
                    yield _Term(term_id, name, definition, False)
            finally:
                base.close()
        except sqlite3.Error as error:
            raise Unusable("damaged database", str(error)) from None
