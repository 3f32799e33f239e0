"""What the decoder is asked for, and what it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draftstill.decode.drafters import Drafter, Row
from draftstill.decode.network import Network
from draftstill.decode.programs import parts
from draftstill.decode.sampling import Sampling
from draftstill.decode.stops import StopText
from draftstill.decode.trace import Trace
from draftstill.errors import DraftstillError


@dataclass(slots=True)
class Request:
    """One text to write."""

    prompt: Sequence[int]
    """What the text continues; for an encoder-decoder target, what the encoder reads."""
    max_new_tokens: int
    seed: int = 0
    ignore_eos: bool = False
    """Run to the length limit: all arms of a timing then do the same work."""
    sampling: Sampling | None = None
    """None: the decoder's."""
    stop: Sequence[str] = ()
    """The text ends with the token that completes one of these strings; it is emitted."""


@dataclass(slots=True)
class Active:
    """A request being answered."""

    index: int
    request: Request
    row: Row
    trace: Trace
    stops: StopText | None = None

    @property
    def remaining(self) -> int:
        return self.request.max_new_tokens - len(self.trace.tokens)


def check_request(n: int, request: Request, target: Network, can_read: bool) -> None:
    """Refuse what cannot be answered, naming the prompt by its number."""
    prompt, limit = request.prompt, target.max_positions
    if not prompt:
        raise DraftstillError(f"prompt {n} is empty", mend="a prompt needs at least one token")
    if min(prompt) < 0 or max(prompt) >= target.vocab:
        bad = next(t for t in prompt if not 0 <= t < target.vocab)
        raise DraftstillError(f"prompt {n} holds token id {bad}, outside the target's vocabulary of {target.vocab}",
                              mend="tokenise with the target's own tokenizer")  # fmt: skip
    if len(prompt) >= limit and request.max_new_tokens > 0:
        raise DraftstillError(f"prompt {n} has {len(prompt)} tokens; the target's context holds {limit}", mend="shorten the prompt")
    if request.max_new_tokens < 0:
        raise DraftstillError("max_new_tokens is negative", value=request.max_new_tokens)
    if request.stop and not can_read:
        raise DraftstillError(f"prompt {n} has stop strings, but the decoder cannot turn ids into text", mend="give it detokenize=")
    if any(not s for s in request.stop):
        raise DraftstillError(f"prompt {n} has an empty stop string", key="stop", mend="leave it out")


def check_vocabulary(target: Network, drafter: Drafter | None) -> None:
    """No drafter may propose an id that the target does not have, nor a law over other ids."""
    guesser, model = parts(drafter) or (None, None)
    for what, vocab in (("draft", None if model is None else model.network.vocab), ("guesser", None if guesser is None else guesser.vocab)):
        if vocab is not None and vocab != target.vocab:
            raise DraftstillError(f"the {what}'s vocabulary has {vocab:,} ids, the target's {target.vocab:,}",
                                  mend="give both the number of real ids they share (vocab=)")  # fmt: skip
