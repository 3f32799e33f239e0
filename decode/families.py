"""Reading transformers' modules into uniform layers. A new decoder-only family is one reader here; the forward knows no family.

What a family computes was read in its modeling file (transformers 5): the order of casts, where norms stand, which switches count.
A switch that is neither read nor refused here must be one that the modeling file ignores too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from draftstill.decode.layers import ACTIVATIONS, Layer, Linear, Norm, Sort, Stack
from draftstill.errors import DraftstillError

# What is supported, and what is refused.

_LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text")
DECODER_ONLY = (*_LLAMA_LIKE, "gpt2", "gpt_neox", "opt", "phi")
ENCODER_DECODER = ("t5",)
SUPPORTED = DECODER_ONLY + ENCODER_DECODER
_ROPE = ("default", "linear", "llama3", "yarn")
_LAYER_TYPED = ("qwen2", "qwen3", "gemma2", "gemma3_text")
"""Families whose modeling file reads ``layer_types``; in the others only full attention may stand there."""
_STATEFUL = (
    "mamba", "falcon_mamba", "falcon_h1", "jamba", "zamba", "bamba", "lfm2", "lfm3", "qwen3_next", "qwen3_5", "qwen4_exp", "recurrent_gemma",
    "rwkv", "xlstm", "granitemoehybrid", "nemotron_h", "kimi_linear", "minimax", "olmo_hybrid", "bailing_hybrid", "zaya", "hgrn",
)  # fmt: skip
_STATE_WORDS = ("linear", "conv", "mamba", "recurrent", "ssm", "rnn", "delta")
_ACTIVATION_KEY = {
    "gemma2": "hidden_activation", "gemma3_text": "hidden_activation", "gpt2": "activation_function", "opt": "activation_function", "t5": "dense_act_fn",
}  # fmt: skip
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_bidirectional_attention": (None, False), "is_causal": (None, True), "add_cross_attention": (None, False), "clip_qkv": (None,),
    "logit_scale": (None, 1), "logits_scaling": (None, 1), "residual_multiplier": (None, 1), "embedding_multiplier": (None, 1),
    "attention_multiplier": (None,), "attention_chunk_size": (None,), "quantization_config": (None,),
}  # fmt: skip
"""Switches that would change what is computed, with the values that do not. Some belong to other families: a config that carries one
was written for another modeling file than the one it names."""


def _activation(config: Any) -> str:
    return getattr(config, _ACTIVATION_KEY.get(config.model_type, "hidden_act"), "?")


def _ropes(config: Any) -> list[dict[str, Any]]:
    """Rotary parameters, one set per layer type where they differ."""
    found = getattr(config, "rope_parameters", None) or {}
    nested = [v for v in found.values() if isinstance(v, dict)]
    return nested or [found]


def plain_head(config: Any) -> bool:
    """Whether the logits of such a transformers model are nothing but head @ last hidden state: no bias, cap or scale, no encoder."""
    return getattr(config, "final_logit_softcapping", None) is None and config.model_type not in ("phi", *ENCODER_DECODER)


def refuse_unsupported(config: Any, key: str = "target.source") -> None:
    """Refuse, by name, a model that this decoder would run wrongly. Reads the config alone, so it can be asked before any download.

    Raises:
        DraftstillError: state that cannot be rolled back, an unknown family, or a switch that is not implemented.
    """
    kind = getattr(config, "model_type", "?")
    listing = f"supported: {', '.join(SUPPORTED)}"

    def refuse(problem: str, mend: str = listing) -> None:
        raise DraftstillError(problem, key=key, mend=mend)

    inner = getattr(config, "text_config", None)
    layer_types = list(dict.fromkeys([*(getattr(config, "layer_types", None) or []), *(getattr(inner, "layer_types", None) or [])]))
    stateful = [t for t in layer_types if any(w in t for w in _STATE_WORDS)]
    if stateful or kind.startswith(_STATEFUL):
        found = f" ({', '.join(stateful)})" if stateful else ""
        refuse(f"models of type {kind!r} keep recurrent or convolutional state{found}, which cannot be rolled back when a proposal is rejected",
               f"use a model whose only state is a KV cache; {listing}")  # fmt: skip
    if kind not in SUPPORTED:
        if inner is not None or getattr(config, "vision_config", None) is not None:
            alone = getattr(inner, "model_type", None)
            hint = f"use a checkpoint of the language model alone (model_type {alone!r})" if alone in SUPPORTED else "use a text-only model"
            refuse(
                f"models of type {kind!r} wrap a language model beside other parts (vision, audio), which is not supported",
                f"{hint}; {listing}",
            )
        experts = any(getattr(config, n, None) for n in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"))
        refuse(f"models of type {kind!r}{' (mixture of experts)' if experts else ''} are not supported by the decoder",
               f"{listing}. Models with recurrent or convolutional state cannot be rolled back.")  # fmt: skip
    allowed = {"full_attention", "sliding_attention"} if kind in _LAYER_TYPED else {"full_attention"}
    if other := [t for t in layer_types if t not in allowed]:
        refuse(f"{kind!r} with layers of type {', '.join(other)} is not supported", f"layers may be of type {', '.join(sorted(allowed))}")
    if "sliding_attention" in layer_types and not getattr(config, "sliding_window", None):
        refuse(f"{kind!r} with sliding_attention layers but without sliding_window is not supported", "set sliding_window in config.json")
    for rope in _ropes(config):
        if (rope_type := rope.get("rope_type", "default")) not in _ROPE:
            refuse(
                f"{kind!r} with rotary scaling {rope_type!r} is not supported (it changes with the length)",
                f"supported: {', '.join(_ROPE)}",
            )
        if kind not in ("gpt_neox", "phi") and rope.get("partial_rotary_factor", 1.0) not in (None, 1.0):
            refuse(f"{kind!r} with partial_rotary_factor {rope['partial_rotary_factor']} is not supported", "supported for: gpt_neox, phi")
    for name, neutral in _NEUTRAL.items():
        if (value := getattr(config, name, None)) not in neutral:
            mend = "save the model dequantized" if name == "quantization_config" else "use a model without it"
            refuse(f"{kind!r} with {name} is not supported" + ("" if isinstance(value, dict) else f" (found {value!r})"), mend)
    if kind == "gemma3_text" and getattr(config, "attn_logit_softcapping", None) is not None:
        refuse(f"{kind!r} with attn_logit_softcapping is not supported: transformers ignores it", "set it to null if the model was made so")
    if _activation(config) not in ACTIVATIONS:
        refuse(f"{kind!r} with activation {_activation(config)!r} is not supported", f"supported: {', '.join(ACTIVATIONS)}")


# Readers.


def read(model: Any, key: str = "target.source") -> Stack:
    """The model's weights, arranged for the forward. Single matrices are copied, so the model may be thrown away."""
    config = model.config
    refuse_unsupported(config, key)
    if config.model_type in ENCODER_DECODER:
        raise DraftstillError(f"models of type {config.model_type!r} have an encoder, which is not supported here", key=key,
                              mend="use a decoder-only model")  # fmt: skip
    if not type(model).__module__.startswith(f"transformers.models.{config.model_type.removesuffix('_text')}."):
        raise DraftstillError(f"this {config.model_type!r} model runs code of its own ({type(model).__name__}), which the decoder does not know",
                              key=key, mend="use a model that transformers itself implements")  # fmt: skip
    return (_READERS.get(config.model_type) or _llama)(model)


