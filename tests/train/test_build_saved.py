"""Every builder's draft is an ordinary model of its family: saved and loaded it says the same, and tied embeddings stay tied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from draftstill.decode import Network, refuse_unsupported
from draftstill.sources import load_tokenizer, quiet_transformers, resolve_model
from draftstill.train.build import build_draft, preflight
from draftstill.vocabulary import check_vocabulary
from tests.pipeline import PADDED, REAL, words
from tests.train.drafts import FAMILIES, recipe_of, recorded, saved, tiny

BUILDERS: dict[str, dict[str, Any]] = {
    "depth": {"source": "prune", "layers": [0, 2]},
    "auto": {"source": "prune", "layers": "auto", "depth": 2, "search": {"positions": 24, "beam": 1}},
    "width": {"source": "prune", "layers": [1, 2], "keep_heads": 0.5, "keep_mlp": 0.4},
    "fresh": {"source": "fresh", "depth": 2},
    "fresh narrow": {"source": "fresh", "depth": 1, "fresh": {"hidden_size": 24, "num_attention_heads": 4, "head_dim": 10}},
    "existing": {},
    "cut": {"cut": True, "layers": [0], "keep_mlp": 0.5},
    "transplant": {"transplant": True},
}


@pytest.fixture(
    scope="module", params=[(f, t) for f in FAMILIES for t in (True, False)], ids=lambda p: f"{p[0]}-{'tied' if p[1] else 'untied'}"
)
def home(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, bool]:
    """A recorded home, a target of the family, a draft of it and a donor with another tokenizer."""
    folder, (family, tied) = tmp_path_factory.mktemp("home"), request.param
    recorded()  # here, since the tests themselves take no gradients
    saved(folder / "target", tiny(family, tied))
    saved(folder / "own", tiny(family, tied, seed=3, layers=2, rows=REAL + 1))
    saved(folder / "donor", tiny(family, tied, seed=4, layers=1, rows=160), [*words()[:90], "zzz", *words()[90:150]])
    return folder, family, tied


@pytest.mark.parametrize("builder", BUILDERS)
@torch.no_grad()
def test_saved_and_loaded_it_says_the_same(home: tuple[Path, str, bool], builder: str, tmp_path: Path) -> None:
    folder, family, tied = home
    section = {"source": str(folder / ("donor" if builder == "transplant" else "own")), **BUILDERS[builder]}
    # The recording is another target's: shapes and ids are what matters here.
    recipe = recipe_of(folder / "home", f"target.source={folder / 'target'}", **section)
    preflight(recipe)
    draft = build_draft(recipe)
    model, config = draft.model, draft.model.config
    # (For a qwen2 transformers takes its own tokenizer class, which adds a token.)
    real = check_vocabulary(load_tokenizer(resolve_model(recipe.target, "target")), draft.tokenizer, PADDED, config.vocab_size).real_size
    assert draft.vocab == real <= config.vocab_size and config.model_type == family
    assert all(p.dtype == torch.float32 and p.requires_grad for p in model.parameters())
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied == config.tie_word_embeddings
    ids = torch.randint(REAL, (2, 11), generator=torch.Generator().manual_seed(1))
    before = model(ids, use_cache=False).logits
    with quiet_transformers():
        model.save_pretrained(tmp_path / "saved")
        loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert torch.equal(loaded(ids, use_cache=False).logits, before)
    assert (loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()) == tied == loaded.config.tie_word_embeddings
    with safe_open(tmp_path / "saved" / "model.safetensors", "pt") as file:
        assert ("lm_head.weight" in file.keys()) == (not tied)  # noqa: SIM118 - not a dict
    # The decoder reads it as transformers does.
    refuse_unsupported(loaded.config)
    network = Network(loaded, vocab=REAL, pack_weights=False)
    hidden = network.forward(ids, network.new_cache(2, 11), [0, 0])
    assert torch.allclose(network.logits(hidden), before[..., :REAL], atol=2e-4, rtol=1e-4)
    # Built again it is the same, and it shares no memory with what the target lends.
    again = build_draft(recipe)
    assert again.name == draft.name and again.facts == draft.facts
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.model.parameters(), strict=True))
    kept = draft.target_head.clone()
    model.lm_head.weight.zero_()
    assert torch.equal(draft.target_head, kept)
