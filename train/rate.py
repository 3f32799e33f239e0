"""The peak learning rate that a recipe leaves open: in proportion to the weights that it moves."""

from __future__ import annotations

from typing import Any

import torch

from draftstill.progress import say
from draftstill.recipe import Recipe

CUT, WHOLE, NEW = 0.025, 0.01, 1e-3
"""Of the size of the embedding's numbers a step: for a draft cut out of a larger model, for a model that goes on as it is. And for layers or adapters
that begin from nothing, whatever the size of anything else."""
NOISE = 0.06
"""Above this share the first steps may undo what the draft began with: 5.8% cost a little, 8.7% nearly everything (docs/benchmarks.md)."""


def weight_size(model: Any, vocab: int) -> float:
    """Root mean square of the embedding's numbers, over the real tokens."""
    with torch.no_grad():
        return float(model.get_input_embeddings().weight[:vocab].float().square().mean().sqrt())


def peak_rate(recipe: Recipe, model: Any, vocab: int, *, quiet: bool = False) -> float:
    """The peak learning rate: the recipe's, or with ``auto`` what suits the draft.

    AdamW moves each number by about the learning rate a step, however small the number or its gradient is. What a step does to a model is therefore
    the ratio of the two, as in Adafactor's relative step size (Shazeer & Stern 2018, section 8), and models differ in the size of their numbers: the
    embedding's are .136 in SmolLM2-135M and .017 in Qwen2.5-0.5B. docs/benchmarks.md has the trials behind the shares.

    Args:
        model: the draft with its first weights, a warm start's included.
        vocab: real tokens.
        quiet: say nothing: another process does.
    """
    settings, size = recipe.train, weight_size(model, vocab)
    warm = settings.init_from is not None
    anew = settings.lora is not None or (recipe.draft.source == "fresh" and not warm) or size == 0
    share = CUT if recipe.draft.pruned and not warm else WHOLE
    own = NEW if anew else float(f"{share * size:.2g}")
    given = [r for r in (settings.learning_rate, *(p.learning_rate for p in settings.phases)) if isinstance(r, float)]
    if not quiet and settings.learning_rate == "auto":
        say(
            f"  train: peak learning rate {own:g}"
            + ("" if anew else f", {share:.1%} of the size of the draft's embedding (RMS {size:.3g})")
        )
    if not quiet and not anew and max(given, default=0.0) > NOISE * size:
        say(f"  train.learning_rate: {max(given):g} moves the draft's embedding (RMS {size:.3g}) by up to {max(given) / size:.0%} of its size in every "
            f"step, and the first ones may undo what it began with; auto is {own:g}")  # fmt: skip
    return own if settings.learning_rate == "auto" else settings.learning_rate
