"""A lean forward pass over a static KV cache, for models whose state is only a KV cache.

Shape suffixes: B rows, T new tokens, S cache slots, H hidden, N heads, K key-value heads, D head width, V vocabulary.

Why our own forward: ``generate`` costs more per step than a small draft model does, and its cache grows by
concatenation. Here keys and values are written in place at each row's position; rolling back is forgetting a length.
What families differ in is read into uniform layers (``families``); the forward knows none of their names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftstill.decode.families import SUPPORTED, plain_head, read, refuse_unsupported
from draftstill.decode.layers import Layer, Linear, Sort, Stack, can_pack, capped_attention, pack_all, rotate, tensors

__all__ = ["SUPPORTED", "Network", "Places", "Sight", "StaticCache", "plain_head", "prefill", "refuse_unsupported"]


_FOLDED = 16
"""Tokens up to which heads that share keys are put behind each other: a draft step or a verify pass, not a prefill."""


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
        part = object.__new__(type(self))
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
class Sight:
    """What the new tokens see from layers of one sort."""

    cos: Tensor | None
    sin: Tensor | None
    low: int
    """First slot read: a window may end before the cache begins."""
    mask: Tensor | None
    """True where a token may look, or a bias to add (-inf where it may not); broadcasts to [B, N, T, end - low]."""
    folded: Tensor | None = None
    """The same for queries of heads that share keys put one behind the other, [B, 1, N / K * T, end - low]."""


@dataclass(slots=True)
class Places:
    """Where the new tokens of one forward go and what they may see; the same for every layer of a sort."""

    where: tuple[Any, ...]
    """Index into [B, K, S, D] stores."""
    end: int
    """Slots read end here."""
    together: bool
    """All rows at one position: plain slices, no index tensors."""
    sights: list[Sight]
    """One per sort of layers."""
    learned: Tensor | None = None
    """Learned embeddings of the tokens' positions; broadcasts to [B, T, H]."""
    source: Tensor | None = None
    """True where a row's encoded text is; [B, 1, 1, E]."""


