"""A donor's embeddings moved to the target's vocabulary, so that a model with another tokenizer can draft."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from draftstill.vocabulary import real_size

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_ROLES = ("eos_token_id", "bos_token_id", "pad_token_id", "unk_token_id")
"""Where one of the target's tokens plays several roles, the first of these decides."""


@dataclass(frozen=True, slots=True)
class Donation:
    """For each of the target's real tokens the donor's tokens that stand for it; none: the mean of all."""

    rows: list[list[int]]
    copied: int
    """Tokens with the same bytes, or the same role."""
    composed: int
    """Tokens that the donor writes with others of its own."""

    @property
    def facts(self) -> dict[str, Any]:
        """Shares of the target's tokens."""
        count = max(len(self.rows), 1)
        copied, composed = round(self.copied / count, 4), round(self.composed / count, 4)
        return {"tokens": len(self.rows), "copied": copied, "composed": composed, "mean": round(1 - copied - composed, 4)}


def donation(target: Any, donor: Any) -> Donation:
    """Match the target's tokens with the donor's by the bytes they write.

    Special tokens are matched by name, then by role (end of text with end of text). A token that the donor lacks is written with the
    donor's own tokens, or byte by byte where it is a piece of a character.
    """
    written, known = token_bytes(target), token_bytes(donor)
    own, specials = donor.get_vocab(), _specials(target)
    by_bytes: dict[bytes, int] = {}
    # Of equals the first, and a byte's fallback last: beside a token of its own nothing is ever written with it, so its row is untrained.
    fallback = {number for token, number in own.items() if _BYTE.fullmatch(token)}
    for number, text in sorted(known.items(), key=lambda entry: (entry[0] in fallback, entry[0]), reverse=True):
        by_bytes[text] = number
    roles: dict[int, int] = {}
    for role in _ROLES:
        mine, its = getattr(target, role, None), getattr(donor, role, None)
        if mine is not None and its is not None:
            roles.setdefault(mine, its)
    rows: list[list[int]] = []
    copied = composed = 0
    for number in range(real_size(target)):
        found: int | None = None
        if number in specials:
            found = own.get(specials[number], roles.get(number))
        elif number in written:
            found = by_bytes.get(written[number])
        made = [found] if found is not None else _spelt(donor, written.get(number, b""), known, by_bytes)
        copied, composed = copied + (found is not None), composed + (found is None and bool(made))
        rows.append(made)
    return Donation(rows, copied, composed)


def transplanted(model: Any, donated: Donation, donor_tokens: int, target_config: Any) -> Any:
    """The donor with embedding and head rows for the target's tokens, in float32; the model itself is changed.

    Tied embeddings stay tied. A row is the donor's, the mean of several, or the mean of all its real tokens.
    """
    rows = len(donated.rows)
    embedding = nn.Embedding.from_pretrained(_rows(model.model.embed_tokens.weight.detach(), donated, donor_tokens), freeze=False)
    tied = model.config.tie_word_embeddings
    head = nn.Linear(embedding.embedding_dim, rows, bias=False, device="meta")
    head.weight = embedding.weight if tied else nn.Parameter(_rows(model.lm_head.weight.detach(), donated, donor_tokens))
    model.model.embed_tokens, model.lm_head = embedding, head
    model.config.vocab_size = model.model.vocab_size = model.vocab_size = rows
    for role in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(model.config, role, getattr(target_config, role, None))
    return model


def _rows(matrix: Tensor, donated: Donation, donor_tokens: int) -> Tensor:
    counts = torch.tensor([len(r) for r in donated.rows])
    sources = torch.tensor([i for r in donated.rows for i in r], dtype=torch.int64)
    places = torch.arange(len(counts)).repeat_interleave(counts)
    sums = torch.zeros(len(counts), matrix.shape[1], dtype=torch.float64).index_add_(0, places, matrix[sources].double())
    mean = matrix[:donor_tokens].double().mean(0)
    return torch.where((counts > 0)[:, None], sums / counts.clamp_min(1)[:, None], mean).float()


def _spelt(donor: Any, text: bytes, known: dict[int, bytes], by_bytes: dict[bytes, int]) -> list[int]:
    """The donor's tokens that write ``text``; none where it cannot."""
    try:
        ids = list(donor(text.decode(), add_special_tokens=False)["input_ids"])
    except UnicodeDecodeError:
        ids = []
    # Some tokenizers set a space before every text, or change its letters: then the longest tokens that stand there decide.
    if b"".join(known.get(i, b"") for i in ids) == text:
        return ids
    longest, at, found = max(map(len, by_bytes), default=0), 0, list[int]()
    while at < len(text):
        end = next((e for e in range(min(len(text), at + longest), at, -1) if text[at:e] in by_bytes), None)
        if end is None:
            return []
        found, at = [*found, by_bytes[text[at:end]]], end
    return found


def token_bytes(tokenizer: Any) -> dict[int, bytes]:
    """What each token writes, special tokens left out.

    Byte-level vocabularies (GPT-2's and its kin) spell bytes as printable characters; sentencepiece ones write a space as U+2581 and a
    byte as <0xAB>. In others a token writes itself.
    """
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    ways = json.dumps([backend.get("decoder"), backend.get("pre_tokenizer")], ensure_ascii=False)
    special, added = _specials(tokenizer), {t["id"]: t["content"] for t in backend.get("added_tokens", [])}
    byte_of = _byte_of() if '"ByteLevel"' in ways else None

    def spelled(number: int, token: str) -> bytes:
        if byte_of is None and _BYTE.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        if number not in added:  # added tokens stand as they are written
            if byte_of is not None and all(c in byte_of for c in token):
                return bytes(byte_of[c] for c in token)
            if byte_of is None and "\u2581" in ways:
                token = token.replace("\u2581", " ")
        return token.encode("utf-8", "surrogatepass")

    return {number: spelled(number, token) for token, number in tokenizer.get_vocab().items() if number not in special}


def _specials(tokenizer: Any) -> dict[int, str]:
    return dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))


def _byte_of() -> dict[str, int]:
    """The characters by which byte-level vocabularies spell bytes (GPT-2's table)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + n): b for n, b in enumerate(others)}
