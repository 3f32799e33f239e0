"""What a row's fields mean: guessed from the first rows of a file, or said by the recipe."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from draftstill.readers.conversations import INSTRUCTING, checked_tools, compared, conversation, plain, readable, text_of
from draftstill.readers.rows import Row, Unusable, document, excerpt, names_of, usable

_ABSENT = object()

TEXT, MESSAGES, PROMPT, INSTRUCTION, REQUESTS, ANSWERS = (
    "documents", "messages", "prompt and response", "instruction", "OpenAI batch requests", "OpenAI batch responses")  # fmt: skip
_GROUPS = ("conversation_id", "session_id", "thread_id", "chat_id")
"""Fields that name the conversation which several rows belong to."""
_SYSTEM = ("system", "system_prompt")
_PAIRS = (("prompt", "response"), ("prompt", "completion"), ("question", "answer"), ("query", "response"), ("input", "output"))
_BATCH = {"messages": "body.messages", "prompt": "body.prompt", "tools": "body.tools", "functions": "body.functions"}


@dataclass(frozen=True)
class Shape:
    """A name for people, and the path of each field that is used."""

    name: str
    fields: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, name: str, fields: Mapping[Any, str]) -> Shape:
        return cls(name, tuple(fields.items()))

    def __str__(self) -> str:
        renamed = ", ".join(f"{role}: {path}" for role, path in self.fields if role != path)
        return f"{self.name} ({renamed})" if renamed else self.name

    def row(self, row_id: str, value: dict[str, Any], answer: object = None) -> Row:
        """The document or conversation of a row.

        Args:
            answer: the assistant's message, where it stands in another row.

        Raises:
            Unusable: with the reason.
        """
        fields = dict(self.fields)
        at = lambda role: _at(value, fields.get(role))  # noqa: E731
        family = at("group")
        family = None if family in (_ABSENT, None, "") else f"{fields['group']}={family}"
        if "text" in fields:
            return document(row_id, self._needed(value, "text"), family)
        if "messages" in fields and (at("messages") is not _ABSENT or "prompt" not in fields):
            turns: object = self._needed(value, "messages")
            answer = at("answer") if answer is None and at("answer") is not _ABSENT else answer
        else:
            turns, answer = self._turns(value, answer)
        system = next((found for found in map(at, _SYSTEM) if not _says_nothing(found)), None)
        messages = _instructed(system, conversation(turns))
        if answer is not None:
            messages += conversation([{"role": "user", "content": "-"}, _as_message(answer)])[1:]
        tools = _tools(at("tools"), at("functions"))
        if not compared(messages).strip():
            raise Unusable("empty conversation", "no turn has any text")
        return Row(row_id, readable(messages), family=family, messages=messages, tools=tools)

    def _needed(self, value: dict[str, Any], role: str) -> Any:
        path = dict(self.fields)[role]
        found = _at(value, path)
        if found is _ABSENT:
            other = guess([value])
            looks = f"; it looks like {other.name}" if other is not None and other.name != self.name else ""
            raise Unusable("missing field", f"{path!r}: this row has {names_of(value)}{looks}")
        return found

    def _turns(self, value: dict[str, Any], answer: object) -> tuple[object, object]:
        """The list of turns before the answer, and the answer, of a row with a prompt or an instruction."""
        fields = dict(self.fields)
        asked = self._needed(value, "instruction" if "instruction" in fields else "prompt")
        reply = "output" if "output" in fields else "response"
        response = self._needed(value, reply) if reply in fields else answer
        if isinstance(asked, list):  # turns already
            return asked, response
        if not isinstance(asked, str):
            raise Unusable("null content" if asked is None else "not a string", f"the prompt is {type(asked).__name__}")
        about = _at(value, fields.get("input"))
        if about is not _ABSENT and about is not None and not isinstance(about, str):
            raise Unusable("not a string", f"the input is {type(about).__name__}")
        if isinstance(about, str) and about.strip():
            asked = f"{asked}\n\n{about}"
        if not asked.strip():
            raise Unusable("empty turn", "the prompt")
        if response is None and reply in fields:
            raise Unusable("null content", "the response")
        return [*_earlier(_at(value, fields.get("history"))), {"role": "user", "content": asked}], response


def _earlier(history: object) -> list[dict[str, Any]]:
    """The turns before a prompt, where a row holds them as pairs of question and answer (LLaMA-Factory's form of Alpaca)."""
    if not isinstance(history, list):  # some other field of that name
        return []
    turns = []
    for pair in history:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise Unusable("not a string", f"history: a pair of question and answer, not {excerpt(pair)}")
        turns += [{"role": role, "content": text} for role, text in zip(("user", "assistant"), pair, strict=True)]
    return turns


def _instructed(system: object, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The turns behind the row's own system prompt, unless they begin with instructions already."""
    if messages[0]["role"] in INSTRUCTING:
        return messages
    try:
        text = text_of(system)
    except Unusable as error:
        raise Unusable(error.reason, f"the system prompt: {error.detail}") from None
    return [{"role": "system", "content": plain(system)}, *messages] if text.strip() else messages


def _says_nothing(value: object) -> bool:
    return value in (_ABSENT, None, []) or (isinstance(value, str) and not value.strip())


def _tools(tools: object, functions: object) -> list[dict[str, Any]] | None:
    """The tools of a row, or what stands in their place in OpenAI's first form: the functions alone."""
    found = None if tools is _ABSENT else checked_tools(tools)
    if found is None and functions is not _ABSENT and (known := checked_tools(functions)) is not None:
        found = [f if "function" in f else {"type": "function", "function": f} for f in known]
    return found


def _as_message(answer: object) -> object:
    """A response as one turn: text, a message, or a list with one message."""
    if isinstance(answer, list) and len(answer) == 1 and isinstance(answer[0], dict):
        answer = answer[0]
    return answer if isinstance(answer, dict) else {"role": "assistant", "content": answer}


def _at(value: Any, path: str | None) -> Any:
    """The value at a.b.0; a key with dots of its own comes first."""
    if path is None:
        return _ABSENT
    if isinstance(value, dict) and path in value:
        return usable(value[path])
    for part in path.split("."):
        if isinstance(value, dict) and part in value:
            value = usable(value[part])
        elif isinstance(value, list) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        else:
            return _ABSENT
    return value


def guess(rows: Iterable[dict[str, Any]]) -> Shape | None:
    """The commonest shape of some rows; None where no row has a known one.

    Fields that not every row has (tools, system, group) are read from any row, whichever rows showed them.
    """
    rows = list(rows)
    found = Counter(shape for row in rows if (shape := _guess_one(row)) is not None)
    if not found:
        return None
    shape = found.most_common(1)[0][0]
    fields = dict(shape.fields)
    if shape.name in (REQUESTS, ANSWERS):
        return shape
    group = next((name for name in _GROUPS if any(isinstance(row.get(name), str | int) for row in rows)), None)
    if "text" not in fields:
        fields.update({name: name for name in (*_SYSTEM, "tools", "functions", "history")})
    if group:
        fields["group"] = group
    return Shape.of(shape.name, fields)


def _guess_one(row: dict[str, Any]) -> Shape | None:
    if "custom_id" in row and isinstance(row.get("body"), dict):
        return Shape.of(REQUESTS, _BATCH)
    if "custom_id" in row and ("response" in row or "error" in row):
        return Shape.of(ANSWERS, {})
    for name in ("messages", "conversations", "conversation"):
        if _is_turns(row.get(name)):
            return Shape.of(MESSAGES if name == "messages" else "ShareGPT conversations", {"messages": name})
    if "instruction" in row and "output" in row:
        return Shape.of(INSTRUCTION, {"instruction": "instruction", "input": "input", "output": "output"})
    for prompt, response in _PAIRS:
        if prompt in row and response in row:
            return Shape.of(PROMPT, {"prompt": prompt, "response": response})
    for name in ("text", "content", "document", "body"):
        if name in row:
            return Shape.of(TEXT, {"text": name})
    for name in ("prompt", "question"):
        if name in row:
            return Shape.of("prompts", {"prompt": name})
    return None


def _is_turns(value: object) -> bool:
    if isinstance(value, str):
        return value.lstrip().startswith("[")
    return isinstance(value, list) and (not value or isinstance(value[0], dict))


def explicit(fields: Mapping[Any, str]) -> Shape:
    """The shape that the recipe describes."""
    name = next(
        n for n, role in ((TEXT, "text"), (MESSAGES, "messages"), (PROMPT, "prompt"), (INSTRUCTION, "instruction")) if role in fields
    )
    return Shape.of(name, fields)


def answer_of(row: dict[str, Any]) -> object:
    """The assistant's message in a row of a batch response file.

    Raises:
        Unusable: the request failed.
    """
    response = row.get("response")
    if row.get("error") or not isinstance(response, dict) or response.get("status_code", 200) != 200:
        raise Unusable("failed response", excerpt(row.get("error") or response))
    message = _at(response, "body.choices.0.message")
    message = _at(response, "body.choices.0.text") if message is _ABSENT else message
    if message is _ABSENT or not (
        isinstance(message, str) or (isinstance(message, dict) and (message.get("content") or message.get("tool_calls")))
    ):
        raise Unusable("failed response", "there is no message in it")
    return message
