"""Who writes responses, and how they get to disk: the decoder in process, or a server.

A file holds a window of prompts. In process a window is decoded whole and then written: how rows stand side by side decides the last bits of a
logit, so a window that was cut off is decoded again as it was, and a resumed run ends with the same bytes. What a server wrote
cannot be had again: every row goes into a journal as it arrives.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from draftstill.distill.dialects import Answer, Ask
from draftstill.distill.prompts import Prompt, encode, seed_of
from draftstill.distill.ranks import Ranks
from draftstill.distill.servers import Client, ServerError, each
from draftstill.errors import DraftstillError
from draftstill.recipe import Recipe, Respond
from draftstill.runfolder import atomic_write, read_json, write_json

FINISHED = ("eos", "stop", "length", "context")
"""Ends of a text that can be learnt from; whatever else a server says (a filter, an abort) leaves no row."""
TRUNCATED = ("length", "context")
_FILES = 16
"""Files that a side has at least, where it has that many batches: a restart loses a sixteenth of it, and as many processes can share it."""
RESPOND, INSTRUCT = "respond", "instruct"
"""What is written, and so which stream of random numbers: answers to prompts; instructions, of which a cut-off one is still looked at."""
Row = dict[str, Any]
Window = tuple[Path, Sequence[Prompt]]


class Engine(Protocol):
    """Writes windows of prompts to their files; ``tell`` hears of every new token count."""

    def write(self, windows: Sequence[Window], length: int, salt: str, tell: Callable[[int], None]) -> None: ...


def windows(folder: Path, stem: str, prompts: Sequence[Prompt], settings: Respond) -> list[Window]:
    """The files of a list of prompts; they depend on nothing but their number and the recipe."""
    batches = -(-len(prompts) // settings.batch_size)
    step = settings.batch_size * max(1, min(settings.window, batches // _FILES))
    return [(folder / f"{stem}-{n:05d}.json", prompts[at : at + step]) for n, at in enumerate(range(0, len(prompts), step))]


def written(engine: Engine, found: Sequence[Window], here: Ranks, length: int, salt: str, tell: Callable[[int], None]) -> None:
    """Make sure that this process's share of the files is there. A file of other prompts is written anew."""
    missing = []
    for number, (path, prompts) in enumerate(found):
        if here.mine(number):
            rows = read_json(path) if path.exists() else None
            if rows is not None and [r["prompt_id"] for r in rows] == [p.id for p in prompts]:
                tell(sum(len(r.get("response", ())) for r in rows))
            else:
                missing.append((path, prompts))
    if missing:
        engine.write(missing, length, salt, tell)


def read_rows(found: Sequence[Window]) -> Iterator[Row]:
    """All rows, dropped ones among them, in order."""
    for path, _ in found:
        yield from read_json(path)


def row_of(prompt: Prompt, tokens: Sequence[int], finish: str, settings: Respond, salt: str) -> Row:
    """What is kept of a response. A dropped one leaves its prompt's name and its end, so that it is counted."""
    if finish not in FINISHED or (salt == RESPOND and settings.truncated == "drop" and finish in TRUNCATED):
        return {"prompt_id": prompt.id, "dropped": True, "finish": finish}
    return {
        "prompt_id": prompt.id,
        "prompt": prompt.ids,
        "supervised_from": prompt.supervised_from,
        "response": list(tokens),
        "finish": finish,
    }


class InProcess:
    """The decoder: rows side by side, waiting ones enter as others finish; with ``respond.draft`` speculatively."""

    def __init__(self, recipe: Recipe, target: Any) -> None:
        from draftstill.decode import Decoder, ModelDrafter, Sampling

        settings, sampler = recipe.respond, recipe.respond.sampler
        drafter = ModelDrafter(_draft(recipe, target), settings.draft_gamma) if settings.draft else None
        self.recipe = recipe
        self.decoder = Decoder(target.network, drafter, sampling=Sampling(**sampler.model_dump()), eos=target.eos, rows=settings.batch_size)

    def write(self, windows: Sequence[Window], length: int, salt: str, tell: Callable[[int], None]) -> None:
        from draftstill.decode import Request

        for path, prompts in windows:
            # Of similar length side by side: a step reads the cache up to the longest row.
            order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i].ids), i))
            requests = [Request(prompts[i].ids, length, seed=seed_of(self.recipe.seed, salt, prompts[i].id)) for i in order]
            traces = dict(zip(order, self.decoder.run(requests, on_tokens=lambda _, __, new: tell(len(new))), strict=True))
            write_json(
                path, [row_of(p, traces[i].tokens, traces[i].finish or "none", self.recipe.respond, salt) for i, p in enumerate(prompts)]
            )


def _draft(recipe: Recipe, target: Any) -> Any:
    from draftstill.decode import make_network
    from draftstill.sources import load_model, load_tokenizer, resolve_model
    from draftstill.stages import resolved_device, resolved_dtype
    from draftstill.vocabulary import check_vocabulary

    assert recipe.respond.draft is not None
    source = resolve_model(recipe.respond.draft, "respond.draft.source")
    model = load_model(source, resolved_dtype(recipe), resolved_device(recipe))
    check_vocabulary(target.tokenizer, load_tokenizer(source), target.config.vocab_size, model.config.vocab_size, "respond.draft.source")
    return make_network(model, vocab=target.vocab, key="respond.draft.source")


