"""Tiny random models: the decoder's harness runs on CPU in seconds."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from draftstill.decode import Network

CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config, "mistral": MistralConfig}


@functools.cache
def _model(kind: str, vocab: int, seed: int, layers: int, positions: int, sharp: float):
    torch.manual_seed(seed)
    extra = {"sliding_window": None} if kind == "mistral" else {}
    config = CONFIGS[kind](
        vocab_size=vocab, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=positions, head_dim=8, tie_word_embeddings=False, bos_token_id=0, eos_token_id=None, pad_token_id=0, **extra,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.mul_(sharp)  # far from uniform, so that argmaxes are no ties and drafts differ
            else:
                p.add_(0.1 * torch.randn_like(p))
    return model


def make_model(kind: str = "llama", vocab: int = 96, seed: int = 0, layers: int = 2, positions: int = 256, sharp: float = 6.0):
    """A random model; the same arguments give the same weights."""
    return copy.deepcopy(_model(kind, vocab, seed, layers, positions, sharp))


def noised(model, scale: float, seed: int = 9):
    """A copy with noise on its weights: a draft that is often, not always, right."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(scale * p.std() * torch.randn(p.shape, generator=generator))
    return other


def constant(model, token: int):
    """A draft that always proposes one token."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.zero_()
        other.lm_head.weight[token] = 50 * torch.sign(other.model.norm.weight)
        other.model.embed_tokens.weight.copy_(other.model.embed_tokens.weight.abs())
    return other


@pytest.fixture(scope="session")
def target():
    return make_model()


@pytest.fixture(scope="session")
def drafts(target):
    """The five kinds of draft of the harness."""
    return {
        "self": target, "noised": noised(target, 0.3), "independent": make_model(seed=5, layers=1),
        "constant": constant(target, 7), "other_kind": make_model("qwen2", seed=3, layers=1),
    }  # fmt: skip


def network(model, **kw) -> Network:
    return Network(model, **kw)
