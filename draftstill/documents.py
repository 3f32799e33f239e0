"""The documents of a finished corpus stage."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from draftstill.sides import SPLITS


@dataclass(frozen=True)
class Document:
    """One document or conversation; ``group`` is the id of the first document of its group, and a group has one split."""

    id: str
    split: str
    group: str
    text: str
    """A document's text; of a conversation, its turns one below the other, for statistics, comparison and scoring as a document."""
    messages: list[dict[str, Any]] | None = None
    """A conversation's turns in OpenAI form; None for plain documents."""
    tools: list[dict[str, Any]] | None = None
    """Tools that the conversation offered the model, in OpenAI form."""


def read_documents(folder: str | Path, split: str) -> list[Document]:
    """The documents of one split (``train``, ``validation`` or ``test``) of a finished corpus stage, in reading order."""
    return list(iter_documents(folder, split))


def iter_documents(folder: str | Path, split: str) -> Iterator[Document]:
    """The same, one by one."""
    for _, document in _placed(_listing(folder), split):
        yield document


def stored_documents(folder: str | Path, split: str) -> list[Document]:
    """The same, each read from the disk when it is looked at: in memory stand names and places."""
    shelf = _Shelf(_listing(folder))
    return [_Stored(shelf, at, document) for at, document in _placed(shelf.path, split)]


def _listing(folder: str | Path) -> Path:
    return Path(folder) / "documents.jsonl"


def _placed(path: Path, split: str) -> Iterator[tuple[int, Document]]:
    if split not in SPLITS:
        raise ValueError(f"split is one of {SPLITS}, not {split!r}")
    at = 0
    with open(path, "rb") as file:
        for line in file:
            row = json.loads(line)
            if row["split"] == split:
                yield at, Document(**row)
            at += len(line)


class _Shelf:
    """A listing, and the document in it that was looked at last."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] | None = None
        self._last: tuple[int, Document] | None = None

    def read(self, at: int) -> Document:
        if self._last is None or self._last[0] != at:
            if self._file is None:
                self._file = open(self.path, "rb")  # noqa: SIM115 - closed when nobody holds a document any more
            self._file.seek(at)
            self._last = at, Document(**json.loads(self._file.readline()))
        return self._last[1]


class _Stored(Document):
    def __init__(self, shelf: _Shelf, at: int, document: Document) -> None:
        # The fields of a frozen class are set this way; text, messages and tools stay on the shelf.
        for name, value in (("id", document.id), ("split", document.split), ("group", document.group), ("_place", (shelf, at)),
                            ("_is_chat", document.messages is not None)):  # fmt: skip
            object.__setattr__(self, name, value)

    def _whole(self) -> Document:
        shelf, at = self.__dict__["_place"]
        found: Document = shelf.read(at)
        return found

    @property
    def text(self) -> str:  # type: ignore[override]
        return self._whole().text

    @property
    def messages(self) -> list[dict[str, Any]] | None:  # type: ignore[override]
        return self._whole().messages if self.__dict__["_is_chat"] else None  # most ask only whether there are any

    @property
    def tools(self) -> list[dict[str, Any]] | None:  # type: ignore[override]
        return self._whole().tools
