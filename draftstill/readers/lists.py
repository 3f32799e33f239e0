"""The items of a JSON list, read piecewise: a list of gigabytes takes the memory of its largest item."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from typing import Any

from draftstill.readers.rows import Unusable
from draftstill.readers.streams import encoding_of
from draftstill.readers.values import DECODER, parse, shallow

_PIECE = 1 << 16
_USED = 1 << 20
_SPACE = re.compile(r"[ \t\r\n]*+")
_SIGN = re.compile(r'["\[\]{},]')
_WITHIN = re.compile(r'(?:[^"\\]++|\\.)*+', re.DOTALL)
"""What may stand in a string."""
_NO_UTF8 = re.compile("[\udc80-\udcff]")
"""Bytes that are no UTF-8, as Python escapes them."""
_CLOSING = {"[": "]", "{": "}"}


def items(stream: io.BufferedReader, limit: int) -> Iterator[Any]:
    """The values of the list, or why there is none: a damaged item and one of more than ``limit`` characters cost themselves alone, as long
    as their brackets and quotes show where they end.

    Raises:
        Unusable: the rest cannot be read.
    """
    encoding = encoding_of(stream)
    strict = "strict" if encoding == "utf-16" else "surrogateescape"
    text = io.TextIOWrapper(stream, encoding=encoding, errors=strict, newline="\n")
    try:
        yield from _List(text, limit)
    except UnicodeDecodeError as error:
        raise Unusable("not UTF-8", f"byte {error.start} of a piece") from None


class _List:
    """A window on the text: ``at`` moves through the buffer, which is copied only when more is read."""

    def __init__(self, text: io.TextIOWrapper, limit: int) -> None:
        self._text, self._limit = text, limit
        self._buffer, self._at = "", 0
        self._broken = False
        """Whether the buffer holds bytes that are no UTF-8."""

    def _more(self) -> bool:
        """Read on, behind what is not used yet; False at the end of the file."""
        left = self._buffer[self._at :]
        piece = self._text.read(max(_PIECE, len(left)))  # as much again, so that a long item is not copied for every piece
        self._buffer, self._at = left + piece, 0
        self._broken = _NO_UTF8.search(self._buffer) is not None
        return bool(piece)

    def _sign(self) -> str | None:
        """The next character that is no space, not yet used; None at the end of the file."""
        while True:
            space = _SPACE.match(self._buffer, self._at)
            self._at = space.end() if space else self._at
            if self._at < len(self._buffer):
                return self._buffer[self._at]
            if not self._more():
                return None

    def __iter__(self) -> Iterator[Any]:
        self._sign()
        self._at += 1  # behind the opening bracket
        while (sign := self._sign()) != "]":
            if sign is None:
                raise Unusable("bad JSON", "the file ends inside its list")
            if sign == ",":
                self._at += 1
            else:
                yield self._item()
        self._at += 1
        if self._sign() is not None:
            raise Unusable("rest not read", "the list ends, and something stands behind it")

    def _item(self) -> Any:
        if self._at > _USED:
            self._buffer, self._at = self._buffer[self._at :], 0  # an error of the decoder counts the lines before it
        start = self._at
        try:
            value, end = DECODER.raw_decode(self._buffer, start)
            # A number at the very end of the buffer may go on.
            if not self._broken and end - start <= self._limit and (end < len(self._buffer) or isinstance(value, dict | list | str)):
                self._at = end
                return shallow(value, self._buffer, start, end)
        except (ValueError, RecursionError):
            pass  # damaged, or it goes on behind the buffer
        except Unusable as error:
            return error
        text = self._passed()
        if text is None or len(text) > self._limit:
            return Unusable("too long", f"an item of more than {self._limit:,} characters")
        if _NO_UTF8.search(text):
            return Unusable("not UTF-8", "in an item of the list")
        try:
            return parse(text)
        except Unusable as error:
            return error

    def _passed(self) -> str | None:
        """The text of an item by its brackets and quotes, ``at`` behind it; None where it was too long to keep.

        Raises:
            Unusable: it has no end.
        """
        opened: list[str] = []
        at, whole = self._at, True
        while True:
            at, ended = self._scanned(at, opened)
            if ended:
                text, self._at = self._buffer[self._at : at], at
                return text if whole else None
            if not whole or at - self._at > self._limit:
                whole, self._at = False, at
            at -= self._at
            if not self._more():
                raise Unusable("bad JSON", "the file ends inside an item of its list")

    def _scanned(self, at: int, opened: list[str]) -> tuple[int, bool]:
        """How far the item reaches within the buffer, and whether it ends there; ``opened`` are the closing signs that it waits for."""
        while at < len(self._buffer):
            if opened and opened[-1] == '"':
                inside = _WITHIN.match(self._buffer, at)
                at = inside.end() if inside else at
                if self._buffer[at : at + 1] != '"':  # the end of the buffer, or a backslash in front of it
                    return at, False
            else:
                found = _SIGN.search(self._buffer, at)
                if found is None:
                    return len(self._buffer), False
                at, sign = found.start(), found[0]
                if not opened and sign in ",]":
                    return at, True
                if sign in '"[{':
                    opened.append(_CLOSING.get(sign, sign))
                    at += 1
                    continue
                if sign == "," or not opened:
                    at += 1
                    continue
                if opened[-1] != sign:
                    raise Unusable("bad JSON", f"an item of the list has {sign!r} where {opened[-1]!r} must stand")
            opened.pop()
            at += 1
            if not opened:
                return at, True
        return at, False
