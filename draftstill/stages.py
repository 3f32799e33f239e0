"""The stages of a run and what decides the content of each. Imports no torch, so ``plan`` can ask what is done.

corpus -> [adapted ->] responses -> recording -> draft (one or several) -> score -> published
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from draftstill.errors import DraftstillError
from draftstill.hashes import hash_files
from draftstill.machine import cpu_has_bf16
from draftstill.readers import content_files
from draftstill.recipe import Corpus, Recipe, Source, Target
from draftstill.recipe_io import candidate_recipes as several
from draftstill.runfolder import FAILED, RunFolder, Stage, read_json, write_json

FORMAT = 1
"""Version of the files that stages write; raised when older folders can no longer be read."""


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
    """A hash that changes when a local file or folder changes; None for anything that is not local. Of large files it looks at size and ends only."""
    path = Path(source).expanduser()
    if not path.exists():
        return None
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    return hash_files(((str(p.relative_to(path)) if path.is_dir() else p.name, p) for p in files), whole=False)


def text_content_of(corpus: Corpus, *, whole: bool = False) -> str | None:
    """The same of a corpus, by the files that are read: what lies hidden beside them, or is left out, decides nothing.

    Args:
        whole: look at all bytes of large files, too: a log may be edited in the middle.
    """
    files = content_files(corpus)
    return None if files is None else hash_files(files, whole=whole)


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
        RecipeError: a candidate's key that the section does not have, or a value it does not take.
    """
    return several(recipe) if recipe.train.candidates else {TUNED: recipe}


def draft_stage(candidate: str) -> str:
    """The stage of a candidate."""
    return "draft" if candidate == TUNED else f"draft-{candidate}"


def kind_of(stage: str) -> str:
    """What a stage makes: ``draft-wide`` makes a draft."""
    return stage.partition("-")[0]


def note_failure(stage: Stage, error: Exception, traceback: str | None = None) -> None:
    """Write down why a candidate's draft could not be made, so that the others go on without it.

    Args:
        traceback: of an error that is no fault of the recipe's; its problem then begins with its kind, since its words alone may say nothing.
    """
    problem = (str(error) or type(error).__name__) if traceback is None else f"{type(error).__name__}: {error}"
    told = {} if traceback is None else {"traceback": traceback}
    write_json(stage.begin() / FAILED, {"fingerprint": stage.fingerprint, "error": type(error).__name__, "problem": problem, **told})


def failure(stage: Stage) -> str | None:
    """Why the last attempt at this very stage failed; None where it did not, and where the recipe was changed since."""
    path = stage.work / FAILED
    found = read_json(path) if path.exists() else {}
    return str(found["problem"]) if found.get("fingerprint") == stage.fingerprint else None


def published_draft(recipe: Recipe, run: RunFolder) -> tuple[str, Recipe, Stage]:
    """(name, whole recipe, stage) of the candidate that is published: the only one, else the one that the score names.

    Raises:
        DraftstillError: there are several, and none is scored or the score names none.
    """
    found, own = stages(recipe, run), candidate_recipes(recipe)
    name = next(iter(own)) if len(own) == 1 else None
    if name is None and found["score"].done:
        name = read_json(found["score"].folder / "score.json").get("publish")
    if name not in own:
        raise DraftstillError("the recipe has several candidates, and no score says which one to publish", key="train.candidates",
                              value=", ".join(own), mend="run `draftstill evaluate RECIPE` with the tuned draft among evaluate.candidates")  # fmt: skip
    return name, own[name], found[draft_stage(name)]


