"""Whether a published draft will do its work in each server: what they check when they load it, and what they should.

Three of them take a draft that is wrong and only decode slowly. So every check says per server what happens where it fails:
``refuses`` (an error at start), ``silent`` (loads, and is slow, rejects everything or changes nothing), ``-`` (does not matter there).
Written from the servers' sources at the versions in ``SERVERS``; llama.cpp and transformers were run, too.
"""

from __future__ import annotations

import json
import struct
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from draftstill.evaluate.exporter import COPIED, WRITTEN, TargetFacts
from draftstill.evaluate.gguf_tokens import tokens_of_gguf
from draftstill.evaluate.ggufs import read_header
from draftstill.runfolder import read_json
from draftstill.vocabulary import template_hash

SERVERS = {"vLLM": "0.33.0", "SGLang": "0.5.23", "llama.cpp": "b10359", "transformers": "5.24.0", "TensorRT-LLM": "docs"}
"""Versions whose behaviour the table holds."""
GAP = 128
"""llama.cpp: largest difference of vocabulary sizes."""
ALPHA_POINT = 0.01
_PADDED_MASS = 0.01
"""Sampled drafting loses at most this much acceptance to padding; greedy drafting none."""
_ANY = dict.fromkeys(SERVERS, "silent")


@dataclass(frozen=True)
class Check:
    """One line of the matrix."""

    name: str
    passed: bool | None
    """None: could not be looked at here."""
    found: str
    mend: str
    where: dict[str, str]
    """By server what happens where it fails: refuses, silent or -."""

    def cell(self, server: str) -> str:
        """pass, FAIL (refuses), SILENT, not run, or -."""
        effect = self.where.get(server, "-")
        if effect == "-":
            return "-"
        return "pass" if self.passed else "not run" if self.passed is None else "FAIL" if effect == "refuses" else "SILENT"


def validate(folder: Path, target: TargetFacts, facts: Mapping[str, Any] | None = None) -> list[Check]:
    """Look at a published folder with its target's config, tokenizer and GGUF at hand. Loads no weights.

    ``facts``: what ``export_folder`` found when it loaded the folder back, with ``alpha`` of the publication and ``served`` where measured.
    """
    from transformers import AutoTokenizer

    facts = facts or {}
    config = read_json(folder / "config.json")
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    theirs = target.config.get_text_config()
    both = {"vLLM": "refuses", "SGLang": "refuses", "transformers": "refuses", "TensorRT-LLM": "silent"}
    checks = [
        Check("vocabulary size", config["vocab_size"] == target.rows, f"draft {config['vocab_size']:,}, target {target.rows:,} rows",
              "set publish.vocabulary: padded and publish again" if config["vocab_size"] < target.rows else "train a draft with the target's vocabulary", both),
        _token_ids(tokenizer, target.tokenizer),
        _special_ids(tokenizer, target.tokenizer),
        Check("padding is inert", None if "padded_mass" not in facts else facts["padded_mass"] <= _PADDED_MASS,
              f"padding draws at most {facts.get('padded_mass', 0.0):.2g} of a position", "publish again with --set-aside", _ANY),
        _context(config, target.context),
        _heads(config, theirs),
        Check("16-bit weights", str(config.get("dtype") or config.get("torch_dtype")) in ("bfloat16", "float16"),
              f"stored as {config.get('dtype') or config.get('torch_dtype')}; a server casts to the target's dtype, which rounds differently from the score",
              "train with train.bf16: true", {"vLLM": "silent", "SGLang": "silent", "TensorRT-LLM": "silent"}),
        _tied(folder, config),
        _files(folder, config),
        _neutral(folder),
        Check("chat template", template_hash(tokenizer) == template_hash(target.tokenizer), "the template is not the target's",
              "publish again with --set-aside", {"transformers": "silent"}),
        _logits(facts),
        _alpha(facts.get("alpha")),
        *_gguf(folder, target),
        _served(facts.get("served")),
    ]  # fmt: skip
    return checks


def _token_ids(draft: Any, target: Any) -> Check:
    ours, theirs = draft.get_vocab(), target.get_vocab()
    differing = [t for t in ours.keys() | theirs.keys() if ours.get(t) != theirs.get(t)]
    return Check("token ids", not differing, f"{len(differing):,} tokens differ" + (f", for example {sorted(differing)[0]!r}" if differing else ""),
                 "train the draft with the target's own tokenizer (draft.source: prune keeps it)",
                 {"vLLM": "silent", "SGLang": "refuses", "transformers": "silent", "TensorRT-LLM": "silent"})  # fmt: skip


