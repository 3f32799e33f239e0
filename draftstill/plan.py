"""What a run will do, reuse and need, said before it starts. Imports no torch and asks no network.

Part of the front door (top layer). Every size is an estimate made from the recipe and, where it lies on this machine, the target's
configuration; the constants behind the estimates stand together below.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from draftstill.machine import cores, cpu_has_bf16, cpu_model, memory_gib
from draftstill.progress import duration
from draftstill.recipe import Draft, Recipe, Source
from draftstill.recipe_io import recipe_reference
from draftstill.runfolder import RunFolder, Stage, hash_file, read_json
from draftstill.stages import resolved_device, resolved_dtype, stages, trains_in_bf16

State = Literal["reused", "goes on", "will run", "made by another recipe"]

# Constants of the estimates.
POSITION_BYTES = 4  # per recorded position: token id
LAW_BYTES = 9  # beside the kept ids of a topk position: their count, tail mass, log-normaliser
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
TRAINING_BYTES = 16  # a trained parameter: float32 weight, gradient, two AdamW moments
CHECKPOINT_BYTES = 12  # float32 weight and two moments
EXPORT_BYTES = 4  # a published parameter, at most
RUNTIME_GIB = 1.5  # Python, torch and its work space

BREAK_EVEN_C = (0.05, 0.1, 0.2, 0.3)
BREAK_EVEN_ALPHA = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def state(stage: Stage) -> State:
    """What a run would do with this stage. Looks only: ``Stage.done`` would move a folder aside under --set-aside."""
    record, now = stage.folder / "provenance.json", "reused"
    if not record.exists():
        record, now = stage.work / "stage.json", "goes on"
    if not record.exists():
        return "will run"
    same = read_json(record).get("fingerprint") == stage.fingerprint
    if not same and now == "goes on" and not stage.worked:
        return "will run"
    return "made by another recipe" if not same else "reused" if now == "reused" else "goes on"


@dataclass(frozen=True)
class Size:
    """The numbers of a decoder-only target that estimates need."""

    layers: int
    hidden: int
    vocabulary: int
    layer_parameters: int
    head_parameters: int
    """Embedding and output head; one matrix where they are tied."""
    cache_values: int
    """Key and value numbers per token and layer."""

    def parameters(self, layers: int | None = None) -> int:
        return self.head_parameters + self.layer_parameters * (self.layers if layers is None else layers)


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
    return cache_dir() / "gguf" / f"{hash_file(ggufs[0])}-v{CONVERTER}" / "config.json" if len(ggufs) == 1 and ggufs[0].is_file() else None


def size_of(config: dict[str, Any] | None) -> Size | None:
    """Size of a gated-MLP transformer from its configuration; None where the needed keys are missing."""
    if config is None:
        return None
    config = {**config, **config.get("text_config", {})} if isinstance(config.get("text_config"), dict) else config
    try:
        layers, hidden, vocabulary = (int(config[k]) for k in ("num_hidden_layers", "hidden_size", "vocab_size"))
        heads, inner = int(config["num_attention_heads"]), int(config["intermediate_size"])
    except (KeyError, TypeError, ValueError):
        return None
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head = int(config.get("head_dim") or hidden // heads)
    attention = 2 * hidden * heads * head + 2 * hidden * kv_heads * head
    matrices = 1 if config.get("tie_word_embeddings", False) else 2
    return Size(layers, hidden, vocabulary, attention + 3 * hidden * inner, matrices * vocabulary * hidden, 2 * kv_heads * head)


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
    draft_parameters: int | None


def estimate(recipe: Recipe, target: Size | None, draft: Size | None) -> Estimates:
    """Upper estimates of tokens, disk and memory from the recipe and the models' sizes."""
    rows = recipe.respond.prompts + recipe.respond.heldout_prompts
    length = recipe.respond.prompt_tokens + recipe.respond.max_new_tokens
    responses = rows * recipe.respond.max_new_tokens
    extra = (recipe.record.rollouts + recipe.record.replays) * length
    # What a chat template wrote is not learnt from; of a base model's prompts every position is.
    learnt = recipe.respond.max_new_tokens if recipe.respond.chat_template else length
    recorded = (
        recipe.respond.prompts * learnt
        + recipe.respond.heldout_prompts * recipe.respond.max_new_tokens
        + recipe.record.document_tokens
        + extra
    )
    scored = rows * length + recipe.record.document_tokens + extra
    pieces = math.ceil(recipe.record.document_tokens / recipe.record.sequence_length)
    sequences = recipe.respond.prompts * math.ceil(length / recipe.record.sequence_length) + pieces
    per_step = recipe.train.per_device_train_batch_size * recipe.train.gradient_accumulation_steps
    steps = (
        recipe.train.max_steps if recipe.train.max_steps > 0 else math.ceil(recipe.train.num_train_epochs * math.ceil(sequences / per_step))
    )

    recording = _recording_bytes(recipe, target, scored - recipe.respond.heldout_prompts * length, recipe.respond.heldout_prompts * length)
    pruned = target.parameters(len(recipe.draft.layers)) if target else None
    named = draft.parameters() if draft else None
    drafted = pruned if recipe.draft.source == "prune" else named

    disk = memory = None
    width = DTYPE_BYTES[resolved_dtype(recipe)]
    if target is not None and recording is not None and drafted is not None:
        checkpoints = drafted * CHECKPOINT_BYTES * (recipe.train.save_total_limit + 1)
        disk = recording + target.parameters() * width + checkpoints + 2 * drafted * EXPORT_BYTES
        cache = recipe.respond.batch_size * length * target.layers * target.cache_values * width
        logits = max(recipe.respond.batch_size, recipe.record.batch_size * recipe.record.sequence_length) * target.vocabulary * 4
        asking = target.parameters() * width + max(cache, logits)
        # One micro-batch's float32 logits: the largest single thing when the head is not chunked.
        logits_in_training = 4.0 * recipe.train.per_device_train_batch_size * recipe.record.sequence_length * target.vocabulary
        training = drafted * TRAINING_BYTES + logits_in_training
        memory = max(asking, training) + RUNTIME_GIB * 2**30
    return Estimates(responses, recorded, scored, steps, recording, disk, memory, drafted)


