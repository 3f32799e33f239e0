"""The score."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from draftstill.recipe.base import PositiveInt, Section
from draftstill.recipe.models import Source
from draftstill.recipe.text import Corpus

Arm = Literal["untuned", "tuned", "lookup", "bigram", "composite"]
Gamma = Annotated[int, Field(ge=0, le=64)]
OWN = "own"
"""The run's own held-out text among the domains."""

_LATER = ("domains", "stock", "gammas", "timing_prompts", "timing_tokens")
"""Keys that came later: at their defaults they change nothing, and no fingerprint."""
_LOAD = ("batches", "load_prompts")
"""Keys of the measurement under load, which is made beside the score."""


def _check_label(what: str, name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,30}[A-Za-z0-9])?", name):
        raise ValueError(f"{what}'s name is made of letters, digits and inner hyphens, 32 at most: not {name!r}")


def _check_domains(domains: dict[str, Corpus]) -> dict[str, Corpus]:
    for name in domains:
        _check_label("a domain", name)
        if name.lower() == OWN:
            raise ValueError(f"{name!r} is the run's own text; give the domain another name")
    return domains


def _check_stock(stock: dict[str, Source]) -> dict[str, Source]:
    for name in stock:
        _check_label("a stock draft", name)
    return stock


class Evaluate(Section):
    """The score."""

    candidates: tuple[Arm, ...] = ("untuned", "tuned", "lookup", "composite")
    """Arms scored beside plain decoding: the drafts before and after training (``tuned``: every one of train.candidates), prompt lookup, a
    table of each token's most frequent successor, and ``composite``: lookup first and the tuned draft otherwise."""
    stock: Annotated[dict[str, Source], AfterValidator(_check_stock)] = {}
    """Existing drafts scored beside the tuned ones and at the same gammas, as they are and with their whole head: each a name with a section like
    ``record.draft``, for example the one that you serve today. They must have the target's vocabulary."""
    domains: Annotated[dict[str, Corpus], AfterValidator(_check_domains)] = {}
    """Further held-out text, each a name with a section like ``corpus``: scored apart, to see what the draft is worth elsewhere. None of it
    may have been trained on."""
    temperatures: tuple[Annotated[float, Field(ge=0.0)], ...] = (0.0, 0.7)
    """Each is scored apart."""
    gamma: Annotated[int, Field(ge=1, le=64)] = 3
    """Tokens proposed per round by a draft model."""
    gammas: tuple[Gamma, ...] = ()
    """Sweep of the tuned and composite arms over these numbers of proposed tokens, for example [1, 2, 4, 8]; 0 is plain decoding, which is
    always scored. The draft before training runs at the nearest to gamma. Default: gamma alone."""
    lookup_gamma: Annotated[int, Field(ge=1, le=64)] = 6
    """Tokens proposed per round by prompt lookup, which costs nothing to ask."""
    prompts: PositiveInt = 16
    """Held-out prompts of each domain, one per document while they last. Acceptance is counted on all of them."""
    timing_prompts: PositiveInt | None = None
    """Decode and time every arm on this many of the prompts only (default: on all). Decoding is what a score spends its time on."""
    max_new_tokens: PositiveInt = 64
    """Tokens per prompt and arm; timing ignores EOS so that all arms do the same work."""
    timing_tokens: PositiveInt | None = None
    """Tokens per timed text (default: max_new_tokens)."""
    batches: tuple[PositiveInt, ...] = (1,)
    """Texts decoded side by side. More than [1] measures throughput under load at each, and from which one on speculation stops paying."""
    load_prompts: PositiveInt = 32
    """Requests of a measurement under load, at least sixteen times the largest batch (eight blocks of two for each row)."""
    backend: Literal["auto", "eager", "graphs", "compile"] = "auto"
    """How the decoder's rounds run, plain decoding's included: ``graphs`` captured on CUDA, ``compile`` through torch.compile as well,
    ``auto`` graphs on CUDA and ``eager`` elsewhere. What cannot be had runs eagerly, and the report says why."""
    audit_prompts: Annotated[int, Field(ge=0)] = 4
    """Prompts on which float32 greedy output is compared with plain decoding, token by token."""
    bootstrap: Annotated[int, Field(ge=100)] = 2000
    """Resamples of the paired bootstrap over prompts."""
    confidence: Annotated[float, Field(gt=0.5, lt=1.0)] = 0.95
    """Coverage of the intervals."""

    @model_validator(mode="after")
    def _no_repeats(self) -> Evaluate:
        for key in ("candidates", "temperatures", "gammas", "batches"):
            found = getattr(self, key)
            if len(set(found)) != len(found):
                raise ValueError(f"{key} names something twice: {', '.join(map(str, found))}")
        if not self.temperatures:
            raise ValueError("temperatures is empty")
        if not self.batches:
            raise ValueError("batches is empty; [1] is one text at a time")
        return self

    @property
    def swept(self) -> tuple[int, ...]:
        """The gammas of a draft, ascending, without plain decoding's 0."""
        return tuple(sorted(set(self.gammas) - {0})) or (self.gamma,)

    @property
    def timed_prompts(self) -> int:
        return min(self.prompts, self.timing_prompts or self.prompts)

    @property
    def timed_tokens(self) -> int:
        return self.timing_tokens or self.max_new_tokens

    def decisive(self) -> dict[str, Any]:
        """What decides the score's content, as JSON holds it; keys added later are left out where they change nothing."""
        default = type(self)().model_dump(mode="json")
        limits: dict[str, Any] = {"domains": {"__all__": {"damaged"}}}  # what is refused, not what is scored
        mine = self.model_dump(mode="json", exclude=limits | dict.fromkeys(_LOAD, True))
        return {k: v for k, v in mine.items() if k not in _LATER or v != default[k]}
