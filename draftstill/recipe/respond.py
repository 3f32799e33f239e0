"""What the target is asked, and how it answers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from draftstill.recipe.base import PositiveInt, Section
from draftstill.recipe.models import Source
from draftstill.recipe.server import Server

PromptKind = Literal["real", "cut", "synthetic"]


class Sampler(Section):
    """The deployment's sampler: the law that p and q are processed with."""

    temperature: Annotated[float, Field(ge=0.0)] = 0.7
    """0 is greedy."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Keep the k most probable tokens (0: all)."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Keep the smallest set of tokens that holds this much probability."""


class Synthetic(Section):
    """Instructions that the target invents about passages of the documents, then answers without having seen the passage."""

    passage_tokens: PositiveInt = 192
    """Tokens of a passage."""
    instruction_tokens: PositiveInt = 64
    """Longest instruction; one that is cut off there is refused."""
    ask: str = (
        "Here is a passage from a document:\n\n{passage}\n\nWhat would a person who works with such documents ask an assistant about this "
        "subject? Write one question or task that can be understood without the passage. Answer with it alone, in one line."
    )
    """What the target is told, as a user turn of its chat template; ``{passage}`` stands for the passage."""

    @model_validator(mode="after")
    def _has_a_place(self) -> Synthetic:
        if self.ask.count("{passage}") != 1:
            raise ValueError("respond.synthetic.ask must hold {passage} exactly once")
        return self


class Respond(Section):
    """The target answers prompts from the corpus."""

    prompts: Annotated[int, Field(ge=0)] = 256
    """Training prompts; of documents at most one per 2 * prompt_tokens, of conversations one each."""
    heldout_prompts: PositiveInt = 32
    """Held-out prompts whose responses validate the training."""
    shares: dict[PromptKind, Annotated[float, Field(gt=0.0)]] = {}
    """Shares of the kinds of prompts, for example {real: 2, synthetic: 1}. ``real``: a conversation without the answer it ends with. ``cut``: an opening or
    a passage of a document. ``synthetic``: an instruction that the target invents about a passage. Default: conversations are real prompts,
    documents are cut, as the corpus has them."""
    prompt_tokens: PositiveInt = 64
    """Tokens of a document that make a cut prompt."""
    chat_tokens: PositiveInt = 1024
    """Longest prompt from a conversation, template included. Of a longer one the oldest turns behind the system's are left out; one whose last
    turn alone is too long is refused and counted."""
    synthetic: Synthetic = Synthetic()
    """How instructions are invented."""
    max_new_tokens: PositiveInt = 96
    """Longest response."""
    truncated: Literal["keep", "drop"] = "keep"
    """What becomes of responses that end at max_new_tokens or at the context's end: counted either way."""
    batch_size: PositiveInt = 32
    """Rows decoded side by side."""
    window: PositiveInt = 8
    """Batches that make one file of responses at most: within a file, waiting prompts take the place of finished ones. A restart loses at most
    window * batch_size responses, and never more than a sixteenth of a side beyond one batch."""
    chat_template: bool = False
    """Wrap each cut prompt as a user turn of the target's chat template. Conversations and synthetic prompts always use the template."""
    draft: Source | None = None
    """An existing draft, a section like ``target``: responses are then decoded speculatively. They follow the same law as without; the same seed gives
    another text."""
    draft_gamma: Annotated[int, Field(ge=1, le=64)] = 3
    """Tokens that this draft proposes per round."""
    server: Server | None = None
    """Ask a server instead of decoding in process."""
    sampler: Sampler = Sampler()
    """The deployment's sampler."""

    @model_validator(mode="after")
    def _one_engine(self) -> Respond:
        if self.server and self.draft:
            raise ValueError("respond.draft is for decoding in process; a server has its own")
        return self