def _recording_bytes(recipe: Recipe, target: Size | None, train: int, heldout: int) -> float | None:
    """Of ``train`` positions in the recipe's mode (``auto``: the larger of both) and ``heldout`` hidden states; None where the target's
    size is needed and unknown."""
    r, own = recipe.record, DTYPE_BYTES[resolved_dtype(recipe)]
    id_bytes = 2 if target is not None and target.vocabulary <= 1 << 16 else 3
    topk = POSITION_BYTES + LAW_BYTES + r.top_k * (id_bytes + r.logp_bits // 8)
    if target is None:
        return float(train * topk) if r.mode == "topk" else None
    states = lambda width: POSITION_BYTES + target.hidden * width  # noqa: E731
    hidden = states({None: own, 8: 1.125, 16: 2}[r.hidden_bits])
    each = {"topk": topk, "hidden": hidden, "auto": max(topk, hidden)}[r.mode]
    return float(train * each + heldout * states(own))


def free_bytes(path: Path) -> int:
    """Free space where ``path`` lies or will lie."""
    path = path.expanduser().resolve()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def problems(recipe: Recipe) -> list[str]:
    """What would stop this run, as far as it can be seen without starting it."""
    found = []
    for key, source, sha256 in (
        ("corpus", recipe.corpus.source, recipe.corpus.sha256),
        ("target", recipe.target.source, recipe.target.sha256),
        ("draft", recipe.draft.source, recipe.draft.sha256),
    ):
        if source.startswith("wheel:") and sha256 is None:
            found.append(f"{key}.sha256: missing; a wheel needs its hash")
        elif source.lower().endswith(".gguf") and not Path(source).expanduser().is_file():
            found.append(f"{key}.source: there is no file {source!r}")
    corpus = recipe.corpus.source
    if not corpus.startswith("wheel:") and not Path(corpus).expanduser().exists():
        found.append(f"corpus.source: there is no file or folder {corpus!r}")
    elif Path(recipe.run_dir).resolve().is_relative_to(Path(corpus).expanduser().resolve()):
        found.append("run_dir: lies inside the corpus folder, which would make its own results part of the text; give another")
    need = estimate(recipe, *_sizes(recipe))
    free = free_bytes(Path(recipe.run_dir))
    if (disk := need.disk_bytes or need.recording_bytes or 0) > free:
        found.append(f"run_dir: needs about {_bytes(disk)} and the disk has {_bytes(free)} free; free some or give another run_dir")
    memory = memory_gib() * 2**30
    if resolved_device(recipe) == "cpu" and need.memory_bytes and need.memory_bytes > memory:
        found.append(f"memory: needs about {_bytes(need.memory_bytes)} and this machine has {_bytes(memory)}; lower the batch sizes")
    return found


def _sizes(recipe: Recipe) -> tuple[Size | None, Size | None]:
    """Of the target and of a draft that is not pruned from it."""
    return size_of(local_config(recipe.target)), None if recipe.draft.source == "prune" else size_of(local_config(recipe.draft))


def plan(recipe: Recipe, run: RunFolder) -> str:
    """The whole plan as text."""
    target, draft = _sizes(recipe)
    need = estimate(recipe, target, draft)
    parts = [_key_facts(recipe, run, target, need), _machine(recipe), _stages(recipe, run), _needs(need)]
    parts.append(_break_even(recipe, target, need))
    stopping = problems(recipe)
    if stopping:
        parts.append("problems that would stop the run\n" + "\n".join(f"  {p}" for p in stopping))
    return "\n\n".join(parts)


def _key_facts(recipe: Recipe, run: RunFolder, target: Size | None, need: Estimates) -> str:
    e, s, loss = recipe.evaluate, recipe.respond.sampler, recipe.train.loss
    if target is None:
        size = "size unknown until downloaded"
    else:
        size = f"{_count(target.parameters())} parameters, {target.layers} layers, vocabulary {target.vocabulary:,}"
    kept = ", ".join(map(str, recipe.draft.layers))
    built = f"pruned from the target: layers {kept}" if recipe.draft.source == "prune" else recipe.draft.source
    if need.draft_parameters:
        built += f" (about {_count(need.draft_parameters)} parameters)"
    r = recipe.record
    until = "" if r.kept_mass == 1 else f" or {r.kept_mass:g} of the mass"
    topk = f"topk, K = {r.top_k}{until}, {r.logp_bits}-bit"
    mode = {"topk": topk, "hidden": "hidden states", "auto": f"{topk}, or hidden states where the pilot's tail reaches {r.auto_tail:g}"}[
        r.mode
    ]
    rows = [
        ("run folder", str(run.path)),
        ("target", f"{recipe.target.source} ({size})"),
        ("draft", built),
        ("corpus", recipe.corpus.source),
        ("sampler", f"temperature {s.temperature:g}, top_k {s.top_k or 'all'}, top_p {s.top_p:g}"),
        ("recording", mode),
        (
            "loss",
            f"{loss.label}, temperature {loss.temperature or recipe.record.temperature:g}; learning rate {recipe.train.learning_rate:g}",
        ),
        ("score", f"{', '.join(e.candidates)} at temperature {', '.join(f'{t:g}' for t in e.temperatures)}, gamma {e.gamma}"),
        ("seed", str(recipe.seed)),
    ]
    return "\n".join(f"{name:<12}{value}" for name, value in rows)


def _machine(recipe: Recipe) -> str:
    device, dtype = resolved_device(recipe), resolved_dtype(recipe)
    bf16 = (
        "multiplies bfloat16 in hardware" if cpu_has_bf16() else "no bfloat16 in hardware: float32, and verifying several tokens costs more"
    )
    where = (
        f"device {device}, target in {dtype}, training in {'bfloat16 (float32 master weights)' if trains_in_bf16(recipe) else 'float32'}"
    )
    free = free_bytes(Path(recipe.run_dir))
    return (
        f"this machine\n  {cpu_model()}, {cores()} cores, {memory_gib():.1f} GiB memory, {_bytes(free)} free for the run folder\n"
        f"  CPU: {bf16}\n  {where}"
    )


def _stages(recipe: Recipe, run: RunFolder) -> str:
    lines = ["stages"]
    foreign = False
    for name, stage in stages(recipe, run).items():
        now = state(stage)
        note = ""
        if now == "reused":
            made = read_json(stage.folder / "provenance.json")
            note = f"  (made {made.get('finished', '?')}, took {duration(made.get('seconds', 0))})"
        foreign |= now == "made by another recipe"
        lines.append(f"  {name:<12}{now}{note}")
    if foreign:
        lines.append("  Nothing is overwritten: give another run_dir, or add --set-aside to keep the old stage beside the new one.")
    return "\n".join(lines)


def _needs(need: Estimates) -> str:
    known: Callable[[float | None], str] = lambda b: "unknown until the models are downloaded" if b is None else f"about {_bytes(b)}"  # noqa: E731
    rows = [
        ("tokens", f"{need.response_tokens:,} responded, {need.scored_tokens:,} scored, {need.recorded_tokens:,} recorded (at most)"),
        ("steps", f"{need.train_steps:,} optimizer steps on one device"),
        ("recording", known(need.recording_bytes)),
        ("disk", known(need.disk_bytes)),
        ("memory", known(need.memory_bytes)),
    ]
    return "needs (estimates, on the high side)\n" + "\n".join(f"  {name:<12}{value}" for name, value in rows)


def _break_even(recipe: Recipe, target: Size | None, need: Estimates) -> str:
    from draftstill.decode.theory import best_gamma, break_even

    gamma = recipe.evaluate.gamma
    lines = [
        "what acceptance is worth (theory: independent positions, verifying costs one plain step; measured figures come with evaluate)",
        "  c: a draft step over a target step.  cell: best gamma, predicted speed-up.  break-even: the alpha below which it loses.",
        f"  {'c':>5} {f'break-even at gamma {gamma}':>24}" + "".join(f"{f'alpha {a:g}':>12}" for a in BREAK_EVEN_ALPHA),
    ]
    for c in BREAK_EVEN_C:
        even = break_even(gamma, c)
        cells = []
        for alpha in BREAK_EVEN_ALPHA:
            best, speed = best_gamma(alpha, c)
            cells.append(f"{f'{best}: {speed:.2f}x' if best else 'plain':>12}")
        lines.append(f"  {c:>5.2f} {'never wins' if even is None else f'{even:.2f}':>24}" + "".join(cells))
    if target is not None and need.draft_parameters:
        share = need.draft_parameters / target.parameters()
        lines.append(f"  By parameter count this draft's c is near {share:.2f}; fixed costs per step raise it.")
    return "\n".join(lines)


def _bytes(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{max(count / 2**20, 0.1):.1f} MiB"


def _count(parameters: float) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.1f} M"


def reference_page() -> str:
    """docs/recipe.md: every key of the recipe, from the field docstrings."""
    lines = [
        "# Recipe reference",
        "",
        "<!-- Made by `make docs` from draftstill/recipe/; edit the docstrings there. -->",
        "",
        "A recipe is one YAML file that holds a whole run. Unknown keys, repeated keys and wrong types are refused, all at once.",
        "Any value can be replaced on the command line: `draftstill run RECIPE train.learning_rate=2e-4`.",
        "`draftstill recipe show RECIPE` prints the resolved values, `draftstill recipe schema` the JSON schema for editors.",
    ]
    section: str | None = None
    for key, kind, default, meaning in recipe_reference():
        head = key.rpartition(".")[0]
        if head != section:
            section = head
            lines += ["", f"## {head or 'The run'}", "", "| key | type | default | meaning |", "|---|---|---|---|"]
        lines.append("| " + " | ".join((f"`{key}`", _cell(kind), _cell(default), meaning.replace("``", "`").replace("|", "\\|"))) + " |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text if text == "required" else "`" + text.replace("|", "\\|") + "`"
