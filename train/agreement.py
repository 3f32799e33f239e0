"""The processes of a launch meet a fault together: one that failed alone would go on to the next barrier, and the others wait at theirs for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed

from draftstill.errors import DraftstillError


class EndedElsewhere(DraftstillError):
    """Another process of the launch met what is no candidate's fault, and ends."""


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Around what every process of a launch does by itself: all go on behind it, or none. Nothing inside may wait for the others.

    Raises:
        DraftstillError: another process met one, which it names; EndedElsewhere where that one met anything else.
    """
    try:
        yield
    except Exception as error:
        _met(error)
        raise
    for rank, fault in enumerate(_met(None)):
        if fault is not None:
            kind, problem, about = fault
            raise kind(f"process {rank} of the launch: {problem}", **about)


def _met(error: Exception | None) -> list[tuple[type[DraftstillError], str, dict[str, Any]] | None]:
    """The fault of each process, by rank (None: it has none). Every process calls it."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return []
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, None if error is None else _told(error))
    return found


def _told(error: Exception) -> tuple[type[DraftstillError], str, dict[str, Any]]:
    if isinstance(error, DraftstillError):
        value = error.value if error.value is None or isinstance(error.value, int | float) else str(error.value)
        return DraftstillError, error.problem, {"key": error.key, "value": value, "mend": error.mend}
    return EndedElsewhere, f"{type(error).__name__}: {error}", {}
