"""What a training would be refused for is refused before anything is responded, recorded or loaded: from a fresh run folder, by every way in."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from draftstill.errors import DraftstillError
from draftstill.recipe import Lora
from draftstill.runfolder import read_json, write_json
from draftstill.train import __main__ as entrance
from draftstill.train import launch, loop, memory
from draftstill.train.build import build_draft, preflight
from draftstill.train.launch import preflight_all, train
from draftstill.train.preview import longest, preview
from draftstill.train.setup import attach
from tests.pipeline import PADDED, borrowed, command, make_model, opened, words
from tests.train.drafts import recipe_of, saved, tiny
from tests.train.jobs import RECORDED


def fresh(home: Path, **sections: Any) -> Path:
    """A recipe whose run folder holds nothing; beside it two drafts, one with a tied head, and weights to begin with that do not fit."""
    saved(home / "tied", tiny("llama", tied=True, layers=1))
    make_model(3, 3).save_pretrained(home / "deep")
    wide = make_model(3, 2)
    wide.resize_token_embeddings(PADDED + 8, mean_resizing=False)
    wide.save_pretrained(home / "wide")
    (home / "broken.safetensors").write_bytes(b"nothing")
    for values in (sections.get("draft", {}), sections.get("train", {})):
        for key in ("source", "init_from"):
            if key in values:
                values = values | {key: str(home / values[key])}
                sections["draft" if key == "source" else "train"] = values
    return borrowed(home, **sections)


CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "no such layer": ({"train": {"lora": {"target_modules": ["wq"]}}}, "train.lora.target_modules", "no such layer"),
    "the head": ({"train": {"lora": {"target_modules": ["lm_head"]}}}, "train.lora.target_modules", "every token's logit moves"),
    "a tied embedding": ({"draft": {"source": "tied"}, "train": {"lora": {"target_modules": ["q_proj", "embed_tokens"]}}},
                         "train.lora.target_modules", "the embedding is the same matrix"),
    "a tied head": ({"draft": {"source": "tied"}, "train": {"lora": {"target_modules": ["lm_head"]}}}, "train.lora.target_modules",
                    "the embedding is the same matrix"),
    "a norm": ({"train": {"lora": {"target_modules": ["norm"]}}}, "train.lora.target_modules", "not a linear layer"),
    "no weights": ({"train": {"init_from": "absent"}}, "train.init_from", "no weights here"),
    "damaged weights": ({"train": {"init_from": "broken.safetensors"}}, "train.init_from", "damaged"),
    "weights of other layers": ({"train": {"init_from": "deep"}}, "train.init_from", "is unknown"),
    "weights of another width": ({"train": {"init_from": "wide"}}, "train.init_from", f"is [{PADDED + 8}, 32], not [{PADDED}, 32]"),
    "no replays": ({"train": {"phases": [{}, {"kinds": ["replay"]}]}}, "train.phases.1.kinds", "record.replays"),
    "no rollouts": ({"train": {"phases": [{"kinds": ["rollout", "replay"]}]}}, "train.phases.0.kinds", "record.rollouts or record.replays"),
    "no documents": ({"train": {"phases": [{"kinds": ["document"]}]}, "record": {"document_tokens": 0}}, "train.phases.0.kinds",
                     "record.document_tokens"),
    "no responses": ({"train": {"phases": [{"kinds": ["response"]}]}, "respond": {"prompts": 0}}, "train.phases.0.kinds", "respond.prompts"),
    "a batch without room": ({"train": {"per_device_train_batch_size": 10**7}}, "train.per_device_train_batch_size", "activations of"),
}  # fmt: skip


def nothing_was_made(home: Path) -> bool:
    run = home / "run"
    return not run.exists() or not list(run.rglob("*.json*"))


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_before_any_work(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sections, key, says = CASES[name]
    path = fresh(tmp_path, **sections)
    capsys.readouterr()  # transformers' own progress
    assert command("run", path) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"{key}: ") and says in error and "mend:" in error and "Traceback" not in error
    assert nothing_was_made(tmp_path)


FEW = ("no such layer", "weights of other layers", "no replays", "a batch without room")


@pytest.mark.parametrize("name", FEW)
def test_by_the_launchers_way_in_as_well(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``python -m draftstill.train``, or accelerate launch with one process."""
    sections, key, _ = CASES[name]
    monkeypatch.setattr(sys, "argv", ["draftstill.train", str(fresh(tmp_path, **sections))])
    with pytest.raises(DraftstillError) as caught:
        entrance.main()
    assert caught.value.key == key and nothing_was_made(tmp_path)


@pytest.mark.parametrize("name", FEW)
def test_of_a_candidate_under_its_own_name(name: str, tmp_path: Path) -> None:
    sections, key, _ = CASES[name]
    own = {"train": {k: str(tmp_path / v) if k == "init_from" else v for k, v in sections["train"].items()}}
    with pytest.raises(DraftstillError) as caught:
        preflight_all(opened(fresh(tmp_path, train={"candidates": {"good": {}, "bad": own}}))[0])
    assert caught.value.key == f"train.candidates.bad.{key}"


def test_a_draft_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "memory_gib", lambda: 1e-4)
    recipe, run = opened(fresh(tmp_path))
    with pytest.raises(DraftstillError, match="gradients and moments") as caught:
        train(recipe, run)
    assert caught.value.key == "draft" and nothing_was_made(tmp_path)
    preflight_all(recipe, here=False)  # recorded here, trained elsewhere
    (tmp_path / "other").mkdir()
    assert command("distill", borrowed(tmp_path / "other", "corpus", "responses")) == 0


