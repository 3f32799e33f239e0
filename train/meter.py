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


class Meter:
    """Of one process. What is neither ``compute_share`` nor ``data_share`` of the time went into measurements and checkpoints."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stepping, self.reading = Watch(), Watch()
        """Optimizer steps, and the part of them that waits for batches."""
        self._before = (time.perf_counter(), 0.0, 0.0)

    def read(self) -> dict[str, float]:
        """Shares of the time since the last reading, and the most memory used so far, in GiB."""
        now = (time.perf_counter(), self.stepping.seconds, self.reading.seconds)
        spent, stepped, read = (b - a for a, b in zip(self._before, now, strict=True))
        self._before = now
        spent = max(spent, 1e-9)
        return {
            "train/compute_share": (stepped - read) / spent,
            "train/data_share": read / spent,
            "train/memory_peak_gib": peak(self.device),
        }


def peak(device: torch.device) -> float:
    """Most memory used so far, GiB: allocated on a GPU, else resident of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # Linux counts KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
