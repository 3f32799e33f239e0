"""JSON values, strictly: what Python's own parser would let pass in silence is an error."""

from __future__ import annotations

import json
from typing import Any

from draftstill.readers.rows import Unusable

_DEEPEST = 128
"""Objects and lists in one another. Python's own functions give up near 1,000, somewhere inside of a template or a writer."""


class _Repeated(ValueError):
    pass


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        raise _Repeated(next(k for k, _ in pairs if k in seen or seen.add(k)))  # type: ignore[func-returns-value]
    return value


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


DECODER = json.JSONDecoder(object_pairs_hook=_pairs, parse_constant=_constant)


def parse(text: str) -> Any:
    """A JSON value; a repeated key is an error, since Python would silently take the last.

    Raises:
        Unusable: not JSON, or nested too deeply.
    """
    try:
        return shallow(DECODER.decode(text), text)
    except _Repeated as error:
        raise Unusable("repeated key", repr(str(error))) from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise Unusable("bad JSON", str(error)) from None


def shallow(value: Any, text: str, start: int = 0, end: int | None = None) -> Any:
    """The value, whose JSON stands in this part of the text.

    Raises:
        Unusable: it is nested too deeply.
    """
    end = len(text) if end is None else end
    if text.count("[", start, end) + text.count("{", start, end) > _DEEPEST:  # seldom: counting is faster than looking
        level = [value]
        for _ in range(_DEEPEST):
            level = [x for v in level if isinstance(v, dict | list) for x in (v.values() if isinstance(v, dict) else v)]
        if any(isinstance(v, dict | list) for v in level):
            raise _too_deep()
    return value


def _too_deep() -> Unusable:
    return Unusable("nested too deeply", f"more than {_DEEPEST} objects and lists in one another")
