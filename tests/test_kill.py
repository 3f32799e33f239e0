"""SIGKILL in every stage, the same command again, and the same bytes at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftstill.errors import DraftstillError
from draftstill.runfolder import RunFolder, read_json
from tests.pipeline import ORDER, borrowed, command, hashes, make_home, process

SLOWER: dict[str, Any] = {
    # Small batches and shards: every stage writes often enough to be caught half-way.
    "respond": {"batch_size": 2},
    "record": {"batch_size": 1, "shard_sequences": 1},
    "train": {"max_steps": 40, "eval_steps": 8},
    "evaluate": {"audit_prompts": 2},
}
MARKS: dict[str, str] = {
    "corpus": "corpus.partial/rejected.jsonl",
    "responses": "responses.partial/train-00002.json",
    "recording": "recording.partial/train/shard-00003.safetensors",
    "draft": "draft.partial/checkpoint-0000012/state.json",
    "score": "score.partial/cells/timing/own/t0/0001/plain@0.json",
    "published": "published.partial/model/config.json",
}
"""Stage: a file that appears when it is half done."""
SAME = ("corpus/*.jsonl", "responses/*-0*.json", "recording/*/shard-*", "draft/model/*", "draft/token_ranking.safetensors",
        "published/model/model.safetensors")  # fmt: skip


def kill_when(there: Callable[[], bool], recipe: Path, seconds: float = 90) -> str:
    """Start a run and kill it as soon as a condition holds; returns what it printed."""
    running = process("run", recipe)
    try:
        limit = time.monotonic() + seconds
        while not there():
            if running.poll() is not None or time.monotonic() > limit:
                running.kill()
                pytest.fail(f"the run ended before it could be killed:\n{running.communicate()[0]}")
            time.sleep(0.001)
    finally:
        running.kill()
        output = running.communicate()[0]
    assert running.returncode == -9, output
    return output


@pytest.mark.timeout(300)
def test_killed_in_each_stage_it_ends_with_the_same_bytes(tmp_path: Path) -> None:
    quiet, killed = (make_home(tmp_path / name, **SLOWER) for name in ("quiet", "killed"))
    assert command("run", quiet) == 0
    run = killed.parent / "run"
    for number, stage in enumerate(ORDER):
        output = kill_when((run / MARKS[stage]).exists, killed)
        assert (run / f"{stage}.partial").is_dir() and not (run / stage).exists(), f"killed too late in {stage}:\n{output}"
        assert all((run / name / "provenance.json").exists() for name in ORDER[:number])
        if number:
            assert f"[{number}/6]" in output and "goes on where it stopped" in output
    kept = {p: p.stat().st_mtime_ns for p in (run / "score" / "cells").rglob("*.json")}
    last = process("run", killed)
    output = last.communicate(timeout=120)[0]
    assert last.returncode == 0 and "Traceback" not in output, output
    assert output.count("reused (made") == 5 and {p: p.stat().st_mtime_ns for p in kept} == kept

    for pattern in SAME:
        one, two = hashes(quiet.parent / "run", pattern), hashes(run, pattern)
        assert one == two and one, pattern
    facts = [read_json(home.parent / "run" / "draft" / "provenance.json")["facts"] for home in (quiet, killed)]
    assert facts[0]["weights_sha256"] == facts[1]["weights_sha256"] and facts[0]["curve"] == facts[1]["curve"]
    cells = [home.parent / "run" / "score" / "cells" for home in (quiet, killed)]
    timed = [{str(p.relative_to(c)): read_json(p)["trace"]["tokens"] for p in (c / "timing").rglob("*.json")} for c in cells]
    assert timed[0] == timed[1] and timed[0]
    counted = [{str(p.relative_to(c)): read_json(p) for kind in ("texts", "laws") for p in (c / kind).rglob("*.json")} for c in cells]
    assert counted[0] == counted[1] and counted[0]
    left = (
        [p for p in run.rglob("*") if ".tmp" in p.name or p.name == "stage.json"] + list(run.glob("*.partial")) + list(run.glob("*.old-*"))
    )
    assert not left, "half-written files of killed processes are still there"


# --- moments too short to hit with a signal -----------------------------------------------------------------------------------


def test_killed_while_a_stage_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever call of ``finish`` is the last, another recipe never takes the files over, and the same one ends."""
    for number, (owner, call) in enumerate(((os, "replace"), (Path, "unlink"))):
        home = tmp_path / str(number)
        stage = RunFolder(home).stage("responses", {"seed": 1})
        (stage.begin() / "train-00000.json").write_text("made by the first")
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            real = getattr(owner, call)

            def killed(path: Any, *rest: Any, real: Any = real, **options: Any) -> Any:
                if Path(path).name in ("responses.partial", "stage.json"):
                    raise KeyboardInterrupt
                return real(path, *rest, **options)

            patch.setattr(owner, call, killed)
            stage.finish()
        other = RunFolder(home).stage("responses", {"seed": 2})
        with pytest.raises(DraftstillError, match="seed was 1, is 2"):
            _ = other.done or other.begin()
        again = RunFolder(home).stage("responses", {"seed": 1})
        if not again.done:
            assert (again.begin() / "train-00000.json").exists()
            again.finish()
        assert again.done and (again.folder / "train-00000.json").read_text() == "made by the first"


