"""Several drafts in one recipe: the rules for their names, and each one's values laid over the recipe's."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

RESERVED = ("plain", "untuned", "lookup", "bigram", "composite", "tuned")
"""Names of the score's own arms."""
LONGEST_NAME = 32
"""Characters; names head columns of tables."""

_OF_ONE_SOURCE = ("sha256", "file", "revision", "cut", "transplant")


def check_names(candidates: dict[str, Any]) -> dict[str, Any]:
    """Refuse names that no folder, table column or arm could bear."""
    seen: dict[str, str] = {}
    for name in candidates:
        if not re.fullmatch(r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?", name) or len(name) > LONGEST_NAME:
            raise ValueError(f"a candidate's name is made of letters, digits and inner hyphens, {LONGEST_NAME} at most: not {name!r}")
        if name.lower() in RESERVED:
            raise ValueError(f"{name!r} is the name of an arm of the score; give the candidate another")
        if name.lower() in seen:  # they are folders, and some file systems know no case
            raise ValueError(f"{seen[name.lower()]!r} and {name!r} differ in case only")
        seen[name.lower()] = name
    return candidates


def candidate_values(recipe: BaseModel) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, values of its whole recipe as JSON would hold them), without further candidates. The values are not checked yet."""
    for name, candidate in recipe.train.candidates.items():  # type: ignore[attr-defined]
        values = recipe.model_dump(mode="json", round_trip=True)
        del values["train"]["candidates"]
        if "source" in candidate.draft:
            for key in _OF_ONE_SOURCE:  # they speak of the recipe's own source
                values["draft"].pop(key, None)
        for section in ("draft", "train"):
            _lay_over(values[section], getattr(candidate, section), section_of(type(recipe), section))
        yield name, values


def _lay_over(into: dict[str, Any], values: Mapping[str, Any], model: type[BaseModel] | None) -> None:
    for key, value in values.items():
        inner = section_of(model, key)
        if isinstance(value, Mapping) and isinstance(into.get(key), dict) and inner is not None:
            _lay_over(into[key], value, inner)
        else:
            into[key] = value


def section_of(model: type[BaseModel] | None, key: str) -> type[BaseModel] | None:
    """The section that a key of a section holds, optional or not; None for a key with a value, and for an unknown one."""
    field = model.model_fields.get(key) if model is not None else None
    if field is None:
        return None
    union = typing.get_origin(field.annotation) in (typing.Union, types.UnionType)
    kinds = typing.get_args(field.annotation) if union else (field.annotation,)
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
