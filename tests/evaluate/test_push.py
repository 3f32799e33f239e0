"""Sending a folder through huggingface_hub to a loopback stand-in of the Hub's API (tests/evaluate/hub.py), which is not the Hub."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from draftstill.errors import DraftstillError
from draftstill.evaluate import pushing
from tests.evaluate.hub import TOKEN, StandIn
from tests.evaluate.published import Run

REPO = "jo/contracts-draft"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    import huggingface_hub

    stand_in = StandIn()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", stand_in.url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pushing, "PAUSE", 0.01)
    huggingface_hub.close_session()
    yield stand_in
    huggingface_hub.close_session()
    stand_in.close()


@pytest.fixture
def sent(run: Run, hub: StandIn) -> Run:
    run.keys = {"repo_id": REPO}
    return run


def test_a_private_repository_gets_the_folder_in_one_commit(sent: Run, hub: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    folder = sent.publish(push=True)
    assert hub.repos[REPO]["private"] and len(hub.repos[REPO]["commits"]) == 2
    oid, files = hub.head(REPO)
    assert files == {p.name: p.read_bytes() for p in folder.iterdir()}
    told = capsys.readouterr().out
    assert oid[:12] in told and "vllm serve" in told and REPO in (folder / "README.md").read_text()
    # A second push finds nothing new: no commit, no byte of the weights again.
    puts = [p for m, p in hub.asked if m == "PUT"]
    sent.publish(push=True)
    assert len(hub.repos[REPO]["commits"]) == 2 and [p for m, p in hub.asked if m == "PUT"] == puts


def test_public_only_when_asked(sent: Run, hub: StandIn) -> None:
    sent.keys["private"] = False
    sent.publish(push=True)
    assert not hub.repos[REPO]["private"]


def test_tag_and_collection(sent: Run, hub: StandIn) -> None:
    sent.keys |= {"tag": "v1", "collection": "Contract drafts"}
    sent.publish(push=True)
    assert hub.repos[REPO]["tags"] == {"v1": hub.head(REPO)[0]}
    (slug, made), *_ = hub.collections.items()
    assert made["private"] and [i["id"] for i in made["items"]] == [REPO] and slug.startswith("jo/contract-drafts")
    sent.keys |= {"tag": "v2", "collection": slug}
    sent.publish(push=True)
    assert set(hub.repos[REPO]["tags"]) == {"v1", "v2"} and len(hub.collections) == 1
    with pytest.raises(DraftstillError, match="the tag or name is taken"):
        sent.publish(push=True)


def test_a_pull_request_leaves_main_alone(sent: Run, hub: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    hub.add(REPO, files={"README.md": b"old"})
    sent.keys["pull_request"] = True
    sent.publish(push=True)
    assert hub.head(REPO)[1] == {"README.md": b"old"} and "model.safetensors" in hub.repos[REPO]["requests"][0]
    assert "discussions/1" in capsys.readouterr().out
    sent.keys["tag"] = "v1"
    with pytest.raises(ValueError, match="exclude each other"):
        sent.recipe()


def test_weights_of_an_earlier_publication_are_taken_away_and_other_files_kept(sent: Run, hub: StandIn) -> None:
    old = {"model-00001-of-00002.safetensors": b"1", "model.safetensors.index.json": b"2", "draft-q8_0.gguf": b"3", "LICENSE": b"4"}
    hub.add(REPO, files=old)
    folder = sent.publish(push=True)
    assert set(hub.head(REPO)[1]) == {*(p.name for p in folder.iterdir()), "LICENSE"}


def test_a_commit_in_the_meantime_stops_it(sent: Run, hub: StandIn) -> None:
    hub.add(REPO)

    def meanwhile(method: str, path: str) -> None:
        if "/commit/" in path:
            hub._commit(hub.repos[REPO], {"theirs.txt": b"x"})

    hub.before = meanwhile  # type: ignore[assignment]
    with pytest.raises(DraftstillError, match="someone else committed in the meantime"):
        sent.publish(push=True)
    assert hub.head(REPO)[1] == {"theirs.txt": b"x"}


def test_a_busy_hub_is_asked_again_and_sends_nothing_twice(sent: Run, hub: StandIn) -> None:
    failed: list[str] = []

    def busy(method: str, path: str) -> tuple[int, Any] | None:
        if "/commit/" in path and len(failed) < 2:
            failed.append(path)
            return 503, {"error": "busy"}
        return None

    hub.before = busy
    sent.publish(push=True)
    assert len(failed) == 2 and len(hub.repos[REPO]["commits"]) == 2
    assert len([p for m, p in hub.asked if m == "PUT"]) == 1, "the weights went twice"


def test_a_lost_answer_is_no_second_commit(sent: Run, hub: StandIn) -> None:
    lost: list[str] = []
    reply = hub.reply

    def losing(method: str, path: str, body: bytes, headers: Any) -> tuple[int, Any]:
        answer = reply(method, path, body, headers)
        if "/commit/" in path and not lost:
            lost.append(path)
            return 504, {"error": "gateway"}
        return answer

    hub.reply = losing  # type: ignore[method-assign]
    sent.publish(push=True)
    assert lost and len(hub.repos[REPO]["commits"]) == 2


def test_it_gives_up_in_the_end_and_names_the_repository(sent: Run, hub: StandIn) -> None:
    hub.before = lambda method, path: (503, {"error": "busy"}) if "/commit/" in path else None
    with pytest.raises(DraftstillError, match="the Hub refused") as caught:
        sent.publish(push=True)
    assert REPO in str(caught.value)


def test_without_a_login_it_names_the_command(sent: Run, hub: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    with pytest.raises(DraftstillError, match="hf auth login"):
        sent.publish(push=True)


@pytest.mark.parametrize(
    ("keys", "licence", "message"),
    [
        ({}, "apache-2.0", "publish.repo_id"),
        ({"repo_id": "jo/d"}, None, "publish.license"),
        ({"repo_id": "jo/d"}, "llama3.1", "begins with 'Llama'"),
        ({"repo_id": "jo/Llama-d", "license": "mit"}, "llama3.1", "given out under the Llama licence"),
        ({"repo_id": "jo/d"}, "gemma", "set publish.license: gemma"),
        ({"repo_id": "jo/d", "license": "apache-2.0"}, "gemma", "Gemma's terms"),
        ({"repo_id": "jo/d"}, "cc-by-nc-4.0", "may bind what is made with it"),
        ({"repo_id": "jo/d", "license": "mit"}, "other", "may bind what is made with it"),
    ],
)
def test_what_must_be_decided_stops_the_push_before_anything_is_asked(
    run: Run, hub: StandIn, keys: dict[str, str], licence: str | None, message: str
) -> None:
    run.keys, run.score["target"]["licence"] = keys, licence
    with pytest.raises(DraftstillError, match=re.escape(message)):
        run.publish(push=True)
    assert not hub.asked


@pytest.mark.parametrize(
    ("source", "keys"),
    [
        ("meta-llama/Llama-3.1-8B", {"repo_id": "jo/d", "license": "llama3.1"}),
        ("google/gemma-3-1b-it", {"repo_id": "jo/d", "license": "mit"}),
    ],
)
def test_a_family_is_known_by_its_name_where_the_licence_is_unknown(run: Run, hub: StandIn, source: str, keys: dict[str, str]) -> None:
    run.keys, run.score["target"]["licence"] = keys, None
    run.score["target"]["source"] = run.score["target"]["name"] = source
    with pytest.raises(DraftstillError, match="Llama|Gemma"):
        run.publish(push=True)


def test_decided_licences_pass(run: Run, hub: StandIn) -> None:
    run.score["target"]["licence"] = "gemma"
    run.keys = {"repo_id": "jo/d", "license": "gemma"}
    run.publish(push=True)
    assert "jo/d" in hub.repos


def test_a_draft_that_started_elsewhere_needs_the_users_word_on_its_licence(run: Run, hub: StandIn) -> None:
    run.options, run.keys = {"draft": {"source": "jo/some-model"}}, {"repo_id": "jo/d"}
    with pytest.raises(DraftstillError, match="publish.license"):
        run.publish(push=True)


def test_an_existing_public_repository_is_not_used_for_a_private_draft(sent: Run, hub: StandIn) -> None:
    hub.add(REPO, private=False)
    with pytest.raises(DraftstillError, match="exists and is public"):
        sent.publish(push=True)
    assert len(hub.repos[REPO]["commits"]) == 1


def test_a_dry_run_asks_nothing(sent: Run, hub: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    sent.publish(dry_run=True)
    assert not hub.asked and f"would send these files to {REPO} (private)" in capsys.readouterr().out
