"""The draft as it will be, by configurations alone: what its training would be refused for, said before there is anything to train on."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from draftstill.errors import DraftstillError
from draftstill.estimates import longest
from draftstill.recipe import Recipe
from draftstill.sizes import draft_size, size_of
from draftstill.stages import resolved_device, resolved_dtype, trains_in_bf16
from draftstill.train.checkpoint import check_start
from draftstill.train.fresh import fresh_config
from draftstill.train.memory import check_memory, live_need, need
from draftstill.train.setup import attach


def preview(recipe: Recipe, config: Any, own: Any = None, rows: int | None = None) -> Any:
    """A transformers model on the meta device: names and shapes of the draft's float32 weights, and no weights.

    Args:
        config: the target's.
        own: an existing draft's.
        rows: of embedding and head, where they will be transplanted.

    Raises:
        DraftstillError: sizes that do not fit each other.
    """
    from transformers import AutoModelForCausalLM

    made = _config(recipe, config, own)
    if rows is not None:
        made.vocab_size = rows
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(made).float()


def _config(recipe: Recipe, config: Any, own: Any) -> Any:
    draft = recipe.draft
    if draft.source == "fresh":
        return fresh_config(recipe, config)
    made = copy.deepcopy(own if draft.existing else config)
    if not draft.pruned:
        return made
    base = size_of(made.to_dict())
    size = draft_size(draft, base, base)
    assert base is not None and size is not None
    made.num_hidden_layers = size.layers
    if getattr(made, "layer_types", None):
        made.layer_types = made.layer_types[: size.layers]
    if size.kv_heads < base.kv_heads:
        made.num_key_value_heads, made.num_attention_heads, made.head_dim = size.kv_heads, size.heads, size.head_width
    made.intermediate_size = size.inner
    return made


def check_training(recipe: Recipe, config: Any, own: Any, rows: int | None, vocab: int, *, memory: bool) -> None:
    """Refuse what the training would refuse once everything is recorded.

    Args:
        config, own, rows: as for ``preview``.
        vocab: real tokens.
        memory: the training will run on this machine.

    Raises:
        DraftstillError: a layer that takes no adapter, weights to begin with that do not fit, a phase without text, a step without room.
    """
    check_phases(recipe)
    settings = recipe.train
    memory = memory and not (Path(recipe.run_dir) / "recording").exists()  # then its own sequences decide, a moment later
    if settings.lora is None and settings.init_from is None and not memory:
        return
    model = preview(recipe, config, own, rows)
    if settings.init_from is not None:
        check_start(model, settings.init_from)
    with torch.device("meta"):
        attach(model, settings, recipe.seed)
    if memory:
        tokens = longest(recipe) * settings.per_device_train_batch_size
        head = torch.empty(vocab, config.hidden_size, dtype=getattr(torch, resolved_dtype(recipe)), device="meta")
        compute = torch.bfloat16 if trains_in_bf16(recipe) else torch.float32
        live = live_need(config, head.dtype, tokens) if recipe.record.mode == "live" else 0
        check_memory(need(model, settings, head, tokens, compute, live=live), settings, tokens, torch.device(resolved_device(recipe)))


def check_phases(recipe: Recipe) -> None:
    """Refuse a phase for whose kinds of text the recipe has no source."""
    made = {"response": ("respond.prompts", recipe.respond.prompts), "document": ("record.document_tokens", recipe.record.document_tokens),
            "rollout": ("record.rollouts", recipe.record.rollouts), "replay": ("record.replays", recipe.record.replays)}  # fmt: skip
    for number, phase in enumerate(recipe.train.phases):
        if phase.kinds and not any(made[kind][1] for kind in phase.kinds):
            raise DraftstillError("the recording will hold no text of this kind", key=f"train.phases.{number}.kinds", value=list(phase.kinds),
                                  mend=f"set {' or '.join(made[kind][0] for kind in phase.kinds)} above 0, or name other kinds")  # fmt: skip
