"""Making a run's stages in their order, each or what is left of it. Part of the front door (top layer)."""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftstill.recipe import Recipe
    from draftstill.runfolder import RunFolder, Stage

TITLES = {
    "corpus": ("prepare", "read the documents, group near-duplicates, split off the held-out ones"),
    "adapted": ("adapt", "the target is tuned on the documents and merged"),
    "responses": ("respond", "the target continues prompts cut from the documents"),
    "recording": ("record", "what the draft will learn from goes to disk"),
    "draft": ("train", "the draft learns from it"),
    "score": ("evaluate", "every candidate draft is decoded beside plain decoding"),
    "published": ("publish", "a folder that others can load"),
}
"""Kind of stage: the word for making it, and what happens."""

MAKERS: dict[str, tuple[str, str]] = {
    "corpus": ("corpus", "prepare_corpus"),
    "adapted": ("train", "adapt"),
    "responses": ("distill", "respond"),
    "recording": ("distill", "record"),
    "draft": ("train", "train"),
    "score": ("evaluate", "score"),
    "published": ("evaluate", "publish"),
}
"""Kind of stage: where the function lives that makes it, going on where an earlier attempt stopped. Imported when its turn comes."""


def open_run(recipe_path: Path, overrides: list[str] | None, set_aside: bool = False) -> tuple[Recipe, RunFolder]:
    """The recipe with its overrides, and its run folder."""
    from draftstill.recipe_io import load_recipe
    from draftstill.runfolder import RunFolder

    recipe = load_recipe(recipe_path, overrides or ())
    return recipe, RunFolder(recipe.run_dir, set_aside=set_aside)


def face(folder: str, name: str) -> Callable[..., Any]:
    """A function of a folder, imported when its turn comes."""
    found: Callable[..., Any] = getattr(importlib.import_module(f"draftstill.{folder}"), name)
    return found


def refuse_early(stages: list[Stage], run: RunFolder) -> None:
    """Refuse a folder of another recipe before hours of work, not when its turn comes."""
    from draftstill.plan import state

    for stage in stages if not run.set_aside else []:
        if state(stage) == "made by another recipe":
            _ = stage.done  # raises, and names the keys that differ
            stage.begin()


def through(last: str, recipe: Recipe, run: RunFolder) -> None:
    """Make or reuse every stage up to ``last``, saying which. The caller holds the run folder's lock."""
    from draftstill.progress import say
    from draftstill.runfolder import read_json
    from draftstill.stages import kind_of, stages

    found = stages(recipe, run)
    kinds = list(dict.fromkeys(kind_of(name) for name in found))
    kinds = kinds[: kinds.index(last) + 1]
    of = lambda kind: [stage for name, stage in found.items() if kind_of(name) == kind]  # noqa: E731 - one, of drafts several
    refuse_early([stage for kind in kinds for stage in of(kind)], run)
    if any(not stage.done for kind in kinds if kind in ("adapted", "responses", "recording", "draft") for stage in of(kind)):
        face("train", "preflight_all")(recipe, here="draft" in kinds)
    for number, kind in enumerate(kinds, 1):
        verb, meaning = TITLES[kind]
        group = of(kind)
        made = [stage for stage in group if stage.done]
        names = ", ".join(stage.name for stage in made)
        if len(made) == len(group) or (kind == "draft" and kind != last and made and found["score"].done and failed(group)):
            say(f"[{number}/{len(kinds)}] {names}: reused (made {read_json(made[-1].folder / 'provenance.json')['finished']})")
            if kind == "score":
                under_load(recipe, run)
            continue
        say(f"[{number}/{len(kinds)}] {verb}: {'goes on where it stopped; ' if any(s.begun for s in group) else ''}{meaning}")
        options = {"push": False, "dry_run": False} if kind == "published" else {}
        face(*MAKERS[kind])(recipe, run, **options)
        if kind == "score":
            under_load(recipe, run)
            if recipe.train.report_to:
                face("evaluate", "track_score")(recipe, run)
        if kind == "draft":
            found = stages(recipe, run)  # the score is made of the drafts that could be made


def under_load(recipe: Recipe, run: RunFolder) -> None:
    """Measure the finished score under load where the recipe asks for that, or what is left of it: it is made beside the score, not within."""
    if recipe.evaluate.batches != (1,):
        face("evaluate", "measure_load")(recipe, run)


def failed(drafts: list[Stage]) -> bool:
    """Whether every draft that is missing failed. Where the others are scored, only `train` tries those again."""
    from draftstill.stages import failure

    return all(stage.done or failure(stage) for stage in drafts)


def make(last: str, then: str | None, recipe_path: Path, overrides: list[str] | None, set_aside: bool) -> tuple[Recipe, RunFolder]:
    """What a verb does: make everything up to ``last``, and say what was made and what comes after it."""
    recipe, run = open_run(recipe_path, overrides, set_aside)
    with run.lock():
        through(last, recipe, run)
    from draftstill.stages import failure, kind_of, stages

    print()
    for name, stage in stages(recipe, run).items():
        if kind_of(name) == last and stage.folder.exists():
            print(f"made  {stage.folder}")
        elif (why := failure(stage)) is not None:
            print(f"not made  {name}: {why.splitlines()[0]}")
    if then:
        print(f"next  {shlex.join(['draftstill', then, str(recipe_path), *(overrides or [])])}")
    return recipe, run
