"""``draftstill decode``: watch accepted, corrected and bonus tokens arrive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftstill.decode.trace import Trace, metrics
from draftstill.errors import DraftstillError

STYLE = {"accepted": ("32", ""), "corrected": ("31", "~"), "bonus": ("36", "+"), "plain": ("", "")}
"""Kind of token: terminal colour, and the mark set before it, so that colour is not needed."""


def show(target: str, draft: str | None, prompt: str, *, gamma: int = 4, temperature: float = 0.0, max_new_tokens: int = 128, seed: int = 0,
         json_path: Path | None = None, sha256: str | None = None) -> Trace:  # fmt: skip
    """Continue a prompt, printing tokens as they come and the metrics at the end.

    Args:
        target, draft: model sources as in a recipe; without a draft, plain decoding.
        json_path: where to write the trace.
        sha256: expected hash when the target is a wheel or a GGUF file.
    """
    from draftstill.decode.drafters import ModelDrafter
    from draftstill.decode.engine import Decoder, Request
    from draftstill.decode.loading import load_target
    from draftstill.decode.network import Network
    from draftstill.decode.sampling import Sampling
    from draftstill.progress import is_live, say
    from draftstill.recipe import Corpus, Draft, Recipe, Target
    from draftstill.runfolder import write_json
    from draftstill.sources import load_model, load_tokenizer, resolve_model
    from draftstill.stages import resolved_device, resolved_dtype
    from draftstill.vocabulary import check_vocabulary

    recipe = Recipe(run_dir=".", target=Target(source=target, sha256=sha256), corpus=Corpus(source="."))
    loaded = load_target(recipe)
    drafter = None
    if draft is not None and gamma > 0:
        source = resolve_model(Draft(source=draft), "--draft")
        model = load_model(source, resolved_dtype(recipe), resolved_device(recipe))
        check_vocabulary(loaded.tokenizer, load_tokenizer(source), loaded.config.vocab_size, model.config.vocab_size, "--draft")
        drafter = ModelDrafter(Network(model, vocab=loaded.vocab, key="--draft"), gamma)
    ids = loaded.tokenizer(prompt)["input_ids"]
    if not ids:
        raise DraftstillError("the prompt has no tokens", mend="give a text to continue")
    decoder = Decoder(loaded.network, drafter, gamma=gamma, sampling=Sampling(temperature), eos=loaded.eos)
    writer = _Writer(loaded.tokenizer, is_live())
    (trace,) = decoder.run([Request(ids, max_new_tokens, seed)], on_tokens=writer)
    writer.flush()
    say("\n")
    say(summary(trace))
    if drafter is not None:
        say("marks: accepted as is, ~ corrected by the target, + bonus token after a whole accepted block")
    if json_path is not None:
        write_json(json_path, {"prompt": prompt, "prompt_ids": ids, "trace": trace.to_json(), "metrics": metrics([trace])})
        say(f"trace in {json_path}")
    return trace


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