def linear(*modules: Any) -> Linear:
    """Linear modules one below the other."""
    bias = torch.cat([m.bias.detach() for m in modules]) if modules[0].bias is not None else None
    return Linear(torch.cat([m.weight.detach() for m in modules]), bias)


def _conv1d(module: Any) -> Linear:
    """GPT-2 keeps [in, out]."""
    return Linear(module.weight.detach().t().contiguous(), module.bias.detach())


def norm(module: Any) -> Norm:
    """Any of the families' norm modules."""
    weight = None if module.weight is None else module.weight.detach()
    if isinstance(module, torch.nn.LayerNorm):
        return Norm(weight, None if module.bias is None else module.bias.detach(), tuple(module.normalized_shape), module.eps, "layer")
    assert weight is not None
    eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    if "Gemma" in type(module).__name__:
        return Norm(1.0 + weight.float(), None, tuple(weight.shape), eps, "rms32")
    return Norm(weight, None, tuple(weight.shape), eps)


def _maybe(module: Any, name: str) -> Norm | None:
    found = getattr(module, name, None)
    return None if found is None else norm(found)


def _scale(scaling: float, width: int) -> float | None:
    return None if scaling == width**-0.5 else scaling


def _sorts(config: Any, rotary: Any) -> tuple[list[Sort], list[int]]:
    """Sorts of layers, and each layer's sort.

    Frequencies are built anew: casting a model to bfloat16 casts its own too, and their error grows with the position.
    """
    rotary = type(rotary)(config=config)
    window = getattr(config, "sliding_window", None)
    if config.model_type not in _LAYER_TYPED:
        window = window if config.model_type == "mistral" else None
        return [Sort(window, rotary.inv_freq.float(), float(rotary.attention_scaling))], [0] * config.num_hidden_layers
    names = list(dict.fromkeys(config.layer_types))
    sorts = []
    for name in names:
        prefix = f"{name}_" if hasattr(rotary, f"{name}_inv_freq") else ""
        inv_freq, scaling = getattr(rotary, f"{prefix}inv_freq"), getattr(rotary, f"{prefix}attention_scaling")
        sorts.append(Sort(window if name == "sliding_attention" else None, inv_freq.float(), float(scaling)))
    return sorts, [names.index(t) for t in config.layer_types]


