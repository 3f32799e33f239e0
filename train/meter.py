"""How a training spends its time and memory, between two log lines."""

from __future__ import annotations

import resource
import sys
import time

import torch


class Watch:
    """Adds up the seconds spent inside ``with``."""

    def __init__(self) -> None:
        self.seconds, self._since = 0.0, 0.0

    def __enter__(self) -> None:
        self._since = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._since

    def settle(self) -> None:
        """Add up what is still under way."""


class DeviceWatch(Watch):
    """The same of work that a GPU does behind what asked for it, by events on its stream, so that nobody waits to know."""

    def __init__(self) -> None:
        super().__init__()
        self._begun = torch.cuda.Event(enable_timing=True)
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __enter__(self) -> None:
        self._begun = torch.cuda.Event(enable_timing=True)
        self._begun.record()

    def __exit__(self, *_: object) -> None:
        ended = torch.cuda.Event(enable_timing=True)
        ended.record()
        self._spans.append((self._begun, ended))

    def settle(self) -> None:
        for begun, ended in self._spans:
            ended.synchronize()
            self.seconds += begun.elapsed_time(ended) / 1000
        self._spans.clear()


class Meter:
    """Of one process. What is no share of ``read`` went into measurements and checkpoints."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stepping, self.reading = Watch(), Watch()
        """Optimizer steps, and the part of them that waits for batches."""
        self.scoring: Watch = DeviceWatch() if device.type == "cuda" else Watch()
        """The part of the steps in which a live target scores texts."""
        self._before = (time.perf_counter(), 0.0, 0.0, 0.0)

    def read(self) -> dict[str, float]:
        """Shares of the time since the last reading, and the most memory used so far, in GiB."""
        self.scoring.settle()
        now = (time.perf_counter(), self.stepping.seconds, self.reading.seconds, self.scoring.seconds)
        spent, stepped, read, scored = (b - a for a, b in zip(self._before, now, strict=True))
        self._before = now
        spent = max(spent, 1e-9)
        return {
            # A GPU scores while the host reads the next batch: there the two are not parts of one whole.
            "train/compute_share": (stepped - read - (0.0 if isinstance(self.scoring, DeviceWatch) else scored)) / spent,
            "train/data_share": read / spent,
            **({"train/target_share": scored / spent} if self.scoring.seconds else {}),
            "train/memory_peak_gib": peak(self.device),
        }


def peak(device: torch.device) -> float:
    """Most memory used so far, GiB: allocated on a GPU, else resident of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # Linux counts KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
