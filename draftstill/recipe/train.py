"""The losses and the training."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from draftstill.recipe.base import Fraction, PositiveInt, Section
from draftstill.recipe.candidates import check_names
from draftstill.recipe.record import Kind

LossName = Literal["forward_kl", "reverse_kl", "jsd", "tvd", "nla", "lk", "ce"]


class Switch(Section):
    """When one loss gives way to another."""

    to: LossName = "lk"
    """The loss from then on, with the same eta, beta, temperature, top_k and top_p."""
    alpha: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.4
    """Switched for good after the first measurement in which held-out alpha at the deployment's sampler is at least this."""


class Loss(Section):
    """What the draft is asked to match. docs/losses.md has the formulas."""

    name: LossName = "forward_kl"
    """``forward_kl``: KL(p||q). ``reverse_kl``: KL(q||p). ``jsd``: between the two. ``tvd``: 1 - alpha. ``nla``: -log alpha.
    ``lk``: l*KL(p||q) + (1-l)*TVD with l = exp(-eta*alpha) per token. ``ce``: -log q of the written token."""
    mix: dict[LossName, Annotated[float, Field(gt=0.0)]] = {}
    """A weighted sum of losses in place of name, for example {forward_kl: 0.5, tvd: 0.5}."""
    eta: Annotated[float, Field(gt=0.0)] = 3.0
    """Decay of the KL share in ``lk``."""
    beta: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    """Weight of p in ``jsd``: beta*KL(p||m) + (1-beta)*KL(q||m), m = beta*p + (1-beta)*q."""
    temperature: Annotated[float, Field(gt=0.0)] | None = None
    """Divides both sides' logits inside the loss. Default: record.temperature, and nothing else in ``topk`` mode, whose tail is
    only known there. Not the sampling temperature."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Cut both laws to their k most probable tokens inside the loss, as the deployment would (0: all). At most record.top_k in topk and auto mode."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Cut both laws to their smallest set that holds this much, after top_k."""
    switch: Switch | None = None
    """Another loss from a measured alpha on: KL first, which teaches a draft that is still wrong, and then what rewards acceptance."""

    @property
    def names(self) -> tuple[str, ...]:
        """Every divergence that can come up."""
        return (*(tuple(self.mix) or (self.name,)), *((self.switch.to,) if self.switch else ()))

    @property
    def label(self) -> str:
        """For reports: the loss's name, or the mix, and what it gives way to."""
        first = " + ".join(f"{weight:g} {name}" for name, weight in self.mix.items()) or self.name
        return f"{first}, {self.switch.to} from alpha {self.switch.alpha:g}" if self.switch else first


class Tokens(Section):
    """Which supervised positions count, and how much. The loss is still divided by the number of all of them."""

    first: Annotated[int, Field(ge=0)] = 0
    """Leave out this many positions at the start of each sequence's supervised part."""
    last: Annotated[int, Field(ge=0)] = 0
    """Leave out what comes after this many (0: nothing)."""
    prefix_gamma: Annotated[int, Field(ge=0, le=64)] = 0
    """Prefix confidence: weigh a position with the chance that a round of this many guesses gets there (0: off)."""
    keep: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Selective distillation: learn from this share of each sequence's positions, those with the largest loss over that of the untrained draft
    (1: off). Below 1 a step takes one more product with the head."""


class Candidate(Section):
    """One of several drafts: what it does otherwise than the recipe."""

    draft: dict[str, Any] = {}
    """Keys of the section ``draft`` with this candidate's values, for example {layers: [0, 1, 2]}."""
    train: dict[str, Any] = {}
    """Keys of the section ``train`` with this candidate's values; a section inside, such as loss, is merged key by key."""


class Lora(Section):
    """Low-rank adapters in place of all weights, merged at the end: the draft is an ordinary model. The spellings are those of peft's LoraConfig."""

    r: PositiveInt = 16
    """Rank of each adapter."""
    lora_alpha: Annotated[float, Field(gt=0.0)] = 32.0
    """An adapter's product is scaled by lora_alpha / r."""
    lora_dropout: Fraction = 0.0
    """Dropout before the adapter. Above 0 a gradient depends on how its batch is split."""
    target_modules: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = "all-linear"
    """Linear layers that get an adapter, by the last part of their name, for example [q_proj, v_proj]; ``all-linear``: all but the head."""


class Phase(Section):
    """A part of the training."""

    share: Annotated[float, Field(gt=0.0)] = 1.0
    """Of all steps, in proportion to the other phases' shares."""
    loss: Loss | None = None
    """Default: train.loss."""
    learning_rate: Annotated[float, Field(gt=0.0)] | None = None
    """Peak; warm-up and shape stay those of the whole training. Default: train.learning_rate."""
    kinds: tuple[Kind, ...] = ()
    """Kinds of recorded text that it draws from: response, document, rollout, replay. Default: all."""


