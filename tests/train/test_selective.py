"""Selective distillation: what the untrained draft loses is that of the very batch, however often its texts were seen before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from draftstill.train.launch import train
from draftstill.train.loop import Job
from draftstill.train.module import DistilledDraft
from draftstill.train.step import _batches
from tests.pipeline import borrowed, opened
from tests.train.jobs import RECORDED, Stop, facts_of, job_of, stop_at

KEYS: dict[str, Any] = {"max_steps": 18, "eval_steps": 9, "save_steps": 2, "tokens": {"keep": 0.5}}


def references(job: Job, step: int) -> list[torch.Tensor]:
    job.step = step
    return [batch.reference_N for batch in _batches(job, job.sequences(step)) if batch.reference_N is not None]


@pytest.mark.parametrize("extra", [{}, {"packing": True}, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}])
def test_a_job_that_begins_late_sees_the_same_bits(extra: dict[str, Any], tmp_path: Path) -> None:
    """In a later epoch a text has other neighbours than in the first, and so another padding."""
    early, late = (job_of(borrowed(tmp_path / n, *RECORDED, train={**KEYS, **extra})) for n in ("early", "late"))
    per_epoch = len(early.kept) // early.per_step
    assert 3 * per_epoch < KEYS["max_steps"]
    for step in range(3 * per_epoch):
        seen = references(early, step)
    again = references(late, 3 * per_epoch - 1)
    assert len(seen) == len(again) == early.accumulate and all(torch.equal(a, b) for a, b in zip(seen, again, strict=True))


def test_it_is_a_pass_for_each_batch_and_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, passes, real = job_of(borrowed(tmp_path, *RECORDED, train=KEYS)), [0], DistilledDraft.losses

    def losses(self: DistilledDraft, batch: Any) -> torch.Tensor:
        passes[0] += 1
        return real(self, batch)

    monkeypatch.setattr(DistilledDraft, "losses", losses)
    before = set(vars(job))
    for step in range(12):
        references(job, step)
    assert passes == [12] and set(vars(job)) == before
    assert not any(isinstance(v, dict) and any(isinstance(t, torch.Tensor) for t in v.values()) for v in vars(job).values())


def test_a_restart_in_a_later_epoch_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    once = facts_of(train(*opened(borrowed(tmp_path / "once", *RECORDED, train=KEYS))))
    path = borrowed(tmp_path / "twice", *RECORDED, train=KEYS)
    with monkeypatch.context() as patch, pytest.raises(Stop):
        stop_at(patch, Job, "_optimize", 13, after=True)
        train(*opened(path))
    twice = facts_of(train(*opened(path)))
    assert once["weights_sha256"] == twice["weights_sha256"] and once["curve"] == twice["curve"]
