"""The training job: it learns; a step's gradient does not depend on how its batch is cut; stopped anywhere, it ends the same."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from draftstill.errors import DraftstillError, NonFiniteLoss
from draftstill.recipe import Train
from draftstill.runfolder import hash_file, read_json, write_json
from draftstill.stages import stages
from draftstill.train import loop
from draftstill.train.data import Batch, collate
from draftstill.train.launch import train
from draftstill.train.loop import Job, learning_rate
from tests.pipeline import borrowed, command, environment, finished, make_target, opened, sources, words

RECORDED = ("corpus", "responses", "recording")


def job_of(path: Path) -> Job:
    """A job at step 0, on the finished run's recording."""
    recipe, run = opened(path)
    stage = stages(recipe, run)["draft"]
    return Job(recipe, run.path / "recording", stage.begin(), Accelerator(cpu=True))


def gradients(job: Job, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """What one step hands to its optimizer."""
    found: dict[str, torch.Tensor] = {}

    def keep() -> None:
        found.update({n: p.grad.clone() for n, p in job.module.model.named_parameters() if p.grad is not None})

    monkeypatch.setattr(job.optimizer, "step", keep)
    job._optimize()
    assert found.keys() == {n for n, _ in job.module.model.named_parameters()}
    return found


def assert_same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor], tolerance: float = 2e-6) -> None:
    for name, a in one.items():
        assert float(a.norm()) > 0, name
        assert float((a - two[name]).norm() / a.norm()) < tolerance, name


# --- learning ---------------------------------------------------------------------------------------------------------------


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
        return found if len(measured) <= 3 else type(found)(found.alpha, found.alpha_deploy / 2, found.top1, found.positions)

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


# --- the same gradient, however the batch is cut -----------------------------------------------------------------------------


def test_written_tokens_stand_at_the_law_that_they_were_drawn_from(tmp_path: Path) -> None:
    """What ``ce`` learns. Part of the text is the target's own: it gives those tokens more than the ones before and after them."""
    job = job_of(borrowed(tmp_path, *RECORDED))
    batch = collate(job.recording, range(len(job.recording)))
    teacher = batch.teacher
    assert teacher.ids_NK is not None and teacher.p_NK is not None and teacher.token_N is not None and batch.place_N is not None
    given = lambda token_N: float((teacher.p_NK * (teacher.ids_NK == token_N[:, None])).sum(-1).mean())  # noqa: E731
    assert given(teacher.token_N) > 1.3 * max(given(teacher.token_N.roll(n)) for n in (-1, 1))
    assert int((teacher.token_N < 0).sum()) <= len(job.recording) == int((batch.place_N == 0).sum())


WEIGHED = {"loss": {"mix": {"lk": 0.5, "ce": 0.5}}, "tokens": {"first": 1, "last": 40, "prefix_gamma": 4, "keep": 0.4}}


@pytest.mark.parametrize("extra", [{}, {"head_tokens": 80}], ids=["whole", "trimmed"])
@pytest.mark.parametrize(("size", "accumulate"), [(1, 8), (2, 4), (4, 2)])
def test_accumulation_gives_the_gradient_of_one_batch(
    size: int, accumulate: int, extra: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"max_grad_norm": 1e9, **extra}
    whole = gradients(job_of(borrowed(tmp_path / "whole", *RECORDED, train=keys)), monkeypatch)
    cut = {**keys, "per_device_train_batch_size": size, "gradient_accumulation_steps": accumulate}
    assert_same(whole, gradients(job_of(borrowed(tmp_path / "cut", *RECORDED, train=cut)), monkeypatch))


def moved(path: Path) -> Job:
    """A job whose draft is no longer the untrained one, so that losses have gaps."""
    job = job_of(path)
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in job.module.model.parameters():
            p += 0.02 * torch.randn(p.shape, generator=g)
    return job


def test_weighed_positions_do_not_depend_on_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixed losses, position filters, prefix confidence and selection: the same gradient for 8 sequences as for 2 times 4."""
    keys = {"max_grad_norm": 1e9, **WEIGHED}
    whole = gradients(moved(borrowed(tmp_path / "whole", *RECORDED, train=keys)), monkeypatch)
    cut = {**keys, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    assert_same(whole, gradients(moved(borrowed(tmp_path / "cut", *RECORDED, train=cut)), monkeypatch))
    plain = gradients(moved(borrowed(tmp_path / "plain", *RECORDED, train={"max_grad_norm": 1e9, "loss": WEIGHED["loss"]})), monkeypatch)
    head = "lm_head.weight"
    assert float((plain[head] - whole[head]).norm() / plain[head].norm()) > 0.1, "weights count"


def test_weighed_training_stops_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"max_steps": 6, "eval_steps": 3, "save_steps": 2, **WEIGHED}
    once = train(*opened(borrowed(tmp_path / "once", *RECORDED, train=keys)))
    path = borrowed(tmp_path / "twice", *RECORDED, train=keys)
    with monkeypatch.context() as patch, pytest.raises(Stop):
        stop_at(patch, Job, "_optimize", 4)
        train(*opened(path))
    a, b = (read_json(f / "provenance.json")["facts"] for f in (once, train(*opened(path))))
    assert a["weights_sha256"] == b["weights_sha256"], "the reference is the untrained draft, not the checkpoint"


@pytest.mark.parametrize("weighed", [False, True])
def test_padding_changes_nothing(weighed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = borrowed(tmp_path, *RECORDED, train={"max_grad_norm": 1e9, **(WEIGHED if weighed else {})})
    tight = gradients(moved(path), monkeypatch)

    def padded(*arguments: Any) -> Batch:
        batch = collate(*arguments)
        B, T = batch.ids_BT.shape
        noise = torch.randint(200, (B, 13), generator=torch.Generator().manual_seed(1))
        return Batch(torch.cat([batch.ids_BT, noise], 1), batch.rows_N + batch.rows_N // T * 13, batch.teacher, batch.place_N)

    monkeypatch.setattr(loop, "collate", padded)
    assert_same(tight, gradients(moved(path), monkeypatch))


def test_the_gradient_is_the_mean_over_all_supervised_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against autograd through transformers' own logits and the float64 oracle."""
    from draftstill.distill.divergences import bucketed, forward_kl

    job = job_of(borrowed(tmp_path, *RECORDED, train={"max_grad_norm": 1e9}))
    model, total, tokens = job.module.model, 0.0, 0
    for index in job.order.take(0, job.per_step):
        item = job.recording[index]
        assert item.ids is not None and item.p is not None and item.tail is not None
        logits = model(item.tokens[None], use_cache=False).logits[0, item.start :, : job.draft.vocab].double()
        p, q = bucketed(logits.softmax(-1), item.ids[item.start :], item.p[item.start :].double(), item.tail[item.start :].double())
        total = total + forward_kl(p, q).sum()
        tokens += len(item.tokens) - item.start
    assert isinstance(total, torch.Tensor)
    (total / tokens).backward()
    truth = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    assert_same(truth, gradients(job, monkeypatch), 2e-5)
    assert job.tokens == tokens


def test_two_processes_end_where_one_does(tmp_path: Path) -> None:
    """``-m draftstill.train`` as a launcher starts it, on gloo: a few steps of 2 x 4 sequences against 1 x 8."""
    # AdamW forgives a wrongly scaled gradient. Norms here run from 2.7 to 3.3, so a limit of 3 clips some steps and not others: scale counts.
    keys = {"max_steps": 5, "eval_steps": 5, "save_steps": 2, "max_grad_norm": 3.0}
    recipe, run = opened(borrowed(tmp_path / "one", *RECORDED, train=keys))
    one = train(recipe, run)
    path = borrowed(tmp_path / "two", *RECORDED, train={**keys, "per_device_train_batch_size": 4})
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in "01":
        extra = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        ranks.append(subprocess.Popen([sys.executable, "-m", "draftstill.train", str(path)], env=environment(**extra), text=True,
                                      stdout=subprocess.PIPE, stderr=subprocess.STDOUT))  # fmt: skip
    outputs = [p.communicate(timeout=100)[0] for p in ranks]
    assert [p.returncode for p in ranks] == [0, 0], "\n".join(outputs)
    assert "held-out alpha" in outputs[0] and "held-out alpha" not in outputs[1], "one process speaks"
    two = tmp_path / "two" / "run" / "draft"
    a, b = (read_json(f / "provenance.json")["facts"] for f in (one, two))
    assert a["tokens"] == b["tokens"] and a["best"]["step"] == b["best"]["step"] == 5
    from safetensors.torch import load_file

    first, second = (load_file(f / "model" / "model.safetensors") for f in (one, two))
    start = load_file(sources() / "target" / "model.safetensors")
    for name, tensor in first.items():
        assert torch.allclose(tensor, second[name], atol=1e-5), (name, float((tensor - second[name]).abs().max()))
    assert not torch.allclose(first["lm_head.weight"], start["lm_head.weight"], atol=1e-3)


# --- schedule ----------------------------------------------------------------------------------------------------------------


def test_learning_rate_shapes() -> None:
    for name in ("cosine", "linear", "constant"):
        rates = [learning_rate(Train(learning_rate=1.0, warmup_steps=10, lr_scheduler_type=name), s, 100) for s in range(100)]
        assert all(a < b for a, b in zip(rates[:10], rates[1:11], strict=True)) and rates[0] == pytest.approx(1 / 11)
        assert rates[10] == 1.0 == max(rates)
        assert all(a >= b for a, b in zip(rates[10:], rates[11:], strict=False))
        assert all(r > 0 for r in rates)
        middle, last = rates[55], rates[99]
        assert middle == pytest.approx(1.0 if name == "constant" else 0.5)
        assert last == pytest.approx({"constant": 1.0, "linear": 1 / 90, "cosine": 0.5 * (1 + math.cos(math.pi * 89 / 90))}[name])


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_run_shorter_than_its_warm_up(steps: int) -> None:
    rates = [learning_rate(Train(learning_rate=1.0, warmup_steps=10), s, steps) for s in range(steps)]
    assert all(0 < r <= 1 for r in rates) and rates[-1] == max(rates)


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

    monkeypatch.setattr(loop, "collate", poisoned)
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


# --- stopped and started again -----------------------------------------------------------------------------------------------


class Stop(BaseException):
    """Not an Exception, so that nothing can swallow it on the way."""


