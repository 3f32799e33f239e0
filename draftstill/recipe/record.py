"""The recording of the target's distributions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from draftstill.recipe.base import PositiveInt, Section
from draftstill.recipe.models import Source
from draftstill.recipe.server import Server

Kind = Literal["response", "document", "rollout", "replay"]


class Record(Section):
    """The target's token distributions, on disk."""

    mode: Literal["topk", "hidden", "auto", "text", "live"] = "topk"
    """``topk``: K ids with log-probabilities and the exact tail mass. ``hidden``: the last hidden state, from which all of p follows.
    ``auto``: a pilot sample decides. ``text``: no laws, only what the target wrote (black-box); the loss is then ``ce``. ``live``: no laws
    on disk for training; the target stays in memory and scores each step's texts, see train.live."""
    server: Server | None = None
    """Have a vLLM, SGLang or llama.cpp server score the texts in ``topk`` mode, at temperature 1. It must not speculate, and is tried before the
    target responds."""
    max_refused: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.1
    """End the recording where the server refuses a larger share of the texts, for example as longer than its context. A refused text is
    listed, and nothing is learnt from it."""
    top_k: PositiveInt = 64
    """Kept ids per position in ``topk`` mode, at most."""
    kept_mass: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Keep no more ids at a position once they hold this much probability (1: always top_k). What is not kept is in the tail."""
    logp_bits: Literal[8, 16] = 8
    """Bits of a kept log-probability. 8 moves alpha by less than .001 on average and takes a quarter off the size; 16 is float16."""
    hidden_bits: Literal[8, 16] | None = None
    """Bits of a number of a hidden state: 8 (with a scale for every 32 numbers), 16 (bfloat16); default: the target's dtype. On the demo's
    target 8 bits take .016 from the alpha of a perfect draft, 16 nothing."""
    auto_tail: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.02
    """``auto`` takes ``topk`` where the pilot's mean tail mass is below this: alpha is then known to within it."""
    temperature: Annotated[float, Field(gt=0.0)] = 1.0
    """Divides the target's logits in ``topk`` mode. Near the deployment's the tail is thin and the draft learns the law it will meet."""
    document_tokens: Annotated[int, Field(ge=0)] = 0
    """Tokens of corpus text scored beside the responses (0: responses only). Scoring is several times cheaper than responding."""
    draft: Source | None = None
    """An existing draft that rollouts and replays are made with, a section like ``target``: source, and for a wheel sha256."""
    rollouts: Annotated[int, Field(ge=0)] = 0
    """Training prompts that the draft continues; the target scores what it wrote (student rollouts)."""
    replays: Annotated[int, Field(ge=0)] = 0
    """Training prompts that target and draft decode together; only the positions where a proposed token was rejected are learnt from."""
    replay_gamma: Annotated[int, Field(ge=1, le=64)] = 3
    """Tokens the draft proposes per round in replays."""
    shares: dict[Kind, Annotated[float, Field(gt=0.0)]] = {}
    """Share of each kind of text in the supervised positions, for example {response: 3, document: 1}; the scarcest kind decides how
    much is recorded in all. Default: everything there is."""
    sequence_length: Annotated[int, Field(ge=8)] = 256
    """Longest scored sequence. Longer documents are cut into pieces of this length; other texts, prompt and what was written to it, end there."""
    batch_size: PositiveInt = 8
    """Sequences per teacher forward."""
    shard_sequences: PositiveInt = 64
    """Sequences per shard; a restart loses at most one shard."""
    mirror: str | None = None
    """An fsspec address (``s3://bucket/folder``) that also gets the shards and manifests; it is tried before the target responds."""

    @model_validator(mode="after")
    def _draft_is_there(self) -> Record:
        if (self.rollouts or self.replays) and not self.draft:
            raise ValueError("rollouts and replays need record.draft, the draft that makes them")
        return self

    @model_validator(mode="after")
    def _served(self) -> Record:
        if self.mode == "text" and (self.server or self.rollouts or self.replays):
            raise ValueError("text mode learns from what the target wrote alone: no server, rollouts or replays")
        if self.server and self.mode == "live":
            raise ValueError("live takes the target's weights into the training: leave out record.server, or set record.mode: topk")
        if self.server and self.mode != "topk":
            raise ValueError("a server gives top log-probabilities: set record.mode: topk")
        if self.server and self.temperature != 1.0:
            raise ValueError("a server gives log-probabilities at temperature 1; the tail at another temperature cannot be known")
        if self.server and self.replays:
            raise ValueError("replays decode with the target in process; leave them out, or leave out record.server")
        if self.server and self.server.api == "chat":
            raise ValueError("laws are asked for by token ids: leave out record.server.api")
        return self
