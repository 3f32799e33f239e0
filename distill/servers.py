"""One client for vLLM, SGLang, llama.cpp and other OpenAI-compatible servers: ask, retry, and read what came back. Standard library only."""

from __future__ import annotations

import json
import os
import random
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property
from http.client import HTTPException
from typing import Any, TypeVar
from urllib.parse import urlsplit

from draftstill.distill.dialects import Answer, Api, Ask, Kind, read_answer, request_of
from draftstill.errors import DraftstillError
from draftstill.recipe import Server

_AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
"""Statuses that another attempt may mend."""
OF_ONE_REQUEST = frozenset({400, 413, 422})
"""Statuses that speak of one request: its text is too long, or a filter does not like it."""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 60.0
_OWNERS: dict[str, Kind] = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llama.cpp"}
T = TypeVar("T")
R = TypeVar("R")


class ServerError(DraftstillError):
    """The server did not do what was asked; ``status`` is the HTTP status, None where there was no answer at all."""

    def __init__(self, problem: str, *, status: int | None = None, **more: Any) -> None:
        super().__init__(problem, **more)
        self.status = status


@dataclass(frozen=True, slots=True)
class About:
    """What a server says of itself."""

    kind: Kind
    version: str | None
    model: str
    context: int | None
    """Tokens of prompt and text together."""
    speculates: bool | None
    """Whether it decodes speculatively; None: it does not say."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A key must not travel to where a server points."""

    def redirect_request(self, *_: Any) -> None:
        return None


