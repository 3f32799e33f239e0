"""Checkpoints are whole or absent, and give everything back to the bit."""

from __future__ import annotations

import copy
import errno
import os
import shutil
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftstill.runfolder import hash_file, save_tensors
from draftstill.train import checkpoint, devices
from draftstill.train.checkpoint import BEST, checkpoints, drop_checkpoints, load_checkpoint, model_tensors, save_checkpoint
from tests.pipeline import borrowed, command, finished, hashes


class Pair:
    """A small model with tied weights, and its optimizer in two groups."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.ModuleDict(
            {"embed": torch.nn.Embedding(7, 4), "norm": torch.nn.LayerNorm(4), "head": torch.nn.Linear(4, 7, bias=False)}
        )
        self.model["head"].weight = self.model["embed"].weight
        matrices, rest = [self.model["embed"].weight], list(self.model["norm"].parameters())
        self.optimizer = torch.optim.AdamW([{"params": rest, "weight_decay": 0.0}, {"params": matrices, "weight_decay": 0.1}], lr=0.1)

    def step(self, seed: int) -> None:
        ids = torch.randint(7, (5,), generator=torch.Generator().manual_seed(seed))
        x = self.model["head"](self.model["norm"](self.model["embed"](ids)))
        torch.nn.functional.cross_entropy(x, ids).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        return copy.deepcopy({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()["state"]})


def equal(one: Any, two: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(equal(one[k], two[k]) for k in one)
    return torch.equal(one, two)


def test_everything_comes_back_to_the_bit(tmp_path: Path) -> None:
    pair, other = Pair(0), Pair(1)
    for n in range(3):
        pair.step(n)
    save_checkpoint(tmp_path, pair.model, pair.optimizer, {"step": 3, "curve": [{"alpha": 0.1 + 0.2}]}, 1)
    (folder,) = checkpoints(tmp_path)
    assert load_checkpoint(folder, other.model, other.optimizer) == {"step": 3, "curve": [{"alpha": 0.1 + 0.2}]}
    assert equal(pair.state(), other.state())
    for n in range(3, 6):
        pair.step(n)
        other.step(n)
    assert equal(pair.state(), other.state()), "the next steps differ"


def test_the_newest_are_kept(tmp_path: Path) -> None:
    pair = Pair(0)
    for step in (5, 10, 15, 100):
        save_checkpoint(tmp_path, pair.model, pair.optimizer, {"step": step}, 2)
    assert [p.name for p in checkpoints(tmp_path)] == ["checkpoint-0000015", "checkpoint-0000100"]
    assert (tmp_path / "latest").resolve() == (tmp_path / "checkpoint-0000100").resolve()
    drop_checkpoints(tmp_path)
    assert list(tmp_path.iterdir()) == []


FULL = [("fsync", n) for n in (1, 2, 3)] + [("replace", n) for n in (1, 2, 3, 4, 5)]
"""Each of three files is synced and renamed; the best weights and the checkpoint as a whole are renamed only."""


@pytest.mark.parametrize(("call", "which"), FULL)
def test_a_full_disk_leaves_the_old_checkpoint_intact(call: str, which: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(0)
    save_tensors(tmp_path / BEST, model_tensors(pair.model))
    save_checkpoint(tmp_path, pair.model, pair.optimizer, {"step": 1}, 1)
    before = hashes(tmp_path)
    pair.step(0)
    real, calls = getattr(os, call), [0]

    def full(*arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == which:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(OSError, match="No space") as caught:
            save_checkpoint(tmp_path, pair.model, pair.optimizer, {"step": 2}, 1)
    assert "checkpoint-0000002" in str(caught.value.filename)
    assert hashes(tmp_path) == before and {p.name for p in tmp_path.iterdir()} == {"checkpoint-0000001", "latest", BEST}


def test_every_write_of_a_checkpoint_was_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That the test above misses none: behind those there is only the link to the newest."""
    calls: dict[str, int] = {"fsync": 0, "replace": 0}
    pair = Pair(0)
    save_tensors(tmp_path / BEST, model_tensors(pair.model))

    def count(name: str) -> None:
        real = getattr(os, name)

        def counted(*arguments: Any) -> Any:
            calls[name] += 1
            return real(*arguments)

        monkeypatch.setattr(os, name, counted)

    for name in calls:
        count(name)
    save_checkpoint(tmp_path, pair.model, pair.optimizer, {"step": 1}, 1)
    assert calls["replace"] == 1 + sum(call == "replace" for call, _ in FULL) and calls["fsync"] == sum(call == "fsync" for call, _ in FULL)


