"""Encoder-decoder models (T5): an encoder reads a source once per text, the decoder then looks at it in every layer.

Shape suffixes: as in ``network``; E slots of the source.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftstill.decode.families import ENCODER_DECODER, linear, norm, refuse_unsupported
from draftstill.decode.layers import ACTIVATIONS, Cross, Layer, Linear, Sort, Stack
from draftstill.decode.network import Network, Places, Sight, StaticCache, batches
from draftstill.errors import DraftstillError

_POSITIONS = 1 << 14
"""Longest text where the config names no length: relative positions have no end of their own."""


def make_network(model: Any, **kw: Any) -> Network:
    """The network that fits the model; arguments as for ``Network``."""
    return (EncoderDecoderNetwork if model.config.model_type in ENCODER_DECODER else Network)(model, **kw)


class SourceCache(StaticCache):
    """A decoder's cache, with keys and values of the source, [B, N, E, D] per layer, and its length per row."""

    def __init__(
        self, layers: int, rows: int, heads: int, slots: int, width: int, dtype: torch.dtype, device: torch.device, source: int
    ) -> None:
        super().__init__(layers, rows, heads, slots, width, dtype, device)
        shape = (rows, heads, source, width)
        self.source_keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.source_values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        # Never 0: a row that sees nothing would be NaN, and NaN does not stay behind a mask.
        self.lengths = torch.ones(rows, dtype=torch.long, device=device)
        self.source, self.longest = source, 1
        """Slots for sources, and how many of them are in use: where shapes may change, no more is read."""

    def view(self, first: int, count: int) -> SourceCache:
        part = super().view(first, count)
        assert isinstance(part, SourceCache)
        rows = slice(first, first + count)
        part.source_keys, part.source_values = [k[rows] for k in self.source_keys], [v[rows] for v in self.source_values]
        part.lengths, part.source, part.longest = self.lengths[rows], self.source, self.longest
        return part

    def move(self, source: int, to: int, length: int) -> None:
        super().move(source, to, length)
        for store in (*self.source_keys, *self.source_values, self.lengths):
            store[to] = store[source]

    @property
    def bytes(self) -> int:
        return super().bytes + sum(t.numel() * t.element_size() for t in (*self.source_keys, *self.source_values))


