"""What the sources yield: ends that ``ce`` learns from, prompts of the responses' own, and no more of the corpus in memory than is recorded."""

from __future__ import annotations

from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftstill.corpus import read_documents
from draftstill.decode import Network
from draftstill.distill import Recording, TopK, cut_prompts, encode, inspecting, read_responses, replay, score_texts, seed_of, sources
from draftstill.distill.ranks import Ranks
from draftstill.distill.shards import write_manifest
from draftstill.distill.sources import Materials, Text, cut_off, documents, gather, responses
from draftstill.distill.weights import runs
from draftstill.errors import DraftstillError
from draftstill.recipe_io import load_recipe
from draftstill.train.data import collate
from tests.pipeline import REAL, finished, make_model, make_tokenizer

EOS = 1


def materials(work: Path, *overrides: str) -> Materials:
    """Of the finished run."""
    run = finished() / "run"
    recipe = load_recipe(finished() / "recipe.yaml", overrides)
    target = SimpleNamespace(tokenizer=make_tokenizer(), config=make_model().config)
    return Materials(recipe, target, run / "corpus", run / "responses", work, Ranks())  # type: ignore[arg-type]


# --- ends -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "ended", "kept", "after"), [
    (9, False, [5, 6, 7, EOS], -1), (9, True, [5, 6, 7], EOS), (4, True, [5, 6, 7], EOS), (3, True, [5, 6, 7], EOS), (3, False, [5, 6, 7], EOS),
    (2, True, [5, 6], 7), (2, False, [5, 6], 7),
])  # fmt: skip
def test_what_stands_behind_a_cut(length: int, ended: bool, kept: list[int], after: int) -> None:
    ids, behind = cut_off([5, 6, 7, EOS], length, ended=ended)
    assert (list(ids), behind) == (kept, after) and isinstance(ids, array)


@pytest.mark.parametrize("length", [48, 12])
@pytest.mark.parametrize("side", ["train", "heldout"])
def test_every_written_token_behind_a_recorded_position_is_known(side: str, length: int, tmp_path: Path) -> None:
    """Of responses the end, too, and of cut ones the token at the cut; no text grows by it."""
    found = list(responses(materials(tmp_path, f"record.sequence_length={length}"), side))
    rows = list(read_responses(finished() / "run" / "responses", side))
    assert len(found) == len(rows) and (side == "heldout" or any(r["finish"] == "eos" for r in rows))
    for text, row in zip(found, rows, strict=True):
        whole, end = [*row["prompt"], *row["response"]], row["finish"] == "eos"
        assert list(text.ids) == whole[: min(length, len(whole) - end)]
        assert text.after == (whole[len(text.ids)] if len(text.ids) < len(whole) else -1)
        assert (text.after == EOS) == (end and len(whole) - 1 <= length)


def test_the_end_gets_to_the_loss_and_into_no_state(tmp_path: Path) -> None:
    recording = Recording(finished() / "run" / "recording" / "train")
    ends = [i for i in range(len(recording)) if recording[i].after == EOS]
    assert len(ends) == sum(r["finish"] == "eos" for r in read_responses(finished() / "run" / "responses", "train")) > 0
    batch = collate(recording, ends)
    assert batch.teacher.token_N is not None and batch.place_N is not None
    last = torch.cat([batch.place_N[1:] == 0, torch.tensor([True])])
    assert (batch.teacher.token_N[last] == EOS).all() and (batch.teacher.token_N >= 0).all()
    assert batch.tokens == sum(recording.supervised(i) for i in ends) == sum(recording.length(i) for i in ends)
    assert EOS not in torch.cat([recording[i].tokens for i in ends]).tolist()
    assert len(runs(batch.rows_N, batch.place_N)) == batch.tokens


def test_documents_go_on_where_they_are_cut(tmp_path: Path) -> None:
    bodies = [encode(make_tokenizer(), d.text) for d in read_documents(finished() / "run" / "corpus", "train")]
    texts = list(documents(materials(tmp_path)))
    assert any(t.after >= 0 for t in texts) and any(t.after == -1 for t in texts)
    for text in texts:
        ids = list(text.ids)
        places = [(body, at) for body in bodies for at in range(len(body) - len(ids) + 1) if body[at : at + len(ids)] == ids]
        assert any((body[at + len(ids)] if at + len(ids) < len(body) else -1) == text.after for body, at in places)


@pytest.mark.parametrize("mode", ["topk", "text"])
def test_a_recording_of_text_alone_holds_its_ends_as_before(mode: str, tmp_path: Path) -> None:
    found = gather(materials(tmp_path, f"record.mode={mode}", "train.loss.name=ce", "record.document_tokens=0"))
    rows = list(read_responses(finished() / "run" / "responses", "train"))
    whole = sorted([*r["prompt"], *r["response"]][:48] for r in rows)
    if mode == "text":
        assert sorted(list(t.ids) for t in found) == whole
        assert all(list(t.supervised) == list(range(len(t.ids) - 1)) and t.after == -1 for t in found)
    else:
        assert sorted([*t.ids, *([EOS] if t.after == EOS else [])] for t in found) == whole