def _llama(model: Any) -> Stack:
    """Llama and its kin: Mistral, Qwen2, Qwen3, Gemma 1 to 3. They differ in norms, biases, windows, caps and scales."""
    config, body = model.config, model.model
    sorts, sort_of = _sorts(config, body.rotary_emb)
    layers = []
    for n, layer in enumerate(body.layers):
        attention, mlp = layer.self_attn, layer.mlp
        sandwich = hasattr(layer, "pre_feedforward_layernorm")
        after_attention = norm(layer.post_attention_layernorm)
        layers.append(Layer(
            qkv=linear(attention.q_proj, attention.k_proj, attention.v_proj), out=linear(attention.o_proj),
            up=linear(mlp.gate_proj, mlp.up_proj), down=linear(mlp.down_proj), norm1=norm(layer.input_layernorm),
            norm2=norm(layer.pre_feedforward_layernorm) if sandwich else after_attention,
            post1=after_attention if sandwich else None, post2=_maybe(layer, "post_feedforward_layernorm"),
            q_norm=_maybe(attention, "q_norm"), k_norm=_maybe(attention, "k_norm"),
            scale=_scale(attention.scaling, attention.head_dim), sort=sort_of[n],
        ))  # fmt: skip
    embed = body.embed_tokens.weight.detach()
    scaled = config.model_type.startswith("gemma")
    return Stack(
        layers, sorts, embed, Linear(model.lm_head.weight.detach()), norm(body.norm),
        config.num_attention_heads, config.num_key_value_heads, body.layers[0].self_attn.head_dim, config.max_position_embeddings,
        ACTIVATIONS[_activation(config)],
        # In the embedding's dtype, as transformers has it: 55.5 for sqrt(3072) in bfloat16.
        embed_scale=torch.tensor(config.hidden_size**0.5).to(embed.dtype).item() if scaled else None,
        softcap=config.attn_logit_softcapping if config.model_type == "gemma2" else None,
        logit_cap=getattr(config, "final_logit_softcapping", None) if scaled else None,
    )  # fmt: skip


