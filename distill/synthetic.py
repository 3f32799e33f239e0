"""Synthetic prompts: the target invents what a user would ask about a passage; the instruction alone becomes the prompt.

Instructions that are asked of the target itself stand in for user queries that nobody has (Hong et al., arXiv 2503.07807, found 80 to 93% of
their worth).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

from draftstill.corpus import Document
from draftstill.distill.prompts import LONGER, Prompt, Refusals, has_room, passages, require_room, require_template, templated
from draftstill.recipe import Respond

Written = Callable[[str, list[Prompt], int], list[dict[str, Any]]]
"""From a file's stem, prompts and a longest answer to rows as ``writing`` makes them."""

_NUMBER = re.compile(r"^(?:\(?\d{1,2}[.):]\s+|[-*•–>]\s+|#+\s+)+")
_LABEL = re.compile(
    r"^(?:\W{0,3})(?:question|task|instruction|prompt|query|request|user|answer|response)(?:\s+\d{1,2})?\s*[:\-–]\**\s*", re.IGNORECASE
)
_QUOTES = [('"', '"'), ("“", "”"), ("'", "'"), ("«", "»"), ("**", "**"), ("*", "*"), ("`", "`")]
_FEWEST_WORDS = 3
_ECHO_WORDS = 5
_ECHO_SHARE = 0.5
"""An instruction half of whose 5-word windows stand in the passage copies it."""
_SPARE = 1.25
"""More passages are asked about than instructions are missing, since some replies are refused."""
NO_INSTRUCTION = GIVEN, EMPTY, CUT_OFF, OF_PASSAGE, OF_REQUEST = (
    "instruction given before",
    "empty instruction",
    "instruction cut off",
    "echo of the passage",
    "echo of the request",
)
"""Why a reply makes no prompt."""
_DRY = 512
"""So many passages in a row without an instruction: this target writes none."""


def synthetic_prompts(documents: Sequence[Document], count: int, settings: Respond, tokenizer: Any, seed: int, write: Written, stem: str,
                      refusals: Refusals, known: set[str] | None = None, context: int | None = None) -> list[Prompt]:  # fmt: skip
    """Up to ``count`` prompts, each an instruction of the target's own about another passage; fewer where the passages run out, or where the
    target writes none.

    Args:
        write: has the target answer prompts; what it wrote lies on disk under names that begin with the stem.
        known: instructions that were given before, for another side of the split; those that are found join them.
        context: tokens that the target's context holds.

    Raises:
        DraftstillError: the target's tokenizer has no chat template, or most of the first passages do not fit the context.
    """
    require_template(tokenizer, "respond.shares", "synthetic")
    asked, found = 0, list[Prompt]()
    known = set() if known is None else known
    spots: list[tuple[str, list[int]]] = []
    spent, turn, dry = False, 0, 0
    while len(found) < count and dry < _DRY:
        wanted = asked + int(_SPARE * (count - len(found))) + 4
        if wanted > len(spots) and not spent:
            # More than are wanted now: to find them, every document is looked through.
            spots = passages(documents, 2 * wanted, settings.synthetic.passage_tokens, tokenizer, seed, shorter=True)
            spent = len(spots) < 2 * wanted
        batch = spots[asked:wanted]
        if not batch:
            break
        asked += len(batch)
        dry += len(batch)
        prompts = [_asking(f"{name}?", tokenizer.decode(ids), settings, tokenizer) for name, ids in batch]
        fits = [has_room(p, context) for p in prompts]
        if turn == 0 and 2 * sum(fits) < len(fits):
            require_room(prompts, context, "respond.synthetic.passage_tokens", settings.synthetic.passage_tokens)
        for prompt in (p for p, fit in zip(prompts, fits, strict=True) if not fit):
            refusals.add(prompt.id, LONGER, f"{len(prompt.ids)} tokens with the request; the target's context holds {context}")
        batch, prompts = list(compress(batch, fits)), list(compress(prompts, fits))
        rows = write(f"{stem}-{turn}", prompts, settings.synthetic.instruction_tokens)
        turn += 1
        for (name, ids), row in zip(batch, rows, strict=True):
            reply = tokenizer.decode(row.get("response", ()), skip_special_tokens=True)
            text, reason = instruction(reply, tokenizer.decode(ids), settings.synthetic.ask, row["finish"])
            if reason is None and _bare(text) in known:
                reason = GIVEN
            if reason is not None:
                refusals.add(f"{name}?", reason, text[:200])
            elif len(found) < count:
                known.add(_bare(text))
                dry = 0
                found.append(templated(f"{name}?", [{"role": "user", "content": text}], tokenizer, "synthetic"))
    return found


def instruction(reply: str, passage: str, ask: str, finish: str) -> tuple[str, str | None]:
    """The instruction in a reply, and why it cannot be used (None: it can): the first line that is one, without number, label and quotes."""
    lines = [line.strip() for line in reply.strip().splitlines() if line.strip()]
    # "Sure! Here is a question:" announces the line below it.
    while len(lines) > 1 and lines[0].endswith(":"):
        lines.pop(0)
    if not lines:
        return "", EMPTY
    text = _bared(lines[0])
    if finish != "eos" and len(lines) == 1:
        return text, CUT_OFF
    if len(text.split()) < _FEWEST_WORDS:
        return text, EMPTY
    for source, reason in ((passage, OF_PASSAGE), (ask.replace("{passage}", " "), OF_REQUEST)):
        if _copied(text, source) >= _ECHO_SHARE:
            return text, reason
    return text, None


def _bared(line: str) -> str:
    """Without what stands around an instruction, layer by layer."""
    before = None
    while line != before:
        before = line
        line = _LABEL.sub("", _NUMBER.sub("", line)).strip()
        for left, right in _QUOTES:
            if len(line) > len(left) + len(right) and line.startswith(left) and line.endswith(right):
                line = line[len(left) : -len(right)].strip()
    return line


def _copied(text: str, source: str) -> float:
    """Share of the text's word windows that stand in the source."""
    words, whole = _bare(text).split(), f" {_bare(source)} "
    size = min(_ECHO_WORDS, len(words))
    windows = [" ".join(words[i : i + size]) for i in range(len(words) - size + 1)]
    return sum(f" {w} " in whole for w in windows) / max(1, len(windows))


def _bare(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


def _asking(name: str, passage: str, settings: Respond, tokenizer: Any) -> Prompt:
    """The request for an instruction, as a prompt."""
    return templated(name, [{"role": "user", "content": settings.synthetic.ask.replace("{passage}", passage.strip())}], tokenizer)
