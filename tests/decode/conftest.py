"""Tiny random models: the decoder's harness runs on CPU in seconds."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
)

from draftstill.decode import Network, programs

_WINDOW = {"sliding_window": 8}
_LATE_WINDOW = {"use_sliding_window": True, "max_window_layers": 1, **_WINDOW}
_CAPS = {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0, "query_pre_attn_scalar": 16, **_WINDOW}
_OPT = {"ffn_dim": 64, "word_embed_proj_dim": 32}
FAMILIES = {
    "llama": (LlamaConfig, {}), "mistral": (MistralConfig, {"sliding_window": None}), "qwen2": (Qwen2Config, {}), "qwen3": (Qwen3Config, {}),
    "llama_biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "mistral_window": (MistralConfig, _WINDOW), "qwen2_window": (Qwen2Config, _LATE_WINDOW), "qwen3_window": (Qwen3Config, _LATE_WINDOW),
    "gemma": (GemmaConfig, {}), "gemma2": (Gemma2Config, _CAPS),
    "gemma3": (Gemma3TextConfig, {**_WINDOW, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16}),
    "gpt2": (GPT2Config, {}), "gpt2_scaled": (GPT2Config, {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}),
    "gpt_neox": (GPTNeoXConfig, {"rotary_pct": 0.5}), "gpt_neox_sequential": (GPTNeoXConfig, {"use_parallel_residual": False, "attention_bias": False}),
    "opt": (OPTConfig, _OPT), "opt_after": (OPTConfig, {**_OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 16}),
    "opt_bare": (OPTConfig, {**_OPT, "enable_bias": False, "layer_norm_elementwise_affine": False}),
    "phi": (PhiConfig, {}), "phi_norms": (PhiConfig, {"qk_layernorm": True, "partial_rotary_factor": 0.25}),
}  # fmt: skip
"""Tiny models of every family and of its switches; a window of 8 where there is one."""


@functools.cache
def _model(kind: str, vocab: int, seed: int, layers: int, positions: int, sharp: float):
    torch.manual_seed(seed)
    maker, extra = FAMILIES[kind]
    if maker not in (GPT2Config, OPTConfig):
        extra = {"intermediate_size": 64, **extra}
    if maker not in (GPT2Config, OPTConfig, GPTNeoXConfig, PhiConfig):
        extra = {"num_key_value_heads": 2, "head_dim": 8, **extra}
    config = maker(
        vocab_size=vocab, hidden_size=32, num_hidden_layers=layers, num_attention_heads=4, max_position_embeddings=positions,
        tie_word_embeddings=False, bos_token_id=0, eos_token_id=None, pad_token_id=0, **extra,
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


def small_model():
    """12 tokens, a law far from uniform: texts that repeat themselves and end often."""
    model = make_model(vocab=12, sharp=3.0)
    with torch.no_grad():
        model.lm_head.weight.mul_(4)
    return model


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


@pytest.fixture(autouse=True)
def one_thread():
    """Models this small lose by a second thread: waking it takes longer than its share of the work."""
    torch.set_num_threads(1)


@pytest.fixture
def uncompiled(monkeypatch):
    """Static rounds as plain Python, wherever a test asks for the backend ``static``."""
    monkeypatch.setattr(programs.torch, "compile", lambda body, **options: body)
    monkeypatch.setattr(programs, "packed", lambda *networks: False)  # these need no tracing


@pytest.fixture(scope="module")
def draft(target):
    """A draft that is often right."""
    return noised(target, 0.3)


@pytest.fixture(scope="module")
def small():
    """A small target, its draft and its trimmed draft."""
    near = noised(small_model(), 0.3)
    return Network(small_model()), Network(near), Network(near, head_ids=torch.tensor([0, 1, 3, 4, 7, 8, 11]))
