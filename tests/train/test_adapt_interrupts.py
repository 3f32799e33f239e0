"""Tuning the target under SIGTERM: the step is finished and saved, nothing of it is done again, and the bytes are those of a quiet run."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from draftstill.runfolder import read_json
from draftstill.train import adapt, adapting
from draftstill.train.adapting import Tuning
from draftstill.train.checkpoint import checkpoints
from tests.pipeline import command, hashes, make_home, opened, process

KEYS: dict[str, Any] = {"max_steps": 6, "eval_steps": 3, "save_steps": 4, "sequence_length": 48, "learning_rate": 5e-3, "warmup_steps": 2,
                        "lora_dropout": 0.1}  # fmt: skip


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return adapt(*opened(make_home(tmp_path_factory.mktemp("quiet"), adapt=KEYS)))


def assert_as(folder: Path, quiet: Path) -> None:
    assert hashes(folder / "model") == hashes(quiet / "model")
    one, two = (read_json(f / "provenance.json")["facts"] for f in (folder, quiet))
    assert all(one[k] == two[k] for k in ("curve", "best_step", "steps", "tokens", "nll"))


def terminate_in(monkeypatch: pytest.MonkeyPatch, name: str, step: int) -> None:
    """SIGTERM at the beginning of a step's ``_optimize`` or ``nll``."""
    real = getattr(Tuning, name)

    def struck(tuning: Tuning) -> Any:
        if tuning.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(tuning)

    monkeypatch.setattr(Tuning, name, struck)


@pytest.mark.parametrize(("name", "step", "saved"), [("_optimize", 2, 3), ("_optimize", 3, 4), ("_optimize", 5, 6), ("nll", 0, 1),
                                                     ("nll", 6, 6)])  # fmt: skip
def test_sigterm_finishes_the_step_and_saves_it(
    name: str, step: int, saved: int, quiet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also in the last step, in the last measurement, and where a measurement or a checkpoint is due in that very step."""
    path, before = make_home(tmp_path, adapt=KEYS), signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        terminate_in(patch, name, step)
        assert command("adapt", path) == 143
    assert signal.getsignal(signal.SIGTERM) == before
    error = capsys.readouterr().err
    assert f"stopped by SIGTERM after step {saved}, which is saved; the same command goes on there" in error and "Traceback" not in error
    assert [p.name for p in checkpoints(tmp_path / "run" / "adapted.partial")] == [f"checkpoint-{saved:07d}"]
    assert_as(adapt(*opened(path)), quiet)


def test_a_step_is_saved_before_it_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A measurement may take longer than a scheduler waits."""
    events: list[str] = []
    for name in ("nll", "_save_checkpoint"):
        real = getattr(Tuning, name)
        noted = lambda tuning, name=name, real=real: events.append(f"{name} {tuning.step}") or real(tuning)  # noqa: E731
        monkeypatch.setattr(Tuning, name, noted)
    adapt(*opened(make_home(tmp_path, adapt={**KEYS, "eval_steps": 2, "save_steps": 2, "max_steps": 4})))
    assert events[:5] == ["nll 0", "_save_checkpoint 2", "nll 2", "nll 4", "nll 4"], "the last one is of the merged model"


def test_sigterm_as_a_scheduler_sends_it(tmp_path: Path) -> None:
    path = make_home(tmp_path, adapt={**KEYS, "max_steps": 400, "save_steps": 1000, "eval_steps": 400})
    work = tmp_path / "run" / "adapted.partial"
    running = process("adapt", path)
    try:
        while not (work / "best.safetensors").exists():  # written by the first measurement, when the loop is on its way
            assert running.poll() is None, running.communicate()[0]
            time.sleep(0.001)
        running.send_signal(signal.SIGTERM)
        output = running.communicate(timeout=60)[0]
    finally:
        running.kill()
    assert running.returncode == 143 and "stopped by SIGTERM after step" in output and "Traceback" not in output, output
    (kept,) = work.glob("checkpoint-*")
    assert (work / "latest").resolve() == kept.resolve() and 1 <= int(kept.name.rsplit("-", 1)[1]) < 400


def test_on_cuda_every_step_takes_kernels_that_repeat_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the draft's training does: from the weights' first use to the measurement of the merged model."""
    found: dict[str, set[bool]] = {}
    repeatable = adapting.repeatable
    monkeypatch.setattr(adapting, "repeatable", lambda device: repeatable("cuda"))
    for name in ("__init__", "_optimize", "nll", "save"):
        real = getattr(Tuning, name)

        def noted(*arguments: Any, name: str = name, real: Any = real) -> Any:
            found.setdefault(name, set()).add(torch.are_deterministic_algorithms_enabled())
            return real(*arguments)

        monkeypatch.setattr(Tuning, name, noted)
    adapt(*opened(make_home(tmp_path, adapt={**KEYS, "max_steps": 2})))
    assert found == dict.fromkeys(("__init__", "_optimize", "nll", "save"), {True})
    assert not torch.are_deterministic_algorithms_enabled()
