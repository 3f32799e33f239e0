"""What is known of a target without its weights: enough to lay out prompts and to read what a server wrote."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from draftstill.decode import eos_ids
from draftstill.recipe import Recipe
from draftstill.sources import ModelSource, load_config, load_tokenizer, resolve_model
from draftstill.stages import served_target
from draftstill.vocabulary import real_size


@dataclass(slots=True)
class Described:
    """A target by its tokenizer and configuration."""

    tokenizer: Any
    source: ModelSource
    config: Any
    eos: tuple[int, ...]
    vocab: int
    """Real tokens."""
    revision: str | None
    """Commit of a Hub id."""


def describe_target(recipe: Recipe) -> Described:
    """The recipe's target, its weights left where they are.

    Raises:
        DraftstillError: as loading raises.
    """
    from transformers import GenerationConfig

    source = resolve_model(served_target(recipe), "target.source")
    tokenizer, config = load_tokenizer(source), load_config(source)
    generation = None
    with contextlib.suppress(OSError):  # not every model has one
        generation = GenerationConfig.from_pretrained(source.path_or_id, revision=source.revision)
    vocab = min(real_size(tokenizer), config.vocab_size)
    return Described(
        tokenizer, source, config, eos_ids(config, generation, tokenizer), vocab, getattr(config, "_commit_hash", None) or source.revision
    )
