"""What the recording needs is tried before the hours of responding that come first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftstill.distill import record, recorder, respond, responses
from draftstill.errors import DraftstillError
from tests.distill.fake_server import fake
from tests.distill.test_served_recording import SERVED, served
from tests.pipeline import borrowed, make_home, opened


@pytest.mark.parametrize(("kind", "bad", "keys", "key"), [
    ("vllm", {"cap": 5}, {}, "record.top_k"),
    ("sglang", {"silent": True}, {}, "record.server.url"),
    ("llama.cpp", {"timings": {"draft_n": 3}}, {}, "record.server.url"),
    ("openai", {}, {}, "record.server.url"),
    ("vllm", {}, {"api_key_env": "NO_SUCH_KEY"}, "record.server.api_key_env"),
    ("vllm", {}, {"model": "other"}, "record.server.model"),
    ("vllm", {}, {"url": "http://127.0.0.1:9"}, "record.server.url"),
])  # fmt: skip
def test_a_server_that_cannot_record_is_refused_before_hours_of_responding(kind: str, bad: dict[str, Any], keys: dict[str, Any], key: str,
                                                                           tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    monkeypatch.setattr(responses, "_engine", lambda *_: pytest.fail("the target was asked"))
    with fake(served(kind, **bad), kind) as server:
        home = make_home(tmp_path / "a", **{**SERVED, "record": {**SERVED["record"], "server": {"url": server.url, "retries": 0, **keys}}})
        for entry in (record, respond):  # the launch of many processes, and the command line's stages
            with pytest.raises(DraftstillError) as caught:
                entry(*opened(home))
            assert caught.value.key == key


def test_a_server_is_asked_for_no_more_than_there_is_to_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two probes, since hours lie between them; one where the responses are there, and none where all is."""
    path = "/v1/completions"
    with fake(served("vllm"), "vllm") as server:
        home = make_home(tmp_path / "a", **{**SERVED, "record": {**SERVED["record"], "server": {"url": server.url, "retries": 0}}})
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(recorder, "describe_target", stopped_at(2))
            record(*opened(home))
        assert len(server.asked(path)) == 2 and (tmp_path / "a" / "run" / "responses").exists()
        record(*opened(home))
        probes = [b for b in server.asked(path) if len(b["prompt"]) <= 13 and b["prompt_logprobs"] == 2]
        assert len(probes) == 2
        asked = len(server.calls)
        record(*opened(home))
        assert len(server.calls) == asked


def stopped_at(call: int) -> Any:
    """``describe_target`` that is interrupted at a call."""
    real, calls = recorder.describe_target, list[int]()

    def describe(recipe: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            raise KeyboardInterrupt
        return real(recipe)

    return describe


def test_before_the_target_is_tuned_that_is_what_is_said(tmp_path: Path) -> None:
    with fake(served("vllm"), "vllm") as server:
        home = make_home(tmp_path / "a", **{**SERVED, "adapt": {}, "record": {**SERVED["record"], "server": {"url": server.url}}})
        with pytest.raises(DraftstillError, match="draftstill adapt") as caught:
            record(*opened(home))
    assert caught.value.key == "adapt"


def test_the_place_is_tried_before_the_responses_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line makes the stages one by one: the responses' comes first."""
    monkeypatch.setattr(responses, "_engine", lambda *_: pytest.fail("the target was asked"))
    with pytest.raises(DraftstillError) as caught:
        respond(*opened(borrowed(tmp_path, "corpus", record={"mirror": "nosuch://bucket/one"})))
    assert caught.value.key == "record.mirror"
