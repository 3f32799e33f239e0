"""Acceptance as a server reports it, made one neutral record: an adapter for each kind of server. Pure Python.

A server's counters run from its start and count everybody's requests: differences are taken of two readings, and traffic that is not
ours is refused. What a server does not report is an error; it never becomes a zero.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from draftstill.errors import DraftstillError

Kind = Literal["vllm", "sglang", "llama.cpp"]
Counters = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What a server drafted and kept for our requests. The token that the target adds itself is in no count but ``tokens``."""

    requests: int
    steps: int | None
    """Verify passes; None: not reported."""
    drafted: int
    accepted: int
    tokens: int
    """Emitted, as counted in the answers."""
    accepted_at: list[int] | None
    """Steps that accepted at least i + 1 tokens; None: not reported."""
    source: str
    """Where the counts come from."""
    cut: str
    """What happens to drafted tokens behind the end of a text."""
    sampling: str
    """How the draft picks its tokens, as far as is known."""

    @property
    def acceptance(self) -> float:
        return self.accepted / self.drafted

    @property
    def tau(self) -> float | None:
        """Tokens per verify pass, bonus included, from the counters alone."""
        return None if not self.steps else 1 + self.accepted / self.steps

    @property
    def gamma(self) -> float | None:
        """Drafted tokens per verify pass."""
        return None if not self.steps else self.drafted / self.steps

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "acceptance": self.acceptance, "tau": self.tau, "gamma": self.gamma}


@dataclass(frozen=True, slots=True)
class Adapter:
    """How one kind of server reports."""

    kind: Kind
    requests: str | None
    """Counter of finished requests; None: it has none."""
    tokens: str
    """Counter of generated tokens."""
    busy: tuple[str, ...]
    """Gauges of requests under way and waiting."""
    steps: str | None
    drafted: str | None
    accepted: str | None
    accepted_at: str | None
    cut: str
    sampling: str
    of_answer: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    """steps, drafted, accepted, accepted_at of one answer, those that it names; None: answers name nothing."""
    decode_s: Callable[[Mapping[str, Any]], float | None] = field(default=lambda raw: None)
    """Seconds of decoding without prefill, where an answer says so."""
    validated: bool = False
    """Whether the adapter was tried on a real server, or on its documented output alone."""

    def total(self, counters: Counters, name: str | None) -> float | None:
        """Sum of a counter over its labels; None where the page does not have it."""
        found = [v for key, v in counters.items() if name is not None and key.partition("{")[0] == name]
        return sum(found) if found else None

    def delta(self, before: Counters, after: Counters, name: str | None) -> int | None:
        """How far a counter moved. One that first appears with our requests began at 0.

        Raises:
            DraftstillError: it moved backwards: the server was restarted.
        """
        end = self.total(after, name)
        if end is None:
            return None
        moved = end - (self.total(before, name) or 0.0)
        if moved < 0:
            raise DraftstillError(
                f"the server's counter {name} went backwards: it was restarted while it was measured", mend="measure again"
            )
        return round(moved)

    def record(self, before: Counters, after: Counters, answers: Sequence[Mapping[str, Any]], tokens: int) -> Acceptance:
        """The record of some requests.

        Args:
            before, after: the metrics page, empty where the server shows none.
            answers: raw, one per request; tokens: how many they hold.

        Raises:
            DraftstillError: no drafted tokens are reported, or not how many were accepted, or accepted exceeds drafted.
        """
        found: dict[str, Any] = {}
        source = "the answers"
        if self.of_answer is not None:
            rows = [self.of_answer(raw) for raw in answers]
            for name in ("steps", "drafted", "accepted"):
                values = [r[name] for r in rows if r.get(name) is not None]
                # An answer may hold no draft fields because nothing was drafted for it; that is told by its neighbours.
                found[name] = sum(values) if values else None
            if rows and all(r.get("accepted_at") for r in rows):
                found["accepted_at"] = [sum(column) for column in _columns([r["accepted_at"] for r in rows])]
        counted = {n: self.delta(before, after, getattr(self, n)) for n in ("steps", "drafted", "accepted")}
        if found.get("drafted") is None:
            found, source = counted, f"the counters {self.drafted} and its neighbours, as differences"
        else:
            found["steps"] = counted["steps"] if found["steps"] is None else found["steps"]
        if not found.get("drafted"):
            raise DraftstillError(f"{self.kind} reports no drafted tokens: it decodes without a draft, or does not say what it drafts",
                                  mend=_MENDS[self.kind])  # fmt: skip
        if found.get("accepted") is None:
            raise DraftstillError(f"{self.kind} reports drafted tokens, but not how many it accepted", mend=_MENDS[self.kind])
        if found["accepted"] > found["drafted"]:
            raise DraftstillError(
                f"{self.kind} reports {found['accepted']} accepted of {found['drafted']} drafted tokens: its counts include other tokens"
            )
        return Acceptance(len(answers), found.get("steps"), found["drafted"], found["accepted"], tokens,
                          found.get("accepted_at") or self._at(before, after), source, self.cut, self.sampling)  # fmt: skip

    def _at(self, before: Counters, after: Counters) -> list[int] | None:
        """By position, where the page has a counter for it."""
        if self.accepted_at is None:
            return None
        found: dict[int, float] = {}
        for sign, page in ((1, after), (-1, before)):
            for key, value in page.items():
                if key.partition("{")[0] == self.accepted_at and (place := re.search(r'\bpos(?:ition)?="(\d+)"', key)):
                    found[int(place[1])] = found.get(int(place[1]), 0.0) + sign * value
        return [round(found[i]) for i in sorted(found)] or None

    def foreign(self, before: Counters, after: Counters, requests: int, tokens: int) -> str | None:
        """What the counters saw beside our own requests; None: nothing, or there are no counters to tell."""
        for name, what, ours in ((self.requests, "requests", requests), (self.tokens, "tokens", tokens)):
            moved = self.delta(before, after, name)
            # A server may leave the token of the prefill, or the end of a text, out of its count: it sees fewer than we do, never more.
            if moved is not None and moved > ours + (requests if name == self.tokens else 0):
                return f"{moved} {what} instead of our {ours}"
        return None

    def settled(self, before: Counters, after: Counters, requests: int, tokens: int) -> bool:
        """Whether the page has caught up with answers that were already given."""
        moved = self.delta(before, after, self.requests)
        if moved is not None:
            return moved >= requests
        moved = self.delta(before, after, self.tokens)
        return moved is None or moved >= tokens - requests

    def under_way(self, counters: Counters) -> int:
        """Requests running or waiting."""
        return round(sum(self.total(counters, name) or 0.0 for name in self.busy))


