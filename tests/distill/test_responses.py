"""Responses: prompts of the right documents, whole batches, the same bytes after any stop."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from draftstill.corpus import read_documents
from draftstill.distill import encode, read_responses, respond, responses, writing
from draftstill.errors import DraftstillError
from draftstill.recipe import Respond
from draftstill.runfolder import read_json
from tests.pipeline import SETTINGS, borrowed, finished, hashes, make_tokenizer, opened

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


def test_fewer_prompts_than_asked_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = borrowed(tmp_path, "corpus", respond={"prompts": 2, "heldout_prompts": 500, "max_new_tokens": 2, "batch_size": 64})
    folder = respond(*opened(path))
    count = len(rows(folder, "heldout"))
    assert 8 <= count < 500
    assert f"respond.heldout_prompts: the validation documents hold {count} prompts, not 500" in capsys.readouterr().out
