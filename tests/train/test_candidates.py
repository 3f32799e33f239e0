"""Several drafts from one recording: each has its own stage, one that fails does not lose the others, and each goes on where it stopped."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from draftstill.distill import recording
from draftstill.errors import DraftstillError, NonFiniteLoss
from draftstill.recipe import Recipe
from draftstill.runfolder import FAILED, RunFolder, hash_file, read_json
from draftstill.stages import failure, stages
from draftstill.train import launch
from draftstill.train.launch import preflight_all, train, train_all
from draftstill.train.loop import Job
from tests.pipeline import borrowed, command, finished, hashes, opened

RECORDED = ("corpus", "responses", "recording")
SHORT = {"max_steps": 3, "eval_steps": 3, "save_steps": 1, "per_device_train_batch_size": 4}
GOOD: dict[str, Any] = {"one": {"draft": {"layers": [0]}}, "mild": {"train": {"learning_rate": 1e-3, "loss": {"name": "lk"}}}}
DIVERGES: dict[str, Any] = {"train": {"learning_rate": 1e30}}


def home(path: Path, candidates: dict[str, Any], **train_keys: Any) -> Path:
    return borrowed(path, *RECORDED, train={**SHORT, **train_keys, "candidates": candidates})


def test_each_candidate_is_trained_as_if_alone(tmp_path: Path) -> None:
    """The same bytes as a recipe that says so itself; the recording is made once."""
    folders = train_all(*opened(home(tmp_path / "both", GOOD)))
    assert [f.name for f in folders.values()] == ["draft-one", "draft-mild"] and list(folders) == ["one", "mild"]
    alone = train(*opened(borrowed(tmp_path / "one", *RECORDED, draft={"layers": [0]}, train=SHORT)))
    other = train(*opened(borrowed(tmp_path / "mild", *RECORDED, train={**SHORT, "learning_rate": 1e-3, "loss": {"name": "lk"}})))
    for name, single in (("one", alone), ("mild", other)):
        assert hashes(folders[name] / "model") == hashes(single / "model")
    assert (
        read_json(folders["one"] / "provenance.json")["facts"]["parameters"] < read_json(other / "provenance.json")["facts"]["parameters"]
    )
    assert (hash_file(tmp_path / "both" / "run" / "recording" / "provenance.json")
            == hash_file(finished() / "run" / "recording" / "provenance.json"))  # fmt: skip


@pytest.mark.parametrize("bad", [DIVERGES, {"draft": {"layers": [0, 9]}}], ids=["diverges", "no such layer"])
def test_a_failed_candidate_does_not_lose_the_others(bad: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, run = opened(home(tmp_path, {"bad": bad, **GOOD}))
    folders = train_all(recipe, run)
    assert list(folders) == ["one", "mild"]
    stage = stages(recipe, run)["draft-bad"]
    assert not stage.done and read_json(stage.work / FAILED)["fingerprint"] == stage.fingerprint
    why = failure(stage)
    assert why is not None and ("not finite" in why or "between 0 and 3" in why)
    shown = capsys.readouterr().out
    assert "candidate bad failed" in shown and "failed: bad" in shown.splitlines()[-1]
    # The others are whole, and are not touched when the failed one is tried again.
    before = {name: hashes(folder) for name, folder in folders.items()}
    assert train_all(recipe, run) == folders and "candidate" not in capsys.readouterr().out, "not tried again unasked"
    assert list(train_all(recipe, run, retry=True)) == ["one", "mild"] and "candidate bad (1 of 1)" in capsys.readouterr().out
    assert {name: hashes(folder) for name, folder in folders.items()} == before


def test_a_mended_candidate_is_trained(tmp_path: Path) -> None:
    recipe, run = opened(home(tmp_path, {"bad": {"draft": {"layers": [0, 9]}}, **GOOD}))
    train_all(recipe, run)
    path = borrowed(tmp_path, train={**SHORT, "candidates": {"bad": {"draft": {"layers": [0, 2]}}, **GOOD}})
    folders = train_all(*opened(path))
    assert list(folders) == ["bad", "one", "mild"] and not (folders["bad"] / FAILED).exists()


def test_what_the_score_is_made_of_follows_from_who_failed(tmp_path: Path) -> None:
    recipe, run = opened(home(tmp_path, {"bad": DIVERGES, **GOOD}))
    all_three = stages(recipe, run)["score"].fingerprint
    train_all(recipe, run)
    two = stages(recipe, run)["score"].fingerprint
    assert two != all_three
    stages(recipe, run)["draft-bad"].begin()  # a retry that was killed before it failed again
    assert stages(recipe, run)["score"].fingerprint == two


def test_every_candidate_failed(tmp_path: Path) -> None:
    recipe, run = opened(home(tmp_path, {"a": DIVERGES, "b": {"draft": {"layers": [7]}}}))
    with pytest.raises(DraftstillError, match="every candidate failed") as caught:
        train(recipe, run)
    assert "a: " in str(caught.value) and "b: " in str(caught.value) and "not finite" in str(caught.value)


def test_an_only_draft_still_raises_its_own_error(tmp_path: Path) -> None:
    recipe, run = opened(borrowed(tmp_path, *RECORDED, train={**SHORT, **DIVERGES["train"]}))
    with pytest.raises(DraftstillError, match="not finite"):
        train(recipe, run)
    assert not (tmp_path / "run" / "draft.partial" / FAILED).exists()


def test_a_full_disk_is_no_fault_of_a_candidate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    recipe, run = opened(home(tmp_path, GOOD))
    monkeypatch.setattr(Job, "save", full)
    with pytest.raises(OSError, match="No space"):
        train_all(recipe, run)
    assert failure(stages(recipe, run)["draft-one"]) is None


FAULTS: dict[str, tuple[Exception, bool]] = {
    "of the program": (AttributeError("'Job' object has no attribute 'nme'"), True), "without words": (AssertionError(), True),
    "of memory": (MemoryError(), False), "of the device's memory": (torch.OutOfMemoryError("CUDA out of memory"), False),
    "of the CPU allocator": (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), False),
    "of the recipe": (DraftstillError("it cannot be", key="train.loss", value=1), False),
    "of the numbers": (NonFiniteLoss("step 3: not finite", key="train.learning_rate", value=1.0), False),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_is_not_the_recipes_comes_with_its_traceback(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others go on all the same; what the recipe can bring about speaks for itself."""
    error, traced = FAULTS[fault]
    real = Job.run

    def run(job: Job) -> None:
        if job.settings.learning_rate == 7e-3:
            raise error
        real(job)

    monkeypatch.setattr(Job, "run", run)
    path = home(tmp_path, {"bad": {"train": {"learning_rate": 7e-3}}, "one": GOOD["one"]}, max_steps=1)
    assert command("train", path) == 0
    recipe, run_folder = opened(path)
    stage = stages(recipe, run_folder)["draft-bad"]
    found, told = read_json(stage.work / FAILED), capsys.readouterr()
    assert found["error"] == type(error).__name__ and ("in run\n" in found.get("traceback", "")) == traced == ("Traceback" in told.err)
    assert "not made  draft-bad: " in told.out and "made  " in told.out.replace("not made", "")
    assert (
        not traced
        or f"candidate bad failed: {type(error).__name__}: {error}" in told.out
        and str(failure(stage)).startswith(type(error).__name__)
    )


