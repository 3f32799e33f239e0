"""``draftstill decode``: watch accepted, corrected and bonus tokens arrive."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftstill.decode.trace import Trace, metrics
from draftstill.errors import DraftstillError

if TYPE_CHECKING:
    from draftstill.decode.sampling import Sampling

STYLE = {"accepted": ("32", ""), "corrected": ("31", "~"), "bonus": ("36", "+"), "plain": ("", "")}
"""Kind of token: terminal colour, and the mark set before it, so that colour is not needed."""
_MOST_ADAPTIVE = 8
"""Largest gamma that --adaptive measures costs for."""


def show(target: str, draft: str | None, prompts: str | Sequence[str], *, gamma: int = 4, max_new_tokens: int = 128, seed: int = 0, lookup: bool = False,
         adaptive: bool = False, min_confidence: float = 0.0, backend: Any = "auto", chat: bool = False, stop: Sequence[str] = (),
         json_path: Path | None = None, sha256: str | None = None, **sampling: Any) -> list[Trace]:  # fmt: skip
    """Continue prompts one after the other, printing tokens as they come and the metrics at the end of each.

    Args:
        target, draft: model sources as in a recipe; without a draft and without ``lookup``, plain decoding.
        lookup: prompt lookup where the text repeats itself, the draft (if any) elsewhere.
        adaptive: gamma chosen row by row from measured costs and accepted counts; ``gamma`` is then not used.
        chat: wrap each prompt as a user turn of the target's chat template.
        json_path: where to write the traces.
        sha256: expected hash when the target is a wheel or a GGUF file.
        sampling: fields of ``Sampling``; temperature 0 unless given.
    """
    from draftstill.decode.engine import Decoder
    from draftstill.decode.pairs import open_pair
    from draftstill.decode.requests import Request
    from draftstill.decode.sampling import Sampling
    from draftstill.decode.shapes import is_random
    from draftstill.progress import is_live, say
    from draftstill.runfolder import write_json

    prompts = [prompts] if isinstance(prompts, str) else prompts
    law = Sampling(**{"temperature": 0.0, **sampling})
    if is_random(target):
        raise DraftstillError("random weights have nothing to say", key="--target", value=target, mend="add --simulate-acceptance 0.8")
    pair = open_pair(target, draft if gamma > 0 or adaptive else None, sha256=sha256)
    texts = [_ids(pair.tokenizer, p, chat) for p in prompts]
    drafter = _drafter(pair, gamma, lookup, adaptive, min_confidence, max(map(len, texts)), law)
    decoder = Decoder(
        pair.target,
        drafter,
        sampling=law,
        eos=pair.eos,
        backend=backend,
        detokenize=lambda ids: pair.tokenizer.decode(ids, skip_special_tokens=False),
    )
    traces = []
    for number, ids in enumerate(texts):
        if len(texts) > 1:
            say(f"--- prompt {number + 1} of {len(texts)}")
        writer = _Writer(pair.tokenizer, is_live())
        traces += decoder.run([Request(ids, max_new_tokens, seed + number, stop=stop)], on_tokens=writer)
        writer.flush()
        say("\n")
        say(summary(traces[-1]))
    if drafter is not None:
        say("marks: accepted as is, ~ corrected by the target, + bonus token after a whole accepted block")
    if traces[0].engine.get("fallback"):
        say(f"ran eagerly: {traces[0].engine['fallback']}")
    if json_path is not None:
        stored = [{"prompt": p, "prompt_ids": ids, "text": pair.tokenizer.decode(t.tokens), "trace": t.to_json(), "metrics": metrics([t])}
                  for p, ids, t in zip(prompts, texts, traces, strict=True)]  # fmt: skip
        write_json(json_path, stored[0] if len(stored) == 1 else stored)
        say(f"trace in {json_path}")
    return traces


def _ids(tokenizer: Any, prompt: str, chat: bool) -> list[int]:
    if chat and not getattr(tokenizer, "chat_template", None):
        raise DraftstillError("the target's tokenizer has no chat template", key="--chat", mend="leave --chat out")
    if chat:
        text = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]  # the template has written them
    else:
        ids = tokenizer(prompt)["input_ids"]
    if not ids:
        raise DraftstillError("the prompt has no tokens", mend="give a text to continue")
    return list(ids)


def _drafter(pair: Any, gamma: int, lookup: bool, adaptive: bool, min_confidence: float, context: int, law: Sampling) -> Any:
    from draftstill.decode.adaptive import AdaptiveGamma
    from draftstill.decode.costs import measure_costs
    from draftstill.decode.drafters import CompositeDrafter, ModelDrafter
    from draftstill.decode.guesses import LookupDrafter

    guesser = LookupDrafter(max(gamma, 1), pair.target.vocab, pair.target.device) if lookup else None
    if pair.draft is None:
        if adaptive or min_confidence:
            raise DraftstillError("there is no draft whose gamma could be chosen", key="--draft", mend="name a draft model")
        return guesser
    policy = None
    if adaptive:
        costs = measure_costs(pair.target, {"draft": pair.draft}, context, _MOST_ADAPTIVE, sampling=law)
        policy = AdaptiveGamma(costs.c_by_gamma("draft", _MOST_ADAPTIVE), costs.v_by_gamma(), _MOST_ADAPTIVE)
    model = ModelDrafter(pair.draft, gamma, policy=policy, min_confidence=min_confidence)
    return model if guesser is None else CompositeDrafter(guesser, model)


def summary(trace: Trace) -> str:
    """The metrics line."""
    m = metrics([trace])
    line = f"{m['emitted']} tokens, {m['tokens_per_s']:.1f} tok/s (prefill {m['prefill_s']:.2f} s apart), ended by {trace.finish}"
    if m["proposed"]:
        line += f"\naccepted {m['accepted']} of {m['proposed']} proposed ({m['token_acceptance']:.0%}), tau {m['tau']:.2f} tokens per round"
    return line


class _Writer:
    """Prints tokens with their kind; holds back bytes of a character that is not whole yet."""

    def __init__(self, tokenizer: Any, colour: bool) -> None:
        self.tokenizer, self.colour = tokenizer, colour
        self.held: list[int] = []

    def __call__(self, index: int, trace: Trace, new: list[int]) -> None:
        for token, kind in zip(new, trace.marks()[-len(new) :], strict=True):
            self.held.append(token)
            text = self.tokenizer.decode(self.held)
            if not text.endswith("\ufffd"):
                self._write(text, kind)
                self.held = []

    def _write(self, text: str, kind: str) -> None:
        code, mark = STYLE[kind]
        body = f"{text[: len(text) - len(text.lstrip())]}{mark}{text.lstrip()}" if mark else text
        print(f"\x1b[{code}m{body}\x1b[0m" if self.colour and code else body, end="", flush=True)

    def flush(self) -> None:
        if self.held:
            self._write(self.tokenizer.decode(self.held), "plain")