def stop_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int, *, after: bool = False) -> None:
    """Break off at the n-th call of a function, before or after it did its work."""
    real, calls = getattr(owner, name), [0]

    def counted(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == call and not after:
            raise Stop
        result = real(*arguments, **options)
        if calls[0] == call:
            raise Stop
        return result

    monkeypatch.setattr(owner, name, counted)


def reference() -> str:
    return read_json(finished() / "run" / "draft" / "provenance.json")["facts"]["weights_sha256"]


STOPS = [
    ("before the first checkpoint", Job, "_optimize", 3, False),
    ("between best weights and checkpoint", Job, "_save_checkpoint", 3, False),
    ("in the measurement, before best weights", Job, "held_out", 3, True),
    ("before the model is saved", Job, "save", 1, False),
    ("after the model is saved", Job, "save", 1, True),
    ("after the stage was renamed", loop, "drop_checkpoints", 1, False),
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
        return found if job.step == 6 else type(found)(found.alpha, found.alpha_deploy / 2, found.top1, found.positions)

    monkeypatch.setattr(Job, "held_out", held_out)
    folders = [train(*opened(borrowed(tmp_path / "whole", *RECORDED)))]
    path = borrowed(tmp_path / "stopped", *RECORDED)
    with monkeypatch.context() as patch, pytest.raises(Stop):
        stop_at(patch, Job, "_optimize", 15)
        train(*opened(path))
    folders.append(train(*opened(path)))
    one, two = (read_json(f / "provenance.json")["facts"] for f in folders)
    assert one["best"]["step"] == two["best"]["step"] == 6 and one["weights_sha256"] == two["weights_sha256"]


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


# --- bad input ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("overrides", "says"), [
    ({"draft": {"layers": [0, 4]}}, ["draft.layers", "[0, 4]", "between 0 and 3"]),
    ({"train": {"head_tokens": 200}}, ["train.head_tokens", "200", "0 means the whole head"]),
    ({"draft": {"head_tokens": 5000}}, ["draft.head_tokens", "5000"]),
])  # fmt: skip
def test_a_value_that_does_not_fit_the_target(overrides: dict[str, Any], says: list[str], tmp_path: Path) -> None:
    path = borrowed(tmp_path, *RECORDED, **overrides)
    with pytest.raises(DraftstillError) as caught:
        train(*opened(path))
    assert all(s in str(caught.value) for s in says)
    # Mended, the same command goes through: nothing was made yet that it could overwrite.
    assert train(*opened(borrowed(tmp_path, train={"max_steps": 1}))).exists()


def test_a_trimmed_training_head_needs_a_top_k_recording(tmp_path: Path) -> None:
    path = borrowed(tmp_path, "corpus", "responses", record={"mode": "hidden"}, train={"head_tokens": 80})
    with pytest.raises(DraftstillError, match="top-k recording") as caught:
        train(*opened(path))
    assert caught.value.key == "train.head_tokens"


def test_a_draft_of_another_vocabulary(tmp_path: Path) -> None:
    other = words()
    other[50], other[60] = other[60], other[50]
    make_target(tmp_path / "foreign", seed=3, layers=1, vocabulary=other)
    with pytest.raises(DraftstillError, match="differ at 2 ids") as caught:
        train(*opened(borrowed(tmp_path, *RECORDED, draft={"source": str(tmp_path / "foreign")})))
    assert caught.value.key == "draft.source"


def test_a_recording_of_another_vocabulary(tmp_path: Path) -> None:
    path = borrowed(tmp_path, *RECORDED)
    manifest = tmp_path / "run" / "recording" / "train" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"vocab": 200', '"vocab": 190'))
    with pytest.raises(DraftstillError, match="190") as caught:
        train(*opened(path))
    assert "distill" in str(caught.value)


@pytest.mark.parametrize("what", ["tokenizer_sha256", "revision"])
def test_a_recording_of_another_target(what: str, tmp_path: Path) -> None:
    path = borrowed(tmp_path, *RECORDED)
    manifest = tmp_path / "run" / "recording" / "train" / "manifest.json"
    write_json(manifest, {**read_json(manifest), what: "of another"})
    with pytest.raises(DraftstillError, match=f"its {what} was of another") as caught:
        train(*opened(path))
    assert caught.value.key == "target.source"


def test_going_on_with_another_number_of_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = borrowed(tmp_path, *RECORDED)
    with monkeypatch.context() as patch, pytest.raises(Stop):
        stop_at(patch, Job, "_optimize", 6)
        train(*opened(path))
    state = tmp_path / "run" / "draft.partial" / "checkpoint-0000004" / "state.json"
    write_json(state, {**read_json(state), "per_step": 16})
    with pytest.raises(DraftstillError, match="16 sequences per step over all processes, now it would be 8"):
        train(*opened(path))


def test_a_launch_of_many_processes_does_not_make_the_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, run = opened(borrowed(tmp_path, "corpus"))
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    with pytest.raises(DraftstillError, match="distill RECIPE"):
        train(recipe, run)
    assert os.listdir(tmp_path / "run") == ["corpus"]