def _gpt2(model: Any) -> Stack:
    config, body = model.config, model.transformer
    width = config.n_embd // config.n_head
    layers = [
        Layer(qkv=_conv1d(b.attn.c_attn), out=_conv1d(b.attn.c_proj), up=_conv1d(b.mlp.c_fc), down=_conv1d(b.mlp.c_proj),
              norm1=norm(b.ln_1), norm2=norm(b.ln_2), scale=_scale(b.attn.scaling, width))
        for b in body.h
    ]  # fmt: skip
    return Stack(
        layers, [Sort()], body.wte.weight.detach(), Linear(model.lm_head.weight.detach()), norm(body.ln_f), config.n_head, config.n_head,
        width, config.n_positions, ACTIVATIONS[_activation(config)], gated=False, positions=body.wpe.weight.detach(),
    )  # fmt: skip


def _gpt_neox(model: Any) -> Stack:
    config, body = model.config, model.gpt_neox
    heads, width = config.num_attention_heads, config.hidden_size // config.num_attention_heads

    def by_kind(fused: Any) -> Linear:
        """q, k, v of head 0, of head 1, ... to all q, all k, all v."""
        turn = lambda t: t.detach().unflatten(0, (heads, 3, width)).transpose(0, 1).flatten(0, 2)  # noqa: E731
        return Linear(turn(fused.weight), None if fused.bias is None else turn(fused.bias))

    layers = [
        Layer(qkv=by_kind(x.attention.query_key_value), out=linear(x.attention.dense), up=linear(x.mlp.dense_h_to_4h),
              down=linear(x.mlp.dense_4h_to_h), norm1=norm(x.input_layernorm), norm2=norm(x.post_attention_layernorm))
        for x in body.layers
    ]  # fmt: skip
    return Stack(
        layers, _sorts(config, body.rotary_emb)[0], body.embed_in.weight.detach(), Linear(model.lm_head.weight.detach()),
        norm(body.final_layer_norm), heads, heads, width, config.max_position_embeddings, ACTIVATIONS[_activation(config)],
        gated=False, parallel=config.use_parallel_residual,
    )  # fmt: skip


def _opt(model: Any) -> Stack:
    config, body = model.config, model.model.decoder
    before = config.do_layer_norm_before
    layers = []
    for x in body.layers:
        a, first, second = x.self_attn, norm(x.self_attn_layer_norm), norm(x.final_layer_norm)
        layer = Layer(linear(a.q_proj, a.k_proj, a.v_proj), linear(a.out_proj), linear(x.fc1), linear(x.fc2))
        if before:
            layer.norm1, layer.norm2 = first, second
        else:
            layer.after1, layer.after2 = first, second
        layers.append(layer)
    return Stack(
        layers, [Sort()], body.embed_tokens.weight.detach(), Linear(model.lm_head.weight.detach()), _maybe(body, "final_layer_norm"),
        config.num_attention_heads, config.num_attention_heads, config.hidden_size // config.num_attention_heads,
        config.max_position_embeddings, ACTIVATIONS[_activation(config)], gated=False,
        positions=body.embed_positions.weight.detach()[body.embed_positions.offset :],
        project_in=None if body.project_in is None else linear(body.project_in),
        project_out=None if body.project_out is None else linear(body.project_out),
    )  # fmt: skip


def _phi(model: Any) -> Stack:
    config, body = model.config, model.model
    layers = []
    for x in body.layers:
        a = x.self_attn
        layers.append(Layer(
            qkv=linear(a.q_proj, a.k_proj, a.v_proj), out=linear(a.dense), up=linear(x.mlp.fc1), down=linear(x.mlp.fc2),
            norm1=norm(x.input_layernorm), q_norm=_maybe(a, "q_layernorm"), k_norm=_maybe(a, "k_layernorm"),
        ))  # fmt: skip
    return Stack(
        layers, _sorts(config, body.rotary_emb)[0], body.embed_tokens.weight.detach(),
        Linear(model.lm_head.weight.detach(), model.lm_head.bias.detach()), norm(body.final_layernorm),
        config.num_attention_heads, config.num_key_value_heads, body.layers[0].self_attn.head_dim, config.max_position_embeddings,
        ACTIVATIONS[_activation(config)], gated=False, parallel=True,
    )  # fmt: skip


_READERS: dict[str, Callable[[Any], Stack]] = {"gpt2": _gpt2, "gpt_neox": _gpt_neox, "opt": _opt, "phi": _phi}
