"""Prompts cut from documents at natural borders. One tokenise path for responding, recording and scoring."""

from __future__ import annotations

import hashlib
import random
import re
from dataclasses import dataclass
from typing import Any

from draftstill.corpus import Document
from draftstill.errors import DraftstillError
from draftstill.recipe import Respond

_BORDER = re.compile(r"(?:\n\s*\n|(?<=[.;:])\s+)(?=\S)")
_CHARS_PER_TOKEN = 8
"""More characters than any tokenizer needs per token of prose; the text is tokenised generously and cut to the token."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Ids a target continues; ``supervised_from`` is the first position whose next token is learnt from."""

    id: str
    ids: list[int]
    supervised_from: int


def seed_of(*parts: object) -> int:
    """A 63-bit seed from any names; the same on every machine (Python's ``hash`` is not)."""
    return int.from_bytes(hashlib.sha256("\0".join(map(str, parts)).encode()).digest()[:8], "big") >> 1


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of corpus text: no special tokens added, so that a piece is what stands in the middle of a text."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def opening(tokenizer: Any) -> list[int]:
    """What the tokenizer sets before a text of its own accord (a BOS, or nothing): the deployment's texts begin with it."""
    bare, whole = encode(tokenizer, "a"), tokenizer("a")["input_ids"]
    at = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
    return whole[:at]


def cut_prompts(documents: list[Document], count: int, settings: Respond, tokenizer: Any, seed: int) -> list[Prompt]:
    """Up to ``count`` prompts: one from each document in turn, then second ones and so on, none overlapping another.

    A document's opening comes first, then passages that begin at a paragraph or sentence.
    """
    order = sorted(documents, key=lambda d: seed_of(seed, "order", d.id))
    starts = {d.id: _starts(d, settings.prompt_tokens, seed) for d in order}
    prompts: list[Prompt] = []
    for turn in range(max((len(s) for s in starts.values()), default=0)):
        for document in order:
            if len(prompts) == count:
                return prompts
            if turn < len(starts[document.id]):
                at = starts[document.id][turn]
                ids = encode(tokenizer, document.text[at : at + _CHARS_PER_TOKEN * settings.prompt_tokens])[: settings.prompt_tokens]
                if len(ids) == settings.prompt_tokens:
                    prompts.append(_prompt(f"{document.id}@{at}", ids, settings, tokenizer))
    return prompts


def _starts(document: Document, prompt_tokens: int, seed: int) -> list[int]:
    """Character offsets of passages, the opening first; two passages never share text."""
    borders = [m.end() for m in _BORDER.finditer(document.text)]
    random.Random(seed_of(seed, "borders", document.id)).shuffle(borders)
    length, chosen = _CHARS_PER_TOKEN * prompt_tokens, [0]
    for at in borders:
        if all(abs(at - other) >= 2 * length for other in chosen):
            chosen.append(at)
    return chosen


def _prompt(name: str, ids: list[int], settings: Respond, tokenizer: Any) -> Prompt:
    if not settings.chat_template:
        return Prompt(name, [*opening(tokenizer), *ids], 0)
    if not getattr(tokenizer, "chat_template", None):
        raise DraftstillError("the target's tokenizer has no chat template", key="respond.chat_template", value=True,
                              mend="set respond.chat_template: false for a base model")  # fmt: skip
    turn = [{"role": "user", "content": tokenizer.decode(ids)}]
    templated = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    ids = encode(tokenizer, templated)
    # The template is the server's text, not the target's: only what the target writes is learnt from.
    return Prompt(name, ids, len(ids) - 1)