@pytest.mark.parametrize("links", [True, False])
def test_the_best_weights_go_back_to_the_checkpoints_own(links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the file system knows no links, and when nothing has changed since."""

    def no_links(*_: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    if not links:
        monkeypatch.setattr(os, "link", no_links)
    pair = Pair(0)
    pair.step(1)
    save_tensors(tmp_path / BEST, model_tensors(pair.model))
    save_checkpoint(tmp_path, pair.model, pair.optimizer, {"step": 1}, 2)
    before = hash_file(tmp_path / BEST)
    (folder,) = checkpoints(tmp_path)
    load_checkpoint(folder, pair.model, pair.optimizer)
    pair.step(0)
    save_tensors(tmp_path / BEST, model_tensors(pair.model))
    assert hash_file(tmp_path / BEST) != before == hash_file(folder / BEST), "what is kept does not change with what comes later"
    load_checkpoint(folder, pair.model, pair.optimizer, write=False)
    assert hash_file(tmp_path / BEST) != before, "of a launch one process writes"
    load_checkpoint(folder, pair.model, pair.optimizer)
    assert hash_file(tmp_path / BEST) == before == hash_file(folder / BEST)
    assert {p.name for p in tmp_path.iterdir()} == {"checkpoint-0000001", "latest", BEST}


def test_a_process_that_does_not_write_holds_one_whole_tensor_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathering takes every rank, but weights, moments and averages of all together are for the one that writes."""
    pair, alive, most = Pair(0), weakref.WeakSet[torch.Tensor](), [0]
    pair.step(0)
    real = checkpoint.whole

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        gathered = real(tensor).clone()
        alive.add(gathered)
        most[0] = max(most[0], len(alive))
        return gathered

    for module in (checkpoint, devices):
        monkeypatch.setattr(module, "whole", whole)
    average = {name: p.detach().clone() for name, p in pair.model.named_parameters()}
    twin = devices.Twin(pair.model, None)
    for write, held in ((False, 1), (True, 3 + 3 * 3 + 3)):  # three parameters, of each two moments and a step, averages
        most[0] = 0
        save_checkpoint(tmp_path, pair.model, pair.optimizer, {"step": 1}, 1, average=average, write=write)
        assert most[0] == held and bool(checkpoints(tmp_path)) == write
        assert bool(model_tensors(pair.model, keep=write)) == write
    most[0] = 0
    twin.filled(pair.model, torch.device("cpu"))
    assert most[0] == 1 and equal(twin.model.state_dict(), pair.model.state_dict())


def test_an_engines_checkpoint_is_the_newest_too(tmp_path: Path) -> None:
    def engine(folder: str, tag: str) -> None:
        Path(folder, tag).mkdir(parents=True)

    one = SimpleNamespace(is_main_process=True, wait_for_everyone=lambda: None)
    job: Any = SimpleNamespace(
        accelerator=one, wrapped=SimpleNamespace(save_checkpoint=engine), settings=SimpleNamespace(save_total_limit=1)
    )
    for step in (1, 2):
        devices.save_engine(job, tmp_path / checkpoint.checkpoint_name(step), {"step": step})
    assert (tmp_path / "latest").resolve() == (tmp_path / "checkpoint-0000002").resolve()
    assert {p.name for p in tmp_path.iterdir()} == {"latest", "checkpoint-0000002"}


def test_a_half_removed_checkpoint_is_not_taken_for_a_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(0)
    save_checkpoint(tmp_path, pair.model, pair.optimizer, {"step": 1}, 3)

    def killed(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", killed)
        drop_checkpoints(tmp_path)
    assert checkpoints(tmp_path) == []
    save_checkpoint(tmp_path, pair.model, pair.optimizer, {"step": 2}, 3)
    assert {p.name for p in tmp_path.iterdir()} == {"checkpoint-0000002", "latest"}, "what was left of the first is still there"


def test_a_disk_that_fills_up_in_training_is_told_and_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = borrowed(tmp_path, "corpus", "responses", "recording")
    real = os.replace

    def full(source: Any, to: Any) -> None:
        if "checkpoint-0000008" in str(to):
            raise OSError(errno.ENOSPC, "No space left on device", str(to))
        real(source, to)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        assert command("train", path) == 1
    error = capsys.readouterr().err
    assert "disk full" in error and "free some space" in error and "Traceback" not in error
    assert [p.name for p in checkpoints(tmp_path / "run" / "draft.partial")] == ["checkpoint-0000004"]
    assert command("train", path) == 0
    one, two = (hash_file(home / "run" / "draft" / "model" / "model.safetensors") for home in (tmp_path, finished()))
    assert one == two
