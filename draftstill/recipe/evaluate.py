"""The score."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from draftstill.recipe.base import PositiveInt, Section

Arm = Literal["untuned", "tuned", "lookup", "composite"]


class Evaluate(Section):
    """The score."""

    candidates: tuple[Arm, ...] = ("untuned", "tuned", "lookup", "composite")
    """Arms scored beside plain decoding: the draft before and after training, prompt lookup, lookup first and tuned draft otherwise."""
    temperatures: tuple[Annotated[float, Field(ge=0.0)], ...] = (0.0, 0.7)
    """Each is scored apart."""
    gamma: Annotated[int, Field(ge=1, le=64)] = 3
    """Tokens proposed per round by a draft model."""
    lookup_gamma: Annotated[int, Field(ge=1, le=64)] = 6
    """Tokens proposed per round by prompt lookup, which costs nothing to ask."""
    prompts: PositiveInt = 16
    """Held-out prompts, one per document while they last."""
    max_new_tokens: PositiveInt = 64
    """Tokens per prompt and arm; timing ignores EOS so that all arms do the same work."""
    backend: Literal["auto", "eager", "graphs", "compile"] = "auto"
    """How the decoder's rounds run, plain decoding's included: ``graphs`` captured on CUDA, ``compile`` through torch.compile as well,
    ``auto`` graphs on CUDA and ``eager`` elsewhere. What cannot be had runs eagerly, and the report says why."""
    audit_prompts: Annotated[int, Field(ge=0)] = 4
    """Prompts on which float32 greedy output is compared with plain decoding, token by token."""
    bootstrap: Annotated[int, Field(ge=100)] = 2000
    """Resamples of the paired bootstrap over prompts."""
    confidence: Annotated[float, Field(gt=0.5, lt=1.0)] = 0.95
    """Coverage of the intervals."""
