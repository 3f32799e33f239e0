"""Adapters, averages, switches, phases, early stopping, warm starts: what each changes, and that a restart changes nothing."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftstill.distill import Recorded, Recording
from draftstill.distill.recording import write_manifest
from draftstill.errors import NonFiniteLoss
from draftstill.recipe import Train
from draftstill.runfolder import read_json, write_json
from draftstill.train.data import finite, learnable
from draftstill.train.launch import train
from draftstill.train.loop import Job
from draftstill.train.schedule import stale
from tests.pipeline import borrowed, command, make_model, opened, sources
from tests.train.jobs import RECORDED, Stop, assert_same, facts_of, gradients, job_of, stop_at

LORA = {"r": 4, "lora_dropout": 0.3}
OPTIONS: dict[str, dict[str, Any]] = {
    "adapters with dropout": {"lora": LORA, "learning_rate": 3e-3},
    "average": {"ema_decay": 0.8},
    "switch": {"loss": {"switch": {"to": "lk", "alpha": 0.24}}, "tokens": {"keep": 0.5}},
    "phases": {
        "phases": [{"share": 2, "kinds": ["document"]}, {"share": 1, "kinds": ["response"], "learning_rate": 1e-3, "loss": {"name": "tvd"}}]
    },
    "packed": {"packing": True, "gradient_checkpointing": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_it_learns_and_a_restart_changes_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"max_steps": 18, "eval_steps": 3, "save_steps": 2, "learning_rate": 1e-2, **OPTIONS[name]}
    once = train(*opened(borrowed(tmp_path / "once", *RECORDED, train=keys)))
    path = borrowed(tmp_path / "twice", *RECORDED, train=keys)
    for call in (4, 7):
        with monkeypatch.context() as patch, pytest.raises(Stop):
            stop_at(patch, Job, "_optimize", call, after=True)
            torch.manual_seed(call)  # whatever state the generators are in
            train(*opened(path))
    a, b = facts_of(once), facts_of(train(*opened(path)))
    assert a["weights_sha256"] == b["weights_sha256"] and a["curve"] == b["curve"]
    assert a["best"]["alpha_deploy"] > a["curve"][0]["alpha_deploy"] + 0.03
    assert all(point["tau"] > 1 + point["alpha_deploy"] and point["gamma"] == 2 for point in a["curve"])


# --- adapters ----------------------------------------------------------------------------------------------------------------


def test_adapters_are_merged_into_an_ordinary_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held-out alpha was measured with the adapters on: the published model has it."""
    keys = {"max_steps": 9, "eval_steps": 9, "lora": {"r": 4}}
    folder = train(*opened(borrowed(tmp_path, *RECORDED, train=keys)))
    found = load_file(folder / "model" / "model.safetensors")
    start = load_file(sources() / "target" / "model.safetensors")
    assert not any("lora" in name for name in found) and found.keys() < start.keys()
    moved = {name for name, tensor in found.items() if not torch.equal(tensor, start[name.replace("layers.1.", "layers.3.")])}
    assert moved == {n for n in found if n.endswith("_proj.weight")}, "all linear layers but the head, and nothing else"
    again = job_of(borrowed(tmp_path / "again", *RECORDED, train={"init_from": str(folder / "model")}))
    assert again.held_out().alpha_deploy == pytest.approx(facts_of(folder)["best"]["alpha_deploy"], abs=1e-5)


def test_only_adapters_are_kept(tmp_path: Path) -> None:
    job = job_of(borrowed(tmp_path, *RECORDED, train={"lora": {"r": 4}}))
    job._optimize()
    job.step = 1
    job._save_checkpoint()
    names = load_file(tmp_path / "run" / "draft.partial" / "latest" / "model.safetensors").keys()
    assert names and all("lora_" in n for n in names)


def test_dropout_follows_from_the_step_and_leaves_the_generator_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, states = [], []
    for number in range(2):
        job = job_of(borrowed(tmp_path / str(number), *RECORDED, train={"lora": {"r": 4, "lora_dropout": 0.5}}))
        torch.manual_seed(number)
        states.append(torch.get_rng_state())
        with monkeypatch.context() as patch:
            found.append(gradients(job, patch))
        assert torch.equal(states[-1], torch.get_rng_state())
        if number:
            job.step = 1
            with monkeypatch.context() as patch:
                found.append(gradients(job, patch))
    trained = [n for n in found[0] if "lora_B" in n]
    assert all(torch.equal(found[0][n], found[1][n]) for n in trained) and not all(torch.equal(found[1][n], found[2][n]) for n in trained)


# --- the average -------------------------------------------------------------------------------------------------------------