def test_recordings_are_read_whole_once_for_all_candidates_and_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str] = []
    real = recording.hash_file

    def counted(path: Path) -> str:
        hashed.append(f"{path.parent.name}/{path.name}")
        return real(path)

    monkeypatch.setattr(recording, "hash_file", counted)
    path = home(tmp_path, GOOD, max_steps=1)
    train_all(*opened(path))
    shards = sorted(f"{p.parent.name}/{p.name}" for p in (tmp_path / "run" / "recording").rglob("*.safetensors"))
    assert sorted(hashed) == shards and {s.partition("/")[0] for s in shards} == {"train", "heldout"}
    counts = []
    for rank in range(3):
        before = len(hashed)
        launch._verify(tmp_path / "run" / "recording", SimpleNamespace(process_index=rank, num_processes=3))  # type: ignore[arg-type]
        counts.append(len(hashed) - before)
    assert sorted(hashed[len(shards) :]) == shards and max(counts) - min(counts) <= 2, "each side is shared out, and nothing read twice"


@pytest.mark.parametrize("side", ["train", "heldout"])
def test_a_damaged_recording_is_found_before_the_first_candidate(side: str, tmp_path: Path) -> None:
    path = home(tmp_path, GOOD, max_steps=1)
    shard = sorted((tmp_path / "run" / "recording" / side).glob("shard-*"))[-1]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(DraftstillError, match=f"{shard.name} in .*{side} is not the one that was recorded"):
        train_all(*opened(path))
    assert not list((tmp_path / "run").glob("draft*"))