def _special_ids(draft: Any, target: Any) -> Check:
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id")
    differing = [
        f"{n} {getattr(draft, n, None)} for {getattr(target, n, None)}"
        for n in names
        if getattr(draft, n, None) != getattr(target, n, None)
    ]
    start = [t("a")["input_ids"] for t in (draft, target)]
    differing += ["a text begins with other tokens (BOS)"] if start[0] != start[1] else []
    return Check("special ids", not differing, "; ".join(differing) or "as the target's", "publish again with the target's tokenizer files",
                 {"vLLM": "silent", "SGLang": "silent", "transformers": "silent", "TensorRT-LLM": "silent"})  # fmt: skip


def _context(config: Mapping[str, Any], wanted: int | None) -> Check:
    have = config.get("max_position_embeddings")
    return Check("context length", None if have is None or wanted is None else have >= wanted, f"draft {have}, target {wanted} tokens",
                 "serve with a context of the draft's length (SGLang: --context-length; else SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1)",
                 {"SGLang": "refuses", "vLLM": "silent", "llama.cpp": "silent", "transformers": "silent", "TensorRT-LLM": "silent"})  # fmt: skip


def _heads(config: Mapping[str, Any], target: Any) -> Check:
    def splits(heads: int) -> set[int]:
        return {n for n in (1, 2, 4, 8, 16) if heads % n == 0}

    ours, theirs = config.get("num_attention_heads"), getattr(target, "num_attention_heads", None)
    if not ours or not theirs:
        return Check(
            "tensor parallel", None, "the config names no heads", "", {"vLLM": "refuses", "SGLang": "refuses", "TensorRT-LLM": "refuses"}
        )
    lost = splits(theirs) - splits(ours)
    told = f": the target splits over {sorted(lost)} devices, the draft does not" if lost else ""
    return Check("tensor parallel", not lost, f"draft {ours} heads, target {theirs}{told}",
                 f"serve with a tensor parallel size of {max(splits(ours) & splits(theirs))}",
                 {"vLLM": "refuses", "SGLang": "refuses", "TensorRT-LLM": "refuses"})  # fmt: skip


def _weight_names(folder: Path) -> set[str]:
    names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with open(file, "rb") as handle:
            names |= set(json.loads(handle.read(struct.unpack("<Q", handle.read(8))[0])))
    return names


def _tied(folder: Path, config: Mapping[str, Any]) -> Check:
    tied, head = bool(config.get("tie_word_embeddings")), "lm_head.weight" in (names := _weight_names(folder))
    known = head or "model.embed_tokens.weight" in names  # others name them otherwise; loading back has shown what they do
    return Check("tied weights", tied != head if known else None,
                 f"the config says {'tied' if tied else 'untied'}, the file {'has' if head else 'lacks'} lm_head.weight",
                 "publish again with --set-aside", {s: "silent" for s in SERVERS if s != "llama.cpp"})  # fmt: skip


def _files(folder: Path, config: Mapping[str, Any]) -> Check:
    strays = sorted(p.name for p in folder.iterdir() if p.is_symlink() or not (COPIED.fullmatch(p.name) or WRITTEN.fullmatch(p.name)))
    odd = strays + [k for k in ("quantization_config", "auto_map") if config.get(k)]
    return Check("plain safetensors", not odd, f"{', '.join(odd)}" if odd else "no adapter, pickle, quantisation or own code",
                 "take them away; merge adapters before training", {s: "refuses" for s in SERVERS if s != "llama.cpp"})  # fmt: skip


def _neutral(folder: Path) -> Check:
    found = read_json(folder / "generation_config.json") if (folder / "generation_config.json").exists() else {}
    odd = [k for k in found if not k.endswith("_token_id") and k not in ("_from_model_config", "transformers_version")]
    return Check("neutral generation", not odd, f"generation_config.json sets {', '.join(odd)}" if odd else "only special ids",
                 "publish again with --set-aside", {"transformers": "silent"})  # fmt: skip


def _logits(facts: Mapping[str, Any]) -> Check:
    found = facts.get("load_back_max_difference")
    return Check("loads back equal", facts.get("load_back_equal"), f"largest difference of logits {found}", "publish again with --set-aside",
                 {s: "silent" for s in SERVERS if s != "llama.cpp"})  # fmt: skip


