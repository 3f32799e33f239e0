"""The draft: how one is built, and the job that trains it. Imports torch on use only."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from draftstill.train.build import Draft, build_draft, preflight
    from draftstill.train.heldout import HeldOut, measure
    from draftstill.train.launch import train
    from draftstill.train.loop import Job

_HOME = {
    "Draft": "build",
    "build_draft": "build",
    "preflight": "build",
    "HeldOut": "heldout",
    "measure": "heldout",
    "Job": "loop",
    "train": "launch",
}
__all__ = [*_HOME]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
