"""Jobs on the finished run's recording, their gradients, and ways to break a training off."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from draftstill.runfolder import read_json
from draftstill.stages import stages
from draftstill.train.loop import Job
from tests.pipeline import finished, opened

RECORDED = ("corpus", "responses", "recording")
WEIGHED = {"loss": {"mix": {"lk": 0.5, "ce": 0.5}}, "tokens": {"first": 1, "last": 40, "prefix_gamma": 4, "keep": 0.4}}


def job_of(path: Path) -> Job:
    """A job at step 0, on the finished run's recording."""
    recipe, run = opened(path)
    stage = stages(recipe, run)["draft"]
    return Job(recipe, run.path / "recording", stage.begin(), Accelerator(cpu=True))


def moved(path: Path) -> Job:
    """A job whose draft is no longer the untrained one, so that losses have gaps."""
    job = job_of(path)
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in job.module.model.parameters():
            p += 0.02 * torch.randn(p.shape, generator=g)
    return job


def gradients(job: Job, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """What one step hands to its optimizer."""
    found: dict[str, torch.Tensor] = {}

    def keep() -> None:
        found.update({n: p.grad.clone() for n, p in job.module.model.named_parameters() if p.grad is not None})

    monkeypatch.setattr(job.optimizer, "step", keep)
    job._optimize()
    assert found.keys() == {n for n, p in job.module.model.named_parameters() if p.requires_grad}
    return found


def assert_same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor], tolerance: float = 2e-6) -> None:
    for name, a in one.items():
        assert float(a.norm()) > 0, name
        assert float((a - two[name]).norm() / a.norm()) < tolerance, name


class Stop(BaseException):
    """Not an Exception, so that nothing can swallow it on the way."""


def stop_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int, *, after: bool = False) -> None:
    """Break off at the n-th call of a function, before or after it did its work."""
    real, calls = getattr(owner, name), [0]

    def counted(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == call and not after:
            raise Stop
        result = real(*arguments, **options)
        if calls[0] == call:
            raise Stop
        return result

    monkeypatch.setattr(owner, name, counted)


def terminate_at(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """SIGTERM in the midst of the n-th step."""
    real, calls = Job.sequences, [0]

    def counted(job: Job, step: int) -> list[int]:
        calls[0] += 1
        if calls[0] == call:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(job, step)

    monkeypatch.setattr(Job, "sequences", counted)


def facts_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = read_json(folder / "provenance.json")["facts"]
    return found


def reference() -> str:
    """Weights of the finished run's draft."""
    return str(facts_of(finished() / "run" / "draft")["weights_sha256"])
