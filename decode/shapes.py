"""Models with random weights of a named shape: what a pair costs on this machine can be measured before either exists.

``random:llama-3.1-8b``, ``random:qwen2.5-1.5b,num_hidden_layers=2``, or ``random:PATH`` of a folder with a config.json.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from draftstill.errors import DraftstillError

PREFIX = "random:"
_LLAMA3 = {"model_type": "llama", "vocab_size": 128_256, "tie_word_embeddings": False, "max_position_embeddings": 131_072}
_QWEN2 = {"model_type": "qwen2", "vocab_size": 151_936, "tie_word_embeddings": True, "max_position_embeddings": 32_768}
SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {"model_type": "llama", "vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
                     "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True, "max_position_embeddings": 8192},
    "smollm2-1.7b": {"model_type": "llama", "vocab_size": 49_152, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24,
                     "num_attention_heads": 32, "num_key_value_heads": 32, "tie_word_embeddings": True, "max_position_embeddings": 8192},
    "qwen2.5-0.5b": {**_QWEN2, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2},
    "qwen2.5-1.5b": {**_QWEN2, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2},
    "qwen2.5-7b": {**_QWEN2, "vocab_size": 152_064, "tie_word_embeddings": False, "hidden_size": 3584, "intermediate_size": 18_944,
                   "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4},
    "llama-3.2-1b": {**_LLAMA3, "tie_word_embeddings": True, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                     "num_attention_heads": 32, "num_key_value_heads": 8},
    "llama-3.1-8b": {**_LLAMA3, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8},
    "mistral-7b": {"model_type": "mistral", "vocab_size": 32_768, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
                   "num_attention_heads": 32, "num_key_value_heads": 8, "sliding_window": None, "tie_word_embeddings": False,
                   "max_position_embeddings": 32_768},
}  # fmt: skip
"""The sizes of public models that decide what a step costs."""


def is_random(source: str) -> bool:
    """Whether a source names a shape, not weights."""
    return source.startswith(PREFIX)


def random_config(source: str, key: str) -> Any:
    """The transformers config of ``random:NAME[,KEY=NUMBER...]``.

    Raises:
        DraftstillError: no such shape, or a key that its config does not have.
    """
    from transformers import AutoConfig

    name, *changes = source.removeprefix(PREFIX).split(",")
    if name in SHAPES:
        known = dict(SHAPES[name])
        config = AutoConfig.for_model(known.pop("model_type"), **known)
    elif (Path(name) / "config.json").is_file():
        config = AutoConfig.from_pretrained(name)
    else:
        raise DraftstillError("there is no shape of this name, nor a folder with a config.json", key=key, value=name,
                              mend=f"one of {', '.join(SHAPES)}, or a folder")  # fmt: skip
    for change in changes:
        field, _, text = change.partition("=")
        if not isinstance(getattr(config, field, None), int) or not text.isdigit() or int(text) == 0:
            raise DraftstillError("a change of a shape is KEY=NUMBER with a key of its config", key=key, value=change,
                                  mend="for example num_hidden_layers=2, hidden_size=1024 or vocab_size=32000")  # fmt: skip
        setattr(config, field, int(text))
    if "num_hidden_layers" in source and getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    return config


def random_model(source: str, dtype: str, device: str, key: str, seed: int = 0) -> Any:
    """A model of a named shape, in evaluation mode, with small random weights."""
    from transformers import AutoModelForCausalLM

    config = random_config(source, key)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    except (ValueError, KeyError, RuntimeError) as error:
        raise DraftstillError(f"no model has this shape: {error}", key=key, value=source) from error
    model = model.to_empty(device=device)
    model.tie_weights()
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            # Norms near 1, matrices small: values stay in range whatever the depth.
            if p.dim() < 2:
                p.fill_(1.0)
            else:
                p.normal_(0.0, 0.02, generator=generator)
    return model.eval()
