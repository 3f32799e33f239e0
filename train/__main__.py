"""``accelerate launch -m draftstill.train RECIPE [section.key=value ...] [--set-aside]``.

One process does the same as ``draftstill train RECIPE``.
"""

from __future__ import annotations

import contextlib
import os
import sys

from draftstill.guard import guarded, prepare_environment
from draftstill.launching import read_arguments


def main() -> None:
    recipe, run, set_aside = read_arguments("draftstill.train")
    from draftstill.train.launch import set_others_aside, train

    with run.lock() if os.environ.get("RANK", "0") == "0" else contextlib.nullcontext():
        if set_aside:
            set_others_aside(recipe, run)
        train(recipe, run)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from accelerate import PartialState

        PartialState().destroy_process_group()


if __name__ == "__main__":
    prepare_environment()
    sys.exit(guarded(main))
