"""What kind of text a token is part of: number, name, heading and so on. Pure Python.

Decided from the text alone, so it holds for any tokenizer: a token gets the kind of the word, or of the line, that it stands in. The
rules are for prose with headings and some code in it; scripts without capitals have no names.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

KINDS = ("whitespace", "code", "heading", "line start", "number", "punctuation", "name", "word")
"""In the order in which a token is tried: the first that fits is its kind."""

_HEADING_CHARS = 90
"""A longer line is a paragraph."""
_SENTENCE_END = re.compile(r"[.!?:;]['\")\]]*\s*$")
_ABBREVIATED = re.compile(r"(^|\s)[A-Z][a-z]{0,2}\.$")
"""Dr., Mr., St., initials: no sentence ends there."""
_NUMBERED = re.compile(r"\s*(#+\s|(article|section|part|chapter|schedule|annex)\s|\(?[0-9ivx]+([.)][0-9a-z]*)+\s+\S)", re.IGNORECASE)
_CODE_WORD = re.compile(r"[a-z][a-z0-9]*[A-Z]|[A-Za-z0-9]_[A-Za-z0-9]|[=!<>+-]=|->|::|\(\)|[{}\\]|</|/>|;$")


def token_kinds(pieces: Sequence[str]) -> list[str]:
    """The kind of each piece of a text; the pieces put together are the text."""
    text = "".join(pieces)
    starts = [0, *itertools.accumulate(map(len, pieces))]
    line_kinds = _line_kinds(text)
    found, word_end, word_kind, first_on_line = [], 0, "word", True
    for piece, start in zip(pieces, starts, strict=False):
        stripped = piece.strip()
        at = start + len(piece) - len(piece.lstrip())
        if "\n" in text[start:at] or start == 0:
            first_on_line = True
        if not stripped:
            found.append("whitespace")
            continue
        if at >= word_end:
            word_end, word_kind = _word(text, at)
        kind = line_kinds[text.count("\n", 0, at)]
        if kind is None:
            kind = word_kind
            if kind not in ("code", "number") and first_on_line:
                kind = "line start"
            elif kind in ("word", "name") and not any(c.isalnum() for c in stripped):
                kind = "punctuation"
        found.append(kind)
        first_on_line = "\n" in piece[len(piece.rstrip()) :]
    return found


def _line_kinds(text: str) -> list[str | None]:
    """``code`` or ``heading`` for lines that are one as a whole."""
    kinds: list[str | None] = []
    fenced = False
    for line in text.split("\n"):
        bare = line.strip()
        if bare.startswith("```"):
            fenced = not fenced
            kinds.append("code")
        elif fenced or (bare and (line.startswith(("    ", "\t")) and _CODE_WORD.search(bare) or bare[-1] in "{}" or bare.endswith(");"))):
            kinds.append("code")
        else:
            kinds.append("heading" if _is_heading(bare) else None)
    return kinds


def _is_heading(line: str) -> bool:
    words = re.findall(r"[^\W\d_]+", line)
    if not words or len(line) > _HEADING_CHARS:
        return False
    if line.startswith("#"):
        return True
    if _SENTENCE_END.search(line) and not line.isupper():
        return False
    if line.isupper() and len("".join(words)) > 3:
        return True
    titled = all(w[0].isupper() for w in words if len(w) > 3)
    return bool(_NUMBERED.match(line)) and titled and any(len(w) > 3 for w in words)


def _word(text: str, at: int) -> tuple[int, str]:
    """End and kind of the whitespace-delimited word around a place."""
    begin, end = at, at
    while begin > 0 and not text[begin - 1].isspace():
        begin -= 1
    while end < len(text) and not text[end].isspace():
        end += 1
    word = text[begin:end]
    letters = [c for c in word if c.isalpha()]
    if any(c.isdigit() for c in word) and len(letters) <= 2:
        return end, "number"
    if _CODE_WORD.search(word):
        return end, "code"
    if not letters:
        return end, "number" if any(c.isdigit() for c in word) else "punctuation"
    before = text[:begin].rstrip(" ")
    ended = _SENTENCE_END.search(before[-3:]) is not None and not _ABBREVIATED.search(before[-5:])
    begins_sentence = not before or before.endswith("\n") or ended
    capital = letters[0].isupper() and (not begins_sentence or (len(letters) > 1 and all(c.isupper() for c in letters)))
    return end, "name" if capital else "word"


def pieces_of(tokenizer: object, ids: Sequence[int]) -> list[str]:
    """The text that each id adds; an id that completes no character adds nothing, and the next one all of it."""
    whole, pieces = "", []
    for n in range(1, len(ids) + 1):
        text = tokenizer.decode(list(ids[:n]), skip_special_tokens=False, clean_up_tokenization_spaces=False)  # type: ignore[attr-defined]
        if text.endswith("\ufffd") and n < len(ids):
            pieces.append("")
            continue
        pieces.append(text[len(whole) :])
        whole = text
    return pieces