_MENDS = {
    "vllm": "start it with --speculative-config, and without --disable-log-stats, which takes the counters away",
    "sglang": "start it with --speculative-algorithm STANDALONE and --speculative-draft-model-path",
    "llama.cpp": "start it with -md DRAFT.gguf --spec-type draft-simple, and check that the vocabulary fits (`draftstill publish RECIPE --check`)",
}


def _columns(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    return [[row[i] for row in rows if i < len(row)] for i in range(max(map(len, rows)))]


def _of_sglang(raw: Mapping[str, Any]) -> dict[str, Any]:
    meta = raw.get("meta_info") or {}
    first = lambda *names: next((meta[n] for n in names if meta.get(n) is not None), None)  # noqa: E731 - renamed over versions
    histogram = first("spec_correct_drafts_histogram", "spec_accept_histogram")
    return {
        "steps": first("spec_verify_ct"), "drafted": first("spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num"),
        "accepted": first("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num"),
        "accepted_at": [sum(histogram[i:]) for i in range(1, len(histogram))] if histogram else None,
    }  # fmt: skip


def _of_llama(raw: Mapping[str, Any]) -> dict[str, Any]:
    timings = raw.get("timings") or {}
    return {"drafted": timings.get("draft_n"), "accepted": timings.get("draft_n_accepted")}


def _llama_decode_s(raw: Mapping[str, Any]) -> float | None:
    taken = (raw.get("timings") or {}).get("predicted_ms")
    return None if taken is None else float(taken) / 1000


ADAPTERS: dict[str, Adapter] = {
    "vllm": Adapter(
        "vllm", "vllm:request_success_total", "vllm:generation_tokens_total", ("vllm:num_requests_running", "vllm:num_requests_waiting"),
        "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_per_pos_total", "counted, also behind the end of a text",
        "by argmax unless the server runs with draft_sample_method probabilistic",
    ),
    "sglang": Adapter(
        "sglang", "sglang:num_requests_total", "sglang:generation_tokens_total", ("sglang:num_running_reqs", "sglang:num_queue_reqs"),
        "sglang:spec_verify_calls_total", None, None, None, "proposed ones are counted, also behind the end of a text",
        "by argmax", of_answer=_of_sglang,
    ),
    "llama.cpp": Adapter(
        "llama.cpp", None, "llamacpp:tokens_predicted_total", ("llamacpp:requests_processing", "llamacpp:requests_deferred"),
        "llamacpp:spec_decode_num_drafts_total", "llamacpp:spec_decode_num_draft_tokens_total", "llamacpp:spec_decode_num_accepted_tokens_total",
        "llamacpp:spec_decode_num_accepted_tokens_per_pos_total", "dropped", "by argmax unless the server runs with --spec-draft-probabilistic",
        of_answer=_of_llama, decode_s=_llama_decode_s, validated=True,
    ),
}  # fmt: skip
"""By kind, as ``distill.About`` names it."""


def adapter_of(kind: str, url: str) -> Adapter:
    """The adapter of a server.

    Raises:
        DraftstillError: it is of no kind whose acceptance can be read.
    """
    if kind not in ADAPTERS:
        raise DraftstillError(
            "this server is none of vLLM, SGLang and llama.cpp, so its acceptance cannot be read", key="--server", value=url
        )
    return ADAPTERS[kind]
