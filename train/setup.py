"""What a job does before its first step: whether recording and draft belong together, adapters, memory, and the optimizer's groups."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import DistributedType

from draftstill.distill import Recording
from draftstill.errors import DraftstillError
from draftstill.recipe import Adapt, Recipe, Train
from draftstill.runfolder import read_json
from draftstill.sources import load_config, load_tokenizer, resolve_model
from draftstill.stages import served_target
from draftstill.train.adapter import check_layers, with_adapter
from draftstill.train.memory import check_memory, live_need, need
from draftstill.vocabulary import real_size, tokenizer_hash

if TYPE_CHECKING:
    from draftstill.train.loop import Job


def check_recording(recipe: Recipe, recording: Recording, heldout: Recording) -> None:
    """Refuse a recording that the draft cannot learn from, by the target's tokenizer and config: its weights are not loaded yet.

    Raises:
        DraftstillError: another vocabulary, another target, or a form that the recipe's training cannot use.
    """
    source = resolve_model(served_target(recipe), "target.source")
    config, tokenizer = load_config(source), load_tokenizer(source)
    vocab, revision = real_size(tokenizer), getattr(config, "_commit_hash", None) or source.revision
    for manifest in (recording.manifest, heldout.manifest):
        if manifest["vocab"] != vocab:
            raise DraftstillError(f"the recording has {manifest['vocab']:,} tokens, the target's vocabulary {vocab:,}", key="target.source",
                                  value=recipe.target.source, mend="record with this recipe's target: draftstill distill RECIPE")  # fmt: skip
        for what, now in (("tokenizer_sha256", tokenizer_hash(tokenizer)), ("revision", revision)):
            if manifest[what] != now:
                raise DraftstillError(f"the target is not the one that was recorded: its {what} was {manifest[what]}, is {now}", key="target.source",
                                      value=recipe.target.source, mend="pin target.revision to the old commit, or record again")  # fmt: skip
    check_head_tokens(recipe, vocab)
    if recipe.train.head_tokens and recording.mode != "topk":
        chosen = " (record.mode: auto chose hidden states)" if recipe.record.mode == "auto" else ""
        raise DraftstillError(f"a trimmed training head needs a top-k recording{chosen}", key="train.head_tokens", value=recipe.train.head_tokens,
                              mend="set record.mode: topk, or train.head_tokens: 0")  # fmt: skip


def templated(recipe: Recipe, responses: Path) -> bool:
    """Whether every recorded text but documents begins with the target's chat template.

    Conversations and invented instructions always do, whatever respond.chat_template says of cut prompts; which kinds there are is among the facts of
    the responses' stage. Where some prompts are cut as they are a sequence does not tell its kind: False, as where the stage is not there any more.
    """
    if recipe.respond.chat_template:
        return True
    told = responses / "provenance.json"
    kinds = read_json(told)["facts"].get("kinds", {}) if told.exists() else {}
    # Without responses to train on, rollouts continue prompts that the stage has not seen.
    return bool(kinds) and "cut" not in kinds and recipe.respond.prompts > 0


def check_head_tokens(recipe: Recipe, vocab: int) -> None:
    """Trimmed heads must be smaller than the whole one."""
    for key, count in (("train.head_tokens", recipe.train.head_tokens), ("draft.head_tokens", recipe.draft.head_tokens)):
        if count >= vocab:
            raise DraftstillError(
                f"as many head tokens as the vocabulary's {vocab:,}, or more", key=key, value=count, mend="0 means the whole head"
            )
    if recipe.train.head_tokens and recipe.record.mode in ("hidden", "live"):  # what ``auto`` chooses is known once it is recorded
        raise DraftstillError("a trimmed training head needs a top-k recording", key="train.head_tokens", value=recipe.train.head_tokens,
                              mend="set record.mode: topk, or train.head_tokens: 0")  # fmt: skip


def attach(model: Any, settings: Train, seed: int) -> Any:
    """Put the recipe's adapters into the model; returns peft's wrapper, or None where all weights are trained.

    Raises:
        DraftstillError: a layer that takes no adapter, such as a head or an embedding tied to it.
    """
    if settings.lora is None:
        return None
    asked = Adapt(**settings.lora.model_dump())
    check_layers(model, asked, "train.lora.target_modules")
    with torch.random.fork_rng(devices=[]):
        wrapper, _, _ = with_adapter(model, asked, seed)
    return wrapper


def checkpoint_layers(model: Any) -> None:
    """Compute the layers' activations again in the backward pass."""
    # transformers 5.24 calls it by this name and warns about the other.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def fits(job: Job) -> None:
    """Refuse a step that cannot fit the device."""
    lengths = sorted((job.recording.length(i) for i in job.kept), reverse=True)[: job.settings.per_device_train_batch_size]
    tokens = lengths[0] * job.settings.per_device_train_batch_size
    if job.settings.packing:  # rows are as short as their sequences; a batch of them is no larger than its longest
        tokens = sum(lengths)
    processes = job.accelerator.num_processes
    sharded = job.accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
    live = 0
    if job.recording.mode == "live":
        config = load_config(resolve_model(served_target(job.recipe), "target.source"))
        padded = lengths[0] * job.settings.per_device_train_batch_size  # the target's rows are never packed
        live = live_need(config, job.target_head.dtype, padded, processes if job.settings.live == "shard" else 1)
    needed = need(job.draft.model, job.settings, job.target_head, tokens, job.compute, processes if sharded else 1, live)
    check_memory(needed, job.settings, tokens, job.accelerator.device)


def groups(module: torch.nn.Module, settings: Train) -> list[dict[str, Any]]:
    """Weight decay on matrices, none on norms and biases."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    return [{"params": [p for p in parameters if p.dim() >= 2], "weight_decay": settings.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}]  # fmt: skip
