"""What this machine is and can do, without importing torch."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import time
from pathlib import Path
from typing import Any

_CGROUP, _CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Feature flags from /proc/cpuinfo (empty where there is none)."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return frozenset(line.split(":", 1)[1].split())
    except OSError:
        pass
    return frozenset()


def cpu_has_bf16() -> bool:
    """Whether the CPU multiplies bfloat16 in hardware. Elsewhere bfloat16 is emulated and slower than float32."""
    return bool({"amx_bf16", "avx512_bf16"} & cpu_flags())


def cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_gib() -> float:
    """Memory that this process may fill: the machine's, or what a container or a scheduler allows of it."""
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_memory_limits()]) / 2**30


def _memory_limits() -> list[int]:
    """Bytes that the own control group and those above it allow, where they set a limit (version 1 writes "none" as nearly 2^63).

    In a container the own group may be what is mounted as the root, under a path that only the host knows: what is not there is passed over.
    """
    found: list[int] = []
    with contextlib.suppress(OSError, ValueError):  # no such file, or a line of another form
        for line in _CGROUP.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            root, name = (_CGROUPS / "memory", "memory.limit_in_bytes") if controllers else (_CGROUPS, "memory.max")
            group = root / path.lstrip("/")
            for folder in (group, *group.parents):
                if folder.is_relative_to(root):
                    with contextlib.suppress(OSError, ValueError):  # "max"
                        found.append(int((folder / name).read_text()))
    return found


def describe_machine() -> dict[str, Any]:
    """For provenance and the report's conditions."""
    names = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")
    return {
        "cpu": cpu_model(),
        "cores": cores(),
        "memory_gib": round(memory_gib(), 1),
        "cpu_flags": [n for n in names if n in cpu_flags()],
        "system": f"{platform.system()} {platform.machine()}",
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
    }


class LoadWatch:
    """CPU time that *other* processes took while we measured.

    A neighbour slows OpenMP's spinning threads many times over, so a timing beside one says nothing.
    """

    def __init__(self) -> None:
        self.start = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float]:
        busy = 0.0
        try:
            fields = [int(x) for x in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
            busy = (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError, IndexError):
            pass
        own = os.times()
        return time.monotonic(), busy, own.user + own.system

    def other_cores(self) -> float:
        """Mean number of cores that others kept busy since the start (0 where /proc/stat is missing)."""
        now = self._now()
        elapsed = max(now[0] - self.start[0], 1e-9)
        return max(0.0, ((now[1] - self.start[1]) - (now[2] - self.start[2])) / elapsed)
