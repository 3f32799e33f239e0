"""Where a draft's first weights come from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draftstill.errors import DraftstillError
from draftstill.train.build import build_draft, prune_depth
from tests.pipeline import PADDED, REAL, make_model, make_target, make_tokenizer, opened, sources, words, write_recipe


def recipe_with(tmp_path: Path, **draft: object):
    path = write_recipe(tmp_path, draft=draft, target={"source": str(sources() / "target")}, corpus={"source": str(sources() / "texts")})
    return opened(path)[0]


@pytest.fixture(scope="module")
def target():
    return make_model()


@torch.no_grad()
def test_a_pruned_draft_is_the_target_without_the_other_layers(target, tmp_path: Path) -> None:
    draft = build_draft(recipe_with(tmp_path, layers=[1, 3]))
    assert draft.vocab == REAL and draft.model.config.num_hidden_layers == 2 and draft.model.config.vocab_size == PADDED
    assert torch.equal(draft.target_head, target.lm_head.weight[:REAL])
    skipped = make_model()
    for index in (0, 2):
        skipped.model.layers[index].forward = lambda hidden_states, *_, **__: hidden_states
    ids = torch.randint(REAL, (2, 17), generator=torch.Generator().manual_seed(0))
    assert torch.allclose(draft.model(ids, use_cache=False).logits, skipped(ids, use_cache=False).logits, atol=1e-5)
    # With a cache, too: layers are numbered anew.
    with_cache, without = (
        draft.model.generate(ids[:1, :5], max_new_tokens=10, do_sample=False, use_cache=u, pad_token_id=0) for u in (True, False)
    )
    assert torch.equal(with_cache, without)


def test_building_twice_gives_the_same_draft(tmp_path: Path) -> None:
    one, two = (build_draft(recipe_with(tmp_path, layers=[0, 2])) for _ in range(2))
    assert one.name == two.name == "target layers 0-2"
    for (name, a), (_, b) in zip(one.model.named_parameters(), two.model.named_parameters(), strict=True):
        assert torch.equal(a, b), name
        assert a.dtype == torch.float32


def test_the_draft_shares_no_memory_with_what_the_target_lends(tmp_path: Path) -> None:
    draft = build_draft(recipe_with(tmp_path, layers=[0]))
    before = draft.target_head.clone()
    with torch.no_grad():
        draft.model.lm_head.weight.zero_()
    assert torch.equal(draft.target_head, before)


@pytest.mark.parametrize("layers", [[4], [0, 99]])
def test_a_layer_the_target_does_not_have(layers: list[int]) -> None:
    with pytest.raises(DraftstillError) as caught:
        prune_depth(make_model(), tuple(layers))
    error = caught.value
    assert error.key == "draft.layers" and error.value == layers and "between 0 and 3" in str(error)


def test_a_named_draft_with_another_padding_fits(tmp_path: Path) -> None:
    make_target(tmp_path / "own", seed=7, layers=1)
    draft = build_draft(recipe_with(tmp_path, source=str(tmp_path / "own")))
    assert draft.name == "own" and draft.vocab == REAL and draft.model.config.num_hidden_layers == 1
    smaller = make_model(7, 1)
    smaller.resize_token_embeddings(REAL, mean_resizing=False)
    smaller.save_pretrained(tmp_path / "smaller")
    make_tokenizer().save_pretrained(tmp_path / "smaller")
    draft = build_draft(recipe_with(tmp_path, source=str(tmp_path / "smaller")))
    assert draft.vocab == REAL and draft.model.config.vocab_size == REAL
    assert draft.tokenizer.get_vocab() == make_tokenizer().get_vocab()


def test_another_vocabulary_is_refused_by_name(tmp_path: Path) -> None:
    other = words()
    other[20], other[21] = other[21], other[20]
    make_target(tmp_path / "foreign", seed=7, layers=1, vocabulary=other)
    with pytest.raises(DraftstillError) as caught:
        build_draft(recipe_with(tmp_path, source=str(tmp_path / "foreign")))
    text = str(caught.value)
    assert caught.value.key == "draft.source" and "differ at 2 ids" in text and repr(other[20]) in text and "prune" in text


def test_an_architecture_that_the_decoder_would_run_wrongly(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=PADDED, bos_token_id=1, eos_token_id=1)).save_pretrained(
        tmp_path / "gpt2"
    )
    make_tokenizer().save_pretrained(tmp_path / "gpt2")
    with pytest.raises(DraftstillError, match="gpt2") as caught:
        build_draft(recipe_with(tmp_path, source=str(tmp_path / "gpt2")))
    assert caught.value.key == "draft.source"