def test_the_average_is_what_is_measured_and_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"max_steps": 6, "eval_steps": 6, "learning_rate": 1e-2, "ema_decay": 0.5}
    seen: list[dict[str, torch.Tensor]] = []
    real = Job._optimize

    def optimize(job: Job) -> Any:
        result = real(job)
        seen.append({n: p.detach().clone() for n, p in job.module.model.named_parameters()})
        return result

    monkeypatch.setattr(Job, "_optimize", optimize)
    folder = train(*opened(borrowed(tmp_path, *RECORDED, train=keys)))
    average = {n: p.detach().clone() for n, p in job_of(borrowed(tmp_path / "start", *RECORDED)).module.model.named_parameters()}
    for step, weights in enumerate(seen):
        d = min(0.5, (1 + step) / (10 + step))
        average = {n: d * average[n] + (1 - d) * w for n, w in weights.items()}
    saved = load_file(folder / "model" / "model.safetensors")
    for name, tensor in saved.items():
        assert torch.allclose(tensor, average[name], atol=1e-6), name
    assert not torch.allclose(saved["lm_head.weight"], seen[-1]["lm_head.weight"], atol=1e-4)


def test_measuring_gives_the_weights_back_to_the_bit(tmp_path: Path) -> None:
    job = job_of(borrowed(tmp_path, *RECORDED, train={"ema_decay": 0.9}))
    job._optimize()
    before = {n: p.detach().clone() for n, p in job.module.model.named_parameters()}
    job._measure()
    assert all(torch.equal(p, before[n]) for n, p in job.module.model.named_parameters())


# --- the loss by measured alpha, phases, early stopping ----------------------------------------------------------------------


def test_the_loss_switches_when_alpha_is_reached_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(borrowed(tmp_path, *RECORDED, train={"loss": {"switch": {"to": "tvd", "alpha": 0.5}}}))
    names = []
    for alpha in (0.3, 0.49, 0.5, 0.2):
        job.curve.append({"alpha_deploy": alpha})
        job.set_objective()
        names.append(job.module.objective.terms[0][0])
    assert names == ["forward_kl", "forward_kl", "tvd", "tvd"]


def test_phases_draw_their_kinds_with_their_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    phases = [{"share": 1, "kinds": ["response"]}, {"share": 3, "kinds": ["document"], "learning_rate": 1e-4, "loss": {"name": "lk"}}]
    job = job_of(
        borrowed(tmp_path, *RECORDED, train={"max_steps": 8, "warmup_steps": 0, "lr_scheduler_type": "constant", "phases": phases})
    )
    kinds = [{job.recording.kind(i) for i in job.sequences(step)} for step in range(8)]
    assert kinds == [{"response"}] * 2 + [{"document"}] * 6
    assert [job.learning_rate(step) for step in range(8)] == [3e-3] * 2 + [1e-4] * 6
    for job.step in range(8):
        job.set_objective()
        assert job.module.objective.terms[0][0] == ("forward_kl" if job.step < 2 else "lk")
    drawn = [i for step in range(2, 8) for i in job.sequences(step)]
    documents = [i for i in range(len(job.recording)) if job.recording.kind(i) == "document"]
    assert sorted(drawn[: len(documents)]) == documents, "each of them once before any a second time"


def test_no_better_alpha_for_long_enough_ends_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    real = Job.held_out

    def held_out(job: Job) -> Any:
        return dataclasses.replace(real(job), alpha_deploy={6: 0.5}.get(job.step, 0.1))

    monkeypatch.setattr(Job, "held_out", held_out)
    keys = {"max_steps": 24, "eval_steps": 3, "save_steps": 2, "early_stopping_patience": 2}
    whole = facts_of(train(*opened(borrowed(tmp_path / "once", *RECORDED, train=keys))))
    assert whole["steps"] == 12 and whole["best"]["step"] == 6 and stale(whole["curve"]) == 2
    assert "stopped after step 12 of 24" in capsys.readouterr().out
    path = borrowed(tmp_path / "twice", *RECORDED, train=keys)
    with monkeypatch.context() as patch, pytest.raises(Stop):
        stop_at(patch, Job, "save", 1)
        train(*opened(path))
    again = facts_of(train(*opened(path)))
    assert again["weights_sha256"] == whole["weights_sha256"] and again["curve"] == whole["curve"]


