"""SIGKILL ten times at arbitrary moments of responding and recording, and the same bytes as an undisturbed run."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from draftstill.runfolder import read_json
from tests.pipeline import command, hashes, make_home, process

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
SETTINGS = {"respond": {"prompts": 36, "heldout_prompts": 6, "batch_size": 1, "window": 2, "max_new_tokens": 24},
            "record": {"batch_size": 1, "shard_sequences": 1, "document_tokens": 1500}}  # fmt: skip


def files(run: Path) -> int:
    """What responding and recording have written so far."""
    return sum(1 for stage in ("responses", "recording") for p in run.glob(f"{stage}*/**/*") if p.is_file() and ".tmp" not in p.name)


def test_killed_ten_times_it_ends_with_the_same_bytes(tmp_path: Path) -> None:
    quiet, killed = (make_home(tmp_path / name, **SETTINGS) for name in ("quiet", "killed"))
    assert command("distill", quiet) == 0
    run, rng, kills = killed.parent / "run", random.Random(0), 0
    while kills < 10:
        running, start = process("distill", killed), files(run)
        # Somewhere behind the next few files; not only at a file's border.
        wanted, pause = start + rng.randint(1, 9), rng.random() * 0.05
        while running.poll() is None and files(run) < wanted:
            time.sleep(0.002)
        time.sleep(pause)
        running.kill()
        output = running.communicate()[0]
        if running.returncode == 0:
            break
        assert running.returncode == -9, output
        kills += 1
    assert kills == 10, "the stages ended before ten kills"
    assert command("distill", killed) == 0
    for pattern in ("responses/*-0*.json", "recording/*/shard-*"):
        one, two = hashes(quiet.parent / "run", pattern), hashes(run, pattern)
        assert one and one == two, pattern
    for side in ("train", "heldout"):
        one, two = (read_json(home.parent / "run" / "recording" / side / "manifest.json") for home in (quiet, killed))
        assert one.pop("target") != two.pop("target"), "each home has a target of its own"
        assert one["shards"] and one == two, side
