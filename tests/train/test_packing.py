"""Packed rows: sequences in one row do not see each other, in any family that is trained."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import transformers

from draftstill.train.data import pack, place
from draftstill.train.module import attention_share

COMMON: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
WINDOW = 5
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {}, "Mistral": {"sliding_window": WINDOW}, "Qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "Qwen3": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
}  # fmt: skip
LENGTHS = [9, 3, 14, 7, 1]


def model_of(family: str, **keys: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**COMMON, **FAMILIES[family], **keys})
    return getattr(transformers, f"{family}ForCausalLM")(config).eval().model


def laid_out(texts: list[torch.Tensor], places: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(first + len(x) for (_, first), x in zip(places, texts, strict=True))
    ids, at = (torch.zeros(1 + max(b for b, _ in places), width, dtype=torch.int64) for _ in range(2))
    for (b, first), x in zip(places, texts, strict=True):
        ids[b, first : first + len(x)], at[b, first : first + len(x)] = x, torch.arange(len(x))
    return ids, at


@pytest.mark.parametrize("family", FAMILIES)
def test_a_document_does_not_see_its_neighbours(family: str) -> None:
    model, g = model_of(family), torch.Generator().manual_seed(1)
    texts = [torch.randint(64, (n,), generator=g) for n in LENGTHS]
    places = place(LENGTHS, 2)
    assert len({b for b, _ in places}) == 2 and any(first for _, first in places)

    def run(some: list[torch.Tensor]) -> list[torch.Tensor]:
        ids, at = laid_out(some, places)
        hidden = model(input_ids=ids, position_ids=at, use_cache=False).last_hidden_state
        return [hidden[b, first : first + len(x)] for (b, first), x in zip(places, some, strict=True)]

    packed = run(texts)
    for text, own in zip(texts, packed, strict=True):
        alone = model(input_ids=text[None], use_cache=False).last_hidden_state[0]
        assert torch.allclose(own, alone, atol=1e-5)
    for changed in range(len(texts)):
        others = [(x + 1) % 64 if i == changed else x for i, x in enumerate(texts)]
        for i, own in enumerate(run(others)):
            assert torch.equal(own, packed[i]) != (i == changed), (changed, i)


@pytest.mark.parametrize("family", [name for name, keys in FAMILIES.items() if keys])
def test_a_window_counts_in_the_document_not_in_the_row(family: str) -> None:
    """A packed document's first tokens see all before them, wherever the row has come to; behind the window a document that is longer
    feels it, or the test above would say nothing of windows."""
    g = torch.Generator().manual_seed(1)
    texts, places = [torch.randint(64, (n,), generator=g) for n in LENGTHS], place(LENGTHS, 2)
    ids, at = laid_out(texts, places)
    narrow, wide = (
        m(input_ids=ids, position_ids=at, use_cache=False).last_hidden_state
        for m in (model_of(family), model_of(family, sliding_window=64))
    )
    assert any(first > WINDOW for _, first in places), "some document begins behind the row's first window"
    for (b, first), n in zip(places, LENGTHS, strict=True):
        one, other = narrow[b, first : first + n], wide[b, first : first + n]
        assert torch.allclose(one[:WINDOW], other[:WINDOW], atol=1e-5)
        assert n <= WINDOW or not torch.allclose(one[WINDOW:], other[WINDOW:], atol=1e-3)


def test_places_never_overlap_and_packing_never_costs_more() -> None:
    rng = random.Random(0)
    for _ in range(50):
        lengths = [rng.randint(1, 40) for _ in range(rng.randint(1, 9))]
        found = pack(lengths, attention=1e-3)
        taken = [(b, c) for (b, first), n in zip(found, lengths, strict=True) for c in range(first, first + n)]
        assert len(taken) == len(set(taken)) == sum(lengths)
        rows, width = 1 + max(b for b, _ in found), 1 + max(c for _, c in taken)
        assert {b for b, _ in found} == set(range(rows))
        assert rows * width * (1 + 1e-3 * width) <= len(lengths) * max(lengths) * (1 + 1e-3 * max(lengths))


def test_what_a_column_costs_decides() -> None:
    assert len({b for b, _ in pack([20, 20, 20, 20], attention=10.0)}) == 4, "attention is dear: nothing to gain by longer rows"
    assert len({b for b, _ in pack([20, 1, 1, 1], attention=0.0)}) == 1
    config = transformers.LlamaConfig(**COMMON)
    layer = model_of("Llama").layers[0]
    matrices = sum(p.numel() for p in layer.parameters() if p.dim() == 2)
    assert attention_share(config) == pytest.approx(2 * 4 * 8 / matrices)
