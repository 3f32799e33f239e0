"""The plan's memory and the trainer's lower bound: who is told that it fits is not refused."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from draftstill import estimates
from draftstill.recipe import Recipe
from draftstill.sizes import size_of
from draftstill.train import memory, preview
from tests.train.drafts import FAMILIES, tiny

QWEN = ("qwen2", {"vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 6, "num_attention_heads": 14,
                         "num_key_value_heads": 2, "tie_word_embeddings": True})  # fmt: skip
WIDE = ("llama", {"vocab_size": 32_000, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 6, "num_attention_heads": 16,
                  "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False})  # fmt: skip
WHOLE: dict[str, Any] = {"source": "some/draft"}
TRAINING: list[dict[str, Any]] = [
    {"bf16": True}, {"gradient_checkpointing": True}, {"ema_decay": 0.99, "tokens": {"keep": 0.5}}, {"bf16": False}, {"packing": True},
    {"lora": {"r": 16}},
]  # fmt: skip


def both(
    home: Path, kind: tuple[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, **sections: Any
) -> tuple[float, float, memory.Need]:
    """(the plan's memory of the whole run, the plan's of the training, the trainer's before anything is recorded)."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(kind[0], **kind[1])
    values = {"run_dir": str(home / "run"), "target": {"source": "some/target", "dtype": "bfloat16"}, "corpus": {"source": "absent"}, "device": "cpu",
              **sections}  # fmt: skip
    recipe = Recipe.model_validate_json(json.dumps(values))
    found: list[memory.Need] = []
    monkeypatch.setattr(preview, "check_memory", lambda need, *rest: found.append(need))
    preview.check_training(recipe, config, config, None, config.vocab_size, memory=True)
    size = size_of(config.to_dict())
    draft = estimates.draft_size(recipe.draft, size, size)
    assert size is not None and draft is not None
    whole = estimates.estimate(recipe, size, [draft]).memory_bytes
    assert whole is not None
    return whole - estimates.RUNTIME_GIB * 2**30, estimates.training_bytes(recipe, size, draft), found[0]


@pytest.mark.parametrize("train", TRAINING, ids=str)
@pytest.mark.parametrize("kind", [QWEN, WIDE], ids=["qwen", "wide"])
def test_the_plan_is_never_below_what_the_trainer_refuses(
    kind: tuple[str, dict[str, Any]], train: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = ((1, 16, 0), (8, 256, 1000), (32, 4096, 0))
    for (batch, length, documents), draft, mode in itertools.product(shapes, (WHOLE, {"layers": [0, 1]}), ("hidden", "live")):
        planned, training, need = both(
            tmp_path, kind, monkeypatch, draft=draft, train={**train, "per_device_train_batch_size": batch},
            record={"mode": mode, "sequence_length": length, "document_tokens": documents}, respond={"chat_tokens": 3000, "max_new_tokens": 200},
        )  # fmt: skip
        assert planned >= training >= need.total, (batch, length, draft, mode)
        assert training <= 2.5 * need.total + 2**30, (batch, length, draft, mode)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_keeps_no_more_than_the_plan_says_and_no_less_than_the_trainer(family: str, bf16: bool) -> None:
    """By what autograd stores, beside the weights."""
    model, rows, length = tiny(family).train(), 4, 64
    size = size_of(model.config.to_dict())
    assert size is not None
    stored = {p.untyped_storage().data_ptr(): torch.empty(0) for p in model.parameters()}
    known = set(stored)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        stored[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no other gets its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        model.model(input_ids=torch.randint(100, (rows, length)), use_cache=False)
    kept = sum(t.untyped_storage().nbytes() for place, t in stored.items() if place not in known)
    factors = 2 * size.layers * size.layer_parameters if bf16 else 0
    # Sines and cosines and the ids; and numbers that no width multiplies: a norm's scale, attention's normaliser.
    shared = 8 * length * size.head_width + 8 * rows * length + 4 * rows * length * size.layers * (2 + 2 * size.heads + size.kv_heads)
    assert size.kept_numbers(False) * (2 if bf16 else 4) <= (kept - factors) / (rows * length)
    assert kept <= rows * length * estimates.kept_bytes(size, False, bf16) + factors + shared


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_numbers_that_a_forward_keeps_are_those_of_its_layers(family: str, tied: bool) -> None:
    size = size_of(tiny(family, tied).config.to_dict())
    assert size is not None
    layer = 6 * 32 + 2 * (4 + 2) * 8 + 4 * 48
    assert size.kept_numbers(False) == 3 * layer and size.kept_numbers(True) == 3 * 32 + layer
