"""How each kind of server is asked to continue a prompt, and what its answer says. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from draftstill.errors import DraftstillError

Kind = Literal["vllm", "sglang", "llama.cpp", "openai"]
Api = Literal["completions", "chat"]
_OF_A_TURN = ("role", "content", "name", "tool_calls", "tool_call_id")
_CHAIN = ["temperature", "top_k", "top_p", "min_p"]
"""llama.cpp's own order ends with the temperature: top-p would then cut another law than everywhere else."""


CALLS, REASONING = "tool_calls", "reasoning set apart"
"""Ends of a chat answer that comes beside its text; without ids nobody knows how the target wrote it."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt and how it is to be continued."""

    ids: Sequence[int]
    max_new_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    ignore_eos: bool = False
    text: str | None = None
    """The ids as text, for services that take no ids."""
    messages: Sequence[dict[str, Any]] = ()
    """In place of the ids over the chat protocol, with ``tools``."""
    tools: Sequence[dict[str, Any]] = ()

    @property
    def sampler(self) -> dict[str, Any]:
        return {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}

    @property
    def seed32(self) -> dict[str, int]:
        return {} if self.seed is None else {"seed": self.seed & 0x7FFFFFFF}


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion."""

    text: str
    ids: list[int] | None
    """Token ids as the server gave them; None: text only."""
    finish: str
    """``eos``, ``stop`` (a stop string), ``length``, what does not stand in the text (``CALLS``, ``REASONING``), or the server's own word."""
    raw: dict[str, Any]


def request_of(kind: Kind, model: str, api: Api, ask: Ask, key: str) -> tuple[str, dict[str, Any]]:
    """Path and body.

    Raises:
        DraftstillError: a sampler that the service does not know; no messages for the chat protocol.
    """
    if api == "chat":
        return "/v1/chat/completions", _chat(kind, model, ask, key)
    if kind == "llama.cpp":
        body = {"prompt": list(ask.ids), "n_predict": ask.max_new_tokens, "ignore_eos": ask.ignore_eos, "return_tokens": True,
                "cache_prompt": False, **ask.sampler, "samplers": _CHAIN, "repeat_penalty": 1.0, **ask.seed32}  # fmt: skip
        return "/completion", body | ({"top_k": 1} if ask.temperature == 0 else {})
    if kind == "sglang":
        asked = {**ask.sampler, "top_k": ask.top_k or -1, "max_new_tokens": ask.max_new_tokens, "ignore_eos": ask.ignore_eos,
                 "repetition_penalty": 1.0, "skip_special_tokens": False}  # fmt: skip
        if ask.seed is not None:
            asked["sampling_seed"] = ask.seed32["seed"]
        return "/generate", {"input_ids": list(ask.ids), "sampling_params": asked}
    body = {"model": model, "prompt": list(ask.ids), "max_tokens": ask.max_new_tokens, **ask.seed32}
    if kind == "vllm":
        # What is not said here the model's own generation config fills in.
        body |= {**ask.sampler, "repetition_penalty": 1.0, "ignore_eos": ask.ignore_eos, "return_token_ids": True, "add_special_tokens": False,
                 "skip_special_tokens": False}  # fmt: skip
    else:
        body |= _plain(ask, key) | ({} if ask.text is None else {"prompt": ask.text})
    return "/v1/completions", body


def _chat(kind: Kind, model: str, ask: Ask, key: str) -> dict[str, Any]:
    if not ask.messages:
        raise DraftstillError("this prompt has no messages to send", key=f"{key}.api", value="chat",
                              mend="set respond.chat_template: true, or api: completions")  # fmt: skip
    messages = [_sent(message, known_only=kind == "openai") for message in ask.messages]
    body: dict[str, Any] = {"model": model, "messages": messages, "max_tokens": ask.max_new_tokens, **ask.seed32}
    if kind == "openai":
        body |= _plain(ask, key)
    elif kind == "llama.cpp":
        body |= {**ask.sampler, "repeat_penalty": 1.0, "samplers": _CHAIN}
    else:
        body |= {**ask.sampler, "repetition_penalty": 1.0} | ({"top_k": ask.top_k or -1} if kind == "sglang" else {})
    if kind == "vllm":
        body["return_token_ids"] = True
    return body | ({"tools": list(ask.tools)} if ask.tools else {})


def _sent(message: dict[str, Any], *, known_only: bool) -> dict[str, Any]:
    """A turn as the protocol has it: arguments of calls as JSON in a string, null for the content of a turn that only calls. Templates want
    both otherwise. Keys that a log keeps beside are left out where a service would refuse them."""
    sent = {k: v for k, v in message.items() if k in _OF_A_TURN or not known_only}
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        sent["tool_calls"] = [_sent_call(call) for call in calls]
        sent["content"] = message.get("content") or None
    return sent


def _sent_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or isinstance(function.get("arguments"), str):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(function.get("arguments") or {}, ensure_ascii=False)}}


def _plain(ask: Ask, key: str) -> dict[str, Any]:
    """What the protocol itself knows."""
    if ask.top_k or ask.min_p:
        raise DraftstillError("this service knows no top_k and no min_p", key="respond.sampler", value=ask.sampler,
                              mend=f"use temperature and top_p, or another {key}.url")  # fmt: skip
    return {"temperature": ask.temperature, "top_p": ask.top_p}


def read_answer(kind: Kind, api: Api, raw: dict[str, Any]) -> Answer | None:
    """None where there is no choice to read."""
    if api == "completions" and kind == "llama.cpp":
        if "content" not in raw:
            return None
        words = {"eos": "eos", "limit": "length", "word": "stop"}
        return Answer(str(raw["content"]), _ids(raw.get("tokens")), words.get(str(raw.get("stop_type")), str(raw.get("stop_type"))), raw)
    if api == "completions" and kind == "sglang":
        if "text" not in raw and "output_ids" not in raw:
            return None
        reason = (raw.get("meta_info") or {}).get("finish_reason") or {}
        finish = str(reason.get("type"))
        if finish == "stop":
            finish = "stop" if isinstance(reason.get("matched"), str) else "eos"
        return Answer(str(raw.get("text", "")), _ids(raw.get("output_ids")), finish, raw)
    choices = raw.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return None
    choice, ids = choices[0], _ids(choices[0].get("token_ids"))
    message = choice.get("message") or {}
    text = message.get("content") if api == "chat" else choice.get("text")
    apart = None if api == "completions" else _apart(message, text, ids)
    return Answer(text if isinstance(text, str) else "", ids, apart or _finish(choice), raw)


def _apart(message: dict[str, Any], text: Any, ids: list[int] | None) -> str | None:
    """In place of an end: what of the answer does not stand in its text. Where ids hold it, only a call is told, since it ends an answer, too."""
    if message.get("tool_calls"):
        return CALLS
    if ids is None and (message.get("reasoning_content") or message.get("reasoning")):
        return REASONING
    return None if ids is not None or text is None or isinstance(text, str) else "content in parts"


def _ids(value: Any) -> list[int] | None:
    return [int(i) for i in value] if isinstance(value, list) and value and all(isinstance(i, int) for i in value) else None


def _finish(choice: dict[str, Any]) -> str:
    """An end of text and a stop string are both ``stop``; vLLM names the string in ``stop_reason``."""
    reason = str(choice.get("finish_reason"))
    return ("stop" if isinstance(choice.get("stop_reason"), str) else "eos") if reason == "stop" else reason
