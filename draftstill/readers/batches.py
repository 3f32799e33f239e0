"""OpenAI batch files: each request gets the response with its ``custom_id`` from the files of the same folder."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from draftstill.readers.rows import Row, Unusable, rejected, usable
from draftstill.readers.shapes import answer_of


class Answers:
    """The messages of response files, on the disk of ``folder``; in memory stands where each one lies."""

    def __init__(self, folder: Path | None = None) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - nameless: gone when the process is
        self._places: dict[tuple[str, str], tuple[str, int, int]] = {}
        self._asked: dict[tuple[str, str], str] = {}

    def add(self, folder: str, row_id: str, row: dict[str, Any]) -> None:
        """Keep a response.

        Raises:
            Unusable: it failed, or its id was there before.
        """
        key = (folder, str(row.get("custom_id")))
        data = json.dumps(answer_of(row)).encode()
        if key in self._places:
            raise Unusable(
                "repeated custom_id", f"{key[1]!r} is the response in {self._places[key][0]}, too; give each batch a folder of its own"
            )
        self._places[key] = (row_id, self._file.seek(0, 2), len(data))
        self._file.write(data)

    def take(self, folder: str, row_id: str, row: dict[str, Any]) -> object:
        """The response to a request, or None.

        Raises:
            Unusable: the id was asked before, so that the response could belong to either.
        """
        key = (folder, str(usable(row.get("custom_id"))))
        if key in self._asked:
            raise Unusable(
                "repeated custom_id", f"{key[1]!r} is the request in {self._asked[key]}, too; give each batch a folder of its own"
            )
        self._asked[key] = row_id
        if key not in self._places:
            return None
        _, at, size = self._places[key]
        self._file.seek(at)
        return json.loads(self._file.read(size))

    def left(self) -> Iterator[Row]:
        """Responses whose request was not there."""
        for key, (row_id, _, _) in self._places.items():
            if key not in self._asked:
                yield rejected(row_id, Unusable("no request", f"no file of this folder has the request {key[1]!r}"))
