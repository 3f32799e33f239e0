"""Stopped anywhere and started again, a training ends the same."""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from draftstill.errors import DraftstillError
from draftstill.runfolder import hash_file, read_json, write_json
from draftstill.train import launch
from draftstill.train.checkpoint import checkpoints
from draftstill.train.launch import train
from draftstill.train.loop import Job
from tests.pipeline import borrowed, command, finished, opened
from tests.train.jobs import RECORDED, WEIGHED, Stop, reference, stop_at, terminate_at

STOPS = [
    ("before the first checkpoint", Job, "_optimize", 3, False),
    ("between best weights and checkpoint", Job, "_save_checkpoint", 3, False),
    ("in the measurement, before best weights", Job, "held_out", 3, True),
    ("before the model is saved", Job, "save", 1, False),
    ("after the model is saved", Job, "save", 1, True),
    ("after the stage was renamed", launch, "drop_checkpoints", 1, False),
]


@pytest.mark.parametrize(("place", "owner", "name", "call", "after"), STOPS, ids=[s[0] for s in STOPS])
def test_interrupted_equals_uninterrupted(
    place: str, owner: Any, name: str, call: int, after: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, run = opened(borrowed(tmp_path, *RECORDED))
    with monkeypatch.context() as patch, pytest.raises(Stop):
        stop_at(patch, owner, name, call, after=after)
        train(recipe, run)
    folder = train(*opened(tmp_path / "recipe.yaml"))
    facts, whole = (read_json(f / "provenance.json")["facts"] for f in (folder, finished() / "run" / "draft"))
    assert facts["weights_sha256"] == reference() == hash_file(folder / "model" / "model.safetensors")
    assert facts["curve"] == whole["curve"] and facts["best"] == whole["best"] and facts["tokens"] == whole["tokens"]


def test_a_run_stopped_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = borrowed(tmp_path, *RECORDED)
    attempts = 0
    while not (tmp_path / "run" / "draft").exists():
        attempts += 1
        with monkeypatch.context() as patch:
            stop_at(patch, Job, "_optimize", 6, after=True)
            try:
                train(*opened(path))
            except Stop:
                assert attempts < 20
    assert attempts > 4
    assert hash_file(tmp_path / "run" / "draft" / "model" / "model.safetensors") == reference()


def test_an_early_best_survives_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best step lies before the checkpoint that the second attempt starts from."""
    real = Job.held_out

    def held_out(job: Job) -> Any:
        found = real(job)
        return found if job.step == 6 else dataclasses.replace(found, alpha_deploy=found.alpha_deploy / 2)

    monkeypatch.setattr(Job, "held_out", held_out)
    folders = [train(*opened(borrowed(tmp_path / "whole", *RECORDED)))]
    path = borrowed(tmp_path / "stopped", *RECORDED)
    with monkeypatch.context() as patch, pytest.raises(Stop):
        stop_at(patch, Job, "_optimize", 15)
        train(*opened(path))
    folders.append(train(*opened(path)))
    one, two = (read_json(f / "provenance.json")["facts"] for f in folders)
    assert one["best"]["step"] == two["best"]["step"] == 6 and one["weights_sha256"] == two["weights_sha256"]


def test_a_restart_repeats_at_most_save_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = borrowed(tmp_path, *RECORDED)
    with monkeypatch.context() as patch, pytest.raises(Stop):
        stop_at(patch, Job, "_optimize", 15)
        train(*opened(path))
    steps: list[int] = []
    real = Job._optimize
    monkeypatch.setattr(Job, "_optimize", lambda job: steps.append(job.step) or real(job))
    train(*opened(path))
    assert steps == list(range(12, 24))


def test_other_logging_and_saving_steps_do_not_ask_for_another_folder(tmp_path: Path) -> None:
    path = borrowed(tmp_path, *RECORDED, train={"save_steps": 7, "logging_steps": 5, "save_total_limit": 2})
    folder = train(*opened(path))
    assert hash_file(folder / "model" / "model.safetensors") == reference()
    assert train(*opened(path, "train.save_steps=3")) == folder


def test_a_finished_stage_leaves_nothing_of_the_work(tmp_path: Path) -> None:
    names = {p.name for p in (finished() / "run" / "draft").iterdir()}
    assert names == {"model", "provenance.json", "token_ranking.safetensors"}


def test_weighed_training_stops_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"max_steps": 6, "eval_steps": 3, "save_steps": 2, **WEIGHED}
    once = train(*opened(borrowed(tmp_path / "once", *RECORDED, train=keys)))
    path = borrowed(tmp_path / "twice", *RECORDED, train=keys)
    with monkeypatch.context() as patch, pytest.raises(Stop):
        stop_at(patch, Job, "_optimize", 4)
        train(*opened(path))
    a, b = (read_json(f / "provenance.json")["facts"] for f in (once, train(*opened(path))))
    assert a["weights_sha256"] == b["weights_sha256"], "the reference is the untrained draft, not the checkpoint"


def test_going_on_with_another_number_of_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = borrowed(tmp_path, *RECORDED)
    with monkeypatch.context() as patch, pytest.raises(Stop):
        stop_at(patch, Job, "_optimize", 6)
        train(*opened(path))
    state = tmp_path / "run" / "draft.partial" / "checkpoint-0000004" / "state.json"
    write_json(state, {**read_json(state), "per_step": 12})
    with pytest.raises(DraftstillError, match="12 sequences per step over all processes, which 1 processes of 8 cannot share evenly"):
        train(*opened(path))


# --- random moments -----------------------------------------------------------------------------------------------------------

PLACES = [(Job, "_optimize"), (Job, "sequences"), (Job, "held_out"), (Job, "_save_checkpoint"), (os, "fsync"), (os, "replace"), (shutil, "rmtree"),
          (torch.Tensor, "backward"), (torch.optim.AdamW, "step")]  # fmt: skip


def test_twenty_kills_at_random_moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each attempt at another place: in a step, in the middle of writing, in measuring, in clearing old files away."""
    rng = random.Random(7)
    path = borrowed(tmp_path, *RECORDED, train={"save_steps": 1, "save_total_limit": 2})
    kills = 0
    while kills < 20:
        owner, name = rng.choice(PLACES)
        few = name in ("held_out", "_save_checkpoint", "rmtree", "_optimize", "step", "backward")
        with monkeypatch.context() as patch:
            stop_at(patch, owner, name, rng.randint(1, 2 if few else 8), after=rng.random() < 0.5)
            try:
                train(*opened(path))
            except Stop:
                kills += 1
        if (tmp_path / "run" / "draft").exists():  # it came to its end before the kill: from the beginning
            assert hash_file(tmp_path / "run" / "draft" / "model" / "model.safetensors") == reference()
            shutil.rmtree(tmp_path / "run" / "draft")
    folder = train(*opened(path))
    assert hash_file(folder / "model" / "model.safetensors") == reference()
    assert {p.name for p in folder.iterdir()} == {"model", "provenance.json", "token_ranking.safetensors"}


def test_sigterm_finishes_the_step_and_saves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = borrowed(tmp_path, *RECORDED)
    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        terminate_at(patch, 6)
        assert command("train", path) == 143
    assert signal.getsignal(signal.SIGTERM) == before
    error = capsys.readouterr().err
    assert "stopped by SIGTERM after step 6, which is saved; the same command goes on there" in error and "Traceback" not in error
    assert [p.name for p in checkpoints(tmp_path / "run" / "draft.partial")] == ["checkpoint-0000006"]
    folder = train(*opened(path))
    assert hash_file(folder / "model" / "model.safetensors") == reference()


def test_sigterm_in_the_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = borrowed(tmp_path, *RECORDED)
    with monkeypatch.context() as patch:
        terminate_at(patch, 24)
        assert command("train", path) == 143
    folder = train(*opened(path))
    facts, whole = (read_json(f / "provenance.json")["facts"] for f in (folder, finished() / "run" / "draft"))
    assert facts["weights_sha256"] == reference() and facts["curve"] == whole["curve"]


def test_going_on_with_fewer_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As two processes of 8 would have left it: one process goes on with two forwards per step, over the same sequences."""
    keys = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    whole = train(*opened(borrowed(tmp_path / "whole", *RECORDED, train=keys)))
    path = borrowed(tmp_path / "cut", *RECORDED)
    state: Any = Job._state
    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(Job, "_divide", lambda job: vars(job).update(accumulate=2, per_step=16))
        patch.setattr(Job, "_state", lambda job: {**state(job), "processes": 2})
        stop_at(patch, Job, "_optimize", 7)
        train(*opened(path))
    folder = train(*opened(path))
    assert "begun with 2 processes, goes on with 1" in capsys.readouterr().out
    one, two = (read_json(f / "provenance.json")["facts"] for f in (whole, folder))
    assert one["tokens"] == two["tokens"]
    a, b = (load_file(f / "model" / "model.safetensors") for f in (whole, folder))
    assert all(torch.allclose(a[n], b[n], atol=1e-4) for n in a)
