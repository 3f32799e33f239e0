"""From a recipe's source to a network ready to decode: one way for the recorder, the trainer and the score."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftstill.decode.encdec import make_network
from draftstill.decode.families import refuse_unsupported
from draftstill.decode.network import Network
from draftstill.errors import DraftstillError
from draftstill.machine import cores
from draftstill.recipe import Recipe, Source
from draftstill.sources import ModelSource, load_model, load_tokenizer, resolve_model
from draftstill.stages import resolved_device, resolved_dtype, served_target
from draftstill.vocabulary import check_vocabulary, real_size


@dataclass(slots=True)
class Loaded:
    """A target in memory."""

    network: Network
    tokenizer: Any
    source: ModelSource
    config: Any
    eos: tuple[int, ...]
    vocab: int
    """Real tokens; padded rows beyond them never count."""
    revision: str | None
    """Commit of a Hub id, as resolved when it was loaded."""


def set_threads() -> None:
    """One thread per core this process may use; the processes of a launch on this machine share them."""
    torch.set_num_threads(max(1, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def load_target(recipe: Recipe, *, dtype: str | None = None) -> Loaded:
    """The recipe's target, in its decode dtype unless told otherwise."""
    set_threads()
    named = served_target(recipe)
    if named is not recipe.target and not Path(named.source).is_dir():
        raise DraftstillError("the target has not been tuned yet", key="adapt", mend="first run: draftstill adapt RECIPE")
    source = resolve_model(named, "target.source")
    tokenizer = load_tokenizer(source)
    model = load_model(source, dtype or resolved_dtype(recipe), resolved_device(recipe))
    refuse_unsupported(model.config)
    vocab = min(real_size(tokenizer), model.config.vocab_size)
    network = make_network(model, vocab=vocab)
    eos = eos_ids(model.config, model.generation_config, tokenizer)
    return Loaded(network, tokenizer, source, model.config, eos, vocab, revision_of(model, source))


@dataclass(slots=True)
class LoadedDraft:
    """An existing draft in memory."""

    network: Network
    name: str
    revision: str | None
    """Commit of a Hub id, as resolved when it was loaded."""


def load_draft(named: Source, key: str, target: Loaded, recipe: Recipe, *, dtype: str | None = None) -> LoadedDraft:
    """An existing draft for ``target``, as it is and with its whole head.

    Args:
        named: where it comes from; ``key`` is the recipe key of the source, for example ``respond.draft.source``.
        recipe: decides dtype and device.

    Raises:
        DraftstillError: another vocabulary than the target's, or as loading raises.
    """
    source = resolve_model(named, key)
    model = load_model(source, dtype or resolved_dtype(recipe), resolved_device(recipe))
    check_vocabulary(target.tokenizer, load_tokenizer(source), target.config.vocab_size, model.config.vocab_size, key)
    return LoadedDraft(make_network(model, vocab=target.vocab, key=key), source.name, revision_of(model, source))


def revision_of(model: Any, source: ModelSource) -> str | None:
    """The commit that transformers resolved a Hub id to; None for a local folder."""
    return getattr(model.config, "_commit_hash", None) or source.revision


def eos_ids(*holders: Any) -> tuple[int, ...]:
    """Every id that ends a text: config, generation config and tokenizer may each name one or several."""
    found: set[int] = set()
    for holder in holders:
        ids = getattr(holder, "eos_token_id", None)
        found.update(ids if isinstance(ids, (list, tuple)) else () if ids is None else (ids,))
    return tuple(sorted(found))
