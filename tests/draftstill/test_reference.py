"""The reference of recipe keys holds every key that a recipe may have, also below sections that are off by default."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from draftstill.recipe_io import recipe_keys, recipe_schema
from draftstill.reference import kind_text, parts, reference_page

ROOT = Path(__file__).resolve().parents[2]


def test_the_reference_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "recipe.md").read_text(encoding="utf-8") == reference_page(), "run `make docs`"


def test_it_covers_every_key_of_every_section() -> None:
    """The JSON schema lists the sections, whatever a recipe holds them in."""
    schema = json.loads(recipe_schema())
    sections = {"Recipe": schema, **{name: s for name, s in schema["$defs"].items() if s.get("type") == "object"}}
    listed = {frozenset(row.key.rsplit(".", 1)[-1] for row in part.rows) for part in parts()}
    for name, section in sections.items():
        plain = {key for key, field in section["properties"].items() if "$ref" not in field}
        assert any(plain <= keys for keys in listed), name
    keys = [row.key for part in parts() for row in part.rows]
    assert len(set(keys)) == len(keys)
    assert set(recipe_keys()) <= set(keys)
    assert {"adapt.r", "respond.server.retries", "train.loss.switch.alpha", "train.phases[].share", "train.candidates.NAME.draft"} <= set(
        keys
    )


def test_every_key_has_a_meaning_and_every_section_one_heading() -> None:
    assert all(row.meaning for part in parts() for row in part.rows)
    headings = re.findall(r"^## (.+)$", reference_page(), re.MULTILINE)
    assert len(set(headings)) == len(headings) > 20


def test_a_section_met_before_says_where_its_keys_stand() -> None:
    kinds = {row.key: row.kind for part in parts() for row in part.rows}
    assert kinds["record.server"] == "section like respond.server"
    assert kinds["evaluate.domains"] == "sections by name like corpus"
    assert kinds["train.phases"] == "list of sections"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (int, "int"),
        (str | None, "str | null"),
        (Annotated[int, Field(gt=0)] | None, "int | null"),
        (Literal["auto", 8], '"auto" | 8'),
        (tuple[Annotated[int, Field(ge=0)], ...] | Literal["auto"], '[int, ...] | "auto"'),
        (dict[str, tuple[str, ...]], "{str: [str, ...]}"),
        (dict[str, Any], "{str: any}"),
    ],
)
def test_types_are_written_as_a_user_would(kind: Any, text: str) -> None:
    assert kind_text(kind) == text
