"""The stages of a run and what decides the content of each. Imports no torch, so ``plan`` can ask what is done.

corpus -> responses -> recording -> draft -> score -> published
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from draftstill.machine import cpu_has_bf16
from draftstill.recipe import Recipe, Source
from draftstill.runfolder import RunFolder, Stage, hash_file

ORDER = ("corpus", "responses", "recording", "draft", "score", "published")

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


def stages(recipe: Recipe, run: RunFolder) -> dict[str, Stage]:
    """All stages of the run by name, each fingerprint covering those before it."""
    corpus = run.stage("corpus", {"format": FORMAT, "seed": recipe.seed, "corpus": recipe.corpus,
                                  "content": content_of(recipe.corpus.source)})  # fmt: skip
    responses = run.stage("responses", {"corpus": corpus.fingerprint, "target": _identity(recipe.target), "respond": recipe.respond,
                                        "dtype": resolved_dtype(recipe), "device": resolved_device(recipe)})  # fmt: skip
    record: dict[str, object] = {"responses": responses.fingerprint, "record": recipe.record.model_dump(mode="json", exclude={"mirror"})}
    if recipe.record.draft:
        record["draft_content"] = content_of(recipe.record.draft.source)
    recording = run.stage("recording", record)
    quiet = {"report_to", "run_name", "logging_steps", "save_steps", "save_total_limit"}
    draft = run.stage("draft", {"recording": recording.fingerprint, "draft": recipe.draft.model_dump(mode="json", exclude={"head_tokens"}),
                                "content": content_of(recipe.draft.source), "train": recipe.train.model_dump(mode="json", exclude=quiet),
                                "bf16": trains_in_bf16(recipe)})  # fmt: skip
    score = run.stage("score", {"draft": draft.fingerprint, "evaluate": recipe.evaluate, "head_tokens": recipe.draft.head_tokens})
    sending = {"repo_id", "private", "pull_request", "tag", "collection"}  # where it goes, not what it is
    published = run.stage("published", {"score": score.fingerprint, "publish": recipe.publish.model_dump(mode="json", exclude=sending)})
    return {s.name: s for s in (corpus, responses, recording, draft, score, published)}