# --- documents --------------------------------------------------------------------------------------------------------------------


def whole_corpus(wanted: int, length: int) -> list[list[int]]:
    """The pieces by tokenising everything first."""
    tokenizer, pieces = make_tokenizer(), []
    for document in read_documents(finished() / "run" / "corpus", "train"):
        ids = encode(tokenizer, document.text)
        pieces += [(seed_of(0, "piece", document.id, at), ids[at : at + length]) for at in range(0, len(ids), length)]
    texts, taken = [], 0
    for _, piece in sorted((p for p in pieces if len(p[1]) >= 32), key=lambda p: p[0]):
        if taken < wanted and len(piece[: wanted - taken]) >= 2:
            texts.append(piece[: wanted - taken])
        taken += len(piece)
    return texts


@pytest.mark.parametrize("spare", [1, 8])
@pytest.mark.parametrize("wanted", [1, 2, 33, 400, 1200, 10**6])
@pytest.mark.parametrize("length", [48, 33, 31])
def test_the_same_pieces_as_of_the_whole_corpus(
    wanted: int, length: int, spare: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_SPARE", spare)
    found = list(documents(materials(tmp_path, f"record.document_tokens={wanted}", f"record.sequence_length={length}")))
    assert [list(t.ids) for t in found] == whole_corpus(wanted, length)
    assert all(isinstance(t.ids, array) for t in found)


def test_only_documents_that_pieces_come_from_are_tokenised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(sources, "encode", lambda tokenizer, text: seen.append(text) or encode(tokenizer, text))
    assert list(documents(materials(tmp_path, "record.document_tokens=20")))
    assert 0 < len(seen) < len(read_documents(finished() / "run" / "corpus", "train")) / 2


# --- prompts of rollouts and replays ----------------------------------------------------------------------------------------------


def test_rollouts_and_replays_continue_the_responses_own_prompts(tmp_path: Path) -> None:
    rows = list(read_responses(finished() / "run" / "responses", "train"))
    for count in (3, 16, 50):
        found = replay._prompts(materials(tmp_path), count)
        assert [(p.id, p.ids, p.supervised_from) for p in found] == [
            (r["prompt_id"], r["prompt"], r["supervised_from"]) for r in rows[:count]
        ]
    bare = materials(tmp_path, "respond.prompts=0")
    assert replay._prompts(bare, 5) == cut_prompts(read_documents(bare.corpus, "train"), 5, bare.recipe.respond, make_tokenizer(), 0)
    bare.target.config.max_position_embeddings = 8
    with pytest.raises(DraftstillError, match="holds 8") as caught:
        replay._prompts(bare, 5)
    assert caught.value.key == "respond.prompt_tokens" and caught.value.value == 8


def test_fewer_prompts_than_asked_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def decode(decoder: Any, prompts: Any, recipe: Any, kind: str) -> list[dict[str, Any]]:
        return [{"tokens": [7, EOS], "finish": "eos", "rejected": [len(p.ids)]} for p in prompts]

    monkeypatch.setattr(replay, "_decoder", lambda *_: None)
    monkeypatch.setattr(replay, "_decode", decode)
    for kind, source in (("rollouts", replay.rollouts), ("replays", replay.rejections)):
        given = materials(tmp_path, f"record.{kind}=20", "record.draft={source: x}")
        found = list(source(given))
        assert len(found) == 16 and all(t.ids[-1] == 7 and t.after == EOS for t in found)
        assert f"record.{kind}: there are 16 training prompts, not 20" in capsys.readouterr().out


# --- inspect ------------------------------------------------------------------------------------------------------------------------


def test_tails_are_told_as_if_all_were_in_memory(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    texts = [Text(torch.randint(REAL, (n,), generator=generator).tolist(), start=n // 3) for n in (40, 23, 31, 9, 12)]
    score_texts(texts, TopK(Network(make_model(), vocab=REAL), 8, 1.0, 0.9, 8), tmp_path, 2, 2, "test")
    write_manifest(tmp_path, {"mode": "topk", "vocab": REAL, "top_k": 8})
    recording = Recording(tmp_path)
    columns = [recording.columns(n) for n in range(recording.shards)]
    tails = torch.cat([c["tail"][c["count"] > 0] for c in columns]).double()
    counts = torch.cat([c["count"][c["count"] > 0] for c in columns]).double()
    shown = dict(inspecting._tails(recording))
    assert shown["kept ids"] == f"mean {counts.mean():.1f} a position, 8 at most"
    mean, ninth, largest = (float(part.split()[-1]) for part in shown["tail mass"].split(","))
    assert mean == pytest.approx(float(tails.mean()), abs=1e-4) and largest == pytest.approx(float(tails.max()), abs=1e-4)
    assert ninth == pytest.approx(float(tails.kthvalue(round(0.9 * len(tails))).values), abs=1e-4)
