"""Tuning the target on the user's text before anything is distilled from it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from draftstill.recipe.base import Fraction, PositiveInt, Section


class Adapt(Section):
    """Tune the target on the corpus's training documents by LoRA and merge it; the merged model takes the target's place in all later stages.

    The spellings are those of peft's LoraConfig and of TrainingArguments."""

    r: PositiveInt = 16
    """Rank of the adapter."""
    lora_alpha: Annotated[float, Field(gt=0.0)] = 32.0
    """The adapter's product is scaled by lora_alpha / r."""
    lora_dropout: Fraction = 0.0
    """Dropout before the adapter."""
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Linear layers that get an adapter, by the last part of their name, for example [q_proj, v_proj]; ``all-linear``: all but the head."""
    learning_rate: Annotated[float, Field(gt=0.0)] = 2e-4
    """Peak learning rate."""
    lr_scheduler_type: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape after the warm-up."""
    warmup_steps: Annotated[int, Field(ge=0)] = 10
    """Steps of linear warm-up."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    """AdamW's decoupled decay."""
    max_grad_norm: Annotated[float, Field(gt=0.0)] = 1.0
    """Gradient clipping."""
    per_device_train_batch_size: PositiveInt = 4
    """Packed sequences per forward."""
    gradient_accumulation_steps: PositiveInt = 1
    """Forwards per optimizer step."""
    gradient_checkpointing: bool = False
    """Compute activations twice instead of keeping them: less memory, about a third slower."""
    num_train_epochs: Annotated[float, Field(gt=0.0)] = 1.0
    """Passes over the training documents."""
    max_steps: int = -1
    """Optimizer steps; -1 goes by num_train_epochs."""
    max_tokens: PositiveInt | None = None
    """Learn from this many tokens of the training documents at most (default: all)."""
    sequence_length: Annotated[int, Field(ge=8)] = 512
    """Tokens of a packed sequence. Longer documents are cut; short ones share a sequence without seeing each other."""
    eval_tokens: PositiveInt = 20_000
    """Tokens of the validation documents that perplexity is measured on, at most."""
    eval_steps: PositiveInt = 100
    """Steps between measurements; the adapter of the best one is merged."""
    save_steps: PositiveInt = 50
    """Steps between checkpoints."""

    @model_validator(mode="after")
    def _makes_sense(self) -> Adapt:
        if self.max_steps == 0 or self.max_steps < -1:
            raise ValueError("max_steps must be -1 (by epochs) or at least 1")
        if not self.target_modules:
            raise ValueError("target_modules must name at least one layer, for example [q_proj, v_proj], or be all-linear")
        return self
