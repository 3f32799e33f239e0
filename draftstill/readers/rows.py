"""What a reader yields, and what it does with a row that it cannot use."""

from __future__ import annotations

from typing import Any, NamedTuple


class Row(NamedTuple):
    """One document or conversation as read, or the reason why there is none."""

    id: str
    text: str | None
    reason: str | None = None
    detail: str = ""
    family: str | None = None
    """Rows of one family stay on one side of the split."""
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    lost: bool = False
    """Behind this row its file holds others that could not be read; nobody knows how many."""


class Unusable(Exception):
    """A row that no document can be made of; with ``lost`` the rest of its file could not be read either."""

    def __init__(self, reason: str, detail: str = "", *, lost: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.detail, self.lost = reason, detail, lost


FAULTS = frozenset({
    "not UTF-8", "damaged gzip", "damaged zstd", "damaged parquet", "damaged database", "bad JSON", "repeated key", "not an object",
    "missing field", "not a string", "lone surrogate", "NUL character", "empty", "bad front matter", "bad messages", "unknown role", "null content",
    "empty turn", "empty conversation", "no user turn", "bad tools", "failed response", "no request", "repeated custom_id", "nested too deeply",
    "repeated id", "rest not read", "bad value",
})  # fmt: skip
"""Reasons that are faults of the input. Others (too short, too long, duplicate, another category) are choices of the recipe."""


def usable(value: Any) -> Any:
    """The value of a field. A column's cell that Python cannot hold stands in its row as the reason, which matters where the field is used.

    Raises:
        Unusable: there is none.
    """
    if isinstance(value, Unusable):
        raise value
    return value


_SHOWN = 60
CUT = " ..."
"""Ends an excerpt that is not the whole value."""


def excerpt(value: object) -> str:
    """A value's beginning on one line, for a message."""
    text = " ".join(str(value).split())
    return text if len(text) <= _SHOWN else text[:_SHOWN] + CUT


def names_of(row: dict[str, Any]) -> str:
    """The fields that a row has, for a message."""
    return ", ".join(repr(excerpt(name)) for name in list(row)[:8]) or "no field"


def one_line_end(text: str) -> str:
    """The text with \\n for every line end."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def document(row_id: str, text: object, family: str | None = None) -> Row:
    """A plain document, or why its text cannot be one."""
    if not isinstance(text, str):
        return Row(row_id, None, "not a string", type(text).__name__)
    return Row(row_id, one_line_end(text), family=family)


def rejected(row_id: str, error: Unusable) -> Row:
    return Row(row_id, None, error.reason, error.detail, lost=error.lost)
