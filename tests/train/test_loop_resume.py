"""Stopped anywhere and started again, a training ends the same."""

from __future__ import annotations

import dataclasses
import errno
import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
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
    ("before a checkpoint that a measurement follows", Job, "_save_checkpoint", 3, False),
    ("between a checkpoint and its measurement", Job, "_save_checkpoint", 3, True),
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
    assert {p.name for p in folder.iterdir()} == {"model", "provenance.json", "token_ranking.safetensors"}, "nothing is left of checkpoints"


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


@pytest.mark.parametrize("links", [True, False])
def test_a_best_that_a_restart_does_not_find_again_is_not_published(links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where sums round otherwise, as on another number of processes, the second attempt measures the same step otherwise."""
    attempt, weights = [1], dict[tuple[int, int], dict[str, torch.Tensor]]()
    alphas = {(1, 0): 0.1, (1, 6): 0.9, (2, 6): 0.05, (2, 12): 0.02}
    real = Job.held_out

    def held_out(job: Job) -> Any:
        place = (attempt[0], job.step)
        weights[place] = {n: p.detach().clone() for n, p in job.module.model.named_parameters()}
        return dataclasses.replace(real(job), alpha_deploy=alphas.get(place, 0.01))

    def no_links(*_: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Job, "held_out", held_out)
    if not links:
        monkeypatch.setattr(os, "link", no_links)
    path = borrowed(tmp_path, *RECORDED)
    with monkeypatch.context() as patch, pytest.raises(Stop):
        stop_at(patch, Job, "_optimize", 8)  # behind the best measurement, which no checkpoint knows
        train(*opened(path))
    assert (1, 6) in weights
    attempt[0] = 2
    folder = train(*opened(path))
    best = read_json(folder / "provenance.json")["facts"]["best"]
    assert (best["step"], best["alpha_deploy"]) == (0, 0.1)
    found = load_file(folder / "model" / "model.safetensors")
    assert all(torch.equal(p, found[n]) for n, p in weights[1, 0].items())


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


def killed_in(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """SIGTERM in the midst of a step's measurement, once."""
    real = Job.held_out

    def held_out(job: Job) -> Any:
        if job.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(job)

    monkeypatch.setattr(Job, "held_out", held_out)


@pytest.mark.parametrize(("step", "saved"), [(0, 1), (12, 13), (24, 24)])
def test_sigterm_in_a_measurement(step: int, saved: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the last one, behind which there is no step to end with."""
    path = borrowed(tmp_path, *RECORDED)
    with monkeypatch.context() as patch:
        killed_in(patch, step)
        assert command("train", path) == 143
    assert [p.name for p in checkpoints(tmp_path / "run" / "draft.partial")] == [f"checkpoint-{saved:07d}"]
    facts, whole = (read_json(f / "provenance.json")["facts"] for f in (train(*opened(path)), finished() / "run" / "draft"))
    assert facts["weights_sha256"] == reference() and facts["curve"] == whole["curve"] and facts["best"] == whole["best"]


def test_sigterm_in_the_last_measurement_of_an_early_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Job.held_out
    monkeypatch.setattr(Job, "held_out", lambda job: dataclasses.replace(real(job), alpha_deploy={6: 0.5}.get(job.step, 0.1)))
    keys = {"eval_steps": 3, "save_steps": 4, "early_stopping_patience": 2}
    whole = train(*opened(borrowed(tmp_path / "whole", *RECORDED, train=keys)))
    path = borrowed(tmp_path / "cut", *RECORDED, train=keys)
    for _ in range(2):  # the second attempt has nothing left to do, and is told so, too
        with monkeypatch.context() as patch:
            killed_in(patch, 12)
            assert command("train", path) == 143
    one, two = (read_json(f / "provenance.json")["facts"] for f in (whole, train(*opened(path))))
    assert one["steps"] == two["steps"] == 12
    assert one["curve"] == two["curve"] and one["weights_sha256"] == two["weights_sha256"]


def test_sigterm_in_the_last_measurement_begins_no_other_candidate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = borrowed(
        tmp_path, *RECORDED, train={"max_steps": 3, "eval_steps": 3, "candidates": {"one": {}, "two": {"draft": {"layers": [0]}}}}
    )
    with monkeypatch.context() as patch:
        killed_in(patch, 3)
        assert command("train", path) == 143
    assert (tmp_path / "run" / "draft-one.partial" / "latest").exists() and not (tmp_path / "run" / "draft-two.partial").exists()
    assert command("train", path) == 0


def test_told_to_end_a_step_is_saved_before_it_is_measured_and_before_anyone_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A measurement may take longer than a scheduler waits; and a launcher kills all ranks as soon as one has ended, so none may before the
    one that writes is through."""
    events: list[str] = []

    def note(owner: Any, name: str, what: str) -> None:
        real = getattr(owner, name)

        def noted(*arguments: Any, **options: Any) -> Any:
            result = real(*arguments, **options)
            events.append(f"{what} {arguments[0].step}" if isinstance(arguments[0], Job) else what)
            return result

        monkeypatch.setattr(owner, name, noted)

    path = borrowed(tmp_path, *RECORDED)
    terminate_at(monkeypatch, 12)  # an eval step, at which a checkpoint is due, too
    note(Job, "held_out", "measured")
    note(Job, "_save_checkpoint", "saved")
    note(Accelerator, "wait_for_everyone", "waited")
    assert command("train", path) == 143
    assert [e for e in events if e != "waited"] == ["measured 0", "saved 4", "measured 6", "saved 8", "saved 12"]
    assert events[-2:] == ["saved 12", "waited"]


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
