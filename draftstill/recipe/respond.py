"""What the target is asked, and how it answers."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from draftstill.recipe.base import PositiveInt, Section


class Sampler(Section):
    """The deployment's sampler: the law that p and q are processed with."""

    temperature: Annotated[float, Field(ge=0.0)] = 0.7
    """0 is greedy."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Keep the k most probable tokens (0: all)."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Keep the smallest set of tokens that holds this much probability."""


class Respond(Section):
    """The target continues prompts cut from the corpus."""

    prompts: Annotated[int, Field(ge=0)] = 256
    """Training prompts, at most one per 2 * prompt_tokens of each document."""
    heldout_prompts: PositiveInt = 32
    """Held-out prompts whose responses validate the training."""
    prompt_tokens: PositiveInt = 64
    """Tokens of a document that make a prompt."""
    max_new_tokens: PositiveInt = 96
    """Longest response."""
    batch_size: PositiveInt = 32
    """Rows decoded together; also how many responses a restart can lose."""
    chat_template: bool = False
    """Wrap each prompt as a user turn of the target's chat template."""
    sampler: Sampler = Sampler()
    """The deployment's sampler."""