def stages(recipe: Recipe, run: RunFolder) -> dict[str, Stage]:
    """All stages of the run by name in their order, each fingerprint covering those before it."""
    limits = {"max_rejected", "damaged", "test_sha256"}  # what is refused, not what is made
    corpus = run.stage("corpus", {"format": FORMAT, "seed": recipe.seed, "corpus": recipe.corpus.model_dump(mode="json", exclude=limits),
                                  "content": text_content_of(recipe.corpus, whole=True)})  # fmt: skip
    target: object = _identity(recipe.target)
    found = [corpus]
    if recipe.adapt is not None:
        # Named where it is not a CPU: run folders made there do not know this key.
        device = {} if resolved_device(recipe) == "cpu" else {"device": resolved_device(recipe)}
        adapted = run.stage("adapted", {"corpus": corpus.fingerprint, "target": target, "dtype": resolved_dtype(recipe), **device,
                                        "adapt": recipe.adapt.model_dump(mode="json", exclude={"save_steps"})})  # fmt: skip
        target = {"adapted": adapted.fingerprint}
        found.append(adapted)
    responses = run.stage("responses", {"corpus": corpus.fingerprint, "target": target, "respond": _respond(recipe),
                                        "dtype": resolved_dtype(recipe), "device": resolved_device(recipe)})  # fmt: skip
    record: dict[str, object] = {"responses": responses.fingerprint, "record": _record(recipe)}
    if recipe.record.draft:
        record["draft_content"] = content_of(recipe.record.draft.source)
    recording = run.stage("recording", record)
    drafts = [_draft_stage(own, name, recording, run) for name, own in candidate_recipes(recipe).items()]
    heads: object = recipe.draft.head_tokens
    fingerprints: object = drafts[0].fingerprint
    if recipe.train.candidates:
        there = {name: (own, d) for (name, own), d in zip(candidate_recipes(recipe).items(), drafts, strict=True) if failure(d) is None}
        fingerprints = {name: d.fingerprint for name, (_, d) in there.items()}
        heads = {name: own.draft.head_tokens for name, (own, _) in there.items()}
    scored: dict[str, object] = {"draft": fingerprints, "evaluate": recipe.evaluate.decisive(), "head_tokens": heads}
    if recipe.evaluate.domains:
        scored["domains"] = {name: text_content_of(d) for name, d in recipe.evaluate.domains.items()}
    if recipe.evaluate.stock:
        scored["stock"] = {name: content_of(s.source) for name, s in recipe.evaluate.stock.items()}
    score = run.stage("score", scored)
    sending = {"repo_id", "private", "pull_request", "tag", "collection"}  # where it goes, not what it is
    published = run.stage("published", {"score": score.fingerprint, "publish": recipe.publish.model_dump(mode="json", exclude=sending)})
    return {s.name: s for s in (*found, responses, recording, *drafts, score, published)}


_LATER = ("lora", "phases", "init_from", "packing", "gradient_checkpointing", "ema_decay", "early_stopping_patience", "live")
"""Keys of ``train`` that older run folders do not know. At its default such a key stands for what those did, so it is left out."""


def _training(recipe: Recipe) -> dict[str, Any]:
    """What of the section ``train`` decides the draft's content."""
    quiet = {"report_to", "run_name", "logging_steps", "save_steps", "save_total_limit", "candidates"}
    later = {key for key in _LATER if getattr(recipe.train, key) == type(recipe.train).model_fields[key].default}
    found = recipe.train.model_dump(mode="json", exclude=quiet | later)
    if found["loss"]["switch"] is None:
        del found["loss"]["switch"]
    if recipe.train.init_from is not None:
        found["init_from"] = content_of(recipe.train.init_from) or recipe.train.init_from
    return found


_MANNERS = {"url", "concurrency", "timeout_s", "retries", "api_key_env"}
"""Keys of a server that say where and how it is asked, not what it answers."""


def _respond(recipe: Recipe) -> dict[str, Any]:
    """What decides the responses. Keys that came later count where they are set, so that older run folders stay valid."""
    settings = recipe.respond
    later = {"shares", "chat_tokens", "synthetic", "truncated", "window", "draft", "draft_gamma", "server"}
    unset = {name for name in later if getattr(settings, name) == type(settings).model_fields[name].default}
    found = settings.model_dump(mode="json", exclude=unset)
    if settings.server:
        found["server"] = settings.server.model_dump(mode="json", exclude=_MANNERS)
    if settings.draft:
        found["draft_content"] = content_of(settings.draft.source)
    return found


def _record(recipe: Recipe) -> dict[str, Any]:
    """What decides the recording; see ``_respond``."""
    settings = recipe.record
    found = settings.model_dump(mode="json", exclude={"mirror", "max_refused"} | ({"server"} if settings.server is None else set()))
    if settings.server:
        found["server"] = settings.server.model_dump(mode="json", exclude=_MANNERS)
    return found


def _draft_stage(recipe: Recipe, candidate: str, recording: Stage, run: RunFolder) -> Stage:
    return run.stage(draft_stage(candidate), {
        "recording": recording.fingerprint, "draft": recipe.draft.deciding(),
        "content": content_of(recipe.draft.source) if recipe.draft.existing else None, "train": _training(recipe),
        "bf16": trains_in_bf16(recipe)})  # fmt: skip
