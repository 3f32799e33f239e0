"""GGUF to safetensors, once per file: loading a GGUF takes 15 s to a minute, loading the result 1 to 6 s.

The weights are what the quantised file holds, no better: results must speak of "the Q4 release of X", not of X.
"""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Any

from draftstill.cache import cache_dir, cached
from draftstill.errors import DraftstillError
from draftstill.progress import say
from draftstill.runfolder import read_json, write_json

CONVERTER = 1
"""Raised when converted folders of older versions must not be used any more."""

_ABOUT = "draftstill_gguf.json"
_SAME_MATRIX = 0.10
"""Two quantisations of one matrix differ by 4 to 7 % (measured: Qwen2.5-Coder 0.5B and 1.5B); two different ones by over 100 %."""


def convert_gguf(path: Path, sha256: str, key: str) -> tuple[Path, dict[str, Any]]:
    """The folder with the file's weights (bfloat16), config and tokenizer, and what is known about it (licence, retied).

    bfloat16 halves the disk and changes nothing measurable: SmolLM2-135M Q4_1, mean NLL 2.687 against 2.6875.

    Raises:
        DraftstillError: gguf is not installed, or transformers cannot read this file.
    """
    entry = cache_dir() / "gguf" / f"{sha256}-v{CONVERTER}"
    cached(entry, lambda work: _convert(path, sha256, work, key))
    return entry, read_json(entry / _ABOUT)


def _convert(path: Path, sha256: str, work: Path, key: str) -> None:
    try:
        import gguf  # noqa: F401 - transformers needs it to read the file
    except ImportError:
        raise DraftstillError("reading a GGUF file needs the gguf package", key=key, value=path.name, mend="pip install gguf") from None
    from draftstill.sources import quiet_transformers

    say(f"converting {path.name} to safetensors (once; kept in {cache_dir()})")
    # transformers draws a bar of its own here, which its settings do not switch off.
    with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):
        try:
            tokenizer, model = _load(path)
            difference = retie(model)
            model.save_pretrained(work)
            tokenizer.save_pretrained(work)
        except OSError as error:
            if error.errno is not None:  # a full disk is the cache's trouble, not the file's
                raise
            raise _unreadable(path, error, key) from error
        except Exception as error:
            raise _unreadable(path, error, key) from error
    about = {
        "gguf": path.name,
        "sha256": sha256,
        "converter": CONVERTER,
        "dtype": "bfloat16",
        "licence": gguf_licence(path),
        "retied": difference,
    }
    if difference is not None:
        say(f"  embedding and head are two quantisations of one matrix (they differ by {difference:.1%}); kept the head's for both")
    write_json(work / _ABOUT, about)
    for file in work.iterdir():
        file.chmod(0o644)  # safetensors writes 0600, which a shared cache cannot use


def _load(path: Path) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    extra: dict[str, Any] = {}
    try:
        # transformers 5.24 marks a model from GGUF as quantised, which then can neither be cast nor saved, unless told to
        # dequantise. Versions without GgufConfig are called without it; the cast below and the saving show whether that worked.
        from transformers import GgufConfig

        extra["quantization_config"] = GgufConfig(dequantize=True)
    except ImportError:
        pass
    folder, name = os.fspath(path.parent), path.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.bfloat16, **extra)
    model = model.to(torch.bfloat16)  # raises where the model is still marked quantised
    if getattr(model.config, "quantization_config", None) is not None:
        del model.config.quantization_config
    return tokenizer, model


def retie(model: Any, limit: float = _SAME_MATRIX) -> float | None:
    """Tie embedding and head again where the file stored one matrix in two quantisations; the head's, the finer one, is kept.

    Without it the model has 136 M (Qwen 0.5B) to 233 M (1.5B) parameters more than its makers gave it.

    Returns:
        The relative difference ||E - H|| / ||H|| of what was tied, or None where nothing was.
    """
    import torch

    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if (
        head is None
        or embedding.weight is head.weight
        or embedding.weight.shape != head.weight.shape
        or getattr(head, "bias", None) is not None
    ):
        return None
    with torch.no_grad():
        # In slices: a float32 copy of a 152,064-row matrix would be gigabytes.
        squares = [((e.float() - h.float()).pow(2).sum().item(), h.float().pow(2).sum().item())
                   for e, h in zip(embedding.weight.split(8192), head.weight.split(8192), strict=True)]  # fmt: skip
    total = sum(h for _, h in squares)
    difference = (sum(d for d, _ in squares) / total) ** 0.5 if total > 0 else float("inf")
    if not difference < limit:
        return None
    embedding.weight = head.weight
    for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
        config.tie_word_embeddings = True
    model.tie_weights()
    return round(difference, 6)


def gguf_licence(path: Path) -> str | None:
    """``general.license`` of the file's header."""
    from gguf import GGUFReader

    entry = GGUFReader(os.fspath(path)).get_field("general.license")
    value = entry.contents() if entry is not None else None
    return value.strip() or None if isinstance(value, str) else None


def _unreadable(path: Path, error: Exception, key: str) -> DraftstillError:
    import transformers

    return DraftstillError(
        f"transformers {transformers.__version__} cannot convert this GGUF file: {' '.join(str(error).split())[:300] or type(error).__name__}",
        key=key, value=str(path), mend="use the model's safetensors release, or another version of transformers",
    )  # fmt: skip
