"""Responses written by a server. What it wrote cannot be had again: every row goes into a journal as it arrives."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from draftstill.distill.dialects import CALLS, Answer, Ask
from draftstill.distill.prompts import Prompt, encode, opening, seed_of
from draftstill.distill.servers import OF_ONE_REQUEST, Client, ServerError, each
from draftstill.distill.writing import FINISHED, REFUSED, TOO_LONG, Row, Window, row_of
from draftstill.errors import DraftstillError
from draftstill.progress import say
from draftstill.recipe import Recipe
from draftstill.runfolder import atomic_write, write_json

_SEVERAL = 5
"""If so many first requests are refused and none is answered, it is not their prompts."""
_PROBED = 8
"""Tokens of the answer that shows whether the ids agree."""
_SERVER = "server"
"""The journal's first line says who wrote it."""


class OverHttp:
    """A server, ``concurrency`` requests at a time.

    Args:
        journal: where rows are kept until their file is whole; each process has its own.
        quiet: another process of the launch tells what there is to tell.

    Raises:
        DraftstillError: no server, or another model than the one that began.
    """

    def __init__(self, recipe: Recipe, target: Any, journal: Path, *, quiet: bool = False) -> None:
        assert recipe.respond.server is not None
        self.recipe, self.target, self.journal, self.server = recipe, target, journal, recipe.respond.server
        self.client = Client.of(self.server, "respond.server")
        self.client.health()
        self.about = self.client.about
        self._begins = opening(target.tokenizer)
        self._checked = False
        self._refuse_another(quiet)

    def write(self, windows: Sequence[Window], length: int, salt: str, tell: Callable[[int], None]) -> None:
        kept = dict(self._kept())
        todo = [p for _, prompts in windows for p in prompts if (salt, p.id) not in kept]
        tell(sum(len(row.get("response", ())) for (s, _), row in kept.items() if s == salt))
        answered = any(_was_answered(row) for row in kept.values())
        if todo and not self._checked:
            self._check(todo, answered)
        got, refused = 0, list[tuple[str, Row]]()
        try:
            for place, row in each(todo, lambda p: self._row(p, length, salt), self.server.concurrency):
                arrived = [(todo[place].id, row)]
                if row["finish"] == REFUSED and not answered:
                    # Not yet written down: where all are refused it is the server, and the same command must ask again.
                    refused += arrived
                    if len(refused) == _SEVERAL:
                        break
                    continue
                if _was_answered(row):
                    answered, arrived, refused = True, refused + arrived, []
                for name, one in arrived:
                    self._note(salt, name, one)
                    kept[salt, name] = one
                    got += 1
                    tell(len(one.get("response", ())))
        except ServerError as error:
            raise ServerError(f"{error.problem}; {got} of {len(todo)} answers of this attempt are kept", status=error.status, key=error.key,
                              value=error.value, mend="the same command goes on from there once the server answers again") from None  # fmt: skip
        if refused:
            raise self._refused_all([str(row["detail"]) for _, row in refused])
        for path, prompts in windows:
            write_json(path, [kept[salt, p.id] for p in prompts])

    def _note(self, salt: str, name: str, row: Row) -> None:
        """Write a row down. The journal begins with it: an attempt that brought nothing leaves nothing."""
        with open(self.journal, "a", encoding="utf-8") as file:
            head = [[_SERVER, "", self._who()]] if file.tell() == 0 else []
            file.writelines(json.dumps(line) + "\n" for line in [*head, [salt, name, row]])
            file.flush()
            os.fsync(file.fileno())

    def _lines(self) -> Iterator[tuple[str, str, Any]]:
        """What earlier attempts wrote down, of whichever process; a line that a kill cut off is none."""
        for path in sorted(self.journal.parent.glob("journal-*.jsonl")):
            text = path.read_text(encoding="utf-8", errors="replace")
            whole = text[: text.rfind("\n") + 1]
            if path == self.journal and whole != text:
                atomic_write(path, whole)
            for line in whole.splitlines():
                kind, name, value = json.loads(line)
                yield kind, name, value

    def _kept(self) -> Iterator[tuple[tuple[str, str], Row]]:
        return (((salt, name), row) for salt, name, row in self._lines() if salt != _SERVER)

    def _who(self) -> dict[str, Any]:
        return {"kind": self.about.kind, "version": self.about.version, "model": self.about.model}

    def _refuse_another(self, quiet: bool) -> None:
        """What another model wrote does not belong to this one's text."""
        now = self._who()
        for before in (value for kind, _, value in self._lines() if kind == _SERVER):
            if before["model"] != now["model"]:
                raise DraftstillError(
                    f"the responses were begun with the model {before['model']!r}, and this server has {now['model']!r}", key="respond.server.model",
                    value=self.server.model, mend=f"serve the first one under its name; or, to begin anew, delete {self.journal.parent}",
                )  # fmt: skip
            if before != now and not quiet:
                say(f"  the responses were begun by {before['kind']} {before['version'] or '(no version)'}, and go on by {now['kind']} "
                    f"{now['version'] or '(no version)'}")  # fmt: skip

    def _room(self, prompt: Prompt, length: int) -> int:
        """Tokens that may be asked for."""
        return length if self.about.context is None else min(length, self.about.context - len(prompt.ids))

    def _ask(self, prompt: Prompt, length: int, salt: str) -> Ask:
        messages = [] if self.server.api == "completions" else prompt.messages
        text = None
        if self.about.kind == "openai" and not messages:
            # A service that takes text sets the tokenizer's opening before it.
            behind = len(self._begins) if prompt.ids[: len(self._begins)] == self._begins else 0
            text = self.target.tokenizer.decode(prompt.ids[behind:])
        return Ask(prompt.ids, length, **self.recipe.respond.sampler.model_dump(), seed=seed_of(self.recipe.seed, salt, prompt.id), text=text,
                   messages=messages, tools=prompt.tools)  # fmt: skip

    def _row(self, prompt: Prompt, length: int, salt: str) -> Row:
        room = self._room(prompt, length)
        if room < 1:
            return {"prompt_id": prompt.id, "dropped": True, "finish": TOO_LONG}
        try:
            answer = self.client.complete(self._ask(prompt, room, salt))
        except ServerError as error:
            if error.status not in OF_ONE_REQUEST:
                raise
            return {"prompt_id": prompt.id, "dropped": True, "finish": REFUSED, "detail": error.problem}
        tokens, finish = self._tokens(answer)
        finish = "context" if finish == "length" and room < length else finish
        return {**row_of(prompt, tokens, finish, self.recipe.respond, salt), **({} if answer.ids else {"retokenised": True})}

    def _tokens(self, answer: Answer) -> tuple[list[int], str]:
        """Ids of an answer by the target's tokenizer, and how it ended; what does not read back as the text it came as is none of the target's.
        A tool call that came with its ids is text like any other; without them nobody knows how the target wrote it."""
        tokenizer, eos = self.target.tokenizer, self.target.eos
        ids, finish = answer.ids, answer.finish
        if ids is None:
            ids = encode(tokenizer, answer.text) if answer.text else []
            if tokenizer.decode(ids) != answer.text:
                return [], "text that the target's tokenizer does not give back"
        elif finish == CALLS:
            finish = "eos"
        if ids and max(ids) >= self.target.vocab:
            return [], "ids that the target does not have"
        if finish == "eos" and eos and (not ids or ids[-1] not in eos):
            ids = [*ids, tokenizer.eos_token_id if tokenizer.eos_token_id in eos else eos[0]]
        return (ids, finish) if ids or finish not in FINISHED else ([], "no text")

    def _check(self, prompts: Sequence[Prompt], answered: bool) -> None:
        """The server's ids must mean what ours mean: its text is read back with our tokenizer.

        Raises:
            DraftstillError: they do not; or it refuses every prompt.
        """
        refused: list[str] = []
        for prompt in [p for p in prompts if self._room(p, _PROBED) > 0][:_SEVERAL]:
            try:
                self._compare(self.client.complete(self._ask(prompt, self._room(prompt, _PROBED), "probe")))
            except ServerError as error:
                if error.status not in OF_ONE_REQUEST:
                    raise
                refused.append(error.problem)
            else:
                self._checked = True
                return
        if refused and not answered:
            raise self._refused_all(refused)

    def _compare(self, answer: Answer) -> None:
        if answer.ids is None:
            return
        tokenizer = self.target.tokenizer
        ours = tokenizer.decode(answer.ids, skip_special_tokens=True) if max(answer.ids) < self.target.vocab else None
        # A character that the limit cuts in half reads differently on both sides.
        plain = lambda t: t.rstrip("\ufffd").strip()  # noqa: E731
        theirs = plain(tokenizer.decode(encode(tokenizer, answer.text), skip_special_tokens=True))
        # Of a chat the server may show a part of the text only: it sets reasoning and tool calls apart.
        if ours is None or (theirs not in ours if self.server.api == "chat" else theirs != plain(ours)):
            raise DraftstillError(f"the server's token ids are not the target's: {answer.ids[:8]} is {ours!r} here and {answer.text!r} there",
                                  key="respond.server.url", value=self.client.url, mend="serve the model that target.source names")  # fmt: skip

    def _refused_all(self, words: Sequence[str]) -> DraftstillError:
        return DraftstillError(
            f"the server refuses every request; of the first {len(words)} it says: {words[0]}", key="respond.server.url", value=self.client.url,
            mend="see what it says: prompts that are too long (respond.chat_tokens, respond.prompt_tokens), or a sampler that it does not take",
        )  # fmt: skip


def _was_answered(row: Row) -> bool:
    """Whether the server wrote, whatever became of it."""
    return row["finish"] not in (REFUSED, TOO_LONG)
