"""``-m draftstill.train`` as a launcher starts it: two processes end where one does, sharded or not, and a launch says no early and clearly."""

from __future__ import annotations

import atexit
import functools
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from accelerate.utils import DistributedType
from safetensors.torch import load_file

from draftstill.distill import __main__ as recorder
from draftstill.errors import DraftstillError, NonFiniteLoss
from draftstill.guard import ENVIRONMENT
from draftstill.runfolder import read_json, write_json
from draftstill.train.agreement import EndedElsewhere, together
from draftstill.train.devices import refuse_environment, refuse_launch, repeatable
from draftstill.train.launch import train
from tests.pipeline import borrowed, environment, finished, hashes, opened, sources
from tests.train.drafts import saved, tiny
from tests.train.jobs import WEIGHED

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs" / "accelerate").glob("*.yaml"))
RECORDED = ("corpus", "responses", "recording")
# AdamW forgives a wrongly scaled gradient. Norms here run from 2.7 to 3.3, so a limit of 3 clips some steps and not others: scale counts.
KEYS: dict[str, Any] = {"max_steps": 50, "eval_steps": 50, "save_steps": 20, "max_grad_norm": 3.0, "warmup_steps": 5,
                        "ema_decay": 0.5}  # fmt: skip
HALVES = {**KEYS, "per_device_train_batch_size": 4}
SHARDED = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
           "FSDP_RESHARD_AFTER_FORWARD": "true", "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}  # fmt: skip
"""What accelerate launch makes of configs/accelerate/fsdp2.yaml."""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def launch(path: Path, *arguments: str, world: int = 2, until: Path | None = None, before: str = "", **extra: str) -> list[tuple[int, str]]:
    """Return code and output of each rank, started as torchrun starts them, on gloo and loopback; killed as soon as ``until`` exists.

    Args:
        before: Python that each runs first.
    """
    port, ranks = str(free_port()), []
    code = (
        f"{before}\nimport sys\nfrom draftstill.guard import guarded\nfrom draftstill.train.__main__ import main\nsys.exit(guarded(main))"
    )
    started = ["-c", code] if before else ["-m", "draftstill.train"]
    for rank in map(str, range(world)):
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
               "MASTER_PORT": port, "OMP_NUM_THREADS": "1", **extra}  # fmt: skip
        ranks.append(subprocess.Popen([sys.executable, *started, str(path), *arguments], env=environment(**own), text=True,
                                      stdout=subprocess.PIPE, stderr=subprocess.STDOUT))  # fmt: skip
    try:
        while until is not None and not until.exists() and all(p.poll() is None for p in ranks):
            time.sleep(0.01)
        for p in ranks if until is not None else ():
            p.kill()
        outputs = [p.communicate(timeout=100)[0] for p in ranks]
    finally:
        for p in ranks:
            p.kill()
    return [(p.returncode, output) for p, output in zip(ranks, outputs, strict=True)]


def new_home() -> Path:
    home = Path(tempfile.mkdtemp(prefix="draftstill-launch-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    return home


FEW: dict[str, Any] = {"max_steps": 12, "eval_steps": 12}
# The tied draft's norms run from .6 to 1.1.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "weighed": WEIGHED,
    "accumulated": FEW,
    "accumulated, tied": {**FEW, "max_grad_norm": 0.75},
}
QUARTERS = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}


@functools.cache
def draft_of(variant: str) -> dict[str, Any]:
    """The section draft: layers of the target, or a model whose head is its embedding."""
    return {"source": str(saved(new_home() / "tied", tiny("llama", tied=True, layers=2)))} if "tied" in variant else {"layers": [0, 3]}


@functools.cache
def alone(variant: str) -> Path:
    """The draft of one process: 50 steps of 8 sequences, or a few."""
    return train(*opened(borrowed(new_home(), *RECORDED, draft=draft_of(variant), train={**KEYS, **VARIANTS[variant]})))


@functools.cache
def home_of(kind: str, variant: str = "plain") -> Path:
    """Where two processes trained: as many steps of 2 x 4 sequences, or of 2 x 2 x 2."""
    home = new_home()
    keys = {**HALVES, **VARIANTS[variant], **(QUARTERS if "accumulated" in variant else {})}
    ranks = launch(borrowed(home, *RECORDED, draft=draft_of(variant), train=keys), **(SHARDED if kind == "fsdp2" else {}))
    assert [code for code, _ in ranks] == [0, 0], "\n".join(output for _, output in ranks)
    assert ("cpu, FSDP" if kind == "fsdp2" else "cpu, MULTI_CPU") in ranks[0][1], "it is what was asked for"
    assert "held-out alpha" in ranks[0][1] and "held-out alpha" not in ranks[1][1], "one process speaks"
    return home


