"""The draft: how one is built, and the job that trains it. Imports torch on use only."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from draftstill.train.adapting import adapt
    from draftstill.train.build import Draft, build_draft, preflight
    from draftstill.train.coverage import covered
    from draftstill.train.heldout import HeldOut, measure
    from draftstill.train.launch import preflight_all, train, train_all
    from draftstill.train.loop import Job
    from draftstill.train.trackers import log_summary

_HOME = {
    "adapt": "adapting",
    "Draft": "build",
    "build_draft": "build",
    "preflight": "build",
    "covered": "coverage",
    "HeldOut": "heldout",
    "measure": "heldout",
    "Job": "loop",
    "preflight_all": "launch",
    "train": "launch",
    "train_all": "launch",
    "log_summary": "trackers",
}
__all__ = [*_HOME]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