class Client:
    """Requests to one server. Safe to use from many threads.

    Args:
        url: with or without the trailing ``/v1``.
        model: None: the only one that it serves.
        retries: further attempts after a time-out, a lost connection, 429 or 5xx; ``Retry-After`` is heeded.
        api_key_env: environment variable that holds the key.
        key: the recipe key that errors name.

    Raises:
        ServerError: every method does where the server cannot be asked, or refuses; its own words are in the message.
    """

    def __init__(self, url: str, *, model: str | None = None, api: Api = "completions", timeout_s: float = 300.0,
                 retries: int = 5, api_key_env: str | None = None, key: str = "--server", sleep: Callable[[float], None] = time.sleep) -> None:  # fmt: skip
        self.url = url.rstrip("/").removesuffix("/v1").rstrip("/")
        self.api, self.timeout_s, self.retries, self.key = api, timeout_s, retries, key
        self._model, self._sleep = model, sleep
        self._headers = {"Content-Type": "application/json"}
        if api_key_env is not None:
            if not os.environ.get(api_key_env):
                raise DraftstillError(
                    "this environment variable is not set", key=f"{key}.api_key_env", value=api_key_env, mend="export it, or leave it out"
                )
            self._headers["Authorization"] = f"Bearer {os.environ[api_key_env]}"
        handlers: list[Any] = [_NoRedirects()]
        if urlsplit(self.url).hostname in ("localhost", "127.0.0.1", "::1"):
            handlers.append(urllib.request.ProxyHandler({}))
        self._opener = urllib.request.build_opener(*handlers)

    @classmethod
    def of(cls, server: Server, key: str) -> Client:
        """As a recipe says."""
        return cls(server.url, model=server.model, api=server.api, timeout_s=server.timeout_s, retries=server.retries,
                   api_key_env=server.api_key_env, key=key)  # fmt: skip

    # -- requests -----------------------------------------------------------------------------------------------------------

    def get(self, path: str, *, retries: int | None = None) -> str:
        """The page as text."""
        return self._ask(path, None, retries)

    def post(self, path: str, body: dict[str, Any], *, retries: int | None = None) -> dict[str, Any]:
        """The JSON object that answers a JSON object."""
        text = self._ask(path, json.dumps(body).encode(), retries)
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise self._error(f"{path} did not answer with a JSON object: {short(text)}")
        return found

    def _ask(self, path: str, body: bytes | None, retries: int | None) -> str:
        attempts = 1 + (self.retries if retries is None else retries)
        pause = _FIRST_WAIT_S
        for attempt in range(attempts):
            request = urllib.request.Request(self.url + path, body, self._headers)
            told: float | None = None
            try:
                with self._opener.open(request, timeout=self.timeout_s) as answer:
                    return answer.read().decode("utf-8", "replace")
            except urllib.error.HTTPError as error:
                problem, status = f"{path} answered {error.code}: {_reason(error)}", error.code
                told = _seconds(error.headers.get("Retry-After"))
                if error.code not in _AGAIN:
                    raise self._error(problem, status) from None
            except (OSError, HTTPException) as error:
                reason = error.reason if isinstance(error, urllib.error.URLError) else error
                problem, status = f"{path} did not answer: {reason or type(error).__name__}", None
            if attempt + 1 < attempts:
                # A little chance, so that many requests that failed together do not come back together.
                self._sleep(min(_LONGEST_WAIT_S, told if told is not None else pause * (0.75 + random.random() / 2)))
                pause *= 2
        tried = f" ({attempts} attempts)" if attempts > 1 else ""
        raise self._error(problem + tried, status)

    def _error(self, problem: str, status: int | None = None) -> ServerError:
        mend = {401: "name the variable that holds the key: api_key_env", 403: "name the variable that holds the key: api_key_env",
                404: "does the server have this endpoint, and serve this model?"}.get(status or 0, "is the server up, and is this its address?")  # fmt: skip
        return ServerError(
            f"the server: {problem}",
            status=status,
            key=f"{self.key}.url",
            value=self.url,
            mend=mend if status not in OF_ONE_REQUEST else None,
        )

    # -- what it is ---------------------------------------------------------------------------------------------------------

    def health(self) -> None:
        """Raises ServerError where the server is not ready to answer."""
        try:
            self.get("/health")
        except ServerError as error:
            if error.status not in (404, 405):  # a service without this page may answer all the same
                raise
            self.get("/v1/models")

    @cached_property
    def about(self) -> About:
        """Kind, version, model and context; asked once."""
        try:
            listed = json.loads(self.get("/v1/models"))["data"]
            names = [str(m["id"]) for m in listed]
        except (ValueError, KeyError, TypeError):
            raise self._error("/v1/models does not list models") from None
        if self._model is not None and self._model not in names:
            raise DraftstillError(f"the server does not serve this model; it serves {', '.join(names) or 'none'}", key=f"{self.key}.model",
                                  value=self._model)  # fmt: skip
        if self._model is None and len(names) != 1:
            raise DraftstillError(
                f"the server serves {len(names)} models: {', '.join(names)}", key=f"{self.key}.model", mend="name one of them"
            )
        first = listed[names.index(self._model) if self._model else 0]
        kind = _OWNERS.get(str(first.get("owned_by", "")).lower().replace(".", ""), "openai")
        version, context, speculates = None, first.get("max_model_len"), None
        if kind == "vllm":
            version = self._page("/version").get("version")
            speculates = self._drafts("vllm:spec_decode")
        elif kind == "sglang":
            said = self._page("/get_server_info") or self._page("/server_info")
            version, speculates = said.get("version"), bool(said.get("speculative_algorithm")) if said else None
            context = context or said.get("max_total_num_tokens")
        elif kind == "llama.cpp":
            said = self._page("/props")
            version, context = said.get("build_info"), (said.get("default_generation_settings") or {}).get("n_ctx")
            speculates = self._drafting_slots()
        return About(
            kind, version, names[0] if self._model is None else self._model, context if isinstance(context, int) else None, speculates
        )

    def _drafts(self, prefix: str) -> bool | None:
        """Whether the metrics page counts drafts; None: there is no such page."""
        try:
            return any(name.startswith(prefix) for name in parse_counters(self.get("/metrics", retries=0)))
        except ServerError:
            return None

    def _drafting_slots(self) -> bool | None:
        """Of llama.cpp; what /props calls ``speculative.types`` says ``none`` even where every slot drafts."""
        try:
            slots = json.loads(self.get("/slots", retries=0))
            return any(bool(slot.get("speculative")) for slot in slots)
        except (ServerError, ValueError, AttributeError, TypeError):
            return None

    def _page(self, path: str) -> dict[str, Any]:
        try:
            found = json.loads(self.get(path, retries=0))
        except (ServerError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def counters(self, path: str = "/metrics") -> dict[str, float]:
        """Samples of the server's metrics page (the Prometheus text format) by name and labels as printed; take differences of two."""
        return parse_counters(self.get(path))

    # -- completions --------------------------------------------------------------------------------------------------------

    def complete(self, ask: Ask, **more: Any) -> Answer:
        """Continue a prompt. Every setting that a server would otherwise fill in itself is sent; ``more`` are keys of the server's own."""
        path, body = request_of(self.about.kind, self.about.model, self.api, ask, self.key)
        raw = self.post(path, body | more)
        answer = read_answer(self.about.kind, self.api, raw)
        if answer is None:
            raise self._error(f"the answer holds no choice: {short(json.dumps(raw))}")
        return answer


def each(items: Sequence[T], ask: Callable[[T], R], concurrency: int) -> Iterator[tuple[int, R]]:
    """(place, answer) of every item in the order of completion, ``concurrency`` at a time.

    After an error nothing new is asked; what was under way is still yielded, then the first error is raised: no finished answer is lost.
    """
    error: Exception | None = None
    with ThreadPoolExecutor(concurrency) as pool:
        waiting = iter(range(len(items)))
        under_way: dict[Future[R], int] = {}
        try:
            while True:
                while error is None and len(under_way) < concurrency and (place := next(waiting, None)) is not None:
                    under_way[pool.submit(ask, items[place])] = place
                if not under_way:
                    break
                for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                    place = under_way.pop(future)
                    if (failed := future.exception()) is None:
                        yield place, future.result()
                    elif isinstance(failed, Exception):
                        error = error or failed
                    else:
                        raise failed
        finally:
            for future in under_way:
                future.cancel()
    if error is not None:
        raise error


_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*(?:\{.*\})?)\s+(\S+)(?:\s+\d+)?$")


def parse_counters(page: str) -> dict[str, float]:
    """Samples of a page in the Prometheus text format."""
    found = {}
    for line in page.splitlines():
        if not line.startswith("#") and (sample := _SAMPLE.match(line.strip())):
            found[sample[1]] = float(sample[2].replace("Inf", "inf"))
    return found


def _seconds(value: str | None) -> float | None:
    try:
        return max(0.0, float(value)) if value else None
    except ValueError:
        return None  # a date


def _reason(error: urllib.error.HTTPError) -> str:
    """The server's own words."""
    try:
        text = error.read().decode("utf-8", "replace")
    except (OSError, HTTPException):
        return str(error.reason)
    try:
        found = json.loads(text)
        found = found.get("error", found) if isinstance(found, dict) else found
        found = found.get("message", found) if isinstance(found, dict) else found
        text = found if isinstance(found, str) else json.dumps(found)
    except ValueError:
        pass
    return short(text) or str(error.reason)


def short(text: str) -> str:
    """One line of a foreign text, for messages."""
    text = " ".join(text.split())
    return text if len(text) <= 300 else text[:297] + "..."
