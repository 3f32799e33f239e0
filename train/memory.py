"""Whether a step can fit, said before it starts. A lower bound: what it refuses cannot run, what it lets pass may still be too large."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from draftstill.errors import DraftstillError
from draftstill.machine import memory_gib
from draftstill.recipe import Train
from draftstill.sizes import size_of


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes of one process."""

    weights: int
    """The draft's, the target's head, and copies that are kept: the average, the reference."""
    training: int
    """Gradients and AdamW's moments."""
    activations: int
    """What one forward keeps for its backward."""
    live: int = 0
    """A target that scores each step's texts (``live_need``)."""

    @property
    def total(self) -> int:
        return self.weights + self.training + self.activations + self.live


def live_need(config: Any, dtype: torch.dtype, tokens: int, shards: int = 1) -> int:
    """Bytes of a live target beside its head: its weights, and the keys and values of a forward; of a sharded one its part of the weights, and
    the largest piece that is gathered.

    Args:
        config: the target's.
        tokens: positions of a forward, padding included.
        shards: processes over which its weights are spread.
    """
    size = size_of(config.to_dict())
    assert size is not None  # of all families that are trained
    embedding = size.vocabulary * size.hidden
    weights = embedding + size.layers * size.layer_parameters
    if shards == 1:
        return (weights + tokens * size.layers * size.cache_values) * dtype.itemsize
    return (weights // shards + max(embedding, size.layer_parameters)) * dtype.itemsize


def need(model: Any, settings: Train, target_head: torch.Tensor, tokens: int, compute: torch.dtype, shards: int = 1, live: int = 0) -> Need:
    """Of one optimizer step.

    Args:
        tokens: positions of a forward, padding included.
        compute: dtype of the matrix products.
        shards: processes over which weights, gradients and moments are spread.
        live: ``live_need``.
    """
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    own = sum(p.numel() * p.element_size() for p in model.parameters())
    copies = 4 * trained * (settings.ema_decay > 0) + own * (settings.tokens.keep < 1)
    weights = (own + copies) // shards + target_head.numel() * target_head.element_size()
    size = size_of(model.config.to_dict())
    assert size is not None  # of all families that are trained
    kept = size.kept_numbers(settings.gradient_checkpointing)
    return Need(weights, 3 * 4 * trained // shards, tokens * kept * compute.itemsize, live)


def there(device: torch.device) -> int:
    """Bytes of the device, or of this process's share of what the machine, or a limit set to it, allows."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return int(memory_gib() * 2**30) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def check_memory(found: Need, settings: Train, tokens: int, device: torch.device) -> None:
    """Refuse a step that cannot fit.

    Raises:
        DraftstillError: with the estimate's parts and what to lower.
    """
    has = there(device)
    if found.total <= has:
        return
    gib = lambda count: f"{count / 2**30:,.1f} GiB"  # noqa: E731
    parts = f"weights {gib(found.weights)}, gradients and moments {gib(found.training)}, activations of {tokens:,} positions {gib(found.activations)}"
    if found.live:
        parts += f", the live target {gib(found.live)}"
    problem = f"a step needs at least {gib(found.total)} ({parts}); there are {gib(has)}"
    fixed = found.total - found.activations
    if fixed > has >= fixed - found.live:
        raise DraftstillError(problem, key="record.mode", value="live",
                              mend="record.mode: topk or hidden keeps the target out of the training; "
                              + ("more processes hold less of it each" if settings.live == "shard" else
                                 "in a launch of several processes train.live: shard divides it"))  # fmt: skip
    if fixed > has:
        raise DraftstillError(
            problem, key="draft", mend="take a smaller draft, train adapters (train.lora), or shard it over several devices"
        )
    mend = "lower it and raise train.gradient_accumulation_steps by as much"
    if not settings.gradient_checkpointing:
        mend += "; train.gradient_checkpointing: true keeps less"
    raise DraftstillError(problem, key="train.per_device_train_batch_size", value=settings.per_device_train_batch_size, mend=mend)