def test_half_written_files_of_a_killed_process_are_cleared_away(tmp_path: Path) -> None:
    stage = RunFolder(tmp_path).stage("draft", {"seed": 1})
    work = stage.begin()
    (work / "checkpoint-0000004").mkdir()
    for name in ("best.safetensors", ".best.safetensors.123.tmp", "checkpoint-0000004/.state.json.123.tmp"):
        (work / name).write_text("x")
    (work / ".checkpoint-0000008.tmp").mkdir()
    (work / ".checkpoint-0000008.tmp" / "model.safetensors").write_text("x")
    RunFolder(tmp_path).stage("draft", {"seed": 1}).begin()
    assert {str(p.relative_to(work)) for p in work.rglob("*")} == {"best.safetensors", "checkpoint-0000004", "stage.json"}


def test_an_attempt_that_made_nothing_claims_nothing(tmp_path: Path) -> None:
    RunFolder(tmp_path).stage("draft", {"seed": 1}).begin()
    second = RunFolder(tmp_path).stage("draft", {"seed": 2})
    work = second.begin()
    assert read_json(work / "stage.json")["fingerprint"] == second.fingerprint
    (work / "checkpoint").write_text("made")
    with pytest.raises(DraftstillError, match="seed was 2, is 3"):
        RunFolder(tmp_path).stage("draft", {"seed": 3}).begin()


def test_ctrl_c_says_how_to_go_on(tmp_path: Path) -> None:
    recipe = make_home(tmp_path, **SLOWER)
    running = process("distill", recipe)
    while not (tmp_path / "run" / MARKS["responses"]).exists():
        assert running.poll() is None, running.communicate()[0]
        time.sleep(0.001)
    running.send_signal(signal.SIGINT)
    try:
        output = running.communicate(timeout=60)[0]
    except subprocess.TimeoutExpired:
        running.kill()
        raise
    assert running.returncode == 130, output
    assert "stopped; the same command goes on where it stopped" in output and "Traceback" not in output
    assert command("distill", recipe) == 0


def test_sigterm_in_training_saves_the_step_and_says_so(tmp_path: Path) -> None:
    """As a scheduler sends it: nothing of the finished steps is done again."""
    recipe = borrowed(tmp_path, "corpus", "responses", "recording", train={"save_steps": 1000, "max_steps": 400, "eval_steps": 400})
    work = tmp_path / "run" / "draft.partial"
    running = process("train", recipe)
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