class EncoderDecoderNetwork(Network):
    """A T5 model arranged for decoding.

    The decoder's text starts with ``start_ids``; ``read`` puts sources into a cache made with room for them. The encoder is
    transformers' own: it runs once per text. ``max_positions`` is soft (positions are relative): the config's ``n_positions``.
    """

    encoder = True

    def __init__(self, model: Any, *, vocab: int | None = None, head_ids: Tensor | None = None, key: str = "target.source",
                 pack_weights: bool = True) -> None:  # fmt: skip
        config = model.config
        refuse_unsupported(config, key)
        if config.model_type not in ENCODER_DECODER:
            raise DraftstillError(f"models of type {config.model_type!r} have no encoder that is supported", key=key)
        if (dtype := model.shared.weight.dtype) == torch.float16:
            raise DraftstillError(f"{config.model_type!r} in float16 is not supported: its activations overflow", key=key,
                                  value=str(dtype), mend="load it in bfloat16 or float32")  # fmt: skip
        attention = model.decoder.block[0].layer[0].SelfAttention
        self._bucket = attention._relative_position_bucket
        self._buckets = {"num_buckets": config.relative_attention_num_buckets, "max_distance": config.relative_attention_max_distance}
        self._bias_by_bucket = attention.relative_attention_bias.weight.detach()
        self._reader = model.encoder
        holders = (getattr(model, "generation_config", None), config)
        starts = [getattr(h, n, None) for n in ("decoder_start_token_id", "pad_token_id") for h in holders]
        self.start_ids = [next((s for s in starts if s is not None), 0)]
        self._take(_read(model), config, vocab, head_ids, pack_weights)

    def _count(self, head: Tensor) -> None:
        """Those of the encoder, too, which a step does not read; tied embeddings count once."""
        super()._count(head)
        own = sum(p.numel() for p in self._reader.parameters() if p.data_ptr() != self.embed.data_ptr())
        self.parameters += own + self._bias_by_bucket.numel()

    def new_cache(self, rows: int, slots: int, source: int = 1) -> SourceCache:
        """Room for ``rows`` texts of ``slots`` tokens, each with a source of up to ``source`` tokens."""
        self._extend(slots)
        return SourceCache(len(self.layers), rows, self.heads, slots, self.width, self.dtype, self.device, max(source, 1))

    def read(self, cache: StaticCache, first: int, sources: Sequence[Sequence[int]]) -> None:
        """Encode the sources of rows first, first+1, ...: their keys and values go into every layer of the cache.

        Raises:
            AssertionError: an empty source, or one longer than the cache has room for.
        """
        assert isinstance(cache, SourceCache)
        if not all(0 < len(s) <= cache.source for s in sources):
            raise AssertionError(f"sources of {sorted({len(s) for s in sources})} tokens; the cache has room for 1 to {cache.source}")
        cache.longest = max(cache.longest, *map(len, sources))
        same = len(sources) > 1 and all(s == sources[0] for s in sources)  # many answers to one source: read it once
        for at, group, width in batches(sources[:1] if same else sources):
            ids = torch.tensor([[*s, *[0] * (width - len(s))] for s in group], device=self.device)
            lengths = torch.tensor([len(s) for s in group], device=self.device)
            mask = torch.arange(width, device=self.device) < lengths[:, None]
            read_BEH = self._reader(input_ids=ids, attention_mask=mask.long()).last_hidden_state
            rows = slice(first, first + len(sources)) if same else slice(first + at, first + at + len(group))
            cache.lengths[rows] = lengths
            for layer, keys, values in zip(self.layers, cache.source_keys, cache.source_values, strict=True):
                assert layer.cross is not None
                kv = layer.cross.kv(read_BEH).unflatten(-1, (2, self.heads, self.width)).permute(2, 0, 3, 1, 4)
                keys[rows, :, :width], values[rows, :, :width] = kv[0], kv[1]

    def _extend(self, length: int) -> None:
        if self._reach >= length:
            return
        super()._extend(length)
        length = self._reach
        distances = torch.arange(length, device=self.device)
        self._bias = self._bias_by_bucket[self._bucket(-distances, bidirectional=False, **self._buckets)].T.contiguous()

    def places(self, starts: Sequence[int] | Tensor, tokens: int, cache: StaticCache) -> Places:
        assert isinstance(cache, SourceCache)
        places = super().places(starts, tokens, cache)
        slots = cache.source if isinstance(starts, Tensor) else cache.longest
        places.source = (torch.arange(slots, device=self.device) < cache.lengths[: len(starts), None])[:, None, None]
        return places

    def _sight(self, sort: Sort, table: Any, positions_BT: Tensor | None, new: Any, lowest: int, end: int, tokens: int,
               fixed: bool) -> Sight:  # fmt: skip
        """A bias for each distance back; -inf ahead."""
        if positions_BT is None:
            positions_BT = torch.arange(lowest, end, device=self.device)[None]
        back_BTS = positions_BT[:, :, None] - torch.arange(end, device=self.device)
        bias = self._bias[:, back_BTS.clamp(min=0)].masked_fill(back_BTS < 0, -torch.inf)
        return Sight(None, None, 0, bias.transpose(0, 1))

    def _attend_source(self, layer: int, x_BTH: Tensor, cache: StaticCache, places: Places) -> Tensor:
        cross, (B, T, _) = self.layers[layer].cross, x_BTH.shape
        assert isinstance(cache, SourceCache) and cross is not None and places.source is not None
        slots = places.source.shape[-1]
        q = cross.q(cross.norm(x_BTH)).view(B, T, self.heads, self.width).transpose(1, 2)
        keys, values = cache.source_keys[layer][:B, :, :slots], cache.source_values[layer][:B, :, :slots]
        a = F.scaled_dot_product_attention(q, keys, values, attn_mask=places.source, scale=1.0)
        return cross.out(a.transpose(1, 2).reshape(B, T, self.heads * self.width))


def _read(model: Any) -> Stack:
    config, body = model.config, model.decoder
    layers = []
    for block in body.block:
        (own, source, feed) = block.layer
        a, c, m = own.SelfAttention, source.EncDecAttention, feed.DenseReluDense
        layers.append(Layer(
            qkv=linear(a.q, a.k, a.v), out=linear(a.o), up=linear(m.wi_0, m.wi_1) if config.is_gated_act else linear(m.wi), down=linear(m.wo),
            norm1=norm(own.layer_norm), norm2=norm(feed.layer_norm), scale=1.0,
            cross=Cross(norm(source.layer_norm), linear(c.q), linear(c.k, c.v), linear(c.o)),
        ))  # fmt: skip
    return Stack(
        layers, [Sort()], body.embed_tokens.weight.detach(), Linear(model.lm_head.weight.detach()), norm(body.final_layer_norm),
        config.num_heads, config.num_heads, config.d_kv, getattr(config, "n_positions", None) or _POSITIONS,
        ACTIVATIONS[config.dense_act_fn], gated=config.is_gated_act,
        out_scale=config.d_model**-0.5 if config.scale_decoder_outputs else None,
    )  # fmt: skip
