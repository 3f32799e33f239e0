"""The client of served models: what it sends, what it makes of answers, and what it does when there are none."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from pydantic import ValidationError

from draftstill.distill import Ask, Client, ServerError, each, parse_counters
from draftstill.errors import DraftstillError
from draftstill.recipe import Server
from tests.distill.fake_server import Reply, fake

OWN_PAGES: Reply = (0, None)
KINDS = ("vllm", "sglang", "llama.cpp", "openai")
PATHS = {"vllm": "/v1/completions", "openai": "/v1/completions", "sglang": "/generate", "llama.cpp": "/completion"}


def answers(kind: str, text: str = "so", ids: list[int] | None = None, finish: str = "eos") -> dict[str, Any]:
    """What a server of a kind answers."""
    if kind == "llama.cpp":
        return {"content": text, "tokens": ids or [], "stop_type": {"eos": "eos", "length": "limit", "stop": "word"}[finish]}
    if kind == "sglang":
        reason = {"eos": {"type": "stop", "matched": 2}, "length": {"type": "length"}, "stop": {"type": "stop", "matched": "END"}}[finish]
        return {"text": text, "output_ids": ids, "meta_info": {"finish_reason": reason}}
    choice: dict[str, Any] = {
        "text": text,
        "finish_reason": "length" if finish == "length" else "stop",
        "stop_reason": "END" if finish == "stop" else None,
    }
    return {"choices": [choice | ({"token_ids": ids} if kind == "vllm" else {})]}


def client(url: str, **options: Any) -> Client:
    return Client(url, **{"retries": 2, "timeout_s": 10.0, "sleep": lambda _: None, **options})


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_known_by_its_own_words(kind: str) -> None:
    with fake(lambda *_: OWN_PAGES, kind) as server:
        found = client(server.url + "/v1/")
        found.health()
        assert (found.about.kind, found.about.model, found.about.context) == (kind, "m", 512)
        assert found.about.version == {"vllm": "0.33.0", "sglang": "0.5.23", "llama.cpp": "b1", "openai": None}[kind]
        assert found.about is found.about and len(server.asked("/v1/models")) == 1


@pytest.mark.parametrize(("kind", "about"), [("sglang", {"speculative": "STANDALONE"}), ("llama.cpp", {"speculative": "draft-simple"}),
                                             ("vllm", {"metrics": "vllm:spec_decode_num_drafts_total 0\n"})])  # fmt: skip
def test_a_server_that_speculates_says_so(kind: str, about: dict[str, Any]) -> None:
    with fake(lambda *_: OWN_PAGES, kind, **about) as server:
        assert client(server.url).about.speculates is True
    with fake(lambda *_: OWN_PAGES, kind, metrics="vllm:num_requests_running 0\n") as server:
        assert client(server.url).about.speculates is False


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("finish", ["eos", "length", "stop"])
def test_answers_are_read_alike(kind: str, finish: str) -> None:
    if kind == "openai" and finish == "stop":
        return  # the protocol has one word for both
    with fake(lambda path, _: (200, answers(kind, "so", [5, 6], finish)) if path == PATHS[kind] else OWN_PAGES, kind) as server:
        found = client(server.url).complete(Ask([1, 2, 3], 8, temperature=0.5, seed=1 << 40 | 7))
    assert (found.text, found.finish) == ("so", finish)
    assert found.ids == (None if kind == "openai" else [5, 6])


@pytest.mark.parametrize("kind", KINDS)
def test_no_sampler_is_left_to_the_server(kind: str) -> None:
    """llama.cpp's defaults are top-k 40, top-p .95, min-p .05; vLLM takes the model's own generation config."""
    with fake(lambda path, _: (200, answers(kind, "so", [5])) if path == PATHS[kind] else OWN_PAGES, kind) as server:
        client(server.url).complete(Ask([1, 2, 3], 8, temperature=0.5, seed=9))
        body = server.asked(PATHS[kind])[0]
    sent = body.get("sampling_params", body)
    assert sent["temperature"] == 0.5 and sent["top_p"] == 1.0
    if kind != "openai":
        assert sent["top_k"] in (0, -1) and sent["min_p"] == 0.0
        assert sent.get("repetition_penalty", sent.get("repeat_penalty")) == 1.0
    assert 9 in (sent.get("seed"), sent.get("sampling_seed"))
    assert body.get("prompt", body.get("input_ids")) == [1, 2, 3]
    if kind == "llama.cpp":
        assert body["samplers"][0] == "temperature", "top-p after the temperature, as everywhere else"


def test_a_service_of_no_known_kind_gets_text_and_refuses_what_it_does_not_know() -> None:
    with fake(lambda path, _: (200, answers("openai")) if path == "/v1/completions" else OWN_PAGES, "openai") as server:
        client(server.url).complete(Ask([1], 8, text="words"))
        assert server.asked("/v1/completions")[0]["prompt"] == "words" and "top_k" not in server.asked("/v1/completions")[0]
        with pytest.raises(DraftstillError, match="top_k"):
            client(server.url).complete(Ask([1], 8, top_k=5))


def test_chat_sends_messages_and_tools_and_knows_tool_calls() -> None:
    message: dict[str, Any] = {"content": None, "tool_calls": [{}]}
    with fake(lambda path, _: (200, {"choices": [{"message": message, "finish_reason": "tool_calls"}]}) if path.endswith("chat/completions") else OWN_PAGES,
              "openai") as server:  # fmt: skip
        chat = client(server.url, api="chat")
        found = chat.complete(Ask([1], 8, messages=[{"role": "user", "content": "x"}], tools=[{"type": "function"}]))
        body = server.asked("/v1/chat/completions")[0]
        assert body["messages"][0]["content"] == "x" and body["tools"] and found.finish == "tool_calls" and found.text == ""
        with pytest.raises(DraftstillError, match="no messages"):
            chat.complete(Ask([1], 8))


# --- when there is no answer ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [(429, {}, {"Retry-After": "7"}), (503, {"error": {"message": "Loading model"}}), (500, "oops"), None])
def test_what_may_pass_is_asked_again(first: Reply) -> None:
    waits: list[float] = []
    left: list[Reply] = [first, first]
    with fake(lambda path, _: left.pop() if left and path == "/x" else (200, {"ok": 1})) as server:
        assert client(server.url, sleep=waits.append).post("/x", {}) == {"ok": 1}
    assert len(waits) == 2
    assert waits == [7.0, 7.0] if first is not None and len(first) > 2 else 0 < waits[0] < waits[1] <= 2


def test_it_gives_up_and_tells_the_server_s_own_words() -> None:
    with fake(lambda *_: (503, {"error": {"message": "Loading model"}})) as server, pytest.raises(ServerError) as caught:
        client(server.url, key="respond.server").health()
    assert caught.value.status == 503 and caught.value.key == "respond.server.url" and caught.value.value == server.url
    assert "Loading model" in str(caught.value) and "3 attempts" in str(caught.value) and len(server.calls) == 3


def test_a_refusal_is_not_asked_again() -> None:
    with (
        fake(lambda *_: (400, {"error": {"message": "Prompt contains invalid tokens"}})) as server,
        pytest.raises(ServerError, match="invalid tokens") as caught,
    ):
        client(server.url).post("/x", {})
    assert caught.value.status == 400 and len(server.calls) == 1


def test_nobody_there_and_nobody_answering() -> None:
    with fake(lambda *_: OWN_PAGES) as server:
        url = server.url
    with pytest.raises(ServerError, match="did not answer"):
        client(url).health()
    with fake(lambda *_: time.sleep(1) or OWN_PAGES) as server, pytest.raises(ServerError, match="timed out"):  # type: ignore[func-returns-value]
        client(server.url, timeout_s=0.1, retries=0).health()


@pytest.mark.parametrize("answer", ["<html>proxy</html>", "[1]", ""])
def test_what_is_no_json_object_is_said(answer: str) -> None:
    with fake(lambda *_: (200, answer)) as server, pytest.raises(ServerError, match="JSON object"):
        client(server.url).post("/x", {})


def test_an_answer_without_a_choice_is_an_error() -> None:
    with (
        fake(lambda path, _: (200, {"choices": []}) if path == "/v1/completions" else OWN_PAGES) as server,
        pytest.raises(ServerError, match="no choice"),
    ):
        client(server.url).complete(Ask([1], 4))


def test_which_model() -> None:
    listed = {"data": [{"id": "a", "owned_by": "vllm"}, {"id": "b", "owned_by": "vllm"}]}
    with fake(lambda path, _: (200, listed) if path == "/v1/models" else OWN_PAGES) as server:
        assert client(server.url, model="b").about.model == "b"
        for model, words in ((None, "serves 2 models: a, b"), ("c", "serves a, b")):
            with pytest.raises(DraftstillError, match=words):
                _ = client(server.url, model=model).about


# --- keys -------------------------------------------------------------------------------------------------------------------------


def test_the_key_comes_from_the_environment_and_goes_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACME_KEY", "sesame")
    with fake(lambda *_: OWN_PAGES) as elsewhere, fake(lambda *_: (307, "", {"Location": elsewhere.url + "/v1/models"})) as server:
        with pytest.raises(ServerError) as caught:
            client(server.url, api_key_env="ACME_KEY").post("/x", {})
        assert server.headers[0]["Authorization"] == "Bearer sesame" and "sesame" not in str(caught.value)
        assert caught.value.status == 307 and not elsewhere.calls, "a redirect would carry the key away"
    monkeypatch.delenv("ACME_KEY")
    with pytest.raises(DraftstillError, match="not set") as missing:
        client("http://localhost:1", api_key_env="ACME_KEY", key="respond.server")
    assert missing.value.key == "respond.server.api_key_env"


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://me:secret@host", "http://host/?key=1", "http://"])
def test_addresses_that_are_none_or_hold_secrets(url: str) -> None:
    with pytest.raises(ValidationError):
        Server(url=url)


# --- many requests ----------------------------------------------------------------------------------------------------------------


def test_no_more_at_once_than_allowed_and_all_places_come_back() -> None:
    with fake(lambda *_: time.sleep(0.02) or (200, {})) as server:  # type: ignore[func-returns-value]
        asking = client(server.url)
        found = dict(each(list(range(12)), lambda n: (asking.post(f"/{n}", {}), n * n)[1], 3))
    assert found == {n: n * n for n in range(12)} and 1 < server.most_at_once <= 3


def test_after_an_error_nothing_new_is_asked_and_nothing_finished_is_lost() -> None:
    asked: list[int] = []
    started = threading.Event()

    def ask(n: int) -> int:
        asked.append(n)
        if n == 1:
            started.wait(5)
            raise ServerError("gone")
        if n == 2:
            started.set()
            time.sleep(0.1)
        return n

    got: list[int] = []
    with pytest.raises(ServerError, match="gone"):
        for place, _ in each(list(range(50)), ask, 2):
            got.append(place)
    assert set(got) == set(asked) - {1} and len(asked) < 10


def test_counters_of_a_metrics_page() -> None:
    page = (
        '# HELP x a\n# TYPE x counter\nx_total{model="a b",le="+Inf"} 3.0\nllamacpp:n 4 1700000\nvllm:e 1e3\nbad line here x\ny NaN\n'
        'z{path="/a}b"} 2\n'
    )
    found = parse_counters(page)
    assert (
        found['x_total{model="a b",le="+Inf"}'] == 3
        and found["llamacpp:n"] == 4
        and found["vllm:e"] == 1000
        and found['z{path="/a}b"}'] == 2
    )
    assert "bad line here x" not in found
