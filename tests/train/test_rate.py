"""The peak learning rate: in proportion to the weights that it moves, and said where it is too large for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from draftstill.recipe import Recipe
from draftstill.train.launch import train
from draftstill.train.loop import Job
from draftstill.train.rate import CUT, NEW, NOISE, WHOLE, peak_rate, weight_size
from tests.pipeline import borrowed, finished, make_model, opened
from tests.train.jobs import RECORDED, facts_of, job_of

CUT_DRAFT = {"source": "prune", "layers": [0]}


def recipe_of(draft: dict[str, Any], **keys: Any) -> Recipe:
    value = {"run_dir": "r", "target": {"source": "t"}, "corpus": {"source": "c"}, "draft": draft, "train": keys}
    return Recipe.model_validate_json(json.dumps(value))


def sized(rms: float, vocab: int = 10) -> Any:
    """A model whose embedding has a known size in its real rows, and noise behind them."""
    model = make_model(layers=1)
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        weight[:vocab] = torch.randn(weight[:vocab].shape, generator=torch.Generator().manual_seed(0))
        weight[:vocab] *= rms / weight[:vocab].square().mean().sqrt()
        weight[vocab:] = 100.0
    return model


@pytest.mark.parametrize("rms", [1e-3, 0.0173, 0.136, 4.0])
def test_it_goes_with_the_size_of_the_weights(rms: float) -> None:
    model = sized(rms)
    assert weight_size(model, 10) == pytest.approx(rms, rel=1e-5)
    assert peak_rate(recipe_of(CUT_DRAFT), model, 10) == pytest.approx(CUT * rms, rel=0.05), "two digits of it"


@pytest.mark.parametrize(
    ("draft", "keys", "expected"),
    [
        (CUT_DRAFT, {}, CUT * 0.1),
        ({"source": "other", "cut": True, "layers": [0]}, {}, CUT * 0.1),
        ({"source": "other"}, {}, WHOLE * 0.1),
        (CUT_DRAFT, {"init_from": "weights"}, WHOLE * 0.1),
        ({"source": "fresh", "depth": 1}, {}, NEW),
        ({"source": "fresh", "depth": 1}, {"init_from": "weights"}, WHOLE * 0.1),
        (CUT_DRAFT, {"lora": {"r": 4}}, NEW),
        (CUT_DRAFT, {"learning_rate": 7e-4}, 7e-4),
    ],
)
def test_what_the_draft_begins_with_decides(draft: dict[str, Any], keys: dict[str, Any], expected: float) -> None:
    assert peak_rate(recipe_of(draft, **keys), sized(0.1), 10) == pytest.approx(expected)


def test_an_embedding_of_zeros_has_no_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert peak_rate(recipe_of(CUT_DRAFT), sized(0.0), 10) == NEW
    assert peak_rate(recipe_of(CUT_DRAFT, learning_rate=1.0), sized(0.0), 10) == 1.0 and "moves" not in capsys.readouterr().out


@pytest.mark.parametrize("where", ["train", "phase", "phase beside auto"])
def test_a_rate_that_makes_noise_of_the_draft_is_said(where: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Qwen2.5-0.5B's first layers, at the rate that suits SmolLM2-135M's, learnt less from 753,000 tokens than at a third of it from 150,000."""
    keys: dict[str, dict[str, Any]] = {
        "train": {"learning_rate": 1.5e-3},
        "phase": {"learning_rate": 4e-4, "phases": [{"share": 1}, {"share": 1, "learning_rate": 1.5e-3}]},
        "phase beside auto": {"phases": [{"share": 1}, {"share": 1, "learning_rate": 1.5e-3}]},
    }
    said = lambda: " ".join(capsys.readouterr().out.split())  # noqa: E731
    peak_rate(recipe_of(CUT_DRAFT, **keys[where]), sized(0.0173), 10)
    assert "train.learning_rate: 0.0015 moves" in (text := said()) and "9% of its size" in text and "auto is 0.00043" in text
    peak_rate(recipe_of(CUT_DRAFT, **keys[where]), sized(0.0173), 10, quiet=True)
    peak_rate(recipe_of(CUT_DRAFT, learning_rate=0.99 * NOISE * 0.0173), sized(0.0173), 10)
    peak_rate(recipe_of(CUT_DRAFT, learning_rate=3e-3), sized(0.136), 10)
    peak_rate(recipe_of({"source": "fresh", "depth": 1}, **keys[where]), sized(0.0173), 10)
    assert "moves" not in said()


def test_the_loop_goes_by_it(tmp_path: Path) -> None:
    keys = {"learning_rate": "auto", "max_steps": 3, "lr_scheduler_type": "constant", "warmup_steps": 0}
    job: Job = job_of(borrowed(tmp_path / "job", *RECORDED, train=keys))
    expected = peak_rate(job.recipe, make_model(), job.draft.vocab, quiet=True)
    assert job.peak == expected == job.learning_rate(0) == job.learning_rate(2) and expected != NEW
    assert [group["lr"] for group in job.optimizer.param_groups] == [expected] * len(job.optimizer.param_groups)
    assert facts_of(train(*opened(borrowed(tmp_path / "run", *RECORDED, train=keys))))["learning_rate"] == expected


def test_a_warm_start_is_measured_as_it_begins(tmp_path: Path) -> None:
    """Its own weights count, not those that they replace."""
    from safetensors.torch import load_file, save_file

    name = "model.embed_tokens.weight"
    found = load_file(finished() / "run" / "draft" / "model" / "model.safetensors")
    save_file({**found, name: found[name] * 3}, str(tmp_path / "start.safetensors"))
    rates = [
        job_of(borrowed(tmp_path / key, *RECORDED, train={"learning_rate": "auto", "init_from": str(path)})).peak
        for key, path in (("as it was", finished() / "run" / "draft" / "model"), ("thrice", tmp_path / "start.safetensors"))
    ]
    assert rates[1] == pytest.approx(3 * rates[0], rel=0.05)
