"""Prompts from conversations: all turns that came before the answer, as the target's chat template lays them out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from draftstill.corpus import Document
from draftstill.distill.prompts import LONGER, Prompt, Refusals, require_template, seed_of, templated
from draftstill.readers import Unusable, text_of
from draftstill.recipe import Respond

_CHARS_PER_TOKEN = 64
"""A prompt with more characters per allowed token than this is not even tokenised: a row may have 10 MB."""
_INSTRUCTING = ("system", "developer")


def real_prompts(documents: Sequence[Document], count: int, settings: Respond, tokenizer: Any, seed: int, context: int | None,
                 refusals: Refusals) -> list[Prompt]:  # fmt: skip
    """Up to ``count`` conversations as prompts, in an order by seed; asking for more only adds. What makes none is refused by name, no error.

    Raises:
        DraftstillError: the target's tokenizer has no chat template.
    """
    require_template(tokenizer, "target.source", getattr(tokenizer, "name_or_path", None) or "the target")
    # Room for at least one token of the answer.
    longest = settings.chat_tokens if context is None else min(settings.chat_tokens, context - 1)
    found: list[Prompt] = []
    for document in sorted(documents, key=lambda d: seed_of(seed, "order", d.id)):
        if len(found) == count:
            break
        try:
            found.append(_prompt(document, tokenizer, longest))
        except Unusable as why:
            refusals.add(document.id, why.reason, why.detail)
    return found


def _prompt(document: Document, tokenizer: Any, longest: int) -> Prompt:
    turns = [chat_turn(m) for m in document.messages or ()]
    # The target answers in place of whoever answered last; where the log ends with a question, it answers that.
    while turns and turns[-1]["role"] == "assistant":
        turns.pop()
    if not any(m["role"] not in _INSTRUCTING and (m["content"].strip() or m.get("tool_calls")) for m in turns):
        raise Unusable("nothing is asked", "no text before the assistant's last turn")
    fitting = [rest for rest in _shorter(turns) if sum(len(m["content"]) for m in rest) <= _CHARS_PER_TOKEN * longest]
    if not fitting:
        raise Unusable(LONGER, f"{len(turns[-1]['content']):,} characters in the last turn; {longest} tokens are allowed")
    for rest in fitting:
        try:
            prompt = templated(document.id, rest, tokenizer, "real", document.tools)
        except Exception as error:  # a template is foreign code, and a tokenizer may refuse a text: the row is refused, the run goes on
            raise Unusable("refused by the chat template", _line(error)) from None
        if len(prompt.ids) <= longest:
            return prompt
    raise Unusable(LONGER, f"{len(prompt.ids)} tokens without its older turns; {longest} are allowed")


def _shorter(turns: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The turns, then without the oldest ones behind the system's: each rest begins with a user's turn, so that roles still alternate."""
    head = turns[:1] if turns[0]["role"] in _INSTRUCTING else []
    starts = [i for i, m in enumerate(turns) if m["role"] == "user" and i > len(head)]
    return [turns, *([*head, *turns[i:]] for i in starts)]


def chat_turn(message: dict[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: text for content, calls as ``tool_calls`` with objects for their arguments, no null keys.

    Raises:
        Unusable: it has no role, or content that is not text.
    """
    turn = {key: value for key, value in message.items() if value is not None}
    if not isinstance(turn.get("role"), str):
        raise Unusable("a turn without a role")
    try:
        turn["content"] = text_of(turn.get("content"))
    except Unusable as why:
        raise Unusable("content that is not text", f"{why.detail}, in a turn of the role {turn['role']!r}") from None
    turn = _as_tools(turn)
    if isinstance(turn.get("tool_calls"), list):
        turn["tool_calls"] = [_call(call) for call in turn["tool_calls"]]
    return turn


def _as_tools(turn: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's first form of calls (one ``function_call``, answered by the role ``function``) in its later one. There a call has an id, by which
    its answer names it; here both have the function's name."""
    if turn["role"] == "function":
        named = {"tool_call_id": f"call_{turn['name']}"} if isinstance(turn.get("name"), str) else {}
        return {**named, **turn, "role": "tool"}
    call = turn.get("function_call")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return turn
    calls = turn.get("tool_calls") or [{"id": f"call_{call['name']}", "type": "function", "function": call}]
    return {**{key: value for key, value in turn.items() if key != "function_call"}, "tool_calls": calls}


def _call(call: Any) -> Any:
    """Arguments arrive as JSON text or as an object; templates write the object out themselves."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
