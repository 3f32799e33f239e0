"""The reference of all recipe keys (docs/recipe.md), made from the sections' docstrings.

Part of the ground layer.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from draftstill.recipe import Recipe


@dataclass(frozen=True)
class Row:
    """One key."""

    key: str
    kind: str
    default: str
    meaning: str


@dataclass(frozen=True)
class Part:
    """One section of the recipe; ``path``: its dotted key, empty for the recipe itself."""

    path: str
    meaning: str
    rows: tuple[Row, ...]


def parts() -> list[Part]:
    """Every section of the recipe, each once, in file order: also those that are off by default and those that stand under names of the user's.

    A section of a kind that came before has no part of its own; its row says where the kind's keys stand.
    """
    return list(_parts(Recipe, "", "", {}))


def _parts(model: type[BaseModel], path: str, meaning: str, known: dict[type[BaseModel], str]) -> Iterator[Part]:
    known[model] = path
    rows, inner = [], []
    for name, field in model.model_fields.items():
        key = f"{path}.{name}" if path else name
        section, more = _section(field.annotation)
        text = " ".join((field.description or "").split()).replace("``", "`")
        if section is None:
            rows.append(Row(key, kind_text(field.annotation), _default(field), text))
            continue
        where, optional = known.get(section), field.annotation is not section
        if optional or where:  # a key that can be left out, or whose keys stand elsewhere
            rows.append(Row(key, f"{more[0]} like {where}" if where else more[0], _default(field), text))
        if where is None:
            known[section] = f"{key}{more[1]}"
            inner.append((section, f"{key}{more[1]}", text))
    yield Part(path, meaning, tuple(rows))
    for section, key, text in inner:
        yield from _parts(section, key, text, known)


def _section(kind: Any) -> tuple[type[BaseModel] | None, tuple[str, str]]:
    """The section that a key holds, if any; how its type is written, and what stands behind the key in its keys."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind, ("section", "")
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _section(inside[0])
    if origin in (typing.Union, types.UnionType):
        for choice in inside:
            if (found := _section(choice))[0] is not None:
                return found
    if origin is dict and (found := _section(inside[1]))[0] is not None:
        return found[0], ("sections by name", ".NAME")
    if origin is tuple and (found := _section(inside[0]))[0] is not None:
        return found[0], ("list of sections", "[]")
    return None, ("", "")


def kind_text(kind: Any) -> str:
    """A key's type as a user would write it: ``int | null``, ``[str, ...]``, ``{str: float}``, ``"auto" | "cpu"``."""
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return kind_text(inside[0])
    if origin is typing.Literal:
        return " | ".join(json.dumps(value) for value in inside)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(kind_text(choice) for choice in inside)
    if origin is tuple:
        return f"[{kind_text(inside[0])}, ...]"
    if origin is dict:
        return f"{{{kind_text(inside[0])}: {kind_text(inside[1])}}}"
    return {types.NoneType: "null", Any: "any"}.get(kind) or str(kind.__name__)


def _default(field: Any) -> str:
    return "required" if field.is_required() else json.dumps(field.default, default=str)


def reference_page() -> str:
    """docs/recipe.md: every key of the recipe, from the field docstrings."""
    lines = [
        "# Recipe reference",
        "",
        "<!-- Made by `make docs` from draftstill/recipe/; edit the docstrings there. -->",
        "",
        "A recipe is one YAML file that holds a whole run. Unknown keys, repeated keys and wrong types are refused, all at once.",
        "Any value can be replaced on the command line: `draftstill run RECIPE train.learning_rate=2e-4`.",
        "`draftstill recipe show RECIPE` prints the resolved values, `draftstill recipe schema` the JSON schema for editors.",
        "",
        "`NAME` stands for a name of your own, `[]` for each member of a list. A section whose default is `null` or empty is off until the recipe has it.",
    ]
    for part in parts():
        lines += ["", f"## {part.path or 'The run'}", "", *([part.meaning, ""] if part.meaning else [])]
        lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
        for row in part.rows:
            lines.append("| " + " | ".join((f"`{row.key}`", _cell(row.kind), _cell(row.default), row.meaning.replace("|", "\\|"))) + " |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text if text == "required" else "`" + text.replace("|", "\\|") + "`"
