"""Sizes of targets and drafts: what a configuration says, and what a recipe's draft will have. Pure arithmetic: no torch.

The builders, the check before a run and ``plan`` all ask here, so that none of them promises what another does not build.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from draftstill.errors import DraftstillError
from draftstill.recipe import Draft

STEP = 8
"""MLP widths are multiples of it: what matrix kernels are made for."""


@dataclass(frozen=True)
class Size:
    """A decoder-only transformer with gated MLPs. Norms and biases are left out: a thousandth of the whole."""

    layers: int
    hidden: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_width: int
    inner: int
    """Width inside the MLP."""
    tied: bool

    @property
    def layer_parameters(self) -> int:
        return 2 * self.hidden * self.head_width * (self.heads + self.kv_heads) + 3 * self.hidden * self.inner

    @property
    def head_parameters(self) -> int:
        """Embedding and output head; one matrix where they are tied."""
        return (1 if self.tied else 2) * self.vocabulary * self.hidden

    @property
    def cache_values(self) -> int:
        """Key and value numbers per token and layer."""
        return 2 * self.kv_heads * self.head_width

    def parameters(self, layers: int | None = None) -> int:
        return self.head_parameters + self.layer_parameters * (self.layers if layers is None else layers)

    def kept_numbers(self, checkpointing: bool, more: int = 0) -> int:
        """Numbers per token that a forward keeps for its backward, at least: of each layer two norms' inputs, normalised inputs and outputs,
        queries, keys, values and what attention makes of them, gate, up, activation and their product; with activation checkpointing each
        layer's input, and all of one layer.

        Args:
            more: of each layer beside these.
        """
        layer = 6 * self.hidden + 2 * (self.heads + self.kv_heads) * self.head_width + 4 * self.inner + more
        return self.layers * self.hidden + layer if checkpointing else self.layers * layer

    def adapter_parameters(self, rank: int) -> int:
        """Of low-rank adapters on all linear layers but the head."""
        queries, keys = self.heads * self.head_width, self.kv_heads * self.head_width
        return self.layers * rank * (2 * (self.hidden + queries) + 2 * (self.hidden + keys) + 3 * (self.hidden + self.inner))

    def step_parameters(self, head_tokens: int = 0) -> int:
        """Those that one decoding step reads: all layers, and the head's rows for ``head_tokens`` ids (0: all)."""
        rows = min(head_tokens, self.vocabulary) or self.vocabulary
        return self.layer_parameters * self.layers + rows * self.hidden


def logits_rows(device: str, vocabulary: int) -> int:
    """Positions whose logits are made at once while a target's laws are recorded: on an accelerator as many as 1 GiB in float32 holds."""
    return 128 if device == "cpu" else max(1, 2**28 // vocabulary)


def size_of(config: dict[str, Any] | None) -> Size | None:
    """Size of a gated-MLP transformer from its configuration; None where the needed keys are missing."""
    if config is None:
        return None
    config = {**config, **config.get("text_config", {})} if isinstance(config.get("text_config"), dict) else config
    try:
        layers, hidden, vocabulary = (int(config[k]) for k in ("num_hidden_layers", "hidden_size", "vocab_size"))
        heads, inner = int(config["num_attention_heads"]), int(config["intermediate_size"])
    except (KeyError, TypeError, ValueError):
        return None
    kv_heads = int(config.get("num_key_value_heads") or heads)
    width = int(config.get("head_dim") or hidden // heads)
    return Size(layers, hidden, vocabulary, heads, kv_heads, width, inner, bool(config.get("tie_word_embeddings", False)))


def draft_size(draft: Draft, target: Size | None, own: Size | None) -> Size | None:
    """What the recipe's draft will have; None where the size it starts from is unknown.

    Args:
        own: size of an existing model that the draft starts from.

    Raises:
        DraftstillError: layers that are not there, shares that round to nothing or to everything, sizes that do not fit each other.
    """
    if draft.source == "fresh":
        return None if target is None else _fresh(draft, target)
    base = own if draft.existing else target
    if base is None:
        return None
    if draft.transplant and draft.existing and target is not None:
        base = replace(base, vocabulary=target.vocabulary)
    return _pruned(draft, base) if draft.pruned else base


def check_layers(depth: int, keep: tuple[int, ...], owner: str = "target") -> None:
    """Refuse layers that a model of ``depth`` layers does not have."""
    if keep[-1] >= depth:
        raise DraftstillError(f"the {owner} has {depth} layers, numbered from 0", key="draft.layers", value=list(keep),
                              mend=f"name layers between 0 and {depth - 1}")  # fmt: skip


def _pruned(draft: Draft, base: Size) -> Size:
    owner = "model to cut" if draft.existing else "target"
    if draft.layers == "auto":
        assert draft.depth is not None
        layers = draft.depth
        if layers > base.layers:
            raise DraftstillError(f"the {owner} has {base.layers} layers", key="draft.depth", value=layers,
                                  mend=f"keep between 1 and {base.layers}")  # fmt: skip
    else:
        check_layers(base.layers, draft.layers, owner)
        layers = len(draft.layers)
    groups = max(1, int(base.kv_heads * draft.keep_heads + 0.5))
    inner = min(base.inner, max(STEP, int(base.inner * draft.keep_mlp / STEP + 0.5) * STEP)) if draft.keep_mlp < 1 else base.inner
    for key, share, kept, whole, what in (
        ("draft.keep_heads", draft.keep_heads, groups, base.kv_heads, "groups of heads that share keys"),
        ("draft.keep_mlp", draft.keep_mlp, inner, base.inner, "units in an MLP"),
    ):
        if share < 1 and kept == whole:
            raise DraftstillError(f"the {owner} has {whole:,} {what}, of which this share rounds to all", key=key, value=share,
                                  mend="set a smaller share, or 1.0 to keep all")  # fmt: skip
    return replace(base, layers=layers, heads=groups * (base.heads // base.kv_heads), kv_heads=groups, inner=inner)


def _fresh(draft: Draft, target: Size) -> Size:
    asked = draft.fresh
    hidden, width = asked.hidden_size or target.hidden, asked.head_dim or target.head_width
    heads = asked.num_attention_heads or (target.heads if hidden == target.hidden else max(1, hidden // width))
    ratio = target.heads // target.kv_heads
    kv_heads = asked.num_key_value_heads or (heads // ratio if heads % ratio == 0 else heads)
    inner = asked.intermediate_size or max(STEP, int(target.inner * hidden / target.hidden / STEP + 0.5) * STEP)
    if heads % kv_heads:
        raise DraftstillError(f"{heads} query heads cannot share {kv_heads} key-value heads evenly", key="draft.fresh.num_key_value_heads",
                              value=kv_heads, mend=f"give a divisor of {heads}, or another num_attention_heads")  # fmt: skip
    if width % 2:
        raise DraftstillError("rotary positions turn pairs of numbers, so a head's width is even", key="draft.fresh.head_dim", value=width,
                              mend=f"for example {width + 1}")  # fmt: skip
    tied = target.tied if asked.tie_word_embeddings is None else asked.tie_word_embeddings
    assert draft.depth is not None
    return Size(draft.depth, hidden, target.vocabulary, heads, kv_heads, width, inner, tied)