class Train(Section):
    """The draft's training; the spellings are those of TrainingArguments."""

    loss: Loss = Loss()
    """The divergence."""
    tokens: Tokens = Tokens()
    """Weights of the positions."""
    phases: tuple[Phase, ...] = ()
    """Parts that follow each other, for example the whole recording and then replays: each a section with share, loss, learning_rate and
    kinds. Default: one part."""
    lora: Lora | None = None
    """Train adapters instead of all weights (default: all weights)."""
    init_from: str | None = None
    """A folder or .safetensors file whose weights the draft begins with, in place of its own: a warm start. Shapes must be the same. To go on
    with a stopped run, repeat its command instead."""
    learning_rate: Annotated[float, Field(gt=0.0)] | Literal["auto"] = "auto"
    """Peak learning rate. ``auto``: 2.5% of the size (root mean square) of the draft's embedding where the draft is cut, 1% where an existing model or a
    warm start goes on, 1e-3 for fresh layers and adapters."""
    lr_scheduler_type: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape after the warm-up."""
    warmup_steps: Annotated[int, Field(ge=0)] = 10
    """Steps of linear warm-up."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    """AdamW's decoupled decay on matrices."""
    adam_beta1: Fraction = 0.9
    """AdamW's first moment decay."""
    adam_beta2: Fraction = 0.95
    """AdamW's second moment decay."""
    max_grad_norm: Annotated[float, Field(gt=0.0)] = 1.0
    """Gradient clipping."""
    per_device_train_batch_size: PositiveInt = 8
    """Sequences per forward on each device."""
    gradient_accumulation_steps: PositiveInt = 1
    """Forwards per optimizer step. A launch that goes on with another number of processes adapts it, so that a step sees as many sequences."""
    live: Literal["replicate", "shard"] = "replicate"
    """Of ``record.mode: live``, where the target lies. ``replicate``: each process has all of its weights on its device, in target.dtype, and
    the keys and values of one forward. ``shard``: each of n processes has an n-th of them (FSDP2) and gathers one layer at a time, or the
    embedding, in every forward; one process alone has all of them either way."""
    packing: bool = False
    """Put several short sequences of a forward into one row, isolated from each other: less padding, the same gradient."""
    gradient_checkpointing: bool = False
    """Compute the layers' activations again in the backward pass instead of keeping them: less memory, more time, the same gradient."""
    ema_decay: Fraction = 0.0
    """Average the weights over steps: average = decay * average + (1 - decay) * weights, with a smaller decay, (1 + step) / (10 + step), at the
    start. The averaged weights are measured, kept and published (0: off)."""
    num_train_epochs: Annotated[float, Field(gt=0.0)] = 1.0
    """Passes over the recording."""
    max_steps: int = -1
    """Optimizer steps; -1 goes by num_train_epochs."""
    bf16: bool | Literal["auto"] = "auto"
    """Matrix products in bfloat16; ``auto`` as for target.dtype. Master weights and the loss stay float32."""
    head_tokens: Annotated[int, Field(ge=0)] = 0
    """Train against this many most frequent ids (0: all) and a fresh sample of the others until full_head_from, then against the
    whole vocabulary: on a CPU the head is the cost, and a small one sees more tokens in the same time."""
    full_head_from: Annotated[float, Field(ge=0.0, le=1.0)] = 0.8
    """Share of the steps after which a trimmed head gives way to the whole one."""
    logging_steps: PositiveInt = 10
    """Steps between log lines."""
    eval_steps: PositiveInt = 50
    """Steps between measurements of held-out alpha."""
    early_stopping_patience: Annotated[int, Field(ge=0)] = 0
    """Stop after this many measurements in a row without a new best held-out alpha (0: never)."""
    save_steps: PositiveInt = 50
    """Steps between checkpoints."""
    save_total_limit: PositiveInt = 1
    """Checkpoints kept."""
    report_to: tuple[Literal["wandb", "tensorboard", "trackio"], ...] = ()
    """Trackers. wandb stays offline unless WANDB_MODE says otherwise."""
    run_name: str | None = None
    """Name shown by the trackers."""
    candidates: Annotated[dict[str, Candidate], AfterValidator(check_names)] = {}
    """Several drafts from one recording, each a name with its own ``draft`` and ``train`` keys over those of the recipe; evaluate ranks them.
    Default: one, named ``tuned``."""

    @property
    def losses(self) -> tuple[Loss, ...]:
        """Every loss section that comes up."""
        return tuple(phase.loss or self.loss for phase in self.phases) or (self.loss,)

    @model_validator(mode="after")
    def _steps(self) -> Train:
        if self.max_steps == 0 or self.max_steps < -1:
            raise ValueError("max_steps must be -1 (by epochs) or at least 1")
        whole = any("ce" in loss.names or loss.top_k or loss.top_p < 1 for loss in self.losses)
        if self.head_tokens and (whole or self.tokens.keep < 1):
            raise ValueError(
                "head_tokens trains against a sample of the ids: not with loss ce, loss.top_k, loss.top_p or tokens.keep, which ask for all"
            )
        return self
