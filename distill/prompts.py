"""Prompts from the corpus: conversations as they are, passages cut at natural borders. One tokenise path for responding, recording and scoring."""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from draftstill.corpus import Document
from draftstill.errors import DraftstillError
from draftstill.recipe import Respond

_BORDER = re.compile(r"(?:\n\s*\n|(?<=[.;:])\s+)(?=\S)")
_CHARS_PER_TOKEN = 8
"""More characters than any tokenizer needs per token of prose; the text is tokenised generously and cut to the token."""


LONGER = "longer than a prompt may be"
"""Why a conversation or a passage makes no prompt, where nothing else is wrong with it."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Ids a target continues; ``supervised_from`` is the first position whose next token is learnt from."""

    id: str
    ids: list[int]
    supervised_from: int
    kind: str = "cut"
    """``real``, ``cut`` or ``synthetic``."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """What a template made the ids from, for services that take messages only."""
    tools: list[dict[str, Any]] = field(default_factory=list)


class Refusals:
    """What made no prompt, by name and reason."""

    def __init__(self) -> None:
        self.rows: list[dict[str, str]] = []

    def add(self, name: str, reason: str, detail: str = "") -> None:
        self.rows.append({"id": name, "reason": reason, "detail": detail})

    def counts(self, since: int = 0) -> dict[str, int]:
        """Rows by reason, from one on."""
        return dict(sorted(Counter(r["reason"] for r in self.rows[since:]).items()))

    def told(self, since: int = 0) -> tuple[str, str]:
        """The commonest reason from one row on, of which there must be one; and all counts with the first detail of that reason, for a message."""
        reason, _ = Counter(r["reason"] for r in self.rows[since:]).most_common(1)[0]
        counts = ", ".join(f"{count:,} {why}" for why, count in self.counts(since).items())
        details = [r["detail"] for r in self.rows[since:] if r["reason"] == reason and r["detail"]]
        return reason, counts + (f"; the first: {details[0]}" if details else "")


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


def cut_prompts(documents: Sequence[Document], count: int, settings: Respond, tokenizer: Any, seed: int, *, context: int | None = None,
                refusals: Refusals | None = None) -> list[Prompt]:  # fmt: skip
    """Up to ``count`` prompts in the corpus's own mixture: conversations as they are (``chats``), documents cut (``cut``), evenly mixed.

    Whatever takes the first few takes both kinds, and asking for more only adds as long as neither runs out: it is not made up for by the other.

    Args:
        context: tokens that the target's context holds.
        refusals: filled with the conversations that made no prompt.

    Raises:
        DraftstillError: a cut prompt does not fit the context.
    """
    from draftstill.distill.chats import real_prompts

    chats, texts = [d for d in documents if d.messages], [d for d in documents if not d.messages]
    upto = lambda n: (2 * n * len(chats) + len(documents)) // (2 * len(documents)) if documents else 0  # noqa: E731 - n times the share, rounded
    share = upto(count)
    found = real_prompts(chats, share, settings, tokenizer, seed, context, refusals or Refusals()) if share else []
    kinds = {True: iter(found), False: iter(cut(texts, count - share, settings, tokenizer, seed, context))}
    mixed = (next(kinds[upto(n + 1) > upto(n)], None) for n in range(count))
    return [p for p in mixed if p is not None]


def cut(
    documents: Sequence[Document], count: int, settings: Respond, tokenizer: Any, seed: int, context: int | None = None
) -> list[Prompt]:
    """Up to ``count`` prompts: one from each document in turn, then second ones and so on, none overlapping another.

    A document's opening comes first, then passages that begin at a paragraph or sentence.

    Raises:
        DraftstillError: one does not fit the context.
    """
    found = [_prompt(name, ids, settings, tokenizer) for name, ids in passages(documents, count, settings.prompt_tokens, tokenizer, seed)]
    require_room(found, context, "respond.prompt_tokens", settings.prompt_tokens)
    return found


def context_of(config: Any) -> int | None:
    """Tokens that a model's context holds, as its configuration says; None: it does not."""
    found = getattr(config, "max_position_embeddings", None)
    return found if isinstance(found, int) else None


