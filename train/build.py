"""Where a draft's first weights come from: cut out of the target, or an existing small model."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch

from draftstill.decode import refuse_unsupported, revision_of
from draftstill.errors import DraftstillError
from draftstill.recipe import Recipe
from draftstill.sources import load_config, load_model, load_tokenizer, resolve_model
from draftstill.stages import resolved_dtype, served_target
from draftstill.vocabulary import check_vocabulary


@dataclass(slots=True)
class Draft:
    """An untrained draft beside what its target lends it."""

    model: Any
    """A transformers model in float32, on the CPU."""
    tokenizer: Any
    """The target's: a draft is always read with it."""
    target_head: torch.Tensor
    """The target's head over the real tokens, [V, H], in the target's dtype."""
    vocab: int
    """Real tokens."""
    name: str
    revision: str | None
    """The target's commit, for a Hub id."""


_TRAINABLE = ("llama", "mistral", "qwen2", "qwen3")
"""Models that can be distilled and pruned: logits are head @ hidden and nothing else, and layers lie where ``prune_depth`` cuts."""


def _refuse_untrainable(config: Any, key: str = "target.source") -> None:
    refuse_unsupported(config, key)
    if config.model_type not in _TRAINABLE:
        raise DraftstillError(f"models of type {config.model_type!r} can be decoded, but not distilled yet", key=key,
                              mend=f"supported here: {', '.join(_TRAINABLE)}")  # fmt: skip


def preflight(recipe: Recipe) -> None:
    """Check, from configs and tokenizers alone, what would stop the training: before hours of responding and recording.

    Raises:
        DraftstillError: an unsupported model, a kept layer the target does not have, a vocabulary that does not fit, a head too large.
    """
    source = resolve_model(served_target(recipe), "target.source")
    config, tokenizer = load_config(source), load_tokenizer(source)
    _refuse_untrainable(config)
    if recipe.draft.source == "prune":
        _check_layers(config.num_hidden_layers, recipe.draft.layers)
        vocab = check_vocabulary(tokenizer, tokenizer, config.vocab_size, config.vocab_size, "draft.source").real_size
    else:
        own = resolve_model(recipe.draft, "draft.source")
        own_config = load_config(own)
        _refuse_untrainable(own_config, "draft.source")
        vocab = check_vocabulary(tokenizer, load_tokenizer(own), config.vocab_size, own_config.vocab_size, "draft.source").real_size
    check_head_tokens(recipe, vocab)


def check_head_tokens(recipe: Recipe, vocab: int) -> None:
    """Trimmed heads must be smaller than the whole one."""
    for key, count in (("train.head_tokens", recipe.train.head_tokens), ("draft.head_tokens", recipe.draft.head_tokens)):
        if count >= vocab:
            raise DraftstillError(
                f"as many head tokens as the vocabulary's {vocab:,}, or more", key=key, value=count, mend="0 means the whole head"
            )
    if recipe.train.head_tokens and recipe.record.mode != "topk":
        raise DraftstillError("a trimmed training head needs a top-k recording", key="train.head_tokens", value=recipe.train.head_tokens,
                              mend="set record.mode: topk, or train.head_tokens: 0")  # fmt: skip


def _check_layers(depth: int, keep: tuple[int, ...]) -> None:
    if keep[-1] >= depth:
        raise DraftstillError(f"the target has {depth} layers, numbered from 0", key="draft.layers", value=list(keep),
                              mend=f"name layers between 0 and {depth - 1}")  # fmt: skip


def build_draft(recipe: Recipe) -> Draft:
    """The draft before training. Deterministic: built again, it is the same.

    Raises:
        DraftstillError: a kept layer the target does not have, or a draft whose vocabulary does not fit.
    """
    source = resolve_model(served_target(recipe), "target.source")
    tokenizer = load_tokenizer(source)
    target = load_model(source, resolved_dtype(recipe), "cpu")
    _refuse_untrainable(target.config)
    target_size, revision = target.config.vocab_size, revision_of(target, source)
    if recipe.draft.source == "prune":
        vocab = check_vocabulary(tokenizer, tokenizer, target_size, target_size, "draft.source").real_size
        head = target.lm_head.weight.detach()[:vocab].clone()
        layers = "-".join(map(str, recipe.draft.layers))
        return Draft(prune_depth(target, recipe.draft.layers).float(), tokenizer, head, vocab, f"{source.name} layers {layers}", revision)
    own = resolve_model(recipe.draft, "draft.source")
    model = load_model(own, "float32", "cpu")
    _refuse_untrainable(model.config, "draft.source")
    vocab = check_vocabulary(tokenizer, load_tokenizer(own), target_size, model.config.vocab_size, "draft.source").real_size
    return Draft(model, tokenizer, target.lm_head.weight.detach()[:vocab].clone(), vocab, own.name, revision)


def prune_depth(model: Any, keep: tuple[int, ...]) -> Any:
    """Keep these layers, with embeddings, final norm and head; the model itself is cut, not copied."""
    _check_layers(model.config.num_hidden_layers, keep)
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = len(keep)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[i] for i in keep]
    model.config = model.model.config = config
    model.model.layers = torch.nn.ModuleList([model.model.layers[i] for i in keep])
    for place, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = place
        layer.self_attn.config = config
    return model