KINDS = [("ddp", "plain"), ("fsdp2", "plain"), ("ddp", "weighed"), ("ddp", "accumulated"), ("fsdp2", "accumulated, tied")]


@pytest.mark.parametrize(("kind", "variant"), KINDS)
def test_two_processes_end_where_one_does(kind: str, variant: str) -> None:
    """2 x 4 sequences against 1 x 8; also with mixed losses, and weights that differ by token and so by rank; and with two forwards a step,
    of which only the second one's gradients may travel, with those of the first in them."""
    one, two = alone(variant), home_of(kind, variant) / "run" / "draft"
    a, b = (read_json(f / "provenance.json")["facts"] for f in (one, two))
    assert a["tokens"] == b["tokens"] and a["best"]["step"] == b["best"]["step"] == {**KEYS, **VARIANTS[variant]}["max_steps"]
    assert b["best"]["alpha"] == pytest.approx(a["best"]["alpha"], abs=1e-4), "measured on whole weights"
    first, second = (load_file(f / "model" / "model.safetensors") for f in (one, two))
    source, head = sources() / "target", "lm_head.weight"
    if "tied" in variant:
        source, head = Path(draft_of(variant)["source"]), "model.embed_tokens.weight"
    start = load_file(source / "model.safetensors")
    assert first.keys() == second.keys() and ("lm_head.weight" in first) == (head == "lm_head.weight")
    furthest = max(float((tensor - second[name]).abs().max()) for name, tensor in first.items())
    assert furthest < 1e-4, furthest
    assert float((first[head] - start[head]).abs().max()) > 1e-2


@pytest.mark.slow
def test_a_sharded_run_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    """Weights, moments and averages come back from a checkpoint's whole tensors as every rank's own pieces."""
    path = borrowed(tmp_path, *RECORDED, train=HALVES)
    killed = launch(path, until=tmp_path / "run" / "draft.partial" / "checkpoint-0000020" / "state.json", **SHARDED)
    assert all(code != 0 for code, _ in killed)
    ranks = launch(path, **SHARDED)
    assert [code for code, _ in ranks] == [0, 0] and "going on at" in ranks[0][1], ranks[0][1]
    a, b = (read_json(h / "run" / "draft" / "provenance.json")["facts"] for h in (home_of("fsdp2"), tmp_path))
    assert a["weights_sha256"] == b["weights_sha256"] and a["curve"] == b["curve"]


ONE_FAILS = """
import os
from draftstill.errors import DraftstillError
from draftstill.train import loop

build = loop.build_draft

def build_draft(recipe):
    if os.environ["RANK"] == "1" and recipe.draft.layers == (0,):
        raise DraftstillError("cannot be read on this machine", key="draft.source", value="there")
    return build(recipe)

loop.build_draft = build_draft
"""


def test_what_one_process_meets_alone_is_no_fault_of_the_launch_and_set_aside_is_done_once(tmp_path: Path) -> None:
    """All give the candidate up, and go on with the next one together. Beforehand one of them moves what other recipes made: a finished stage
    and one that was begun."""
    made = finished() / "run" / "draft"
    for name in ("draft-good", "draft-bad.partial"):
        shutil.copytree(made, tmp_path / "run" / name)
    write_json(tmp_path / "run" / "draft-bad.partial" / "stage.json", read_json(made / "provenance.json"))
    keys = {
        "max_steps": 2,
        "eval_steps": 2,
        "per_device_train_batch_size": 4,
        "candidates": {"bad": {"draft": {"layers": [0]}}, "good": {}},
    }
    path = borrowed(tmp_path, *RECORDED, train=keys)
    ranks = launch(path, "--set-aside", before=ONE_FAILS)
    assert [code for code, _ in ranks] == [0, 0], "\n".join(output for _, output in ranks)
    assert "candidate bad failed: draft.source: process 1 of the launch: cannot be read on this machine" in ranks[0][1]
    found = {p.name for p in (tmp_path / "run").iterdir() if p.name.startswith("draft")}
    assert found == {"draft-bad.partial", "draft-good", "draft-bad.old-1", "draft-good.old-1"}
    assert hashes(tmp_path / "run" / "draft-good.old-1") == hashes(made)


def test_set_aside_is_taken_by_the_recorders_launch_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = borrowed(tmp_path, *RECORDED, record={"top_k": 8})
    monkeypatch.setattr(sys, "argv", ["draftstill.distill", str(path)])
    with pytest.raises(DraftstillError, match="'recording' in this run folder was made by another recipe") as caught:
        recorder.main()
    assert "--set-aside" in str(caught.value.mend)
    monkeypatch.setattr(sys, "argv", ["draftstill.distill", "--set-aside", str(path), "record.top_k=4"])
    recorder.main()
    found = {name: read_json(tmp_path / "run" / name / "train" / "manifest.json")["top_k"] for name in ("recording", "recording.old-1")}
    assert found == {"recording": 4, "recording.old-1": 16}