def test_where_there_is_a_recording_its_own_sequences_decide(tmp_path: Path) -> None:
    """They may be shorter than what the recipe allows: what could be trained before still can."""
    path = borrowed(tmp_path, *RECORDED, train={"max_steps": 1, "per_device_train_batch_size": 10**7})
    preflight_all(opened(path)[0])


def test_the_longest_sequence_of_a_recipe(tmp_path: Path) -> None:
    of = lambda **sections: longest(opened(borrowed(tmp_path, **sections))[0])  # noqa: E731
    assert of() == 48, "documents are cut at record.sequence_length"
    answers = {"record": {"document_tokens": 0, "sequence_length": 4096}}
    settings = {"prompt_tokens": 8, "max_new_tokens": 24, "chat_tokens": 100}
    assert of(**answers, respond=settings) == 8 + 24, "the folder holds documents alone: no conversation can be that long"
    assert of(**answers, respond={**settings, "shares": {"real": 1}}) == 100 + 24
    assert of(record={"document_tokens": 0, "sequence_length": 48}, respond={**settings, "shares": {"real": 1}}) == 48


def test_adapters_count_for_what_they_are(tmp_path: Path) -> None:
    """Memory is reckoned with what is trained: little, with adapters."""
    from transformers import AutoModelForCausalLM

    config, needs = make_model(3, 2).config, []
    settings = opened(borrowed(tmp_path))[0].train
    for lora in (None, Lora(r=2)):
        own = settings.model_copy(update={"lora": lora})
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config).float()
            attach(model, own, 0)
        needs.append(memory.need(model, own, torch.empty(200, 32, device="meta"), 8, torch.float32))
    assert 0 < needs[1].training < needs[0].training / 5 and needs[1].weights >= needs[0].weights


# --- the preview is the draft ------------------------------------------------------------------------------------------------

SHAPES: dict[str, dict[str, Any]] = {
    "layers": {"layers": [0, 2]}, "chosen layers": {"layers": "auto", "depth": 2, "search": {"positions": 40, "beam": 1}},
    "width": {"layers": [1, 3], "keep_heads": 0.5, "keep_mlp": 0.5}, "heads alone": {"layers": [1], "keep_heads": 0.5},
    "own": {"source": "own"}, "own tied": {"source": "tied"}, "own cut": {"source": "own", "cut": True, "layers": [0]},
    "own cut in width": {"source": "own", "cut": True, "layers": [0], "keep_mlp": 0.5},
    "fresh": {"source": "fresh", "depth": 1, "fresh": {"hidden_size": 16}},
    "fresh and tied": {"source": "fresh", "depth": 2, "fresh": {"tie_word_embeddings": True}},
    "transplanted": {"source": "foreign", "transplant": True}, "transplanted and cut": {"source": "foreign", "transplant": True, "cut": True, "layers": [1]},
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    saved(folder / "own", tiny("qwen3", rows=PADDED + 8, layers=2))
    saved(folder / "tied", tiny("qwen3", tied=True, layers=2))
    other = words()
    other[50], other[60] = other[60], other[50]
    saved(folder / "foreign", tiny("mistral", layers=2), other)
    return folder


@pytest.mark.parametrize("name", SHAPES)
def test_the_preview_has_the_shapes_of_what_is_built(name: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However the draft comes about: a check on other shapes would refuse what fits, or let pass what does not."""
    seen: list[Any] = []
    from draftstill.train import build

    real = build.check_training

    def check(recipe: Any, config: Any, own: Any, rows: Any, vocab: int, **options: Any) -> None:
        seen.append(preview(recipe, config, own, rows))
        real(recipe, config, own, rows, vocab, **options)

    monkeypatch.setattr(build, "check_training", check)
    draft = SHAPES[name]
    if draft.get("source") in ("own", "tied", "foreign"):
        draft = {**draft, "source": str(models / draft["source"])}
    recipe = recipe_of(tmp_path, **draft)
    preflight(recipe)
    shapes = lambda model: {n: tuple(p.shape) for n, p in model.named_parameters()}  # noqa: E731
    assert shapes(seen[0]) == shapes(build_draft(recipe).model)
    assert {p.device.type for p in seen[0].parameters()} == {"meta"} and {p.dtype for p in seen[0].parameters()} == {torch.float32}


# --- the recording, before the target's weights ------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["train", "heldout"])
@pytest.mark.parametrize(("what", "value"), [("vocab", 190), ("tokenizer_sha256", "of another"), ("revision", "of another")])
def test_a_recording_of_another_target_is_refused_before_weights_are_loaded(
    what: str, value: Any, side: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = borrowed(tmp_path, *RECORDED)
    manifest = tmp_path / "run" / "recording" / side / "manifest.json"
    write_json(manifest, {**read_json(manifest), what: value})

    def loaded(*_: Any) -> None:
        raise AssertionError("the target was loaded first")

    monkeypatch.setattr(loop, "build_draft", loaded)
    with pytest.raises(DraftstillError, match=str(value)) as caught:
        train(*opened(path))
    assert caught.value.key == "target.source"


def test_nothing_is_checked_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the verb the check comes first of all, by the launch before it records, and never with a recording."""
    calls: list[str] = []
    monkeypatch.setattr(launch, "preflight", lambda recipe, **_: calls.append("preflight"))
    assert command("train", borrowed(tmp_path / "verb", "corpus", "responses", train={"max_steps": 1})) == 0
    assert calls == ["preflight"]
    train(*opened(borrowed(tmp_path / "recorded", *RECORDED, train={"max_steps": 1})))
    assert calls == ["preflight"]
    train(*opened(borrowed(tmp_path / "fresh", "corpus", "responses", train={"max_steps": 1})))
    assert calls == ["preflight"] * 2