class OverHttp:
    """A server, ``concurrency`` requests at a time.

    Args:
        journal: where rows are kept until their file is whole; each process has its own.
    """

    def __init__(self, recipe: Recipe, target: Any, journal: Path) -> None:
        assert recipe.respond.server is not None
        self.recipe, self.target, self.journal, self.server = recipe, target, journal, recipe.respond.server
        self.client = Client.of(self.server, "respond.server")
        self.client.health()
        self.about = self.client.about
        self._checked = False

    def write(self, windows: Sequence[Window], length: int, salt: str, tell: Callable[[int], None]) -> None:
        kept = dict(self._kept())
        todo = [p for _, prompts in windows for p in prompts if (salt, p.id) not in kept]
        tell(sum(len(row.get("response", ())) for (s, _), row in kept.items() if s == salt))
        if todo and not self._checked:
            self._check(todo[0])
        got = 0
        try:
            with open(self.journal, "a", encoding="utf-8") as file:
                for place, row in each(todo, lambda p: self._row(p, length, salt), self.server.concurrency):
                    file.write(json.dumps([salt, todo[place].id, row]) + "\n")
                    file.flush()
                    os.fsync(file.fileno())
                    kept[salt, todo[place].id] = row
                    got += 1
                    tell(len(row.get("response", ())))
        except ServerError as error:
            raise ServerError(f"{error.problem}; {got} of {len(todo)} answers of this attempt are kept", status=error.status, key=error.key,
                              value=error.value, mend="the same command goes on from there once the server answers again") from None  # fmt: skip
        for path, prompts in windows:
            write_json(path, [kept[salt, p.id] for p in prompts])

    def _kept(self) -> Iterator[tuple[tuple[str, str], Row]]:
        """Rows of earlier attempts, of whichever process; a line that a kill cut off is none."""
        for path in sorted(self.journal.parent.glob("journal-*.jsonl")):
            text = path.read_text(encoding="utf-8", errors="replace")
            whole = text[: text.rfind("\n") + 1]
            if path == self.journal and whole != text:
                atomic_write(path, whole)
            for line in whole.splitlines():
                salt, name, row = json.loads(line)
                yield (salt, name), row

    def _ask(self, prompt: Prompt, length: int, salt: str) -> Ask:
        messages = [] if self.server.api == "completions" else prompt.messages
        text = self.target.tokenizer.decode(prompt.ids) if self.about.kind == "openai" and not messages else None
        return Ask(prompt.ids, length, **self.recipe.respond.sampler.model_dump(), seed=seed_of(self.recipe.seed, salt, prompt.id), text=text,
                   messages=messages, tools=prompt.tools)  # fmt: skip

    def _row(self, prompt: Prompt, length: int, salt: str) -> Row:
        if self.about.context is not None and len(prompt.ids) >= self.about.context:
            return {"prompt_id": prompt.id, "dropped": True, "finish": "prompt longer than the server's context"}
        answer = self.client.complete(self._ask(prompt, length, salt))
        tokens, finish = self._tokens(answer)
        return {**row_of(prompt, tokens, finish, self.recipe.respond, salt), **({} if answer.ids else {"retokenised": True})}

    def _tokens(self, answer: Answer) -> tuple[list[int], str]:
        """Ids of an answer by the target's tokenizer, and how it ended; what does not read back as the text it came as is none of the target's."""
        tokenizer, eos = self.target.tokenizer, self.target.eos
        ids, finish = answer.ids, answer.finish
        if ids is None:
            ids = encode(tokenizer, answer.text) if answer.text else []
            if tokenizer.decode(ids) != answer.text:
                return [], "text that the target's tokenizer does not give back"
        if ids and max(ids) >= self.target.vocab:
            return [], "ids that the target does not have"
        if finish == "eos" and eos and (not ids or ids[-1] not in eos):
            ids = [*ids, tokenizer.eos_token_id if tokenizer.eos_token_id in eos else eos[0]]
        return (ids, finish) if ids or finish not in FINISHED else ([], "no text")

    def _check(self, prompt: Prompt) -> None:
        """The server's ids must mean what ours mean: its text is read back with our tokenizer.

        Raises:
            DraftstillError: they do not.
        """
        self._checked = True
        answer = self.client.complete(self._ask(prompt, 8, "probe"))
        if answer.ids is None:
            return
        ours = self.target.tokenizer.decode(answer.ids, skip_special_tokens=True) if max(answer.ids) < self.target.vocab else None
        # A character that the limit cuts in half reads differently on both sides.
        plain = lambda t: t.rstrip("\ufffd").strip()  # noqa: E731
        theirs = self.target.tokenizer.decode(encode(self.target.tokenizer, answer.text), skip_special_tokens=True)
        if ours is None or plain(ours) != plain(theirs):
            raise DraftstillError(f"the server's token ids are not the target's: {answer.ids[:8]} is {ours!r} here and {answer.text!r} there",
                                  key="respond.server.url", value=self.client.url, mend="serve the model that target.source names")  # fmt: skip
