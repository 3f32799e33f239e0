"""A live target in place of recorded laws: the same gradients, weights and restarts, on one process and on two, whole or sharded."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import io
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from draftstill.distill import Recording, Text, inspect, record
from draftstill.distill.scoring import by_length
from draftstill.errors import DraftstillError, NonFiniteLoss
from draftstill.estimates import estimate
from draftstill.plan import plan
from draftstill.recipe import Recipe
from draftstill.runfolder import RunFolder, read_json, write_json
from draftstill.sizes import size_of
from draftstill.stages import stages
from draftstill.train import live, memory, meter
from draftstill.train.build import build_draft, preflight
from draftstill.train.launch import train
from draftstill.train.live import Live, live_target, replicated
from draftstill.train.loop import Job
from draftstill.train.step import optimize
from tests.pipeline import PADDED, borrowed, command, finished, make_model, opened, sources
from tests.train.jobs import Stop, assert_same, gradients, stop_at
from tests.train.test_launch import SHARDED, launch


def folder() -> Path:
    home = Path(tempfile.mkdtemp(prefix="draftstill-live-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    return home


@functools.cache
def disturbed() -> Path:
    """A draft that rollouts and replays are made with: it is like the target, and not it."""
    from tests.train.drafts import saved

    model, g = make_model(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p += 0.3 * p.std() * torch.randn(p.shape, generator=g)
    return saved(folder() / "draft", model)


def recording_keys(mode: str) -> dict[str, Any]:
    """All kinds of text."""
    return {"mode": mode, "rollouts": 3, "replays": 8, "batch_size": 2, "draft": {"source": str(disturbed())}}


@functools.cache
def recorded(mode: str) -> tuple[Path, str]:
    """Run folder with a recording of all kinds of text, made once, and what was said. Look, do not touch."""
    home, said = folder(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        record(*opened(borrowed(home, "corpus", "responses", record=recording_keys(mode))))
    return home / "run", said.getvalue()


def home_of(home: Path, mode: str = "live", **sections: Any) -> Path:
    """A recipe whose recording is done, in a home of its own."""
    record = recording_keys(mode) | sections.pop("record", {})
    path = borrowed(home, "corpus", "responses", record=record, **sections)
    shutil.copytree(recorded(mode)[0] / "recording", home / "run" / "recording")
    return path


def job_of(path: Path) -> Job:
    recipe, run = opened(path)
    return Job(recipe, run.path / "recording", stages(recipe, run)["draft"].begin(), Accelerator(cpu=True))


# --- the recording ------------------------------------------------------------------------------------------------------------


def test_it_holds_the_texts_of_a_hidden_one_and_no_laws() -> None:
    """Of all kinds, with masks and ends; the held-out side is the same to the byte but for the pilot's name."""
    texts, hidden = (Recording(recorded(mode)[0] / "recording" / "train") for mode in ("live", "hidden"))
    assert len(texts) == len(hidden) and {texts.kind(i) for i in range(len(texts))} == {"response", "document", "rollout", "replay"}
    for i in range(len(texts)):
        a, b = texts[i], hidden[i]
        assert torch.equal(a.tokens, b.tokens) and torch.equal(a.rows, b.rows) and a.after == b.after and texts.kind(i) == hidden.kind(i)
        assert a.hidden is a.ids is a.p is a.tail is None
    assert any(texts[i].mask is not None for i in range(len(texts))) and texts.manifest["mode"] == "live"
    assert texts.manifest["bytes"] < hidden.manifest["bytes"] / 4
    held = [Recording(recorded(mode)[0] / "recording" / "heldout") for mode in ("live", "hidden")]
    assert held[0].mode == "hidden" and held[0].manifest == held[1].manifest


def test_it_is_told_as_what_it_is() -> None:
    text, said = inspect(recorded("live")[0] / "recording"), recorded("live")[1]
    train_side = " ".join(text[text.index("recording/train") :].split())
    assert "live: texts alone, no laws; the target scores them while the draft trains" in train_side and "tail mass" not in train_side
    assert "hidden, in float32" in text[: text.index("recording/train")], "the held-out side"
    assert "response 0" in train_side or "document 0" in train_side or "replay 0" in train_side
    assert "record: about" in said and "the target's forwards will take about" in said
    assert "the target's forwards will take" not in recorded("hidden")[1]