def has_room(prompt: Prompt, context: int | None) -> bool:
    """Whether the context holds a prompt and one token of the answer."""
    return context is None or len(prompt.ids) < context


def require_room(prompts: Sequence[Prompt], context: int | None, key: str, value: int) -> None:
    """Raises DraftstillError: the context does not hold one of them with a token of its answer."""
    longest = max(prompts, key=lambda p: len(p.ids), default=None)
    if longest is not None and context is not None and not has_room(longest, context):
        raise DraftstillError(f"a prompt has {len(longest.ids):,} tokens with all that stands around it, and the target's context holds {context:,}",
                              key=key, value=value, mend=f"lower it by at least {len(longest.ids) + 1 - context:,}")  # fmt: skip


def passages(
    documents: Sequence[Document], count: int, tokens: int, tokenizer: Any, seed: int, *, shorter: bool = False
) -> list[tuple[str, list[int]]]:
    """Up to ``count`` passages of ``tokens`` tokens as (name, ids), in the order of ``cut``; ``shorter``: a document's end may be shorter."""
    order = sorted(documents, key=lambda d: seed_of(seed, "order", d.id))
    starts = {d.id: _starts(d, tokens, seed) for d in order}
    found: list[tuple[str, list[int]]] = []
    for turn in range(max((len(s) for s in starts.values()), default=0)):
        for document in order:
            if len(found) >= count:
                return found
            if turn < len(starts[document.id]):
                at = starts[document.id][turn]
                ids = encode(tokenizer, document.text[at : at + _CHARS_PER_TOKEN * tokens])[:tokens]
                if len(ids) == tokens or (shorter and ids):
                    found.append((f"{document.id}@{at}", ids))
    return found


def _starts(document: Document, prompt_tokens: int, seed: int) -> list[int]:
    """Character offsets of passages, the opening first; two passages never share text."""
    borders = [m.end() for m in _BORDER.finditer(document.text)]
    random.Random(seed_of(seed, "borders", document.id)).shuffle(borders)
    # Within a stretch of 2 lengths there is at most one start, so only the neighbouring stretches can hold one that is too near: a document
    # of 10 MB has 100,000 borders.
    apart = 2 * _CHARS_PER_TOKEN * prompt_tokens
    chosen, by_stretch = [0], {0: 0}
    for at in borders:
        stretch = at // apart
        if all(abs(at - by_stretch.get(s, -apart - at)) >= apart for s in (stretch - 1, stretch, stretch + 1)):
            chosen.append(at)
            by_stretch[stretch] = at
    return chosen


def _prompt(name: str, ids: list[int], settings: Respond, tokenizer: Any) -> Prompt:
    if not settings.chat_template:
        return Prompt(name, [*opening(tokenizer), *ids], 0)
    require_template(tokenizer, "respond.chat_template", True)
    return templated(name, [{"role": "user", "content": tokenizer.decode(ids)}], tokenizer)


def require_template(tokenizer: Any, key: str, value: object) -> None:
    """Raises DraftstillError: the tokenizer has no chat template."""
    if not getattr(tokenizer, "chat_template", None):
        mend = "set respond.chat_template: false for a base model" if key == "respond.chat_template" else "use the instruction-tuned model"
        raise DraftstillError("the target's tokenizer has no chat template", key=key, value=value, mend=mend)


def templated(
    name: str, messages: list[dict[str, Any]], tokenizer: Any, kind: str = "cut", tools: list[dict[str, Any]] | None = None
) -> Prompt:
    """Turns as the target's chat template lays them out, open for its answer. Raises whatever the template raises."""
    text = tokenizer.apply_chat_template(messages, tools=tools or None, add_generation_prompt=True, tokenize=False)
    ids = encode(tokenizer, text)
    # The template is the server's text, not the target's: only what the target writes is learnt from.
    return Prompt(name, ids, len(ids) - 1, kind, messages, list(tools or ()))
