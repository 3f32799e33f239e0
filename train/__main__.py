"""``accelerate launch -m draftstill.train RECIPE [section.key=value ...]``; one process does the same as ``draftstill train RECIPE``."""

from __future__ import annotations

import contextlib
import os
import sys

from draftstill.errors import DraftstillError
from draftstill.guard import guarded, prepare_environment
from draftstill.recipe_io import load_recipe
from draftstill.runfolder import RunFolder


def main() -> None:
    arguments = sys.argv[1:]
    if not arguments or arguments[0].startswith("-"):
        raise DraftstillError("no recipe was named", mend="accelerate launch -m draftstill.train RECIPE [section.key=value ...]")
    recipe = load_recipe(arguments[0], arguments[1:])
    from draftstill.train import train

    run = RunFolder(recipe.run_dir)
    with run.lock() if os.environ.get("RANK", "0") == "0" else contextlib.nullcontext():
        train(recipe, run)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from accelerate import PartialState

        PartialState().destroy_process_group()


if __name__ == "__main__":
    prepare_environment()
    sys.exit(guarded(main))