# --- warm start --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["folder", "file", "checkpoint"])
def test_a_warm_start_takes_the_weights_and_nothing_else(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = make_model(5, 2)
    other.save_pretrained(tmp_path / "folder")
    (tmp_path / "checkpoint").mkdir()
    save_file(dict(other.named_parameters()), tmp_path / "checkpoint" / "model.safetensors")
    source = tmp_path / "folder" / "model.safetensors" if form == "file" else tmp_path / form
    job = job_of(borrowed(tmp_path, *RECORDED, train={"init_from": str(source)}))
    assert job.step == 0 and not job.curve
    for (name, p), (_, q) in zip(job.module.model.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(p, q), name


# --- degenerate masks, damaged data ------------------------------------------------------------------------------------------


def edited(home: Path, change: Any, side: str = "train", **sections: Any) -> Path:
    """A home whose recording was changed shard by shard, with a manifest that fits."""
    path = borrowed(home, *RECORDED, **sections)
    folder = home / "run" / "recording" / side
    manifest = read_json(folder / "manifest.json")
    for shard in manifest["shards"]:
        file = folder / shard["file"]
        from safetensors import safe_open

        with safe_open(file, "pt") as opened_file:
            info = json.loads(opened_file.metadata()["draftstill"])
        tensors = load_file(file)
        change(tensors)
        del info["sha256"]  # of other tensors
        save_file(tensors, file, {"draftstill": json.dumps(info)})
    about = {k: v for k, v in manifest.items() if k not in ("format", "mark", "sequences", "positions", "bytes", "rounding", "shards")}
    made = write_manifest(folder, about)
    write_json(folder / "manifest.json", {**made, "mark": manifest["mark"]})
    return path


def test_rows_with_a_degenerate_mask_are_refused_and_counted(tmp_path: Path, capsys: Any) -> None:
    def nothing_supervised(tensors: dict[str, torch.Tensor]) -> None:
        tensors["start"][0] = tensors["offsets"][1] - tensors["offsets"][0]

    path = edited(tmp_path, nothing_supervised)
    recording = Recording(tmp_path / "run" / "recording" / "train")
    shards = recording.shards
    kept, refused = learnable(recording, chat=False)
    assert refused == {"nothing supervised": shards} and len(kept) == len(recording) - shards
    facts = facts_of(train(*opened(path, "train.max_steps=3")))
    assert facts["sequences"] == {"learnt": len(kept), "refused": refused}
    assert f"sequences refused: {shards} (nothing supervised)" in capsys.readouterr().out


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("column", ["tail", "logp"])
def test_a_recording_with_nan_is_named(column: str, value: float, tmp_path: Path) -> None:
    def poison(tensors: dict[str, torch.Tensor]) -> None:
        if column == "logp":  # a code of 8 bits has no such value; float16, which record.logp_bits may ask for, has
            tensors["logp"] = torch.full(tensors["logp"].shape, -4.0, dtype=torch.float16)
        tensors[column][3] = value

    path = edited(tmp_path, poison)
    before = {n: p.clone() for n, p in job_of(borrowed(tmp_path / "clean", *RECORDED)).module.model.named_parameters()}
    job = job_of(path)
    with pytest.raises(NonFiniteLoss, match="the recording itself holds such values, in sequences") as caught:
        for job.step in range(24):
            job._optimize()
            before = {n: p.detach().clone() for n, p in job.module.model.named_parameters()}
    assert caught.value.key == "run_dir" and "record again" in str(caught.value)
    assert all(torch.equal(p, before[n]) for n, p in job.module.model.named_parameters())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_held_out_recording_with_nan_is_named(value: float, tmp_path: Path, capsys: Any) -> None:
    """Before anything is trained on what cannot be measured."""

    def poison(tensors: dict[str, torch.Tensor]) -> None:
        tensors["hidden"][int(tensors["offsets"][2]) - 1, 0] = value

    path = edited(tmp_path, poison, "heldout")
    assert command("train", path) == 1
    error = capsys.readouterr().err
    assert "step 0: held-out alpha is not finite" in error and "in sequences 1\n" in error and "Traceback" not in error
    assert "run_dir:" in error and "recording/heldout" in error and "record again" in error


@pytest.mark.parametrize("column", ["p", "tail", "hidden"])
def test_held_out_values_of_any_kind_are_looked_at(column: str) -> None:
    """Beside supervised positions nothing is read, so nothing there is a fault."""
    law = {"p": torch.ones(4, 2), "tail": torch.ones(4), "hidden": torch.ones(4, 3)}
    for place in range(4):
        item = Recorded(torch.arange(4), 1, **{k: v.clone() for k, v in law.items()})
        getattr(item, column)[place] = float("nan")
        assert finite(item) == (place == 0)


def test_a_measurement_of_broken_weights_is_said_to_be(tmp_path: Path) -> None:
    job = job_of(borrowed(tmp_path, *RECORDED))
    with torch.no_grad():
        job.module.model.lm_head.weight[0, 0] = float("inf")
    with pytest.raises(NonFiniteLoss, match="the weights are not") as caught:
        job._measure()
    assert (
        caught.value.key == "train.learning_rate"
        and not job.curve
        and not (tmp_path / "run" / "draft.partial" / "best.safetensors").exists()
    )


def test_defaults_are_those_of_before() -> None:
    """A run folder made before these keys were there is still the same recipe's."""
    plain = Train()
    assert (plain.lora, plain.phases, plain.init_from, plain.packing, plain.ema_decay, plain.loss.switch) == (
        None,
        (),
        None,
        False,
        0.0,
        None,
    )


def test_accumulated_packed_rows_are_those_of_one_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"max_grad_norm": 1e9, "packing": True}
    one = gradients(job_of(borrowed(tmp_path / "one", *RECORDED, train=keys)), monkeypatch)
    cut = {**keys, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    assert_same(one, gradients(job_of(borrowed(tmp_path / "cut", *RECORDED, train=cut)), monkeypatch), 1e-5)
