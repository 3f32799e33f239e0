"""Twenty real signals at random moments of one training, SIGKILL and SIGTERM, and the weights of an undisturbed one."""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from draftstill.runfolder import hash_file
from draftstill.train.launch import train
from tests.pipeline import borrowed, environment, opened, process
from tests.train.jobs import RECORDED, reference

KILLS = 20


def saved_since(latest: Path, moment: float) -> bool:
    """Whether a checkpoint was written after a moment."""
    with contextlib.suppress(FileNotFoundError):
        return latest.lstat().st_mtime > moment
    return False


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_signals_end_in_the_same_weights(tmp_path: Path) -> None:
    rng = random.Random(3)
    path = borrowed(tmp_path, *RECORDED, train={"save_steps": 1, "save_total_limit": 2})
    model = tmp_path / "run" / "draft" / "model" / "model.safetensors"
    began = time.monotonic()
    whole = process("train", path)
    output = whole.communicate(timeout=300)[0]
    assert whole.returncode == 0, output
    seconds = time.monotonic() - began
    kills: list[int] = []
    attempts = resumed = 0
    while len(kills) < KILLS:
        if model.exists():
            assert hash_file(model) == reference()
            model.parent.parent.rename(tmp_path / f"finished-{attempts}")
        attempts += 1
        running = process("train", path)
        if attempts % 2:  # at any moment; starting up takes most of a run this small
            time.sleep(rng.uniform(0.2, 1.0) * seconds)
        else:  # among its steps
            since = time.time()
            while running.poll() is None and not saved_since(model.parents[2] / "draft.partial" / "latest", since):
                time.sleep(0.002)
            time.sleep(rng.uniform(0.0, 0.3))
        sent = rng.choice((signal.SIGKILL, signal.SIGTERM))
        running.send_signal(sent)
        output = running.communicate(timeout=120)[0]
        if running.returncode != 0:
            # SIGTERM before the loop ends the process as it would any other; in the loop it is 143 with a saved step.
            assert running.returncode in (-sent, 143), output
            assert running.returncode != 143 or "the same command goes on there" in output
            kills.append(running.returncode)
        resumed += "train: going on at" in output
    last = process("train", path)
    output = last.communicate(timeout=300)[0]
    assert last.returncode == 0, output
    assert hash_file(model) == reference()
    # Or all of them would have come while Python was starting.
    assert resumed >= KILLS // 4 and 143 in kills and -signal.SIGKILL in kills, (resumed, kills)
    print(f"{attempts} attempts, {resumed} went on at a checkpoint; exits {kills}")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_of_two_processes_is_told_to_end_and_one_process_goes_on(tmp_path: Path) -> None:
    """Both learn of it in the same step; what they leave, one process finishes, over the same sequences."""
    keys = {"save_steps": 1000, "max_steps": 60, "eval_steps": 60}
    whole = train(*opened(borrowed(tmp_path / "whole", *RECORDED, train={**keys, "gradient_accumulation_steps": 2})))
    path = borrowed(tmp_path / "cut", *RECORDED, train=keys)
    work = tmp_path / "cut" / "run" / "draft.partial"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    places = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [subprocess.Popen([sys.executable, "-m", "draftstill.train", str(path)], env=environment(**places, RANK=r, LOCAL_RANK=r), text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for r in "01"]  # fmt: skip
    try:
        while not (work / "best.safetensors").exists():
            assert all(p.poll() is None for p in ranks), [p.communicate()[0] for p in ranks]
            time.sleep(0.001)
        ranks[1].send_signal(signal.SIGTERM)
        outputs = [p.communicate(timeout=120)[0] for p in ranks]
    finally:
        for p in ranks:
            p.kill()
    assert [p.returncode for p in ranks] == [143, 143], "\n".join(outputs)
    assert len(list(work.glob("checkpoint-*"))) == 1
    last = process("train", path)
    output = last.communicate(timeout=300)[0]
    assert last.returncode == 0 and "begun with 2 processes, goes on with 1" in output, output
    one, two = (load_file(f / "model" / "model.safetensors") for f in (whole, tmp_path / "cut" / "run" / "draft"))
    assert all(torch.allclose(one[n], two[n], atol=1e-3) for n in one)
