"""The training job: it learns, publishes its best, and stops before a step that is not finite."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from draftstill.errors import NonFiniteLoss
from draftstill.runfolder import hash_file, read_json
from draftstill.train import step
from draftstill.train.data import Batch, collate
from draftstill.train.launch import train
from draftstill.train.loop import Job
from tests.pipeline import borrowed, command, opened
from tests.train.jobs import RECORDED, job_of


@pytest.mark.parametrize("loss", ["forward_kl", "reverse_kl", "jsd", "tvd", "nla", "lk"])
def test_a_draft_learns(loss: str, tmp_path: Path) -> None:
    recipe, run = opened(borrowed(tmp_path, *RECORDED, train={"max_steps": 40, "eval_steps": 20, "loss": {"name": loss}}))
    facts = read_json(train(recipe, run) / "provenance.json")["facts"]
    curve = [c["alpha_deploy"] for c in facts["curve"]]
    assert [c["step"] for c in facts["curve"]] == [0, 20, 40]
    assert curve[-1] > curve[0] + 0.07 and facts["best"]["alpha_deploy"] == max(curve)
    assert facts["curve"][-1]["alpha"] > facts["curve"][0]["alpha"] + 0.04


def test_a_trimmed_head_learns_too_and_ends_on_the_whole_one(tmp_path: Path) -> None:
    recipe, run = opened(borrowed(tmp_path, *RECORDED, train={"max_steps": 40, "eval_steps": 20, "head_tokens": 80}))
    curve = read_json(train(recipe, run) / "provenance.json")["facts"]["curve"]
    assert curve[-1]["alpha_deploy"] > curve[0]["alpha_deploy"] + 0.05


def test_the_published_weights_are_those_of_the_best_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later, worse draft does not replace a better one."""
    path = borrowed(tmp_path, *RECORDED)
    recipe, run = opened(path)
    measured: list[dict[str, torch.Tensor]] = []
    real = Job.held_out

    def held_out(job: Job) -> Any:
        measured.append({n: p.detach().clone() for n, p in job.module.model.named_parameters()})
        found = real(job)
        return found if len(measured) <= 3 else dataclasses.replace(found, alpha_deploy=found.alpha_deploy / 2)

    monkeypatch.setattr(Job, "held_out", held_out)
    folder = train(recipe, run)
    facts = read_json(folder / "provenance.json")["facts"]
    place = max(range(3), key=lambda i: facts["curve"][i]["alpha_deploy"])
    assert facts["best"] == facts["curve"][place] and place > 0
    from draftstill.sources import load_model, resolve_model

    saved = load_model(resolve_model(recipe.draft.model_copy(update={"source": str(folder / "model")}), "draft.source"), "float32", "cpu")
    for name, p in saved.named_parameters():
        assert torch.equal(p, measured[place][name]), name
    assert facts["weights_sha256"] == hash_file(folder / "model" / "model.safetensors")


def test_bfloat16_products_train_as_well(tmp_path: Path) -> None:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)  # one process holds one mixed precision
    try:
        recipe, run = opened(borrowed(tmp_path, *RECORDED, train={"max_steps": 30, "eval_steps": 15, "bf16": True}))
        curve = read_json(train(recipe, run) / "provenance.json")["facts"]["curve"]
    finally:
        AcceleratorState._reset_state(True)
    assert curve[-1]["alpha_deploy"] > curve[0]["alpha_deploy"] + 0.05


def test_a_recording_of_hidden_states_trains_too(tmp_path: Path) -> None:
    path = borrowed(tmp_path, "corpus", "responses", record={"mode": "hidden"}, train={"max_steps": 30, "eval_steps": 15})
    recipe, run = opened(path)
    curve = read_json(train(recipe, run) / "provenance.json")["facts"]["curve"]
    assert curve[-1]["alpha_deploy"] > curve[0]["alpha_deploy"] + 0.06


# --- non-finite --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_non_finite_loss_stops_before_the_optimizer_step(poison: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(borrowed(tmp_path, *RECORDED))
    job._optimize()
    job.step = 1
    before = {n: p.detach().clone() for n, p in job.module.model.named_parameters()}
    moments = {k: v.clone() for s in job.optimizer.state_dict()["state"].values() for k, v in s.items()}

    def poisoned(*arguments: Any) -> Batch:
        batch = collate(*arguments)
        assert batch.teacher.p_NK is not None
        batch.teacher.p_NK[3, 0] = poison
        return batch

    monkeypatch.setattr(step, "collate", poisoned)
    with pytest.raises(NonFiniteLoss) as caught:
        job._optimize()
    assert caught.value.key == "train.learning_rate" and "step 1" in str(caught.value)
    for name, p in job.module.model.named_parameters():
        assert torch.equal(p, before[name]), name
    after = {k: v for s in job.optimizer.state_dict()["state"].values() for k, v in s.items()}
    assert all(torch.equal(after[k], moments[k]) for k in moments)


def test_a_diverging_run_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = borrowed(tmp_path, *RECORDED, train={"learning_rate": 1e30, "save_steps": 1})
    assert command("train", path) == 1
    error = capsys.readouterr().err
    assert "train.learning_rate: step" in error and "1e+30" in error and "--set-aside" in error and "Traceback" not in error
    assert not (tmp_path / "run" / "draft").exists()
    # The mend that the message names works.
    assert command("train", path, "train.learning_rate=3e-3") == 1
    assert command("train", path, "train.learning_rate=3e-3", "--set-aside") == 0
    assert (tmp_path / "run" / "draft.old-1").is_dir() and (tmp_path / "run" / "draft" / "model").is_dir()