# --- the same training --------------------------------------------------------------------------------------------------------

LOSSES: dict[str, dict[str, Any]] = {
    "forward_kl": {}, "reverse_kl": {"name": "reverse_kl", "temperature": 0.7}, "lk and ce": {"mix": {"lk": 0.5, "ce": 0.5}},
    "cut": {"name": "tvd", "top_k": 50, "top_p": 0.9, "temperature": 1.5},
}  # fmt: skip


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_are_those_of_recorded_hidden_states(loss: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any loss, at any temperature, over all kinds of text at once: the first steps' sequences are of every kind."""
    keys = {"loss": LOSSES[loss], "per_device_train_batch_size": 40, "max_grad_norm": 1e9, "tokens": {"keep": 0.5} if loss == "cut" else {}}
    found = [gradients(job_of(home_of(tmp_path / mode, mode, train=keys)), monkeypatch) for mode in ("hidden", "live")]
    assert_same(*found, tolerance=1e-6)


def test_weights_after_some_steps_are_those_of_recorded_hidden_states(tmp_path: Path) -> None:
    weights = []
    for mode in ("hidden", "live"):
        job = job_of(home_of(tmp_path / mode, mode))
        for job.step in range(6):
            optimize(job)
        weights.append({n: p.detach() for n, p in job.module.model.named_parameters()})
    # AdamW's first steps divide a gradient by its own size, so that the last bits of small ones show: 3e-6 here, where weights move by 1e-2.
    furthest = max(float((p - weights[1][n]).abs().max()) for n, p in weights[0].items())
    assert furthest < 1e-5, furthest


def test_the_target_is_let_go_before_a_sample_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What decodes loads a target of its own; the memory was reckoned for one."""
    import draftstill.train.launch as launch

    left: list[int] = []
    monkeypatch.setattr(launch, "log_rounds", lambda *_: left.append(sum(isinstance(x, Live) for x in gc.get_objects())))
    before = sum(isinstance(x, Live) for x in gc.get_objects())
    launch.train(*opened(home_of(tmp_path, train={"max_steps": 1, "eval_steps": 1})))
    assert left and set(left) == {before}


def test_states_are_to_the_bit_those_that_would_be_recorded(tmp_path: Path) -> None:
    """In the recorder's own batches; in others padding moves last bits."""
    target = replicated(opened(home_of(tmp_path))[0])
    texts, hidden = (Recording(recorded(mode)[0] / "recording" / "train") for mode in ("live", "hidden"))
    for batch in by_length([Text(texts[i].tokens.tolist()) for i in range(8)], 2):
        expected = torch.cat([hidden[i].hidden[hidden[i].rows] for i in batch])  # type: ignore[index]
        assert torch.equal(target.hidden(texts, batch), expected)


@pytest.mark.parametrize("loss", ["forward_kl", "lk and ce"])
def test_packed_rows_and_accumulated_forwards_give_the_same_gradient(loss: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"loss": LOSSES[loss], "max_grad_norm": 1e9}
    plain = gradients(job_of(home_of(tmp_path / "plain", train=keys)), monkeypatch)
    job = job_of(home_of(tmp_path / "packed", train={**keys, "packing": True}))
    assert_same(plain, gradients(job, monkeypatch), tolerance=1e-5)
    halves = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    assert_same(plain, gradients(job_of(home_of(tmp_path / "halves", train={**keys, **halves})), monkeypatch))


def test_states_come_in_the_order_that_the_batch_has(tmp_path: Path) -> None:
    """Whatever the lengths, and only those of supervised positions."""
    target, hidden = replicated(opened(home_of(tmp_path))[0]), Recording(recorded("hidden")[0] / "recording" / "train")
    texts = Recording(recorded("live")[0] / "recording" / "train")
    masked = next(i for i in range(len(texts)) if texts[i].mask is not None)
    order = [masked, 0, len(texts) - 1, 5]
    expected = torch.cat([hidden[i].hidden[hidden[i].rows] for i in order])  # type: ignore[index]
    found = target.hidden(texts, order)
    assert found.shape == expected.shape and torch.allclose(found, expected, atol=2e-5)
    assert not found.is_inference() and not found.requires_grad


def test_a_layer_search_asks_the_target(tmp_path: Path) -> None:
    """What is kept is measured on laws; where none are recorded the target gives them."""
    draft = {"layers": "auto", "depth": 2, "search": {"positions": 300, "beam": 1}}
    chosen = [build_draft(opened(home_of(tmp_path / mode, mode, draft=draft))[0]).facts for mode in ("hidden", "live")]
    assert chosen[0]["layers"] == chosen[1]["layers"]
    for one, two in zip(*(c["calibration"]["tried"] for c in chosen), strict=True):
        assert one["layers"] == two["layers"] and one["alpha"] == pytest.approx(two["alpha"], abs=1e-5)


# --- to the end, and stopped --------------------------------------------------------------------------------------------------


def facts_of(stage: Path) -> dict[str, Any]:
    found: dict[str, Any] = read_json(stage / "provenance.json")["facts"]
    return found


def test_killed_and_started_again_it_ends_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {"max_steps": 10, "eval_steps": 5, "save_steps": 3, "packing": True}
    whole = facts_of(train(*opened(home_of(tmp_path / "whole", train=keys))))
    assert "the target's own forwards took" in capsys.readouterr().out
    path = home_of(tmp_path / "stopped", train=keys)
    with monkeypatch.context() as patch, pytest.raises(Stop):
        stop_at(patch, Job, "_optimize", 8)
        train(*opened(path))
    again = facts_of(train(*opened(path)))
    assert again["weights_sha256"] == whole["weights_sha256"] and again["curve"] == whole["curve"]
    assert again["heldout"]["mode"] == "hidden" and whole["curve"][-1]["alpha_deploy"] > whole["curve"][0]["alpha_deploy"]


KEYS: dict[str, Any] = {"max_steps": 50, "eval_steps": 50, "save_steps": 50, "max_grad_norm": 3.0, "warmup_steps": 5}


@functools.cache
def alone() -> Path:
    return train(*opened(home_of(folder(), train=KEYS)))


@pytest.mark.slow
@pytest.mark.parametrize("where", ["replicate", "shard"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes_end_where_one_does(kind: str, where: str, tmp_path: Path) -> None:
    """The target whole on each, or in halves; the draft data-parallel or sharded itself. One forward a step, then two."""
    halves = {**KEYS, "live": where, "per_device_train_batch_size": 4 if where == "replicate" else 2}
    halves["gradient_accumulation_steps"] = 8 // (2 * halves["per_device_train_batch_size"])
    ranks = launch(home_of(tmp_path, train=halves), **(SHARDED if kind == "fsdp2" else {}))
    assert [code for code, _ in ranks] == [0, 0], "\n".join(output for _, output in ranks)
    assert ("cpu, FSDP" if kind == "fsdp2" else "cpu, MULTI_CPU") in ranks[0][1]
    one, two = alone(), tmp_path / "run" / "draft"
    assert facts_of(two)["best"]["alpha"] == pytest.approx(facts_of(one)["best"]["alpha"], abs=1e-4)
    first, second = (load_file(f / "model" / "model.safetensors") for f in (one, two))
    furthest = max(float((tensor - second[name]).abs().max()) for name, tensor in first.items())
    assert furthest < 1e-4, furthest


def test_a_sharded_target_holds_pieces_and_says_what_a_whole_one_says(tmp_path: Path) -> None:
    """In a group of one rank, whose piece is all of it; that two ranks have halves is torch's business. Between forwards nothing is gathered."""
    from torch.distributed.tensor import DTensor

    recipe = opened(home_of(tmp_path, train={"live": "shard"}))[0]
    texts, order = Recording(recorded("live")[0] / "recording" / "train"), [3, 0, 20]
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        target = live.sharded(recipe, torch.device("cpu"), 1)
        found = [target.hidden(texts, order) for _ in range(2)]
        model = inspect_closure(target)
        assert len(list(model.parameters())) == 4 * 9 + 2, "the head is not kept twice"
        assert all(isinstance(p, DTensor) and not p.requires_grad for p in model.parameters())
    finally:
        torch.distributed.destroy_process_group()
    assert torch.equal(*found) and torch.allclose(found[0], replicated(recipe).hidden(texts, order), atol=2e-5)
    assert not found[0].requires_grad


def inspect_closure(target: Live) -> Any:
    """The module behind a sharded target."""
    return next(c.cell_contents for c in target._forward.__closure__ if isinstance(c.cell_contents, torch.nn.Module))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("asked", "processes", "taken"), [("shard", 2, "sharded"), ("shard", 1, "replicated"), ("replicate", 2, "replicated")]
)
def test_the_key_decides_in_a_launch(asked: str, processes: int, taken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = opened(borrowed(tmp_path, record={"mode": "live"}, train={"live": asked}))[0]
    for name in ("sharded", "replicated"):
        monkeypatch.setattr(live, name, lambda *_, name=name: name)
    assert live_target(recipe, torch.device("cpu"), processes) == taken  # type: ignore[comparison-overlap]


# --- refused ------------------------------------------------------------------------------------------------------------------

SERVER = {"url": "http://localhost:1"}


@pytest.mark.parametrize(("sections", "says"), [
    ({"record": {"mode": "live", "server": SERVER}}, "leave out record.server"),
    ({"record": {"mode": "hidden"}, "train": {"live": "shard"}}, "record.mode: hidden holds none"),
    ({"record": {"mode": "text"}, "train": {"live": "shard", "loss": {"name": "ce"}}}, "record.mode: text holds none"),
])  # fmt: skip
def test_what_does_not_go_together(sections: dict[str, Any], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("plan", borrowed(tmp_path, **sections)) == 1
    assert says in " ".join(capsys.readouterr().err.split())


def test_a_trimmed_training_head_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(DraftstillError, match="top-k recording") as caught:
        preflight(opened(borrowed(tmp_path, record={"mode": "live"}, train={"head_tokens": 40}))[0])
    assert caught.value.key == "train.head_tokens"


@pytest.mark.parametrize(("side", "what", "value"), [("train", "revision", "of another"), ("heldout", "tokenizer_sha256", "of another")])
def test_texts_of_another_target_are_refused(side: str, what: str, value: str, tmp_path: Path) -> None:
    path = home_of(tmp_path)
    manifest = tmp_path / "run" / "recording" / side / "manifest.json"
    write_json(manifest, {**read_json(manifest), what: value})
    with pytest.raises(DraftstillError, match=value) as caught:
        train(*opened(path))
    assert caught.value.key == "target.source"


def test_a_target_whose_weights_have_changed_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Between the recording and the training: held-out laws and live ones would be of two models."""
    target = tmp_path / "target"
    shutil.copytree(sources() / "target", target)
    path = borrowed(tmp_path, record={"mode": "live"}, respond={"prompts": 4, "heldout_prompts": 4})
    path.write_text(path.read_text().replace(str(finished() / "target"), str(target)))
    assert command("distill", path) == 0
    weights = load_file(target / "model.safetensors")
    weights["model.norm.weight"][0] += 0.5
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    capsys.readouterr()
    assert command("train", path) == 1
    assert "another recipe" in capsys.readouterr().err
    with pytest.raises(DraftstillError):
        train(*opened(path))


def test_states_that_are_not_finite_are_the_targets_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """float16 overflows; a lower learning rate would not help."""
    job, real = job_of(home_of(tmp_path)), Live.hidden
    bad = job.sequences(0)[3]

    def hidden(target: Live, recording: Recording, indices: list[int]) -> torch.Tensor:
        found = real(target, recording, indices)
        return found * torch.inf if bad in indices else found

    monkeypatch.setattr(Live, "hidden", hidden)
    with pytest.raises(NonFiniteLoss, match=f"in sequences {bad}$|in sequences {bad}\\b") as caught:
        optimize(job)
    assert caught.value.key == "target.dtype" and caught.value.value == "float32"


# --- what it costs ------------------------------------------------------------------------------------------------------------


def test_memory_counts_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights without the head, which is counted anyway, and a forward's keys and values; sharded, a part and the largest piece."""
    model = make_model()
    weights = sum(p.numel() for n, p in model.named_parameters() if n != "lm_head.weight" and p.dim() == 2)
    cache = 7 * model.config.num_hidden_layers * 2 * 2 * 8
    assert memory.live_need(model.config, torch.float32, 7) == 4 * (weights + cache)
    assert memory.live_need(model.config, torch.bfloat16, 7) == 2 * (weights + cache)
    largest = max(PADDED * 32, sum(p.numel() for p in model.model.layers[0].parameters() if p.dim() == 2))
    assert memory.live_need(model.config, torch.float32, 7, 4) == 4 * (weights // 4 + largest)
    needs: list[memory.Need] = []
    real = memory.check_memory
    for module in ("setup", "preview"):
        monkeypatch.setattr(f"draftstill.train.{module}.check_memory", lambda found, *rest: (needs.append(found), real(found, *rest)))
    for mode in ("hidden", "live"):
        preflight(opened(borrowed(tmp_path / f"before {mode}", record={"mode": mode}))[0], memory=True)
        job_of(home_of(tmp_path / mode, mode))
    assert needs[0].live == needs[1].live == 0 < needs[3].live <= needs[2].live, "before the recording by its longest sequence"
    assert needs[2].total - needs[0].total == needs[2].live
    has = (needs[3].total - needs[3].activations - 1) / 2**30
    monkeypatch.setattr(memory, "memory_gib", lambda: has)
    with pytest.raises(DraftstillError, match="the live target") as caught:
        job_of(tmp_path / "live" / "recipe.yaml")
    assert caught.value.key == "record.mode" and "train.live: shard" in str(caught.value)


def test_the_plan_says_so(tmp_path: Path) -> None:
    size = size_of(make_model().config.to_dict())
    assert size is not None
    plans, needs = {}, {}
    for mode in ("hidden", "live"):
        recipe: Recipe = opened(borrowed(tmp_path / mode, record={"mode": mode}))[0]
        plans[mode] = " ".join(plan(recipe, RunFolder(recipe.run_dir)).split())
        needs[mode] = estimate(recipe, size, [size])
    assert "token ids alone; the target stays in memory and scores each step's texts (train.live: replicate)" in plans["live"]
    light, heavy = needs["live"].recording_bytes, needs["hidden"].recording_bytes
    assert light and heavy and light < heavy / 2
    tokens = needs["live"].scored_tokens - 6 * 32
    assert heavy - light == tokens * (4 + size.hidden * 4 - 5)


def test_what_the_targets_forwards_take_is_a_share_of_its_own(tmp_path: Path) -> None:
    job = job_of(home_of(tmp_path))
    job._optimize()
    found = job.meter.read()
    shares = [found[f"train/{name}_share"] for name in ("compute", "data", "target")]
    assert all(share > 0 for share in shares) and sum(shares) <= 1
    job = job_of(home_of(tmp_path / "hidden", "hidden"))
    job._optimize()
    assert "train/target_share" not in job.meter.read()


def test_on_cuda_the_targets_time_is_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host is far ahead of it: what it takes is known by events, when they are asked for."""
    clock = [0.0]

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = clock[0]

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: Any) -> float:
            return float(end.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    watch = meter.DeviceWatch()
    for took in (1500.0, 500.0):
        with watch:
            clock[0] += took
        clock[0] += 7.0
    assert watch.seconds == 0
    watch.settle()
    watch.settle()
    assert watch.seconds == 2.0


def test_the_recipe_knows_the_key() -> None:
    with pytest.raises(ValidationError, match="replicate"):
        Recipe.model_validate({"run_dir": "x", "target": {"source": "x"}, "corpus": {"source": "x"}, "train": {"live": "both"}})
