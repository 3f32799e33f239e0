"""Drafts with new layers: sizes, seeds, and what they take over from the target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from draftstill.errors import DraftstillError
from draftstill.train.build import build_draft, preflight
from draftstill.train.fresh import resized
from tests.pipeline import REAL, make_model
from tests.train.drafts import recipe_of, saved, tiny


def test_the_same_width_takes_embedding_head_and_norm_over(tmp_path: Path) -> None:
    draft, target = build_draft(recipe_of(tmp_path, recording=False, source="fresh", depth=2)).model, make_model()
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
        assert torch.equal(draft.get_parameter(name), target.get_parameter(name)), name
    assert not torch.equal(draft.model.layers[0].mlp.up_proj.weight, target.model.layers[0].mlp.up_proj.weight)


def test_the_seed_decides_the_layers(tmp_path: Path) -> None:
    make = lambda *o: build_draft(recipe_of(tmp_path, *o, recording=False, source="fresh", depth=1, fresh={"init": "random"})).model  # noqa: E731
    state = torch.random.get_rng_state()
    one, two, other = make(), make(), make("seed=1")
    assert torch.equal(torch.random.get_rng_state(), state), "the caller's random numbers are its own"
    for (name, a), b, c in zip(one.named_parameters(), two.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert a.dim() < 2 or not torch.equal(a, c), name
    assert float(one.model.embed_tokens.weight.detach().std()) == pytest.approx(one.config.initializer_range, rel=0.05)


def test_a_projection_of_low_rank_loses_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(90, 5, generator=generator) @ torch.randn(5, 32, generator=generator)
    narrow = resized(matrix, 5)
    assert narrow.shape == (90, 5) and torch.allclose(narrow @ narrow.T, matrix @ matrix.T, atol=1e-3)


def test_no_projection_of_that_width_loses_less() -> None:
    matrix = torch.randn(90, 32, generator=torch.Generator().manual_seed(1))
    lost = matrix.square().sum() - resized(matrix, 12).square().sum()
    assert float(lost) == pytest.approx(float(torch.linalg.svdvals(matrix)[12:].square().sum()), rel=1e-4)


def test_more_width_is_padded() -> None:
    matrix = torch.randn(9, 4)
    wide = resized(matrix, 6)
    assert torch.equal(wide[:, :4], matrix) and not wide[:, 4:].any()


SIZES: list[tuple[dict[str, Any], tuple[int, ...]]] = [
    ({}, (32, 64, 4, 2, 8)),
    ({"hidden_size": 16}, (16, 32, 2, 1, 8)),
    ({"hidden_size": 24}, (24, 48, 3, 3, 8)),
    ({"hidden_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}, (48, 96, 2, 1, 8)),
    ({"head_dim": 4, "intermediate_size": 40}, (32, 40, 4, 2, 4)),
]


@pytest.mark.parametrize(("fresh", "sizes"), SIZES)
def test_what_is_left_out_follows_the_target(fresh: dict[str, Any], sizes: tuple[int, ...], tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, recording=False, source="fresh", depth=1, fresh=fresh)
    preflight(recipe)
    model = build_draft(recipe).model
    found = (model.config.hidden_size, model.config.intermediate_size, model.config.num_attention_heads, model.config.num_key_value_heads,
             model.config.head_dim)  # fmt: skip
    assert found == sizes
    with torch.no_grad():
        assert torch.isfinite(model(torch.arange(REAL)[None, :9]).logits).all()


@pytest.mark.parametrize("tied", [True, False])
def test_tied_or_not_is_a_choice(tied: bool, tmp_path: Path) -> None:
    draft = build_draft(
        recipe_of(tmp_path, recording=False, source="fresh", depth=1, fresh={"hidden_size": 16, "tie_word_embeddings": tied})
    )
    model = draft.model
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied == model.config.tie_word_embeddings


@pytest.mark.parametrize(
    ("fresh", "key"),
    [
        ({"num_attention_heads": 5, "num_key_value_heads": 2}, "draft.fresh.num_key_value_heads"),
        ({"num_key_value_heads": 3}, "draft.fresh.num_key_value_heads"),
        ({"head_dim": 7}, "draft.fresh.head_dim"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_before_any_work(fresh: dict[str, Any], key: str, tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, recording=False, source="fresh", depth=1, fresh=fresh)
    for ask in (preflight, build_draft):
        with pytest.raises(DraftstillError) as caught:
            ask(recipe)
        assert caught.value.key == key and caught.value.mend


def test_every_layer_attends_fully(tmp_path: Path) -> None:
    """Of a target with a sliding window, too: two texts that differ only far back differ at their end."""
    target = tiny("mistral")
    target.config.sliding_window = 4
    saved(tmp_path / "target", target)
    recipe = recipe_of(tmp_path / "home", f"target.source={tmp_path / 'target'}", recording=False, source="fresh", depth=1)
    model = build_draft(recipe).model
    one = torch.arange(5, 25)[None]
    other = one.clone()
    other[0, 0] = 99
    with torch.no_grad():
        assert not torch.equal(model(one).logits[0, -1], model(other).logits[0, -1])
