"""``accelerate launch -m draftstill.distill RECIPE [section.key=value ...] [--set-aside]``: responses and recording by every process."""

from __future__ import annotations

import contextlib
import os
import sys

from draftstill.guard import guarded, prepare_environment
from draftstill.launching import make_way, read_arguments
from draftstill.stages import resolved_device


def main() -> None:
    recipe, run, set_aside = read_arguments("draftstill.distill")
    from draftstill.distill import record
    from draftstill.distill.ranks import leave, ranks

    with run.lock() if os.environ.get("RANK", "0") == "0" else contextlib.nullcontext():
        if set_aside:
            here = ranks(resolved_device(recipe))
            if here.main:
                make_way(recipe, run, "recording")
            here.wait()
        record(recipe, run)
    leave()


if __name__ == "__main__":
    prepare_environment()
    sys.exit(guarded(main))
