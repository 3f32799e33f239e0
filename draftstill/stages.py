"""The stages of a run and what decides the content of each. Imports no torch, so ``plan`` can ask what is done.

corpus -> [adapted ->] responses -> recording -> draft (one or several) -> score -> published
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from draftstill.errors import DraftstillError
from draftstill.machine import cpu_has_bf16
from draftstill.recipe import Recipe, Source, Target
from draftstill.runfolder import RunFolder, Stage, hash_file

FORMAT = 1
"""Version of the files that stages write; raised when older folders can no longer be read."""

_LARGE = 64 << 20


def resolved_device(recipe: Recipe) -> str:
    """``cuda`` or ``cpu``, decided without importing torch."""
    if recipe.device != "auto":
        return recipe.device
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "unset") in ("", "-1")
    return "cuda" if Path("/dev/nvidia0").exists() and not hidden else "cpu"


def resolved_dtype(recipe: Recipe) -> str:
    """The dtype the target runs in: bfloat16 where the hardware multiplies it, else float32."""
    if recipe.target.dtype != "auto":
        return recipe.target.dtype
    return "bfloat16" if resolved_device(recipe) == "cuda" or cpu_has_bf16() else "float32"


def trains_in_bf16(recipe: Recipe) -> bool:
    """Whether training multiplies in bfloat16."""
    if recipe.train.bf16 != "auto":
        return bool(recipe.train.bf16)
    return resolved_device(recipe) == "cuda" or cpu_has_bf16()


def content_of(source: str) -> str | None:
    """A hash that changes when a local file or folder changes; None for anything that is not local.

    Large files count by size and their first and last MiB, so that asking about a 16 GB model stays quick.
    """
    path = Path(source).expanduser()
    if not path.exists():
        return None
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file()):
        size = file.stat().st_size
        digest.update(f"{file.relative_to(path) if path.is_dir() else file.name}\0{size}\0".encode())
        if size <= _LARGE:
            digest.update(hash_file(file).encode())
        else:
            with open(file, "rb") as handle:
                digest.update(handle.read(1 << 20))
                handle.seek(-(1 << 20), os.SEEK_END)
                digest.update(handle.read())
    return digest.hexdigest()


def _identity(source: Source) -> dict[str, object]:
    return {**source.model_dump(mode="json"), "content": content_of(source.source)}


TUNED = "tuned"
"""Name of a recipe's only candidate."""


def served_target(recipe: Recipe) -> Target:
    """The model whose answers count from the responses on: the target as named, or what ``adapt`` makes of it."""
    if recipe.adapt is None:
        return recipe.target
    return Target(source=str(Path(recipe.run_dir) / "adapted" / "model"), dtype=recipe.target.dtype)


def candidate_recipes(recipe: Recipe) -> dict[str, Recipe]:
    """The recipe of each candidate by name, with its own draft and train sections and no further candidates.

    Raises:
        DraftstillError: a candidate's key that the section does not have, or a value it does not take.
    """
    if not recipe.train.candidates:
        return {TUNED: recipe}
    found = {}
    for name, candidate in recipe.train.candidates.items():
        data = recipe.model_dump(mode="python")
        del data["train"]["candidates"]
        for section in ("draft", "train"):
            _merge(data[section], getattr(candidate, section))
        try:
            found[name] = Recipe.model_validate(data, strict=False)
        except ValidationError as error:
            first = error.errors()[0]
            raise DraftstillError(first["msg"], key=".".join(["train.candidates", name, *map(str, first["loc"])]), value=first.get("input"),
                                  mend="docs/recipe.md lists the keys of draft and train") from None  # fmt: skip
    return found


def _merge(into: dict[str, Any], values: dict[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict) and key not in ("mix", "candidates"):
            _merge(into[key], value)
        else:
            into[key] = value


def draft_stage(candidate: str) -> str:
    """The stage of a candidate."""
    return "draft" if candidate == TUNED else f"draft-{candidate}"


def kind_of(stage: str) -> str:
    """What a stage makes: ``draft-wide`` makes a draft."""
    return stage.partition("-")[0]


def stages(recipe: Recipe, run: RunFolder) -> dict[str, Stage]:
    """All stages of the run by name in their order, each fingerprint covering those before it."""
    corpus = run.stage("corpus", {"format": FORMAT, "seed": recipe.seed, "corpus": recipe.corpus,
                                  "content": content_of(recipe.corpus.source)})  # fmt: skip
    target: object = _identity(recipe.target)
    found = [corpus]
    if recipe.adapt is not None:
        adapted = run.stage("adapted", {"corpus": corpus.fingerprint, "target": target, "adapt": recipe.adapt})
        target = {"adapted": adapted.fingerprint}
        found.append(adapted)
    responses = run.stage("responses", {"corpus": corpus.fingerprint, "target": target, "respond": recipe.respond,
                                        "dtype": resolved_dtype(recipe), "device": resolved_device(recipe)})  # fmt: skip
    record: dict[str, object] = {"responses": responses.fingerprint, "record": recipe.record.model_dump(mode="json", exclude={"mirror"})}
    if recipe.record.draft:
        record["draft_content"] = content_of(recipe.record.draft.source)
    recording = run.stage("recording", record)
    drafts = [_draft_stage(own, name, recording, run) for name, own in candidate_recipes(recipe).items()]
    heads: object = recipe.draft.head_tokens
    fingerprints: object = drafts[0].fingerprint
    if recipe.train.candidates:
        fingerprints = [d.fingerprint for d in drafts]
        heads = [own.draft.head_tokens for own in candidate_recipes(recipe).values()]
    score = run.stage("score", {"draft": fingerprints, "evaluate": recipe.evaluate, "head_tokens": heads})
    sending = {"repo_id", "private", "pull_request", "tag", "collection"}  # where it goes, not what it is
    published = run.stage("published", {"score": score.fingerprint, "publish": recipe.publish.model_dump(mode="json", exclude=sending)})
    return {s.name: s for s in (*found, responses, recording, *drafts, score, published)}


def _draft_stage(recipe: Recipe, candidate: str, recording: Stage, run: RunFolder) -> Stage:
    quiet = {"report_to", "run_name", "logging_steps", "save_steps", "save_total_limit", "candidates"}
    return run.stage(draft_stage(candidate), {
        "recording": recording.fingerprint, "draft": recipe.draft.model_dump(mode="json", exclude={"head_tokens"}),
        "content": content_of(recipe.draft.source), "train": recipe.train.model_dump(mode="json", exclude=quiet),
        "bf16": trains_in_bf16(recipe)})  # fmt: skip
