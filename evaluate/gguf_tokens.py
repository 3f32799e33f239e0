"""A tokenizer as GGUF keeps it: copied from the target's GGUF, or derived from a tokenizer.json whose way of splitting is surely known."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from draftstill.errors import DraftstillError
from draftstill.runfolder import read_json

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""llama.cpp's token types."""
_LISTS = ("tokens", "token_type", "scores", "merges")
_QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {_QWEN: "qwen2", _QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|"): "llama-bpe"}
"""Patterns that llama.cpp reimplements under a name. Any other would make it split texts differently: silently worse."""


@dataclass(frozen=True)
class TokenTable:
    """Everything under ``tokenizer.`` in a GGUF."""

    tokens: list[str]
    types: list[int]
    scores: list[float] | None
    merges: list[str] | None
    fields: dict[str, Any] = field(default_factory=dict)
    """The scalar fields by their whole name: model, pre, ids of special tokens, add_bos_token, the chat template."""
    origin: str = ""
    """Where it was taken from, for the report."""

    def padded(self, rows: int) -> TokenTable:
        """With as many tokens as the model has rows; the added ones stand for no text.

        Raises:
            DraftstillError: more tokens than rows.
        """
        more = rows - len(self.tokens)
        if more < 0:
            raise DraftstillError(f"the draft has {rows:,} rows and the target's GGUF {len(self.tokens):,} tokens", key="publish.vocabulary",
                                  mend="set publish.vocabulary: padded")  # fmt: skip
        names = [f"[PAD{i}]" for i in range(len(self.tokens), rows)]
        scores = self.scores if self.scores is None else [*self.scores, *[-1000.0] * more]
        return replace(self, tokens=[*self.tokens, *names], types=[*self.types, *[UNUSED] * more], scores=scores)

    def write(self, writer: Any) -> None:
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if self.scores is not None:
            writer.add_token_scores(self.scores)
        if self.merges is not None:
            writer.add_token_merges(self.merges)
        for name, value in self.fields.items():
            add = writer.add_bool if isinstance(value, bool) else writer.add_uint32 if isinstance(value, int) else writer.add_string
            add(name, value)


def tokens_of_gguf(path: Path) -> TokenTable:
    """The target's own: equal flags and ids by construction."""
    import gguf

    fields = {n: f.contents() for n, f in gguf.GGUFReader(os.fspath(path)).fields.items() if n.startswith("tokenizer.")}
    lists = {n: fields.pop(f"tokenizer.ggml.{n}", None) for n in _LISTS}
    if not lists["tokens"] or any(not isinstance(v, str | int | bool) for v in fields.values()):
        odd = ", ".join(n for n, v in fields.items() if not isinstance(v, str | int | bool)) or "tokenizer.ggml.tokens"
        raise DraftstillError(
            f"the tokenizer in {path.name} has a form that is not copied ({odd})", key="publish.gguf", mend="set publish.gguf: []"
        )
    types = lists["token_type"] or [NORMAL] * len(lists["tokens"])
    return TokenTable(lists["tokens"], types, lists["scores"], lists["merges"], fields, "the target's GGUF")


def tokens_of_folder(folder: Path) -> TokenTable:
    """Derived from ``tokenizer.json``.

    Raises:
        DraftstillError: ``publish.gguf``: no byte-level BPE, or one whose way of splitting text llama.cpp has no known name for.
    """
    spec = read_json(folder / "tokenizer.json") if (folder / "tokenizer.json").exists() else {}
    settings = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").exists() else {}
    model, pre = spec.get("model") or {}, pre_tokenizer_name(spec)
    if model.get("type") != "BPE" or model.get("byte_fallback") or pre is None:
        raise DraftstillError("how this tokenizer splits text has no name in llama.cpp that is surely right", key="publish.gguf",
                              value=str(model.get("type")), mend="set publish.target_gguf to the GGUF file that serves the target: its tokenizer is copied; "
                              "or publish.gguf: []")  # fmt: skip
    by_id = {i: t for t, i in model["vocab"].items()}
    types = dict.fromkeys(by_id, NORMAL)
    for added in spec.get("added_tokens") or []:
        by_id[added["id"]] = added["content"]
        types[added["id"]] = CONTROL if added.get("special") else USER_DEFINED
    size = max(by_id) + 1
    tokens = [by_id.get(i, f"[PAD{i}]") for i in range(size)]
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    ids = {t: i for i, t in by_id.items()}
    fields: dict[str, Any] = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre}
    config = read_json(folder / "config.json")
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = settings.get(f"{name}_token")
        token = token.get("content") if isinstance(token, dict) else token
        number = ids.get(token) if token is not None else config.get(f"{name}_token_id") if name == "eos" else None
        if isinstance(number, int):
            fields[f"tokenizer.ggml.{key}_token_id"] = number
    fields["tokenizer.ggml.add_bos_token"] = _adds_bos(spec, settings, ids)
    fields["tokenizer.ggml.add_space_prefix"] = False
    template = folder / "chat_template.jinja"
    if text := template.read_text(encoding="utf-8") if template.exists() else settings.get("chat_template"):
        fields["tokenizer.chat_template"] = text
    return TokenTable(tokens, [types.get(i, UNUSED) for i in range(size)], None, merges, fields, f"tokenizer.json ({pre})")


def pre_tokenizer_name(spec: dict[str, Any]) -> str | None:
    """llama.cpp's name for how a tokenizer.json splits text; None where that is not sure."""
    top = spec.get("pre_tokenizer") or {}
    steps = top.get("pretokenizers", []) if top.get("type") == "Sequence" else [top]
    normal = spec.get("normalizer")
    kinds = [s.get("type") for s in steps]
    if not kinds or kinds[-1] != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return None
    if kinds == ["ByteLevel"] and normal is None:
        return "gpt-2" if steps[0].get("use_regex", True) else None
    if kinds == ["Digits", "ByteLevel"] and normal is None:
        return "smollm" if steps[0].get("individual_digits") and steps[1].get("use_regex", True) else None
    if (
        kinds == ["Split", "ByteLevel"]
        and not steps[1].get("use_regex", True)
        and steps[0].get("behavior") == "Isolated"
        and not steps[0].get("invert")
    ):
        name = SPLITS.get((steps[0].get("pattern") or {}).get("Regex", ""))
        # Qwen's normalises to NFC, Llama 3's does not; llama.cpp does neither.
        return name if normal is None or (name == "qwen2" and normal.get("type") == "NFC") else None
    return None


def _adds_bos(spec: dict[str, Any], settings: dict[str, Any], ids: dict[str, int]) -> bool:
    """Whether a text becomes BOS first: the post-processor decides, not the ``add_bos_token`` that fast tokenizers ignore."""
    bos = settings.get("bos_token")
    bos = bos.get("content") if isinstance(bos, dict) else bos
    top = spec.get("post_processor") or {}
    for step in top.get("processors", []) if top.get("type") == "Sequence" else [top]:
        single = step.get("single") or []
        if step.get("type") == "TemplateProcessing" and single and (single[0].get("SpecialToken") or {}).get("id") == bos and bos in ids:
            return True
    return False
