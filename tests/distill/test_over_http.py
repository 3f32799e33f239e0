"""Responses from servers: a row that is refused costs itself, what all lose is said with its mend, and what is sent is what the protocol wants."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftstill.distill import Ask, Client, read_responses, respond, seed_of
from draftstill.distill.chats import chat_turn
from draftstill.distill.dialects import read_answer, request_of
from draftstill.distill.writing import FINISHED
from draftstill.errors import DraftstillError
from tests.distill.fake_server import Reply, fake
from tests.distill.test_responses_engines import continuation, facts, home_for, rows
from tests.pipeline import hashes, make_tokenizer, opened

KINDS = ("vllm", "sglang", "llama.cpp", "openai")
FILES = "*-0*.json"


def answered(body: Any) -> Reply:
    tokens, finish = continuation(body["prompt"])
    text = make_tokenizer().decode([t for t in tokens if t != 1])
    return 200, {"choices": [{"text": text, "token_ids": tokens, "finish_reason": finish}]}


def picky(refuses: Callable[[Any], bool], status: int = 400, words: str = "This model's maximum context length is 64 tokens") -> Any:
    """A vLLM that refuses some requests."""

    def answer(path: str, body: Any) -> Reply:
        if path != "/v1/completions":
            return 0, None
        return (status, {"error": {"message": words}}) if refuses(body) else answered(body)

    return answer


def listed(folder: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / "rejected.jsonl").read_text().splitlines()]


# --- refused rows -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_row_that_is_refused_is_dropped_and_counted(tmp_path: Path, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    unlucky = lambda body: seed_of(*body["prompt"]) % 4 == 0  # noqa: E731
    with fake(picky(lambda _: False)) as server:
        whole = respond(*opened(home_for(tmp_path / "whole", server)))
    with fake(picky(unlucky, status)) as server:
        folder = respond(*opened(home_for(tmp_path / "a", server)))
    told, kept = facts(folder), {r["prompt_id"]: r["response"] for r in rows(folder) + rows(folder, "heldout")}
    wanted = {r["prompt_id"]: r["response"] for r in rows(whole) + rows(whole, "heldout") if not unlucky({"prompt": r["prompt"]})}
    assert kept == wanted and 0 < told["dropped"] == told["finish"]["refused by the server"] == 20 - len(kept)
    assert len(listed(folder)) == told["dropped"] and all("maximum context length is 64" in r["detail"] for r in listed(folder))
    assert "maximum context length is 64" in capsys.readouterr().out


@pytest.mark.parametrize("status", [401, 404, 500])
def test_other_statuses_stop_the_stage(tmp_path: Path, status: int) -> None:
    count, lock = [0], threading.Lock()

    def later(body: Any) -> bool:
        with lock:
            count[0] += 1
            return count[0] > 6

    with fake(picky(later, status)) as server, pytest.raises(DraftstillError) as caught:
        respond(*opened(home_for(tmp_path / "a", server)))
    assert caught.value.key == "respond.server.url" and "answers of this attempt are kept" in str(caught.value)


@pytest.mark.parametrize("probe", [True, False])
def test_where_the_first_are_all_refused_nothing_is_dropped(tmp_path: Path, probe: bool) -> None:
    """The probe asks for 8 tokens; a server may refuse what is longer only."""
    refuses = lambda body: body["max_tokens"] > (0 if probe else 8)  # noqa: E731
    home = tmp_path / "a"
    with fake(picky(refuses, words="top_k is not supported")) as server:
        path = home_for(home, server, max_new_tokens=12)
        with pytest.raises(DraftstillError, match=r"refuses every request.*top_k is not supported") as caught:
            respond(*opened(path))
        assert caught.value.key == "respond.server.url" and len(server.asked("/v1/completions")) <= 5 + 3 + 1
    assert not list((home / "run").rglob("journal-*")), "nothing came, so nothing claims the folder: another sampler may take it"
    with fake(picky(lambda _: False)) as server:  # mended: the same command
        folder = respond(*opened(home_for(home, server)))
    assert facts(folder)["dropped"] == 0 and len(rows(folder)) == 16


def test_refusals_before_the_first_answer_are_kept_with_it(tmp_path: Path) -> None:
    count, lock = [0], threading.Lock()

    def first(body: Any) -> bool:
        with lock:
            count[0] += 1
            return 1 < count[0] <= 5  # behind the probe

    with fake(picky(first)) as server:
        home = home_for(tmp_path / "a", server, server={"url": server.url, "retries": 0, "concurrency": 1})
        folder = respond(*opened(home))
    assert facts(folder)["finish"]["refused by the server"] == 4 and len(rows(folder)) + len(rows(folder, "heldout")) == 16


def test_no_more_is_asked_for_than_there_is_room(tmp_path: Path) -> None:
    def answer(path: str, body: Any) -> Reply:
        if path != "/v1/completions":
            return 0, None
        if len(body["prompt"]) + body["max_tokens"] > 12:
            return 400, {"error": {"message": "too long"}}
        return 200, {
            "choices": [{"text": " ".join(["ban"] * body["max_tokens"]), "token_ids": [6] * body["max_tokens"], "finish_reason": "length"}]
        }

    ban = make_tokenizer().convert_tokens_to_ids("ban")
    assert ban == 6
    with fake(answer, context=12) as server:
        folder = respond(*opened(home_for(tmp_path / "a", server)))
        assert {b["max_tokens"] for b in server.asked("/v1/completions")} == {4}
        assert facts(folder)["finish"] == {"context": 20} and all(len(r["response"]) == 4 for r in rows(folder))
    with fake(answer, context=12) as server, pytest.raises(DraftstillError, match="ended by 'context'") as caught:
        respond(*opened(home_for(tmp_path / "b", server, truncated="drop")))
    assert caught.value.key == "respond.max_new_tokens"
    with fake(answer, context=8) as server:
        with pytest.raises(DraftstillError, match="longer than the server's context") as caught:
            respond(*opened(home_for(tmp_path / "c", server)))
        assert caught.value.key == "respond.chat_tokens" and not server.asked("/v1/completions")


# --- when nothing can be kept -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("finish", "text", "key", "mend"), [
    ("content_filter", "", "respond.server.url", "asks anew"),
    ("stop", "neverheard of", "respond.server.url", "target.source"),
    ("tool_calls", "", "respond.server.api", "completions"),
    ("reasoning set apart", "ban ban", "respond.server.api", "completions"),
])  # fmt: skip
def test_the_commonest_end_is_named_with_its_mend(tmp_path: Path, finish: str, text: str, key: str, mend: str) -> None:
    def answer(path: str, body: Any) -> Reply:
        if path not in ("/v1/completions", "/v1/chat/completions"):
            return 0, None
        message: dict[str, Any] = {"content": text}
        if finish == "tool_calls":
            message = {"content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
        elif finish == "reasoning set apart":
            message["reasoning_content"] = "bar bar"
        return 200, {"choices": [{"text": text, "message": message, "finish_reason": "stop" if "reasoning_content" in message else finish}]}

    api = "chat" if key == "respond.server.api" else "completions"
    sections: dict[str, Any] = {"chat_template": True}
    with fake(answer, "openai") as server:
        home = home_for(tmp_path / "a", server, server={"url": server.url, "retries": 0, "api": api}, **sections)
        with pytest.raises(DraftstillError, match="no response of the side 'train'") as caught:
            respond(*opened(home))
    assert caught.value.key == key and mend in str(caught.value.mend) and "16 of 16" in str(caught.value)
    if key == "respond.server.url":  # another server is asked for all of it again

        def better(path: str, body: Any) -> Reply:
            return (200, {"choices": [{"text": "ban ban", "finish_reason": "stop"}]}) if path == "/v1/completions" else (0, None)

        with fake(better, "openai") as server:
            assert len(rows(respond(*opened(home_for(tmp_path / "a", server))))) == 16


# --- the chat protocol ------------------------------------------------------------------------------------------------------------

CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"q": "é"}'}}],
}


@pytest.mark.parametrize("kind", KINDS)
def test_calls_go_out_as_the_protocol_has_them(kind: Any) -> None:
    log = [{"role": "user", "content": "Who?", "timestamp": 5}, CALL, {"role": "tool", "tool_call_id": "1", "content": "me"},
           {"role": "assistant", "content": "Let me see.", "tool_calls": [{"id": "2", "type": "function", "function": {"name": "g", "arguments": {}}}]},
           {"role": "assistant", "content": ""}]  # fmt: skip
    messages = [chat_turn(m) for m in log]
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {"q": "é"}, "templates want objects"
    sent = request_of(kind, "m", "chat", Ask([1], 4, messages=messages), "respond.server")[1]["messages"]
    assert sent[1]["tool_calls"][0]["function"]["arguments"] == '{"q": "é"}' and sent[1]["content"] is None
    assert sent[3]["tool_calls"][0]["function"]["arguments"] == "{}" and sent[3]["content"] == "Let me see."
    assert sent[4]["content"] == "" and sent[2] == messages[2]
    assert ("timestamp" in sent[0]) == (kind != "openai")
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {"q": "é"}, "the prompt itself stays as it was"


def test_vllm_gives_ids_over_chat_and_a_call_with_ids_is_kept(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()

    def answer(path: str, body: Any) -> Reply:
        if path != "/v1/chat/completions":
            return 0, None
        assert body["return_token_ids"] is True
        call = seed_of(json.dumps(body["messages"])) % 2
        message = {"content": None, "tool_calls": [{}]} if call else {"content": tokenizer.decode([8, 9])}
        return 200, {
            "choices": [
                {"message": message, "token_ids": [7, 6, 1] if call else [8, 9, 1], "finish_reason": "tool_calls" if call else "stop"}
            ]
        }

    with fake(answer) as server:
        home = home_for(tmp_path / "a", server, chat_template=True, server={"url": server.url, "retries": 0, "api": "chat"})
        folder = respond(*opened(home))
    assert {tuple(r["response"]) for r in rows(folder)} == {(7, 6, 1), (8, 9, 1)} and facts(folder)["finish"] == {"eos": 20}
    assert facts(folder)["server"]["retokenised"] == 0
    bad = {"choices": [{"message": {"content": "ban bar"}, "token_ids": [50, 51], "finish_reason": "stop"}]}
    with fake(lambda path, _: (200, bad) if path.endswith("completions") else (0, None)) as server:
        home = home_for(tmp_path / "b", server, chat_template=True, server={"url": server.url, "retries": 0, "api": "chat"})
        with pytest.raises(DraftstillError, match="token ids are not the target's"):
            respond(*opened(home))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reason", ["stop", "length"])
@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_an_answer_without_its_reasoning_is_none(name: str, reason: str, kind: Any) -> None:
    """Without ids nobody knows how the target wrote what the server sets apart; taken as it is, the answer would stand straight behind the prompt."""

    def finish(message: dict[str, Any], **more: Any) -> str:
        found = read_answer(kind, "chat", {"choices": [{"message": message, "finish_reason": reason, **more}]})
        assert found is not None
        return found.finish

    plain = {"stop": "eos", "length": "length"}[reason]
    assert finish({"content": "ban", name: "ber ber"}) == finish({"content": None, name: "ber ber"}) == "reasoning set apart"
    assert finish({"content": "ban", name: "ber ber"}, token_ids=[6, 7]) == plain, "the ids hold it"
    assert finish({"content": "ban", name: ""}) == finish({"content": "ban", name: None}) == finish({"content": "ban"}) == plain


def test_an_answer_in_parts_is_no_text() -> None:
    parts = [{"type": "thinking", "thinking": "ber"}, {"type": "text", "text": "ban"}]
    found = read_answer("openai", "chat", {"choices": [{"message": {"content": parts}, "finish_reason": "stop"}]})
    assert found is not None and found.text == "" and found.finish not in FINISHED


def test_rows_without_their_reasoning_are_dropped_and_counted(tmp_path: Path) -> None:
    def answer(path: str, body: Any) -> Reply:
        if path != "/v1/chat/completions":
            return 0, None
        apart = {"reasoning_content": "ber ber"} if seed_of(json.dumps(body["messages"])) % 2 else {}
        return 200, {"choices": [{"message": {"content": "ban ban", **apart}, "finish_reason": "stop"}]}

    with fake(answer, "openai") as server:
        folder = respond(
            *opened(home_for(tmp_path / "a", server, chat_template=True, server={"url": server.url, "retries": 0, "api": "chat"}))
        )
    told = facts(folder)
    assert 0 < told["dropped"] == told["finish"]["reasoning set apart"] == 20 - told["finish"]["eos"] < 20


def test_a_service_of_text_gets_it_without_the_opening(tmp_path: Path) -> None:
    """Such a service sets the BOS itself; told twice, it would answer another prompt."""
    from tokenizers.processors import TemplateProcessing

    with fake(
        lambda path, _: (200, {"choices": [{"text": "ban ban", "finish_reason": "stop"}]}) if path == "/v1/completions" else (0, None),
        "openai",
    ) as server:
        home = home_for(tmp_path / "a", server)
        tokenizer = make_tokenizer()
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<user> $A", special_tokens=[("<user>", 2)])
        tokenizer.save_pretrained(home.parent / "target")
        folder = respond(*opened(home))
        asked = {b["prompt"] for b in server.asked("/v1/completions")}
    assert all(r["prompt"][0] == 2 for r in rows(folder)) and asked and not any("<user>" in text for text in asked)
    assert {tokenizer.decode(r["prompt"][1:]) for r in rows(folder)} <= asked


# --- another server ---------------------------------------------------------------------------------------------------------------


def dying(after: int) -> Callable[[str, Any], Reply]:
    count, lock = [0], threading.Lock()

    def answer(path: str, body: Any) -> Reply:
        if path != "/v1/completions":
            return 0, None
        with lock:
            count[0] += 1
            if count[0] > after:
                return None
        return answered(body)

    return answer


def under(name: str, version: str, answer: Callable[[str, Any], Reply]) -> Callable[[str, Any], Reply]:
    """The same server with a model and version of its own."""
    pages: dict[str, Any] = {
        "/v1/models": {"data": [{"id": name, "owned_by": "vllm", "max_model_len": 512}]},
        "/version": {"version": version},
    }
    return lambda path, body: (200, pages[path]) if path in pages else answer(path, body)


def test_who_goes_on_is_compared_with_who_began(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fake(picky(lambda _: False)) as server:
        whole = respond(*opened(home_for(tmp_path / "whole", server)))
    home = tmp_path / "a"
    with fake(under("m", "1.0", dying(8))) as server, pytest.raises(DraftstillError, match="answers of this attempt are kept"):
        respond(*opened(home_for(home, server)))
    with fake(under("other", "1.0", picky(lambda _: False))) as server:
        with pytest.raises(DraftstillError, match="begun with the model 'm', and this server has 'other'") as caught:
            respond(*opened(home_for(home, server)))
        assert caught.value.key == "respond.server.model" and not server.asked("/v1/completions")
    capsys.readouterr()
    with fake(under("m", "2.0", picky(lambda _: False))) as server:
        folder = respond(*opened(home_for(home, server)))
    assert "begun by vllm 1.0, and go on by vllm 2.0" in capsys.readouterr().out
    assert hashes(folder, FILES) == hashes(whole, FILES) and list(read_responses(folder, "train"))


def test_what_a_refusal_says_has_no_mend_of_a_dead_server() -> None:
    for status in (400, 413, 422):
        with fake(lambda *_, status=status: (status, {"error": {"message": "no"}})) as server, pytest.raises(DraftstillError) as caught:  # type: ignore[misc]
            Client(server.url, retries=0).post("/x", {})
        assert "is the server up" not in str(caught.value)
