"""A server that is asked over HTTP."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from draftstill.recipe.base import PositiveInt, Section


class Server(Section):
    """An OpenAI-compatible HTTP server: vLLM, SGLang, llama.cpp, or another."""

    url: str
    """Its address, for example ``http://localhost:8000``."""
    model: str | None = None
    """Model to ask for. Default: the only one that it serves."""
    api: Literal["completions", "chat"] = "completions"
    """``completions``: token ids are sent, by the target's own tokenizer and template. ``chat``: messages are sent and the server's template
    applies; for services that offer nothing else."""
    concurrency: PositiveInt = 8
    """Requests under way at once."""
    timeout_s: Annotated[float, Field(gt=0.0)] = 300.0
    """Longest wait for one answer."""
    retries: Annotated[int, Field(ge=0)] = 5
    """Further attempts after a time-out, a lost connection, or status 429 or 5xx, each after twice the wait of the one before."""
    api_key_env: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Name of the environment variable that holds the key. The key itself never stands in a recipe."""

    @field_validator("url")
    @classmethod
    def _plain(cls, url: str) -> str:
        from urllib.parse import urlsplit

        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("an address such as http://localhost:8000")
        if parts.username or parts.password or parts.query:
            raise ValueError("no user, password or query in the address: a key is named by api_key_env")
        return url
