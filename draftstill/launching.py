"""What ``accelerate launch -m draftstill.distill`` and ``-m draftstill.train`` have in common: their arguments, and stages that make way."""

from __future__ import annotations

import sys

from draftstill.errors import DraftstillError
from draftstill.recipe import Recipe
from draftstill.recipe_io import load_recipe
from draftstill.runfolder import RunFolder
from draftstill.stages import kind_of, stages

_SET_ASIDE = "--set-aside"


def read_arguments(module: str) -> tuple[Recipe, RunFolder, bool]:
    """The recipe with its overrides, its run folder, and whether ``--set-aside`` was given.

    The run folder is not told of it: every process of the launch would move the same stage. One of them lets stages ``make_way``.
    """
    arguments = [a for a in sys.argv[1:] if a != _SET_ASIDE]
    if not arguments or arguments[0].startswith("-"):
        raise DraftstillError("no recipe was named", mend=f"accelerate launch -m {module} RECIPE [section.key=value ...] [{_SET_ASIDE}]")
    recipe = load_recipe(arguments[0], arguments[1:])
    return recipe, RunFolder(recipe.run_dir), _SET_ASIDE in sys.argv[1:]


def make_way(recipe: Recipe, run: RunFolder, last: str) -> None:
    """Move every stage aside that another recipe made, up to those of the kind ``last``."""
    found = stages(recipe, RunFolder(run.path, set_aside=True))
    kinds = [kind_of(name) for name in found]
    for stage, kind in zip(found.values(), kinds, strict=True):
        if kinds.index(kind) <= kinds.index(last):
            stage.make_way()