class Network:
    """Weights of a transformers model, arranged for decoding.

    Args:
        model: a transformers model of a supported family (``SUPPORTED``), in the dtype to decode in.
        vocab: real vocabulary; padded head rows beyond it are never scored.
        head_ids: score only these ids (ascending); logits then have one column per kept id.
        pack_weights: on a CPU lay matrices out as its kernels read them, where that works (``packed``). They cannot be compiled then.
    """

    encoder = False
    """Whether texts are conditioned on a source that an encoder reads (``EncoderDecoderNetwork``)."""
    start_ids: Sequence[int] = ()
    """What every text of an encoder-decoder starts with."""
    plain_head: bool
    """Whether logits are nothing but head @ hidden."""
    parameters: int
    """Distinct ones; a tied head counts once."""
    step_bytes: int
    """Bytes of weights that one step reads."""
    columns: int
    """Logits per position."""
    packed: bool
    """Whether matrices are laid out for the CPU's kernels."""

    def __init__(self, model: Any, *, vocab: int | None = None, head_ids: Tensor | None = None, key: str = "target.source",
                 pack_weights: bool = True) -> None:  # fmt: skip
        self._take(read(model, key), model.config, vocab, head_ids, pack_weights)

    def _take(self, stack: Stack, config: Any, vocab: int | None, head_ids: Tensor | None, pack_weights: bool) -> None:
        self.kind = config.model_type
        self.stack, self.layers, self.norm, self.embed = stack, stack.layers, stack.norm, stack.embed
        self.heads, self.kv_heads, self.width, self.max_positions = stack.heads, stack.kv_heads, stack.width, stack.max_positions
        self.dtype, self.device = self.embed.dtype, self.embed.device
        self.vocab = vocab or stack.head.weight.shape[0]
        self.head_ids = None if head_ids is None else head_ids.to(self.device)
        kept = lambda t: t[: self.vocab] if self.head_ids is None else t[: self.vocab][self.head_ids].contiguous()  # noqa: E731
        head = Linear(kept(stack.head.weight), None if stack.head.bias is None else kept(stack.head.bias))
        stack.head = head  # lets a whole head go that was trimmed
        self.plain_head = head.bias is None and stack.logit_cap is None
        self.columns, self.hidden = head.weight.shape
        self._count(head.weight)
        self.packed = pack_weights and self.device.type == "cpu" and can_pack(self.dtype)
        if self.packed:
            for record in (stack, *self.layers):
                pack_all(record)
        self._act, self._softcap = stack.activation, stack.softcap
        # Partial rotary: the rest of a head's width passes.
        self._turned = max((2 * len(s.inv_freq) for s in stack.sorts if s.inv_freq is not None), default=self.width)
        self._tables: list[tuple[Tensor, Tensor] | None] = [None] * len(stack.sorts)
        self._learned, self._reach = stack.positions, 0
        self._outgrown: list[Any] = []
        self._extend(min(1024, self.max_positions))

    def _count(self, head: Tensor) -> None:
        """Distinct parameters, a tied head counting once; and the bytes that one step reads: not the rows of an untied embedding."""
        found = {t.data_ptr(): t.numel() for t in tensors(self.stack) if self.head_ids is None or t is not head}
        self.parameters = sum(found.values()) + sum(t.numel() for layer in self.layers for t in tensors(layer))
        tied = self.embed.data_ptr() == head.data_ptr()
        self.step_bytes = (self.parameters - (0 if tied else self.embed.numel())) * self.embed.element_size()

    def new_cache(self, rows: int, slots: int, source: int = 0) -> StaticCache:
        """Room for ``rows`` texts of ``slots`` tokens; ``source`` matters to encoder-decoders only."""
        self._extend(slots)
        return StaticCache(len(self.layers), rows, self.kv_heads, slots, self.width, self.dtype, self.device)

    def _extend(self, length: int) -> None:
        """Tables of positions for at least ``length`` slots."""
        if self._reach >= length:
            return
        # A captured graph reads the tables it was made with, and the new ones begin alike: the old ones stay. Doubling bounds their number.
        self._outgrown.append((list(self._tables), self._learned, getattr(self, "_bias", None)))
        length = self._reach = max(length, 2 * self._reach)
        for n, sort in enumerate(self.stack.sorts):
            if sort.inv_freq is not None:
                angle = torch.outer(torch.arange(length, device=self.device, dtype=torch.float32), sort.inv_freq.to(self.device))
                cos, sin = angle.cos() * sort.scaling, angle.sin() * sort.scaling
                self._tables[n] = torch.cat([cos, cos], -1).to(self.dtype), torch.cat([-sin, sin], -1).to(self.dtype)
        self.cos, self.sin = self._tables[0] or (torch.empty(0), torch.empty(0))
        if self._learned is not None and len(self._learned) < length:
            # Only padding ever stands past the last learned position.
            self._learned = F.pad(self._learned, (0, 0, 0, length - len(self._learned)))

    def places(self, starts: Sequence[int] | Tensor, tokens: int, cache: StaticCache) -> Places:
        """Where ``tokens`` new tokens of each row go, and what they may see.

        Args:
            starts: position of each row's first new token. A list of host integers reads and writes no more of the cache than
                it needs. A tensor [B] has static shapes whatever its values: one forward for every position, which a graph can
                capture; it reads the whole cache behind a mask.
        """
        lowest, positions_BT = 0, None
        if isinstance(starts, Tensor):
            end, positions_BT = cache.slots, starts[:, None] + torch.arange(tokens, device=self.device)
        else:
            lowest, end = min(starts), max(starts) + tokens
            if end > cache.slots:
                raise AssertionError(f"position {end} past the cache's {cache.slots} slots")
            if lowest + tokens < end:
                positions_BT = torch.tensor(starts, device=self.device)[:, None] + torch.arange(tokens, device=self.device)
        if positions_BT is None:
            new: Any = slice(lowest, end)
            where: tuple[Any, ...] = (slice(None), slice(None), new)
        else:
            new = positions_BT
            where = (torch.arange(len(positions_BT), device=self.device)[:, None], slice(None), positions_BT)
        fixed = isinstance(starts, Tensor)
        sights = [self._sight(sort, table, positions_BT, new, lowest, end, tokens, fixed)
                  for sort, table in zip(self.stack.sorts, self._tables, strict=True)]  # fmt: skip
        return Places(where, end, positions_BT is None, sights, None if self._learned is None else self._learned[new])

    def _sight(self, sort: Sort, table: tuple[Tensor, Tensor] | None, positions_BT: Tensor | None, new: Any, lowest: int, end: int,
               tokens: int, fixed: bool) -> Sight:  # fmt: skip
        """A token at position t sees t-window+1 .. t."""
        low = 0 if sort.window is None else max(0, lowest - sort.window + 1)
        cos, sin = (None, None) if table is None else (table[0][new], table[1][new])
        if positions_BT is None:
            mask = torch.ones(tokens, end - low, dtype=torch.bool, device=self.device).tril(lowest - low) if tokens > 1 else None
            if mask is not None and sort.window is not None and end > sort.window:
                mask.triu_(lowest - low - sort.window + 1)
            return Sight(cos, sin, low, mask, None if mask is None or tokens > _FOLDED else self._folded(mask, tokens))
        slots = torch.arange(low, end, device=self.device)
        mask = slots <= positions_BT[:, :, None]
        if sort.window is not None:
            mask = mask & (slots > positions_BT[:, :, None] - sort.window)
        mask = mask[:, None]
        folded = self._folded(mask, tokens) if fixed or tokens <= _FOLDED else None
        return Sight(None if cos is None else cos[:, None], None if sin is None else sin[:, None], low, mask, folded)

    def _folded(self, mask: Tensor, tokens: int) -> Tensor | None:
        """Once for all layers what each would do: the mask as a bias, for queries of heads that share keys put one behind the other."""
        if self._softcap is not None:
            return None
        bias = torch.zeros(mask.shape, dtype=self.dtype, device=self.device).masked_fill(~mask, -torch.inf)
        repeats = 1 if tokens == 1 else self.heads // self.kv_heads
        return bias if repeats == 1 else bias.repeat(*[1] * (bias.dim() - 2), repeats, 1)

    def forward(self, ids_BT: Tensor, cache: StaticCache, starts: Sequence[int] | Tensor) -> Tensor:
        """Process tokens at positions starts[b] .. starts[b]+T-1, writing the cache.

        Args:
            ids_BT: token ids.
            cache: rows 0..B-1 are used.
            starts: position of each row's first token; everything before it must be in the cache. See ``places``.

        Returns:
            Final (normed) hidden states, [B, T, H].
        """
        B, T = ids_BT.shape
        stack = self.stack
        places = self.places(starts, T, cache)
        x_BTH = F.embedding(ids_BT, self.embed)
        if stack.embed_scale is not None:
            x_BTH = x_BTH * stack.embed_scale
        if stack.project_in is not None:
            x_BTH = stack.project_in(x_BTH)
        if places.learned is not None:
            x_BTH = x_BTH + places.learned
        for n, layer in enumerate(self.layers):
            h = x_BTH if layer.norm1 is None else layer.norm1(x_BTH)
            a = self._attend(layer, h, cache.keys[n][:B], cache.values[n][:B], places)
            if stack.parallel:
                x_BTH = self._feed(layer, h if layer.norm2 is None else layer.norm2(x_BTH)) + a + x_BTH
                continue
            x_BTH = x_BTH + (a if layer.post1 is None else layer.post1(a))
            if layer.after1 is not None:
                x_BTH = layer.after1(x_BTH)
            if layer.cross is not None:
                x_BTH = x_BTH + self._attend_source(n, x_BTH, cache, places)
            f = self._feed(layer, x_BTH if layer.norm2 is None else layer.norm2(x_BTH))
            x_BTH = x_BTH + (f if layer.post2 is None else layer.post2(f))
            if layer.after2 is not None:
                x_BTH = layer.after2(x_BTH)
        x_BTH = x_BTH if self.norm is None else self.norm(x_BTH)
        if stack.project_out is not None:
            x_BTH = stack.project_out(x_BTH)
        return x_BTH if stack.out_scale is None else x_BTH * stack.out_scale

    def _feed(self, layer: Layer, h: Tensor) -> Tensor:
        if not self.stack.gated:
            return layer.down(self._act(layer.up(h)))
        gate, up = layer.up(h).chunk(2, -1)
        return layer.down(self._act(gate).mul_(up))

    def _attend(self, layer: Layer, h: Tensor, keys: Tensor, values: Tensor, places: Places) -> Tensor:
        B, T, _ = h.shape
        sight = places.sights[layer.sort]
        qkv = layer.qkv(h).view(B, T, self.heads + 2 * self.kv_heads, self.width).transpose(1, 2)
        qk, v = qkv.split([self.heads + self.kv_heads, self.kv_heads], 1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = qk.split([self.heads, self.kv_heads], 1)
            qk = torch.cat([layer.q_norm(q), layer.k_norm(k)], 1)
        if sight.cos is not None and sight.sin is not None:
            if self._turned == self.width:
                qk = rotate(qk, sight.cos, sight.sin)
            else:
                qk = torch.cat([rotate(qk[..., : self._turned], sight.cos, sight.sin), qk[..., self._turned :]], -1)
        q, k = qk.split([self.heads, self.kv_heads], 1)
        if places.together:
            keys[places.where], values[places.where] = k, v
        else:  # advanced indices around a slice put B, T first
            keys[places.where], values[places.where] = k.transpose(1, 2), v.transpose(1, 2)
        keys, values = keys[:, :, sight.low : places.end], values[:, :, sight.low : places.end]
        if self._softcap is not None:
            a = capped_attention(q, keys, values, sight.mask, layer.scale, self._softcap)
        elif T == 1 or sight.folded is not None:
            # Heads that share keys become rows of one query: the CPU's grouped kernel takes 3 times as long for a single token
            # (.12-.21 ms against .045 per layer of the demo's target), and 1.2 to 1.6 times as long for a few.
            q = q.reshape(B, self.kv_heads, self.heads // self.kv_heads * T, self.width)
            alone = q.shape[2] == 1 and q.dtype == torch.bfloat16 and not q.is_cuda
            if alone:  # of one row the CPU's bfloat16 kernel takes twice as long as of two (89 us against 45, 8 heads, 150 slots)
                q = q.expand(-1, -1, 2, -1)
            a = F.scaled_dot_product_attention(
                q, keys, values, attn_mask=sight.mask if sight.folded is None else sight.folded, scale=layer.scale
            )
            if alone:
                a = a[:, :, :1]
            if T > 1:
                a = a.reshape(B, self.heads, T, self.width).transpose(1, 2)
            a = a.reshape(B, T, self.heads * self.width)
        else:
            gqa = self.heads != self.kv_heads
            a = F.scaled_dot_product_attention(q, keys, values, attn_mask=sight.mask, enable_gqa=gqa, scale=layer.scale)
            a = a.transpose(1, 2).reshape(B, T, self.heads * self.width)
        return layer.out(a)

    def read(self, cache: StaticCache, first: int, sources: Sequence[Sequence[int]]) -> None:
        """Encode the sources of rows first, first+1, ... (encoder-decoders only)."""
        raise NotImplementedError(f"{self.kind} has no encoder")

    def _attend_source(self, layer: int, x_BTH: Tensor, cache: StaticCache, places: Places) -> Tensor:
        raise NotImplementedError(f"{self.kind} has no encoder")

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits over the real vocabulary (or the kept ids), [..., V]."""
        z = self.stack.head(hidden)
        if (cap := self.stack.logit_cap) is not None:
            z = torch.tanh(z / cap) * cap
        return z.float()


_PREFILL_TOKENS = 4096
"""Tokens of one prefill forward: enough to fill the machine, few enough to bound the memory of its activations."""


def batches(texts: Sequence[Sequence[int]]) -> Iterator[tuple[int, list[Sequence[int]], int]]:
    """Neighbouring texts that one forward reads: index of the first, the texts, the length of the longest."""
    at = 0
    while at < len(texts):
        count, width = 0, 0
        while at + count < len(texts) and (count == 0 or (count + 1) * max(width, len(texts[at + count])) <= _PREFILL_TOKENS):
            width = max(width, len(texts[at + count]))
            count += 1
        yield at, list(texts[at : at + count]), width
        at += count


def prefill(network: Network, cache: StaticCache, first: int, texts: Sequence[Sequence[int]]) -> None:
    """Put each text into its row of the cache, rows first, first+1, ...; shorter texts are padded with garbage past their end."""
    if len(texts) > 1 and not network.encoder and all(t == texts[0] for t in texts):
        # Many answers to one prompt: read it once. (Of an encoder-decoder, texts begin alike but have sources of their own.)
        prefill(network, cache, first, texts[:1])
        for row in range(first + 1, first + len(texts)):
            cache.move(first, row, len(texts[0]))
        return
    for at, group, width in batches(texts):
        if width:
            ids = torch.tensor([[*t, *[0] * (width - len(t))] for t in group], device=network.device)
            network.forward(ids, cache.view(first + at, len(group)), [0] * len(group))
