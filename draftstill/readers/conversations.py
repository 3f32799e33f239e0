"""Conversations in OpenAI form: turns of other logs are renamed, what is in OpenAI form already is kept as it is."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from typing import Any

from draftstill.readers.rows import Row, Unusable, excerpt
from draftstill.readers.values import parse
from draftstill.redact import Redactor

Messages = list[dict[str, Any]]

ROLES = {
    "system": "system", "developer": "developer", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant",
    "chatgpt": "assistant", "bot": "assistant", "ai": "assistant", "model": "assistant", "tool": "tool", "observation": "tool",
    "function_response": "tool", "tool_response": "tool", "function": "function", "function_call": "function_call", "tool_call": "function_call",
}  # fmt: skip
"""Names of roles in logs, lower-cased, and OpenAI's. A ``function_call`` is an assistant's turn whose text is the call."""
INSTRUCTING = ("system", "developer")
_TEXT_PARTS = ("text", "input_text", "output_text")
_KEY = 16
"""Bytes of a SHA-256 that tell prompts apart."""


def conversation(value: object) -> Messages:
    """The turns of a list of messages (role, content) or ShareGPT turns (from, value); the list may stand as JSON in a string.

    Raises:
        Unusable: with the reason.
    """
    if isinstance(value, str):
        value = parse(value)
    if not isinstance(value, list):
        raise Unusable("bad messages", f"{type(value).__name__} in place of a list of turns")
    if not value:
        raise Unusable("empty conversation")
    turns = [_turn(number, turn) for number, turn in enumerate(value, 1)]
    if not any(turn["role"] == "user" for turn in turns):
        raise Unusable("no user turn", "roles: " + ", ".join(dict.fromkeys(turn["role"] for turn in turns)))
    return turns


def _turn(number: int, turn: object) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise Unusable("bad messages", f"turn {number} is {type(turn).__name__}, not an object")
    share = "role" not in turn and "from" in turn
    named = turn.get("from") if share else turn.get("role")
    role = ROLES.get(named.lower()) if isinstance(named, str) else None
    if role is None:
        raise Unusable("unknown role", f"turn {number}: {excerpt(repr(named))}")
    # Null keys say nothing, and templates trip over them; only a null content means something: the turn is nothing but tool calls.
    kept = {k: plain(v) for k, v in turn.items() if v is not None and k not in ("role", "content", *(("from", "value") if share else ()))}
    content = turn.get("value") if share else turn.get("content")
    content = plain(content) if isinstance(content, list) else content
    made: dict[str, Any] = {"role": role, "content": content, **kept}
    if role == "function_call":
        made = {"role": "assistant", **_call(content, number), **kept}
    calls = made.get("tool_calls") or made.get("function_call")
    _check_content(made["content"], made["role"], number, bool(calls))
    return made


def plain(value: Any) -> Any:
    """A value that JSON can hold: columns also have times, decimals and NaN, which become text."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    exact = value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value))
    return value if exact else str(value)


def _call(content: object, number: int) -> dict[str, Any]:
    try:
        call = parse(content) if isinstance(content, str) else content
    except Unusable:
        call = None
    if isinstance(call, dict) and isinstance(call.get("name"), str):
        call = {"name": call["name"], "arguments": call.get("arguments", {})}
        return {"content": None, "tool_calls": [{"id": f"call_{number}", "type": "function", "function": call}]}
    return {"content": content}


def _check_content(content: object, role: str, number: int, calls: bool) -> None:
    if content is None:
        if not calls:
            raise Unusable("null content", f"turn {number} ({role})")
        return
    try:
        text = text_of(content)
    except Unusable as error:
        raise Unusable(error.reason, f"turn {number} ({role}): {error.detail}") from None
    if role == "user" and not text.strip():
        raise Unusable("empty turn", f"turn {number} (user)")


def text_of(content: object) -> str:
    """The text of a message's content: a string, null, or parts, which stand one behind the other as chat templates set them. A part is a
    string or an object with ``text`` and a type that means text, or none.

    Raises:
        Unusable: an image or sound, or no content at all.
    """
    if isinstance(content, list):
        return "".join(map(_part, content))
    if content is None or isinstance(content, str):
        return content or ""
    raise Unusable("not a string", f"the content is {type(content).__name__}")


def _part(part: object) -> str:
    if isinstance(part, dict):
        kind = part.get("type")
        if kind is not None and kind not in _TEXT_PARTS:
            raise Unusable("not only text", f"a part of type {excerpt(repr(kind))}")
        part = part.get("text")
    if not isinstance(part, str):
        raise Unusable("bad messages", "a part without text")
    return part


def _spoken(message: dict[str, Any]) -> str:
    called = message.get("tool_calls") or []
    if not isinstance(called, list):
        raise Unusable("bad messages", "the tool calls are no list")
    calls = [call.get("function", call) if isinstance(call, dict) else call for call in called]
    calls += [message["function_call"]] if message.get("function_call") else []
    written = [text_of(message.get("content"))]
    for call in calls:
        if not isinstance(call, dict):
            raise Unusable("bad messages", "a tool call is not an object")
        arguments = call.get("arguments", "")
        arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        written.append(f"{call.get('name', '')}({arguments})")
    return "\n".join(part for part in written if part)


def readable(messages: Messages) -> str:
    """All turns, each with its role, one below the other."""
    return "\n\n".join(f"{m['role'].capitalize()}: {_spoken(m)}" for m in messages)


def compared(messages: Messages) -> str:
    """What makes a conversation differ from others: its turns without the instructions, which a service gives to all."""
    said = [_spoken(m) for m in messages if m["role"] not in INSTRUCTING]
    return "\n".join(part for part in said if part)


def prompt_keys(messages: Messages) -> Iterator[bytes]:
    """16 bytes for every prompt in a conversation: its turns before each of the assistant's, and all of them where nobody has answered the
    last. Instructions are left out: they are the service's, not the asker's. A log that writes down each request with all that went before it
    holds one conversation in many rows, and they share these.
    """
    digest, asked = hashlib.sha256(), False
    for message in messages:
        if message["role"] in INSTRUCTING:
            continue
        if message["role"] == "assistant":
            if asked:
                yield digest.digest()[:_KEY]
            asked = False
        else:
            asked = True
        digest.update(json.dumps([message["role"], _spoken(message).strip()]).encode())
    if asked:
        yield digest.digest()[:_KEY]


def checked_tools(value: object) -> list[dict[str, Any]] | None:
    """A list of tools, or the JSON of one.

    Raises:
        Unusable: something else.
    """
    if isinstance(value, str) and value.strip():
        try:
            value = parse(value)
        except Unusable as error:
            raise Unusable("bad tools", error.detail) from None
    if value in (None, "", []):
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise Unusable("bad tools", f"{type(value).__name__} in place of a list of objects")
    return plain(value)


def redacted(row: Row, redactor: Redactor) -> Row:
    """The row with placeholders for private data; one value has one placeholder in all of its turns."""
    if row.text is None:
        return row
    if row.messages is None:
        return row._replace(text=redactor.replace(row.text, beside=row.text)[0])
    messages, tools = redactor.replace(row.messages, row.tools, beside=row.text)
    return row if (messages, tools) == (row.messages, row.tools) else row._replace(text=readable(messages), messages=messages, tools=tools)
