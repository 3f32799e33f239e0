"""A draft as a GGUF file for llama.cpp: weights of a few known families, tokenizer exactly as the target's own GGUF has it.

llama.cpp drops a draft whose vocabulary type, BOS/EOS flags or token texts differ from the target's with one log line and then decodes
plainly. Hence the tokenizer is copied from the target's file where there is one, and derived only where its splitting is surely known.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from draftstill.errors import DraftstillError
from draftstill.evaluate.gguf_tokens import TokenTable
from draftstill.runfolder import read_json

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""transformers' model_type and llama.cpp's name. Llama's (and so Mistral's) query and key rows are stored in another order."""
KINDS = ("f16", "q8_0")


def gguf_fault(folder: Path) -> str | None:
    """Why the model in ``folder`` cannot be written as GGUF, or None. Reads its config only."""
    config = read_json(folder / "config.json")
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        return f"its family is {kind}; written are {', '.join(ARCHITECTURES)}"
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if (form := rope.get("rope_type") or rope.get("type") or "default") != "default":
        return f"its positions are scaled ({form}), which this export does not write"
    window = config.get("sliding_window") if config.get("use_sliding_window", kind == "mistral") else None
    if window and window < config["max_position_embeddings"]:
        return f"its attention sees a window of {window} tokens, which llama.cpp's {ARCHITECTURES[kind]} has not"
    if config.get("hidden_act", "silu") != "silu":
        return f"its activation is {config['hidden_act']}, not silu"
    return None


def write_gguf(folder: Path, out: Path, kind: str, tokens: TokenTable, *, name: str, licence: str | None = None) -> dict[str, Any]:
    """Write the safetensors model in ``folder`` to ``out``.

    Args:
        kind: ``f16`` or ``q8_0``. Vectors stay float32; a matrix whose rows are no multiple of 32 stays f16 in ``q8_0``, as in llama.cpp.
        tokens: the tokenizer to store; padded to the model's rows with tokens that no text becomes.

    Returns:
        name, kind, bytes, tensors, and the largest rounding error of a weight relative to the largest weight of its matrix.

    Raises:
        DraftstillError: ``publish.gguf``: a family, position scaling, bias or value that cannot be written faithfully.
    """
    import gguf

    if fault := gguf_fault(folder):
        raise DraftstillError(f"no GGUF of this draft can be written: {fault}", key="publish.gguf", value=kind,
                              mend="set publish.gguf: [] and convert the folder with llama.cpp's convert_hf_to_gguf.py")  # fmt: skip
    config = read_json(folder / "config.json")
    writer = gguf.GGUFWriter(out, ARCHITECTURES[config["model_type"]])
    _header(writer, config, kind, name, licence)
    rows = config["vocab_size"]
    tokens.padded(rows).write(writer)
    worst, count = 0.0, 0
    for label, array in _tensors(folder, config):
        stored, error = _encoded(label, array, kind)
        writer.add_tensor(label, stored[0], raw_dtype=stored[1])
        worst, count = max(worst, error), count + 1
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {
        "file": out.name,
        "kind": kind,
        "bytes": out.stat().st_size,
        "tensors": count,
        "largest_rounding": round(worst, 6),
        "tokens_from": tokens.origin,
    }


def _header(writer: Any, config: dict[str, Any], kind: str, name: str, licence: str | None) -> None:
    import gguf

    heads = config["num_attention_heads"]
    head = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {}
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(name)
    if licence:
        writer.add_license(licence)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0))
    writer.add_rope_dimension_count(head)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16 if kind == "f16" else gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _tensors(folder: Path, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Names as llama.cpp has them and float32 values, one tensor in memory at a time."""
    import gguf
    from safetensors import safe_open

    arch = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == ARCHITECTURES[config["model_type"]])
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    heads = config["num_attention_heads"]
    turned = (
        {"self_attn.q_proj": heads, "self_attn.k_proj": config.get("num_key_value_heads") or heads}
        if gguf.MODEL_ARCH_NAMES[arch] == "llama"
        else {}
    )
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for label in sorted(tensors.keys()):
                if label == "lm_head.weight" and config.get("tie_word_embeddings"):
                    continue  # one matrix: llama.cpp takes token_embd for the head where there is no output
                known = names.get_name(label, try_suffixes=(".weight", ".bias"))
                if known is None or label == "lm_head.bias":
                    raise DraftstillError(f"llama.cpp's {ARCHITECTURES[config['model_type']]} has no place for the tensor {label}", key="publish.gguf",
                                          mend="set publish.gguf: []")  # fmt: skip
                array = tensors.get_tensor(label).float().numpy()
                for part, count in turned.items():
                    if part in label:
                        array = _turn(array, count)
                yield known, array


def _turn(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from half-by-half (transformers' rotary embedding) to pair-by-pair (llama.cpp's): the reverse of its reading."""
    half = array.shape[0] // heads // 2
    return array.reshape(heads, 2, half, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def _encoded(label: str, array: np.ndarray, kind: str) -> tuple[tuple[np.ndarray, Any], float]:
    import gguf

    largest = float(np.abs(array).max()) if array.size else 0.0
    if not np.isfinite(largest):
        raise DraftstillError(f"the tensor {label} holds values that are not finite", key="publish.gguf", mend="train the draft again")
    if array.ndim == 1:
        return (np.ascontiguousarray(array), gguf.GGMLQuantizationType.F32), 0.0
    if kind == "q8_0" and array.shape[-1] % 32 == 0:
        stored = gguf.quantize(np.ascontiguousarray(array), gguf.GGMLQuantizationType.Q8_0)
        back, what = gguf.dequantize(stored, gguf.GGMLQuantizationType.Q8_0), gguf.GGMLQuantizationType.Q8_0
    else:
        if largest > 65504:
            raise DraftstillError(
                f"the tensor {label} holds {largest:.3g}, more than a 16-bit float can", key="publish.gguf", mend="set publish.gguf: []"
            )
        stored, what = array.astype(np.float16), gguf.GGMLQuantizationType.F16
        back = stored.astype(np.float32)
    return (stored, what), float(np.abs(back - array).max()) / (largest or 1.0)


def read_header(path: Path) -> dict[str, Any]:
    """The key-value fields of a GGUF file.

    Raises:
        DraftstillError: it is none.
    """
    import gguf

    try:
        return {name: field.contents() for name, field in gguf.GGUFReader(os.fspath(path)).fields.items()}
    except (ValueError, OSError) as error:
        raise DraftstillError(f"{path.name} is no readable GGUF file: {error}", value=str(path), mend="fetch or write it again") from None