def test_stopped_in_the_second_candidate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is not trained again, the second goes on at its checkpoint, and both end the same as without the stop."""

    class Stop(BaseException):
        pass

    whole = {n: hashes(f / "model") for n, f in train_all(*opened(home(tmp_path / "whole", GOOD))).items()}
    path, steps = home(tmp_path / "cut", GOOD), []
    real = Job._optimize

    def counted(job: Job) -> Any:
        if len(steps) == 5:
            raise Stop
        steps.append(job.step)
        return real(job)

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(Job, "_optimize", counted)
        train_all(*opened(path))
    assert steps == [0, 1, 2, 0, 1]
    steps.clear()
    monkeypatch.setattr(Job, "_optimize", lambda job: steps.append(job.step) or real(job))
    folders = train_all(*opened(path))
    assert steps == [2] and {n: hashes(f / "model") for n, f in folders.items()} == whole


def test_candidates_of_another_precision(tmp_path: Path) -> None:
    """accelerate holds one precision per process."""
    folders = train_all(*opened(home(tmp_path, {"half": {"train": {"bf16": True}}, "full": {}}, max_steps=1)))
    assert list(folders) == ["half", "full"]


def test_a_candidate_that_cannot_fit_the_target_is_refused_before_anything_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = borrowed(tmp_path, train={"candidates": {"ok": {}, "deep": {"draft": {"layers": [0, 9]}}}})
    with pytest.raises(DraftstillError) as caught:
        preflight_all(opened(path)[0])
    assert caught.value.key == "train.candidates.deep.draft.layers"
    assert command("train", path) == 1 and not any(p.is_dir() for p in (tmp_path / "run").iterdir())


def test_the_command_says_each_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = home(tmp_path, {"bad": DIVERGES, **GOOD})
    assert command("train", path) == 0
    shown = capsys.readouterr().out
    assert "[4/4] train" in shown and "candidate bad (1 of 3)" in shown and "candidate mild (3 of 3)" in shown
    assert f"made  {tmp_path / 'run' / 'draft-one'}" in shown and "not made  draft-bad: " in shown
    changed = yaml.safe_load(path.read_text())
    del changed["train"]["candidates"]["bad"]
    path.write_text(yaml.safe_dump(changed, sort_keys=False))
    assert command("train", path) == 0
    assert "draft-one, draft-mild: reused (made 20" in capsys.readouterr().out


def test_the_first_of_several_is_what_train_returns(tmp_path: Path) -> None:
    recipe, run = opened(home(tmp_path, GOOD, max_steps=1))
    assert train(recipe, run).name == "draft-one"
    assert isinstance(recipe, Recipe) and isinstance(run, RunFolder) and sorted(os.listdir(run.path))[-1] == "responses"
