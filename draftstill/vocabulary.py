"""The vocabulary contract: one id means one token to the target and to the draft. Imports no torch.

Only ids cross between the two models, so ids are what must agree; merges and normalisers are the target tokenizer's
business alone. Configured sizes may be padded differently (151,936 against 152,064): padded ids are never real tokens.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from draftstill.errors import DraftstillError


@dataclass(frozen=True)
class Vocabulary:
    """Sizes, in ids. Every real token's id is below ``real_size``; columns from there on are padding, -inf on both sides."""

    real_size: int
    target_size: int
    draft_size: int


def real_size(tokenizer: Any) -> int:
    """Ids of real tokens lie below this."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def check_vocabulary(
    target_tokenizer: Any, draft_tokenizer: Any, target_vocab_size: int, draft_vocab_size: int, key: str = "draft.source"
) -> Vocabulary:
    """Compare the tokenizers id by id over the real tokens, and the configured sizes with them.

    Raises:
        DraftstillError: an id that means different tokens, or a model with fewer rows than its tokenizer has tokens.
    """
    target, draft = target_tokenizer.get_vocab(), draft_tokenizer.get_vocab()
    names = _name(target_tokenizer, "the target"), _name(draft_tokenizer, "the draft")
    if target != draft:
        of_target, of_draft = _by_id(target), _by_id(draft)
        differing = sorted(i for i in of_target.keys() | of_draft.keys() if of_target.get(i) != of_draft.get(i))
        examples = "; ".join(
            f"id {i} is {_show(of_target.get(i))} to the target, {_show(of_draft.get(i))} to the draft" for i in differing[:3]
        )
        raise DraftstillError(
            f"the tokenizers of {names[0]} ({len(target):,} tokens) and {names[1]} ({len(draft):,} tokens) differ at "
            f"{len(differing):,} ids: {examples}",
            key=key,
            mend="take a draft of the target's own family, or draft.source: prune, which keeps the target's tokenizer",
        )
    real = real_size(target_tokenizer)
    if real == 0:
        raise DraftstillError(f"the tokenizer of {names[0]} has no tokens", key="target.source")
    for where, name, size in (("target.source", names[0], target_vocab_size), (key, names[1], draft_vocab_size)):
        if size < real:
            raise DraftstillError(
                f"{name} is configured for {size:,} ids, but its tokenizer's ids go up to {real - 1:,}", key=where, value=size,
                mend="resize the model's embeddings to its tokenizer (resize_token_embeddings), save it, and name the saved folder",
            )  # fmt: skip
    return Vocabulary(real, target_vocab_size, draft_vocab_size)


def tokenizer_hash(tokenizer: Any) -> str:
    """SHA-256 over the sorted (token, id) pairs and the special ids: equal hashes, equal meaning of every id."""
    special = {name: getattr(tokenizer, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id")}
    return _digest([sorted(tokenizer.get_vocab().items()), special, sorted(getattr(tokenizer, "all_special_ids", None) or [])])


def template_hash(tokenizer: Any) -> str:
    """SHA-256 of the chat template (of ``null`` where there is none)."""
    return _digest(getattr(tokenizer, "chat_template", None))


def _digest(value: Any) -> str:
    # ASCII escapes: byte-level vocabularies may hold lone surrogates, which UTF-8 cannot encode.
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def _by_id(vocabulary: dict[str, int]) -> dict[int, tuple[str, ...]]:
    tokens: dict[int, tuple[str, ...]] = {}
    for token, number in sorted(vocabulary.items()):
        tokens[number] = (*tokens.get(number, ()), token)
    return tokens


def _show(tokens: tuple[str, ...] | None) -> str:
    return "no token" if tokens is None else " and ".join(map(repr, tokens))


def _name(tokenizer: Any, default: str) -> str:
    return str(getattr(tokenizer, "name_or_path", "") or default)