def _alpha(alpha: Mapping[str, Any] | None) -> Check:
    told = (
        "the score kept no decoded texts to measure on"
        if not alpha
        else f"{alpha['published']:.4f} loaded back, {alpha['scored']:.4f} in the score, {alpha['positions']} positions"
    )
    return Check("alpha as scored", None if not alpha else abs(alpha["published"] - alpha["scored"]) <= ALPHA_POINT, told,
                 "score again: `draftstill evaluate RECIPE --set-aside`", {s: "silent" for s in SERVERS if s != "llama.cpp"})  # fmt: skip


def _gguf(folder: Path, target: TargetFacts) -> list[Check]:
    here = {"llama.cpp": "refuses"}
    silent = {"llama.cpp": "silent"}  # one log line, then plain decoding
    files = sorted(folder.glob("*.gguf"))
    if not files:
        return [
            Check(
                "GGUF file",
                None,
                "the folder has none",
                "set publish.target_gguf or convert it with llama.cpp's convert_hf_to_gguf.py",
                here,
            )
        ]
    heads = [read_header(f) for f in files]
    out = [Check("GGUF file", True, ", ".join(f.name for f in files), "", here)]
    if target.gguf is None:
        return [*out, Check("GGUF vocabulary", None, "the target's GGUF is not known here", "set publish.target_gguf", silent)]
    theirs = tokens_of_gguf(target.gguf)
    faults = []
    for file, head in zip(files, heads, strict=True):
        ours = head["tokenizer.ggml.tokens"]
        for key in ("model", "pre", "add_bos_token", "add_eos_token", "bos_token_id", "eos_token_id"):
            name = f"tokenizer.ggml.{key}"
            if head.get(name) != theirs.fields.get(name):
                faults.append(f"{file.name}: {key} is {head.get(name)}, the target's {theirs.fields.get(name)}")
        if abs(len(ours) - len(theirs.tokens)) > GAP:
            faults.append(f"{file.name}: {len(ours):,} tokens, the target {len(theirs.tokens):,}; llama.cpp takes a difference of {GAP}")
        other = [i for i, (a, b) in enumerate(zip(ours, theirs.tokens, strict=False)) if i >= 5 and a != b]
        faults += [f"{file.name}: {len(other):,} token texts differ, the first at id {other[0]}"] if other else []
    return [*out, Check("GGUF vocabulary", not faults, "; ".join(faults) or "as the target's GGUF",
                        "set publish.target_gguf to the file that serves the target and publish again", silent)]  # fmt: skip


def _served(served: Mapping[str, Any] | None) -> Check:
    if not served:
        return Check(
            "served acceptance",
            None,
            "not measured in a running server",
            "draftstill publish RECIPE --check --served",
            {"llama.cpp": "silent"},
        )
    gap = abs(served["acceptance"] - served["ours"])
    return Check("served acceptance", gap <= 0.02, f"{served['acceptance']:.4f} in llama.cpp, {served['ours']:.4f} in Draftstill's decoder",
                 "compare the two texts: quantisation may turn near-ties", {"llama.cpp": "silent"})  # fmt: skip


def matrix_json(checks: list[Check]) -> list[dict[str, Any]]:
    """For draft_report.json: each check with its cell per server."""
    return [{**{k: v for k, v in asdict(c).items() if k not in ("where", "mend")}, "mend": c.mend if c.passed is False else None,
             "servers": {s: c.cell(s) for s in SERVERS}} for c in checks]  # fmt: skip


def failures(checks: list[Check]) -> list[Check]:
    return [c for c in checks if c.passed is False]


def matrix_text(checks: list[Check]) -> str:
    """At most 80 columns: the matrix, then each failure with its mend."""
    short = {"transformers": "transf.", "TensorRT-LLM": "TRT-LLM"}
    lines = [f"{'':<20}" + "".join(f"{short.get(s, s):>11}" for s in SERVERS)]
    lines += [f"{c.name:<20}" + "".join(f"{c.cell(s):>11}" for s in SERVERS) for c in checks]
    lines += [
        "",
        "FAIL: refused at start.  SILENT: loads, then decodes slowly or not as scored.",
        *textwrap.wrap("Read: " + ", ".join(f"{s} {v}" for s, v in SERVERS.items()) + ".", 80),
    ]
    for check in (c for c in checks if not c.passed):
        told = "not run: " if check.passed is None else ""
        lines += textwrap.wrap(f"{told}{check.name}: {check.found}", 80)
        lines += textwrap.wrap(f"mend: {check.mend}", 80, initial_indent="  ", subsequent_indent="  ") if check.mend else []
    return "\n".join(lines)
