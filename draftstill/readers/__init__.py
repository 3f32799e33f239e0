"""Readers of the user's text: files of text and of rows, datasets of the Hub, standard input, and some packages with real text.

A reader yields one ``Row`` for everything it looked at; what cannot be used carries a reason, so that nothing goes missing without being
counted. Of text and of rows of JSON no reader holds more than one in memory, of parquet 256 rows and a page of each column.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from draftstill.errors import DraftstillError
from draftstill.readers.conversations import compared, prompt_keys, redacted, text_of
from draftstill.readers.files import File, Meter, folder_files, included, kind_of, name_of, open_files
from draftstill.readers.hub import hub_files, hub_folder, is_hub
from draftstill.readers.licences import licence_rows, licences_folder, unwrap
from draftstill.readers.ontologies import ontology_rows
from draftstill.readers.rows import CUT, FAULTS, Row, Unusable, document, rejected
from draftstill.readers.streams import decoded, unpacked
from draftstill.readers.tables import table_rows
from draftstill.recipe import Corpus
from draftstill.sources import is_wheel, wheel_files

__all__ = [
    "CUT",
    "FAULTS",
    "Meter",
    "Row",
    "Unusable",
    "compared",
    "content_files",
    "local_path",
    "prompt_keys",
    "read_rows",
    "redacted",
    "text_of",
    "unwrap",
]

STANDARD_INPUT = "-"


def local_path(source: str) -> Path | None:
    """Where the source lies on this machine, there or not; None: elsewhere. ``hf:FOLDER`` lies here."""
    if is_hub(source):
        return hub_folder(source)
    return None if source == STANDARD_INPUT or is_wheel(source) else Path(source).expanduser()


def content_files(corpus: Corpus) -> list[tuple[str, Path]] | None:
    """(name, path) of the files of this machine that decide what is read; None where the source lies elsewhere or is not there."""
    root = local_path(corpus.source)
    if root is None or not root.exists():
        return None
    if root.is_file():
        return [(name_of(Path(root.name)), root)]
    if is_hub(corpus.source):
        return open_files(root)  # which of them make the split, ``datasets`` learns from several of them
    licences = licences_folder(root) if corpus.format in ("auto", "licensedcode") else None
    if licences is not None or corpus.format == "licensedcode":
        return [(name_of(path.relative_to(root)), path) for path in licences.glob("*.LICENSE")] if licences else []
    return [(name, path) for name, path in open_files(root) if kind_of(name, corpus.format)[0] and included(name, corpus.include)]


def read_rows(corpus: Corpus, meter: Meter | None = None, folder: Path | None = None) -> Iterator[Row]:
    """Every row of ``corpus.source``, in an order that depends on names only.

    Args:
        meter: follows the bytes read.
        folder: on the disk where text waits that cannot be read twice or in order, in files without a name (the system's own, where None).

    Raises:
        DraftstillError: the source is missing, or holds no file of the wanted format.
    """
    meter = meter or Meter()
    if corpus.source == STANDARD_INPUT:
        yield from _standard_input(corpus, meter, folder)
        return
    if is_hub(corpus.source):
        yield from _file_rows(hub_files(corpus, meter), corpus, meter, folder)
        return
    root = _root(corpus)
    licences = licences_folder(root) if corpus.format in ("auto", "licensedcode") else None
    if licences is not None:
        yield from licence_rows(licences, corpus)
        return
    if corpus.format == "licensedcode":
        raise DraftstillError("no licensedcode/data/licenses folder with .LICENSE files here", key="corpus.source", value=corpus.source,
                              mend="use the licensedcode-data wheel, or another corpus.format")  # fmt: skip
    yield from _file_rows(folder_files(root, corpus.format, corpus.include, corpus.source, meter), corpus, meter, folder)


def _root(corpus: Corpus) -> Path:
    if is_wheel(corpus.source):
        return wheel_files(corpus.source, corpus.sha256, "corpus.source")
    root = Path(corpus.source).expanduser()
    if not root.exists():
        raise DraftstillError("no such file or folder", key="corpus.source", value=corpus.source,
                              mend=f"check the spelling; it was looked for at {root.absolute()}")  # fmt: skip
    return root


def _file_rows(files: list[File], corpus: Corpus, meter: Meter, folder: Path | None) -> Iterator[Row]:
    meter.files, meter.total = len(files), sum(file.size for file in files)
    if corpus.format == "ontology":
        yield from ontology_rows(files, corpus, meter)
        return
    texts = [file for file in files if file.kind == "text"]
    tables = [file for file in files if file.kind != "text"]
    for file in texts:
        yield _text(file, corpus, meter)
    yield from table_rows(tables, corpus, meter, folder)


def _text(file: File, corpus: Corpus, meter: Meter) -> Row:
    limit = 4 * corpus.max_chars
    try:
        with unpacked(file, meter) as stream:
            data = stream.read(limit + 1)
        if len(data) > limit:
            raise Unusable("too long", f"more than {limit:,} bytes")
        return document(file.name, decoded(data))
    except Unusable as error:
        return rejected(file.name, error)._replace(lost=False)  # one document, and all of it is named


def _standard_input(corpus: Corpus, meter: Meter, folder: Path | None) -> Iterator[Row]:
    if sys.stdin is None or sys.stdin.isatty():
        raise DraftstillError("standard input is a terminal, so there is no text in it", key="corpus.source", value=STANDARD_INPUT,
                              mend="pipe the text in: zcat log.jsonl.gz | draftstill run RECIPE")  # fmt: skip
    if corpus.format not in ("auto", "jsonl", "text", "json"):
        raise DraftstillError("standard input is read as jsonl, json or text", key="corpus.format", value=corpus.format,
                              mend="write it to a file and give that")  # fmt: skip
    # Rows are looked at before they are read, and a pipe cannot go back.
    with tempfile.TemporaryFile(dir=folder) as copy:  # nameless: gone when the process is
        shutil.copyfileobj(sys.stdin.buffer, copy)
        copy.flush()
        kind = "jsonl" if corpus.format == "auto" else corpus.format
        yield from _file_rows([File("stdin", kind, copy.tell(), lambda: _again(copy))], corpus, meter, folder)


def _again(copy: IO[bytes]) -> IO[bytes]:
    """A file without a name, from its beginning. The one opened before goes on no more: they share a position."""
    os.lseek(copy.fileno(), 0, os.SEEK_SET)
    return open(os.dup(copy.fileno()), "rb")
