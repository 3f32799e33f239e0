"""What this machine lets a process have: its memory, or what a container or a scheduler leaves of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftstill import machine

GIB = 2**30
NONE = 2**63 - 4096
"""What version 1 writes for no limit."""
V1 = "12:cpu,cpuacct:/\n4:memory:{}\n1:name=systemd:/init\n0::/"


def limited(root: Path, own: str | None, limits: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> float:
    """Memory in GiB under a tree of control groups; ``own``: the text of /proc/self/cgroup, None where there is none."""
    if own is not None:
        (root / "cgroup").write_text(own + "\n")
    for name, limit in limits.items():
        (root / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "fs" / name).write_text(f"{limit}\n")
    monkeypatch.setattr(machine, "_CGROUP", root / "cgroup")
    monkeypatch.setattr(machine, "_CGROUPS", root / "fs")
    monkeypatch.setattr(machine.os, "sysconf", lambda name: {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 64 * GIB // 4096}[name])
    return machine.memory_gib()


@pytest.mark.parametrize(("own", "limits", "gib"), [
    (None, {"memory.max": GIB}, 64),
    ("0::/", {}, 64),
    ("0::/", {"memory.max": 4 * GIB}, 4),
    ("0::/", {"memory.max": "max"}, 64),
    ("0::/a/b", {"a/b/memory.max": 8 * GIB, "a/memory.max": "max"}, 8),
    ("0::/a/b", {"a/b/memory.max": "max", "a/memory.max": 2 * GIB}, 2),
    ("0::/slurm/job_7/step_0/task_0", {"slurm/job_7/memory.max": 6 * GIB, "slurm/job_7/step_0/memory.max": 5 * GIB}, 5),
    ("0::/a", {"b/memory.max": GIB, "memory.max": 100 * GIB}, 64),
    ("0::/../../other", {"memory.max": 3 * GIB}, 3),
    (V1.format("/docker/7f"), {"memory/docker/7f/memory.limit_in_bytes": 4 * GIB, "memory/memory.limit_in_bytes": NONE}, 4),
    (V1.format("/docker/7f"), {"memory/memory.limit_in_bytes": 4 * GIB}, 4),
    (V1.format("/slurm/uid_0/job_7"), {"memory/slurm/uid_0/memory.limit_in_bytes": NONE, "memory/slurm/uid_0/job_7/memory.limit_in_bytes": 9 * GIB}, 9),
    (V1.format("/"), {"memory/memory.limit_in_bytes": NONE, "memory.max": "max"}, 64),
    ("a line of another form", {"memory.max": GIB}, 64),
])  # fmt: skip
def test_memory_is_what_the_own_group_and_those_above_it_allow(
    own: str | None, limits: dict[str, object], gib: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert limited(tmp_path, own, limits, monkeypatch) == gib


def test_the_trainer_and_the_plan_see_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from draftstill import plan
    from draftstill.train import memory

    limited(tmp_path, "0::/box", {"box/memory.max": 3 * GIB}, monkeypatch)
    assert memory.there(torch.device("cpu")) == 3 * GIB and plan.memory_gib() == 3 and machine.describe_machine()["memory_gib"] == 3.0
