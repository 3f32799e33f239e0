"""The adapter that a target is tuned with: low-rank pairs beside its linear layers (LoRA, Hu et al. 2021, arXiv 2106.09685), by peft."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from draftstill.distill import seed_of
from draftstill.errors import DraftstillError
from draftstill.recipe import Adapt


def with_adapter(model: Any, settings: Adapt, seed: int) -> tuple[Any, Any, nn.ParameterList]:
    """The model with a fresh LoRA: peft's wrapper, the model inside, and the adapter's parameters in float32."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed_of(seed, "lora"))
    modules = settings.target_modules if isinstance(settings.target_modules, str) else list(settings.target_modules)
    config = LoraConfig(
        r=settings.r, lora_alpha=settings.lora_alpha, lora_dropout=settings.lora_dropout, target_modules=modules, task_type="CAUSAL_LM"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers 5.24 renames what peft 0.21 asks for, and what 5.17 offers
        adapted = get_peft_model(model, config)
        inner = adapted.get_base_model()
        if settings.gradient_checkpointing:
            inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return adapted, inner, nn.ParameterList([p for p in adapted.parameters() if p.requires_grad])


def check_layers(model: Any, settings: Adapt, key: str = "adapt.target_modules") -> None:
    """Refuse layers that do not exist, are not linear, or are the output head. ``model`` may lie on the meta device.

    Raises:
        DraftstillError: by ``key``, naming what there is.
    """
    if settings.target_modules == "all-linear":
        return
    head = model.get_output_embeddings()
    modules = {name: m for name, m in model.named_modules() if name}
    linear = sorted({n.rsplit(".", 1)[-1] for n, m in modules.items() if isinstance(m, nn.Linear) and m is not head})
    for wanted in settings.target_modules:
        met = [m for name, m in modules.items() if name == wanted or name.endswith(f".{wanted}")]
        if any(m is head or m is model.get_input_embeddings() for m in met):
            tied = (
                "the embedding is the same matrix"
                if model.config.get_text_config().tie_word_embeddings
                else "every token's logit moves with it"
            )
            problem = f"the {'head' if any(m is head for m in met) else 'embedding'} takes no adapter: {tied}"
        elif not met:
            problem = "the model has no such layer"
        elif not all(isinstance(m, nn.Linear) for m in met):
            problem = "not a linear layer"
        else:
            continue
        raise DraftstillError(problem, key=key, value=wanted, mend=f"choose from {', '.join(linear)}; or all-linear")


def preflight_adapt(settings: Adapt, config: Any) -> None:
    """``check_layers`` from the target's configuration alone, without its weights."""
    from transformers import AutoModelForCausalLM

    if settings.target_modules != "all-linear":
        with torch.device("meta"):
            check_layers(AutoModelForCausalLM.from_config(config), settings)
