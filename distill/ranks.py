"""The processes of one launch: who makes what, and where they wait for each other. Pieces are shared out by number."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

_PATIENCE = timedelta(days=2)
"""The main process may prepare a corpus, and one rank a last shard, while the others wait."""


def _alone() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among ``world``; process 0 is the main one."""

    rank: int = 0
    world: int = 1
    wait: Callable[[], None] = _alone
    """Returns once every process has come here."""

    @property
    def main(self) -> bool:
        return self.rank == 0

    def mine(self, number: int) -> bool:
        """Whether this process makes piece ``number``."""
        return number % self.world == self.rank


def ranks(device: str = "cpu") -> Ranks:
    """The launch that this process belongs to: RANK and WORLD_SIZE, as accelerate and torchrun set them."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return Ranks()
    from accelerate import PartialState

    state = PartialState(cpu=device == "cpu", timeout=_PATIENCE)
    return Ranks(state.process_index, state.num_processes, state.wait_for_everyone)


def leave() -> None:
    """End this process's part in its launch, if it has one."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from accelerate import PartialState

        PartialState().destroy_process_group()
