"""SIGTERM, as a scheduler or a shutdown sends it: the step is finished and a checkpoint written before the process ends."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator

import torch
from accelerate import Accelerator

EXIT_CODE = 128 + signal.SIGTERM


class Terminated(SystemExit):
    """Asked to end, and everything is saved."""

    def __init__(self) -> None:
        super().__init__(EXIT_CODE)


@contextlib.contextmanager
def termination() -> Iterator[threading.Event]:
    """An event that SIGTERM sets in place of ending the process. Outside the main thread, which alone can take signals, nothing sets it."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = signal.signal(signal.SIGTERM, lambda *_: asked.set())
    try:
        yield asked
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def anywhere(accelerator: Accelerator, told: threading.Event) -> bool:
    """Whether it came to any process of the launch: the same answer for all. Every rank calls it."""
    count = accelerator.reduce(torch.tensor([float(told.is_set())], device=accelerator.device), "sum")
    return float(count) > 0


def terminated(step: int, *, quiet: bool) -> Terminated:
    """Says that the run stops after ``step``."""
    if not quiet:
        print(f"\nstopped by SIGTERM after step {step}, which is saved; the same command goes on there", file=sys.stderr, flush=True)
    return Terminated()