@pytest.mark.parametrize(("error", "ends"), [
    (DraftstillError("no room", key="draft", value=Path("there"), mend="make some"), False), (NonFiniteLoss("not finite"), False),
    (OSError(28, "No space left on device"), True), (RuntimeError("a fault"), True),
])  # fmt: skip
def test_together_all_go_on_or_none(error: Exception, ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is the recipe's may be passed over by all; anything else ends the process that met it, and so must end the others."""
    told: list[Any] = []

    def gather(found: list[Any], own: Any) -> None:
        told.append(pickle.loads(pickle.dumps(own)))  # as it travels
        found[:] = [*told, *[None] * (3 - len(told))]

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    with together():
        pass
    with pytest.raises(type(error)) as own, together():
        raise error
    assert own.value is error
    with pytest.raises(DraftstillError, match="process 1 of the launch: ") as caught, together():
        pass
    assert isinstance(caught.value, EndedElsewhere) == ends and str(error) in str(caught.value).replace(
        "process 1 of the launch: ", ""
    ).replace("'there'", "there")


def test_on_cuda_a_training_asks_for_kernels_that_repeat_themselves() -> None:
    """And leaves the process as it was: what is decoded afterwards is not slowed down."""
    flags = lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),  # noqa: E731
                     torch.utils.deterministic.fill_uninitialized_memory)  # fmt: skip
    before = flags()
    with repeatable("cuda"):
        assert flags() == (True, True, False)
    with repeatable("cpu"):
        assert flags() == before
    assert flags() == before and ENVIRONMENT["CUBLAS_WORKSPACE_CONFIG"] in (":4096:8", ":16:8"), "what cuBLAS asks for"


# --- refused at once ---------------------------------------------------------------------------------------------------------


def test_a_launch_of_many_processes_does_not_make_the_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each says so on its own, before it waits for the others at a barrier."""
    recipe, run = opened(borrowed(tmp_path, "corpus", "responses"))
    monkeypatch.setenv("WORLD_SIZE", "2")  # and nobody else is there to be waited for
    with pytest.raises(DraftstillError, match="must not make it") as caught:
        train(recipe, run)
    assert "draftstill distill RECIPE" in str(caught.value) and not (tmp_path / "run" / "recording.partial").exists()


@pytest.mark.parametrize(("asked", "says"), [
    ({"ACCELERATE_USE_DEEPSPEED": "true"}, "DeepSpeed is not installed"),
    ({"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}, "every process must load it"),
])  # fmt: skip
def test_a_launch_that_cannot_work(asked: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DraftstillError, match=says) as caught:
        refuse_environment()
    assert caught.value.key == "accelerate launch" and "configs/accelerate/fsdp2.yaml" in str(caught.value)


@pytest.mark.parametrize(("kind", "version_2", "says"), [
    (DistributedType.MEGATRON_LM, False, "MEGATRON_LM is not supported"),
    (DistributedType.FSDP, False, "version 1"),
    (DistributedType.DEEPSPEED, False, "average"),
])  # fmt: skip
def test_a_kind_of_launch_that_is_not_served(kind: DistributedType, version_2: bool, says: str, tmp_path: Path) -> None:
    recipe, _ = opened(borrowed(tmp_path, train={"ema_decay": 0.9}))
    with pytest.raises(DraftstillError, match=says):
        refuse_launch(SimpleNamespace(distributed_type=kind, is_fsdp2=version_2), recipe)  # type: ignore[arg-type]


# --- the configurations that ship --------------------------------------------------------------------------------------------


def test_the_configurations_are_there_and_accelerate_reads_them() -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    assert [p.stem for p in CONFIGS] == ["ddp", "fsdp2", "single", "two_nodes", "zero2", "zero3"]
    for path in CONFIGS:
        assert load_config_from_file(str(path)).mixed_precision == "no", "the recipe decides"
        text = path.read_text()
        assert "-m draftstill.train RECIPE" in text, "each says how it is used"
        # 30 seconds behind SIGTERM torch's launcher kills, checkpoint or not.
        assert ("export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=" in text) == (path.stem != "single")


def test_the_sharding_that_is_tested_is_the_one_that_ships() -> None:
    stated = yaml.safe_load((ROOT / "configs" / "accelerate" / "fsdp2.yaml").read_text())["fsdp_config"]
    for name, value in SHARDED.items():
        if name != "ACCELERATE_USE_FSDP":
            assert str(stated[name.lower()]).lower() == value.lower(), name
