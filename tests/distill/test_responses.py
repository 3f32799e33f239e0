"""Responses: prompts of the right documents, whole batches, the same bytes after any stop."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from draftstill.corpus import read_documents
from draftstill.distill import encode, read_responses, respond, responses, writing
from draftstill.errors import DraftstillError
from draftstill.recipe import Respond
from draftstill.runfolder import read_json
from tests.pipeline import SETTINGS, borrowed, finished, hashes, make_target, make_tokenizer, opened, write_recipe
from tests.pipeline import words as make_words

SIDES = {"train": "train", "heldout": "validation"}


@pytest.fixture(scope="module")
def done() -> Path:
    return finished() / "run"


def rows(folder: Path, side: str) -> list[dict[str, Any]]:
    return list(read_responses(folder, side))


@pytest.mark.parametrize("stop", [1, 3])
def test_stopped_and_started_again_gives_the_same_bytes(stop: int, done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = borrowed(tmp_path, "corpus")
    written: list[str] = []
    real = writing.write_json

    def counted(place: Path, value: Any) -> None:
        if len(written) == stop:
            raise KeyboardInterrupt
        written.append(place.name)
        real(place, value)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(writing, "write_json", counted)
        respond(*opened(path))
    work = tmp_path / "run" / "responses.partial"
    kept = {p.name: p.stat().st_mtime_ns for p in work.glob("*-0*.json")}
    assert len(kept) == stop
    folder = respond(*opened(path))
    assert {n: (folder / n).stat().st_mtime_ns for n in kept} == kept, "whole batches are not written again"
    assert hashes(folder, "*-0*.json") == hashes(done / "responses", "*-0*.json")
    facts, whole = (read_json(f / "provenance.json")["facts"] for f in (folder, done / "responses"))
    assert {k: facts[k] for k in ("prompts", "tokens", "finish")} == {k: whole[k] for k in ("prompts", "tokens", "finish")}


def test_a_row_does_not_depend_on_its_batch(done: Path, tmp_path: Path) -> None:
    folder = respond(*opened(borrowed(tmp_path, "corpus", respond={"batch_size": 1})))
    for side in SIDES:
        assert rows(folder, side) == rows(done / "responses", side)


def test_finish_reasons_and_tokens_are_counted(done: Path) -> None:
    facts = read_json(done / "responses" / "provenance.json")["facts"]
    every = [r for side in SIDES for r in rows(done / "responses", side)]
    assert facts["finish"] == dict(Counter(r["finish"] for r in every)) and facts["tokens"] == sum(len(r["response"]) for r in every)
    assert set(facts["finish"]) == {"eos", "length"}, "the tiny target should show both"
    assert facts["prompts"] == {"train": 16, "heldout": 6}
    limit = SETTINGS["respond"]["max_new_tokens"]
    for row in every:
        response = row["response"]
        assert (response[-1] == 1) == (row["finish"] == "eos") and 1 not in response[:-1] and max(response) < 200
        assert len(response) == limit if row["finish"] == "length" else len(response) <= limit
        assert row["supervised_from"] == 0 and len(row["prompt"]) == 8


def test_prompts_never_overlap_and_stay_on_their_side(done: Path) -> None:
    tokenizer = make_tokenizer()
    for side, split in SIDES.items():
        documents = {d.id: d for d in read_documents(done / "corpus", split)}
        every = responses.cut_prompts(list(documents.values()), 1000, Respond(prompt_tokens=8), tokenizer, 0)
        known = {p.id: p.ids for p in every}
        assert all(known[r["prompt_id"]] == r["prompt"] for r in rows(done / "responses", side))
        places: dict[str, list[int]] = {}
        for prompt in every:
            name, at = prompt.id.rsplit("@", 1)
            assert encode(tokenizer, documents[name].text[int(at) :])[:8] == prompt.ids
            places.setdefault(name, []).append(int(at))
        assert max(map(len, places.values())) > 1
        for name, starts in places.items():
            starts.sort()
            ends = [at + len(" ".join(documents[name].text[at:].split()[:8])) for at in starts]
            assert all(end <= following for end, following in zip(ends, starts[1:], strict=False)), name


def test_every_document_gives_its_opening_first(done: Path) -> None:
    documents = read_documents(done / "corpus", "train")
    found = responses.cut_prompts(documents, 1000, Respond(prompt_tokens=8), make_tokenizer(), 0)
    assert [p.id.rsplit("@", 1)[1] for p in found[: len(documents)]] == ["0"] * len(documents)
    assert len(found) > len(documents) and len({p.id for p in found}) == len(found)
    few = responses.cut_prompts(documents, 5, Respond(prompt_tokens=8), make_tokenizer(), 0)
    assert few == found[:5], "asking for more only adds"


def test_behind_a_chat_template_only_the_answer_is_learnt_from(tmp_path: Path) -> None:
    folder = respond(*opened(borrowed(tmp_path, "corpus", respond={"chat_template": True, "prompts": 3, "heldout_prompts": 1})))
    user, assistant = make_tokenizer().convert_tokens_to_ids(["<user>", "<assistant>"])
    for row in rows(folder, "train"):
        prompt = row["prompt"]
        assert prompt[0] == user and prompt[-2] == assistant and len(prompt) == 8 + 3
        assert row["supervised_from"] == len(prompt) - 1, "the last prompt position predicts the first written token"


def test_a_base_model_has_no_chat_template() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    documents = read_documents(finished() / "run" / "corpus", "train")
    with pytest.raises(DraftstillError) as caught:
        responses.cut_prompts(documents, 1, Respond(chat_template=True, prompt_tokens=8), tokenizer, 0)
    assert caught.value.key == "respond.chat_template" and "false" in str(caught.value)


def test_documents_shorter_than_a_prompt(tmp_path: Path) -> None:
    path = borrowed(tmp_path, "corpus", respond={"prompt_tokens": 200})
    with pytest.raises(DraftstillError) as caught:
        respond(*opened(path))
    assert caught.value.key == "respond.prompt_tokens" and caught.value.value == 200
    # Mended as the message says, the same folder goes through.
    assert respond(*opened(path, "respond.prompt_tokens=8")).exists()


def refusing(home: Path, words: str, **respond: Any) -> Path:
    """A home whose corpus is conversations, and whose template takes those of some words only."""
    (home / "texts").mkdir(parents=True)
    rng = random.Random(0)
    spoken = [" ".join(rng.choices(make_words()[6:], k=20)) for _ in range(60)]
    turns = ([{"role": "system", "content": "kind"}, {"role": "user", "content": text}] for text in spoken)
    (home / "texts" / "chats.jsonl").write_text("".join(json.dumps({"messages": m}) + "\n" for m in turns))
    make_target(home / "target")
    tokenizer = make_tokenizer()
    tokenizer.chat_template = words
    tokenizer.save_pretrained(home / "target")
    return write_recipe(home, corpus={"heldout_fraction": 0.4, "min_chars": 1}, respond=respond)


def test_where_the_template_takes_nothing_its_words_are_said_and_listed(tmp_path: Path) -> None:
    path = refusing(tmp_path / "a", "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}")
    with pytest.raises(DraftstillError, match=r"refused by the chat template; the first: .*System role not supported") as caught:
        respond(*opened(path))
    listing = tmp_path / "a" / "run" / "responses.partial" / "rejected.jsonl"
    assert (caught.value.key, caught.value.value) == ("corpus.source", str(tmp_path / "a" / "texts")) and str(listing) in str(
        caught.value.mend
    )
    rows = [json.loads(line) for line in listing.read_text().splitlines()]
    assert rows and all("System role not supported" in row["detail"] for row in rows)
    # Mended by the template alone: the stage is another one, and what lies there claims nothing.
    make_tokenizer().save_pretrained(tmp_path / "a" / "target")
    folder = respond(*opened(path, "respond.max_new_tokens=2"))
    assert not (folder / "rejected.jsonl").exists()


def test_where_all_conversations_are_too_long_their_limit_is_named(tmp_path: Path) -> None:
    path = refusing(tmp_path / "a", make_tokenizer().chat_template, chat_tokens=5)
    with pytest.raises(DraftstillError, match="longer than a prompt may be; the first: .*5 are allowed") as caught:
        respond(*opened(path))
    assert caught.value.key == "respond.chat_tokens" and caught.value.value == 5 and "context" in str(caught.value.mend)


def test_where_the_target_invents_nothing_the_kind_is_named(tmp_path: Path) -> None:
    synthetic = {"passage_tokens": 8, "instruction_tokens": 1, "ask": "{passage}"}
    path = borrowed(tmp_path, "corpus", respond={"prompts": 4, "shares": {"synthetic": 1.0}, "synthetic": synthetic})
    with pytest.raises(DraftstillError, match="no prompt could be made of the train documents") as caught:
        respond(*opened(path))
    assert caught.value.key == "respond.shares" and (tmp_path / "run" / "responses.partial" / "rejected.jsonl").exists()


@pytest.mark.parametrize(("keys", "key", "value"), [
    ({"prompt_tokens": 256}, "respond.prompt_tokens", 256),
    ({"prompt_tokens": 254, "chat_template": True}, "respond.prompt_tokens", 254),
    ({"shares": {"synthetic": 1.0, "cut": 1.0}, "prompt_tokens": 256}, "respond.prompt_tokens", 256),
    ({"shares": {"synthetic": 1.0}, "synthetic": {"passage_tokens": 250, "ask": "ban ber bin {passage} bist"}}, "respond.synthetic.passage_tokens", 250),
])  # fmt: skip
def test_prompts_that_the_target_s_context_does_not_hold_are_refused_before_anything_is_decoded(
    keys: dict[str, Any], key: str, value: int, tmp_path: Path
) -> None:
    (tmp_path / "long").mkdir()
    for n in range(12):
        known = make_words()[6:]
        (tmp_path / "long" / f"{n}.txt").write_text(" ".join(known[(n * 7 + i * (n + 1)) % len(known)] for i in range(700)) + "\n")
    path = borrowed(tmp_path, respond={"prompts": 4, "heldout_prompts": 2, **keys})
    with pytest.raises(DraftstillError, match="holds 256") as caught:
        respond(*opened(path, f"corpus.source={tmp_path / 'long'}"))
    assert caught.value.key == key and caught.value.value == value and "lower it" in str(caught.value.mend)
    assert not list((tmp_path / "run" / "responses.partial").glob("*-0*.json")), "nothing was decoded"


def test_fewer_prompts_than_asked_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = borrowed(tmp_path, "corpus", respond={"prompts": 2, "heldout_prompts": 500, "max_new_tokens": 2, "batch_size": 64})
    folder = respond(*opened(path))
    count = len(rows(folder, "heldout"))
    assert 8 <= count < 500
    assert f"respond.heldout_prompts: the validation documents hold {count} prompts, not 500" in capsys.readouterr().out
