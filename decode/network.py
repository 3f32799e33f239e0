"""A lean forward pass over a static KV cache, for decoder-only models whose state is only a KV cache.

Shape suffixes: B rows, T new tokens, S cache slots, H hidden, N heads, K key-value heads, D head width, V vocabulary.

Why our own forward: ``generate`` costs more per step than a small draft model does, and its cache grows by
concatenation. Here keys and values are written in place at each row's position; rolling back is forgetting a length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftstill.errors import DraftstillError

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")
_ROPE = ("default", "linear", "llama3", "yarn")


class StaticCache:
    """Keys and values of one model, [B, K, S, D] per layer, allocated once.

    Slot s of a row holds position s. Slots at or past a row's length are garbage: every read is masked by position, and
    the next write covers them, so rollback needs no work.
    """

    def __init__(self, layers: int, rows: int, kv_heads: int, slots: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (rows, kv_heads, slots, width)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.rows, self.slots = rows, slots

    def view(self, first: int, count: int) -> StaticCache:
        """Rows first .. first+count-1, sharing memory."""
        part = object.__new__(StaticCache)
        part.keys = [k[first : first + count] for k in self.keys]
        part.values = [v[first : first + count] for v in self.values]
        part.rows, part.slots = count, self.slots
        return part

    def move(self, source: int, to: int, length: int) -> None:
        """Copy the first ``length`` slots of one row onto another."""
        for store in (*self.keys, *self.values):
            store[to, :, :length] = store[source, :, :length]

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))


@dataclass(slots=True)
class _Layer:
    norm1: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    norm2: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


def _cat(*modules: Any) -> tuple[Tensor, Tensor | None]:
    weight = torch.cat([m.weight.detach() for m in modules])
    bias = torch.cat([m.bias.detach() for m in modules]) if modules[0].bias is not None else None
    return weight, bias


def refuse_unsupported(config: Any, key: str = "target.source") -> None:
    """Refuse, by name, a model that this decoder would run wrongly."""
    kind = getattr(config, "model_type", "?")
    if kind not in SUPPORTED:
        raise DraftstillError(
            f"models of type {kind!r} are not supported by the decoder",
            key=key, mend=f"supported: {', '.join(SUPPORTED)}. Models with recurrent or convolutional state cannot be rolled back.",
        )  # fmt: skip
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    if layer_types != {"full_attention"} or (kind == "mistral" and getattr(config, "sliding_window", None)):
        raise DraftstillError(
            f"{kind!r} with sliding-window attention is not supported yet", key=key, mend="use a model with full attention"
        )
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in _ROPE:
        raise DraftstillError(
            f"rotary scaling {rope!r} is not supported (it changes with the length)", key=key, mend=f"supported: {', '.join(_ROPE)}"
        )


class Network:
    """Weights of a transformers model, arranged for decoding.

    Args:
        model: a ``LlamaForCausalLM`` or one of its kin (``SUPPORTED``), in the dtype to decode in.
        vocab: real vocabulary; padded head rows beyond it are never scored.
        head_ids: score only these ids (ascending); logits then have one column per kept id.
    """

    def __init__(self, model: Any, *, vocab: int | None = None, head_ids: Tensor | None = None, key: str = "target.source") -> None:
        config = model.config
        refuse_unsupported(config, key)
        self.kind, self.hidden = config.model_type, config.hidden_size
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.eps, self.max_positions = config.rms_norm_eps, config.max_position_embeddings
        if config.hidden_act != "silu":
            raise DraftstillError(f"activation {config.hidden_act!r} is not supported", key=key, mend="supported: silu")
        self.embed = model.model.embed_tokens.weight.detach()
        self.dtype, self.device = self.embed.dtype, self.embed.device
        self.layers = [self._layer(layer) for layer in model.model.layers]
        self.norm = model.model.norm.weight.detach()
        self.vocab = vocab or model.lm_head.weight.shape[0]
        head = model.lm_head.weight.detach()[: self.vocab]
        self.head_ids = None if head_ids is None else head_ids.to(self.device)
        self.head = head if self.head_ids is None else head[self.head_ids].contiguous()
        # Built anew: casting a model to bfloat16 casts these frequencies too, and their error grows with the position.
        rotary = type(model.model.rotary_emb)(config=config)
        self._inv_freq, self._scaling = rotary.inv_freq.float(), float(getattr(rotary, "attention_scaling", 1.0))
        self.cos = self.sin = torch.empty(0)
        self._rotary(min(1024, self.max_positions))

    @staticmethod
    def _layer(layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        qkv, qkv_bias = _cat(attention.q_proj, attention.k_proj, attention.v_proj)
        gate_up, gate_up_bias = _cat(mlp.gate_proj, mlp.up_proj)
        out, out_bias = _cat(attention.o_proj)
        down, down_bias = _cat(mlp.down_proj)
        q_norm, k_norm = (getattr(attention, n).weight.detach() if hasattr(attention, n) else None for n in ("q_norm", "k_norm"))
        return _Layer(
            layer.input_layernorm.weight.detach(), qkv, qkv_bias, q_norm, k_norm, out, out_bias,
            layer.post_attention_layernorm.weight.detach(), gate_up, gate_up_bias, down, down_bias,
        )  # fmt: skip

    @property
    def parameters(self) -> int:
        """Distinct parameters; a tied head counts once."""
        tensors = {t.data_ptr(): t.numel() for t in (self.embed, self.norm)}
        if self.head_ids is None:
            tensors[self.head.data_ptr()] = self.head.numel()
        inner = sum(t.numel() for layer in self.layers for t in (getattr(layer, n) for n in _Layer.__slots__) if t is not None)
        return sum(tensors.values()) + inner

    def new_cache(self, rows: int, slots: int) -> StaticCache:
        self._rotary(slots)
        return StaticCache(len(self.layers), rows, self.kv_heads, slots, self.width, self.dtype, self.device)

    def _rotary(self, length: int) -> None:
        if self.cos.shape[0] >= length:
            return
        angle = torch.outer(torch.arange(length, device=self.device, dtype=torch.float32), self._inv_freq.to(self.device))
        angle = torch.cat([angle, angle], -1)
        self.cos, self.sin = (angle.cos() * self._scaling).to(self.dtype), (angle.sin() * self._scaling).to(self.dtype)

    def forward(self, ids_BT: Tensor, cache: StaticCache, starts: list[int]) -> Tensor:
        """Process tokens at positions starts[b] .. starts[b]+T-1, writing the cache.

        Args:
            ids_BT: token ids.
            cache: rows 0..B-1 are used.
            starts: position of each row's first token; everything before it must be in the cache.

        Returns:
            Final (normed) hidden states, [B, T, H].
        """
        B, T = ids_BT.shape
        end = max(starts) + T
        if end > cache.slots:
            raise AssertionError(f"position {end} past the cache's {cache.slots} slots")
        single = min(starts) == max(starts)
        if single:
            first = starts[0]
            cos, sin = self.cos[first:end], self.sin[first:end]
            where: tuple[Any, ...] = (slice(None), slice(None), slice(first, end))
            mask = None
            if T > 1:
                mask = torch.ones(T, end, dtype=torch.bool, device=self.device).tril(first)
        else:
            positions_BT = torch.tensor(starts, device=self.device)[:, None] + torch.arange(T, device=self.device)
            cos, sin = self.cos[positions_BT][:, None], self.sin[positions_BT][:, None]
            where = (torch.arange(B, device=self.device)[:, None], slice(None), positions_BT)
            mask = (torch.arange(end, device=self.device) <= positions_BT[:, :, None])[:, None]
        x_BTH = F.embedding(ids_BT, self.embed)
        for layer, keys, values in zip(self.layers, cache.keys, cache.values, strict=True):
            x_BTH = x_BTH + self._attend(layer, x_BTH, keys[:B], values[:B], where, end, cos, sin, mask, single)
            h = F.rms_norm(x_BTH, (self.hidden,), layer.norm2, self.eps)
            gate, up = F.linear(h, layer.gate_up, layer.gate_up_bias).chunk(2, -1)
            x_BTH = x_BTH + F.linear(F.silu(gate) * up, layer.down, layer.down_bias)
        return F.rms_norm(x_BTH, (self.hidden,), self.norm, self.eps)

    def _attend(self, layer: _Layer, x_BTH: Tensor, keys: Tensor, values: Tensor, where: tuple[Any, ...], end: int,
                cos: Tensor, sin: Tensor, mask: Tensor | None, single: bool) -> Tensor:  # fmt: skip
        B, T, _ = x_BTH.shape
        h = F.rms_norm(x_BTH, (self.hidden,), layer.norm1, self.eps)
        qkv = F.linear(h, layer.qkv, layer.qkv_bias).view(B, T, self.heads + 2 * self.kv_heads, self.width).transpose(1, 2)
        qk, v = qkv.split([self.heads + self.kv_heads, self.kv_heads], 1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = qk.split([self.heads, self.kv_heads], 1)
            q, k = F.rms_norm(q, (self.width,), layer.q_norm, self.eps), F.rms_norm(k, (self.width,), layer.k_norm, self.eps)
            qk = torch.cat([q, k], 1)
        q, k = _rotate(qk, cos, sin).split([self.heads, self.kv_heads], 1)
        if single:
            keys[where], values[where] = k, v
        else:  # advanced indices around a slice put B, T first
            keys[where], values[where] = k.transpose(1, 2), v.transpose(1, 2)
        keys, values = keys[:, :, :end], values[:, :, :end]
        if T == 1:
            # Heads that share keys become rows of one query: the CPU's grouped kernel takes 3 times as long for a single token
            # (.12-.21 ms against .045 per layer of the demo's target), and plain decoding is nothing but single tokens.
            q = q.reshape(B, self.kv_heads, self.heads // self.kv_heads, self.width)
            a = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask).reshape(B, 1, self.heads * self.width)
        else:
            a = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=self.heads != self.kv_heads)
            a = a.transpose(1, 2).reshape(B, T, self.heads * self.width)
        return F.linear(a, layer.out, layer.out_bias)

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits over the real vocabulary (or the kept ids), [..., V]."""
        return F.linear(hidden, self.head).float()


_PREFILL_TOKENS = 4096
"""Tokens of one prefill forward: enough to fill the machine, few enough to bound the memory of its activations."""


def prefill(network: Network, cache: StaticCache, first: int, texts: Sequence[Sequence[int]]) -> None:
    """Put each text into its row of the cache, rows first, first+1, ...; shorter texts are padded with garbage past their end."""
    at = 0
    if len(texts) > 1 and all(t == texts[0] for t in texts):
        # Many answers to one prompt: read it once.
        prefill(network, cache, first, texts[:1])
        for row in range(first + 1, first + len(texts)):
            cache.move(first, row, len(texts[0]))
        return
    while at < len(texts):
        count, width = 0, 0
        while at + count < len(texts) and (count == 0 or (count + 1) * max(width, len(texts[at + count])) <= _PREFILL_TOKENS):
            width = max(width, len(texts[at + count]))
            count += 1
        if width:
            ids = torch.tensor([[*t, *[0] * (width - len(t))] for t in texts[at : at + count]], device=network.device)
            network.forward(ids, cache.view(first + at, count), [0] * count)
        at += count


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin
