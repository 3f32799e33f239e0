"""Trackers: offline, told everything, and never the end of a training."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from draftstill.errors import DraftstillError
from draftstill.runfolder import read_json
from draftstill.stages import stages
from draftstill.train import trackers
from draftstill.train.launch import train, train_all
from draftstill.train.meter import Meter
from draftstill.train.trackers import ROUND_COLUMNS, flat, markdown, refuse_missing
from tests.pipeline import borrowed, opened

RECORDED = ("corpus", "responses", "recording")
SHORT = {"max_steps": 2, "eval_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 4}
HAVE_TENSORBOARD = importlib.util.find_spec("tensorboard") is not None


class Recorder(GeneralTracker):  # type: ignore[misc]
    """Keeps what it is told."""

    name, requires_logging_directory = "trackio", False
    made: list[Recorder] = []
    fails: frozenset[str] = frozenset()

    def __init__(self, project: str, **options: Any) -> None:
        super().__init__(_blank=True)
        self.project, self.options = project, options
        self.config: dict[str, Any] = {}
        self.rows: list[tuple[int | None, dict[str, Any]]] = []
        self.calls: list[str] = []
        Recorder.made.append(self)

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fails:
            raise RuntimeError("the server is down")

    @property
    def tracker(self) -> Recorder:
        return self

    def start(self) -> None:
        self._called("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._called("config")
        self.config = values

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self._called("log")
        self.rows.append((step, values))

    def finish(self) -> None:
        self._called("finish")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> type[Recorder]:
    """trackio, as far as a training can tell."""
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "trackio", Recorder)
    monkeypatch.setattr(Recorder, "made", [])
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: ModuleType(name) if name == "trackio" else real(name, *a))
    monkeypatch.setitem(trackers._TABLES, "trackio", lambda t, title, columns, rows, step: t.log({title: (columns, rows)}, step=step))
    return Recorder


def test_what_is_told(recorder: type[Recorder], tmp_path: Path) -> None:
    keys = {**SHORT, "loss": {"name": "lk"}, "report_to": ["trackio"], "run_name": "mine"}
    recipe, run = opened(borrowed(tmp_path, *RECORDED, train=keys))
    train(recipe, run)
    (told,) = recorder.made
    assert told.project == "draftstill" and told.options == {"name": "mine"} and told.calls[-1] == "finish"
    assert told.config["train.max_steps"] == 2 and told.config["target.source"] == recipe.target.source
    assert all(isinstance(v, str | int | float | bool) for v in told.config.values())
    steps = [(step, row) for step, row in told.rows if "train/loss" in row]
    assert [step for step, _ in steps] == [1, 2]
    row = steps[-1][1]
    for name in ("loss", "alpha_low", "alpha_high", "top1", "grad_norm", "learning_rate", "tokens_per_s", "compute_share", "data_share",
                 "memory_peak_gib"):  # fmt: skip
        assert math.isfinite(row[f"train/{name}"]), name
    terms = {k: v for k, v in row.items() if k.startswith("train/loss_")}
    assert terms.keys() == {"train/loss_forward_kl", "train/loss_tvd"} and sum(terms.values()) == pytest.approx(row["train/loss"]), "of LK"
    assert 0 <= row["train/alpha_low"] <= row["train/alpha_high"] <= 1
    assert 0 < row["train/compute_share"] + row["train/data_share"] <= 1.001 and 0.05 < row["train/memory_peak_gib"] < 64
    curve = [row for _, row in told.rows if "heldout/alpha_deploy" in row]
    assert [c["heldout/step"] for c in curve] == [0, 2]
    ((step, table),) = [(step, row["rounds"]) for step, row in told.rows if "rounds" in row]
    columns, rows = table
    assert step == 2 and columns == ROUND_COLUMNS and {r[0] for r in rows} == {0, 1, 2}
    assert all(0 <= accepted <= proposed <= recipe.evaluate.gamma and text.count("|") == 1 for _, _, proposed, accepted, text in rows)


@pytest.mark.parametrize("where", ["start", "config", "log", "finish"])
def test_a_tracker_that_fails_is_said_once_and_left_out(
    where: str, recorder: type[Recorder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Recorder, "fails", frozenset([where]))
    folder = train(*opened(borrowed(tmp_path, *RECORDED, train={**SHORT, "report_to": ["trackio"]})))
    assert (folder / "model" / "model.safetensors").exists()
    assert capsys.readouterr().out.count("tracker trackio: RuntimeError: the server is down; the training goes on without it") == 1
    assert recorder.made[0].calls.count(where) == 1


def test_a_table_that_cannot_be_made_loses_nothing(
    recorder: type[Recorder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def sample(*_: Any) -> None:
        raise MemoryError("no room for the target")

    monkeypatch.setattr(trackers, "sample_rounds", sample)
    assert train(*opened(borrowed(tmp_path, *RECORDED, train={**SHORT, "report_to": ["trackio"]}))).exists()
    assert "no table of rounds (MemoryError: no room for the target)" in capsys.readouterr().out


def test_each_candidate_has_a_run_of_its_own(recorder: type[Recorder], tmp_path: Path) -> None:
    keys = {**SHORT, "max_steps": 1, "report_to": ["trackio"], "candidates": {"a": {}, "b": {"train": {"learning_rate": 1e-4}}}}
    train_all(*opened(borrowed(tmp_path, *RECORDED, train=keys)))
    assert [t.options["name"] for t in recorder.made] == ["run-draft-a", "run-draft-b"]
    assert [t.config["train.learning_rate"] for t in recorder.made] == [3e-3, 1e-4]
    assert all(t.calls[-1] == "finish" for t in recorder.made) and all(step in (0, 1) for t in recorder.made for step, _ in t.rows)


def test_trackers_change_nothing_about_the_draft(recorder: type[Recorder], tmp_path: Path) -> None:
    recipe, run = opened(borrowed(tmp_path, *RECORDED, train=SHORT))
    quiet, told = (stages(r, run)["draft"].fingerprint for r in (recipe, opened(tmp_path / "recipe.yaml", "train.report_to=[trackio]")[0]))
    assert quiet == told


def test_wandb_writes_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    recipe, run = opened(borrowed(tmp_path, *RECORDED, train={**SHORT, "max_steps": 1, "report_to": ["wandb"]}))
    train(recipe, run)
    (folder,) = (run.path / "trackers" / "wandb").glob("offline-run-*")
    (written,) = folder.glob("run-*.wandb")
    assert written.stat().st_size > 1000
    tables = [json.loads(p.read_text()) for p in folder.rglob("*.table.json")]
    assert [t["columns"] for t in tables] == [list(ROUND_COLUMNS)] and tables[0]["data"]


@pytest.mark.skipif(not HAVE_TENSORBOARD, reason="tensorboard is not installed")
def test_tensorboard_writes_what_it_can_read(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recipe, run = opened(borrowed(tmp_path, *RECORDED, train={**SHORT, "report_to": ["tensorboard"]}))
    train(recipe, run)
    (events,) = [p for p in (run.path / "trackers" / "tensorboard").rglob("events.out.*") if p.parent.name == "draftstill"]
    found = EventAccumulator(str(events)).Reload()
    assert [e.step for e in found.Scalars("heldout/alpha_deploy")] == [0, 2] and [e.step for e in found.Scalars("train/loss")] == [1, 2]
    assert yaml.safe_load(next(events.parent.rglob("hparams.yml")).read_text())["train.max_steps"] == 2


@pytest.mark.skipif(HAVE_TENSORBOARD, reason="tensorboard is installed")
def test_a_tracker_that_is_not_installed(tmp_path: Path) -> None:
    recipe, run = opened(borrowed(tmp_path, *RECORDED, train={**SHORT, "report_to": ["tensorboard"]}))
    for refuse in (lambda: refuse_missing(recipe), lambda: train(recipe, run)):
        with pytest.raises(DraftstillError, match="not installed") as caught:
            refuse()
        assert caught.value.key == "train.report_to" and "pip install tensorboard" in str(caught.value)


def test_dotted_settings() -> None:
    assert flat({"a": {"b": {"c": 1}, "d": None}, "e": [1, 2], "f": {}}) == {"a.b.c": 1, "a.d": "None", "e": "[1, 2]", "f": "{}"}


def test_a_markdown_table_keeps_its_cells() -> None:
    table = markdown(["a", "b"], [["x|y", "one\ntwo"], ["\\", 3]]).splitlines()
    assert table[0] == "| a | b |" and len(table) == 4
    assert table[2] == r"| x\|y | one\ntwo |" and table[3] == "| \\\\ | 3 |"


def test_the_meter_counts_between_readings() -> None:
    meter = Meter(torch.device("cpu"))
    with meter.stepping, meter.reading:
        pass
    first = meter.read()
    assert first["train/data_share"] >= 0 and first["train/compute_share"] + first["train/data_share"] <= 1
    assert meter.read()["train/data_share"] == 0, "the time before belongs to the line before"


def test_a_launch_has_no_table(recorder: type[Recorder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its other processes would wait for it."""
    accelerator = Accelerator(cpu=True)
    recipe, run = opened(borrowed(tmp_path, *RECORDED, train={**SHORT, "report_to": ["trackio"]}))
    trackers.open_trackers(accelerator, recipe, stages(recipe, run)["draft"])
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    trackers.log_rounds(accelerator, recipe, run.path / "recording", tmp_path, 1)
    assert recorder.made[0].rows == [] and read_json(run.path / "recording" / "provenance.json")
    trackers.close_trackers(accelerator)


def test_alpha_over_a_sample_of_the_ids_is_told_as_an_estimate(recorder: type[Recorder], tmp_path: Path) -> None:
    """While the head is cut, and in a line that a cut step counts in; the names of the bounds are for the whole head."""
    keys = {**SHORT, "max_steps": 6, "logging_steps": 2, "head_tokens": 40, "full_head_from": 0.5, "report_to": ["trackio"]}
    train(*opened(borrowed(tmp_path, *RECORDED, train=keys)))
    (told,) = recorder.made
    rows = {step: row for step, row in told.rows if "train/loss" in row}
    assert sorted(rows) == [2, 4, 6]
    bounds, estimates = {"alpha_low", "alpha_high", "top1"}, {"alpha_estimate_low", "alpha_estimate_high", "top1_estimate"}
    for step, row in rows.items():
        names = {name.removeprefix("train/") for name in row}
        expected, others = (bounds, estimates) if step == 6 else (estimates, bounds)
        assert expected <= names and not names & others, step
        assert all(0 <= row[f"train/{name}"] <= 1 for name in expected)
