"""Sources of states: shares, rollouts of a draft, replay of exactly the rejected positions; recording by many ranks and elsewhere."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from draftstill.decode import Decoder, ModelDrafter, Network, Request, Sampling
from draftstill.decode.trace import Round, Trace
from draftstill.distill import Recording, Text, inspect, read_responses, record, recorder, seed_of
from draftstill.distill.replay import rejected
from draftstill.distill.shards import write_manifest
from draftstill.distill.sources import bucketed, describe, in_shares
from draftstill.errors import DraftstillError
from draftstill.recipe_io import load_recipe
from draftstill.runfolder import read_json
from draftstill.train.data import collate
from tests.pipeline import REAL, borrowed, environment, finished, hashes, make_model, make_target, make_tokenizer, opened

GAMMA = 3
MIXED: dict[str, Any] = {"rollouts": 7, "replays": 9, "replay_gamma": GAMMA, "document_tokens": 400}


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target, disturbed: sometimes right."""
    from draftstill.sources import quiet_transformers

    folder = tmp_path_factory.mktemp("draft")
    model = disturbed()
    with quiet_transformers():
        model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def disturbed() -> Any:
    model = make_model()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * 0.05 * p.std())
    return model


@pytest.fixture(scope="module")
def mixed(draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of every kind of text."""
    home = tmp_path_factory.mktemp("mixed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "2")  # as many threads as each of two processes has: sums are split by threads
        return record(*opened(borrowed(home, "corpus", "responses", record=MIXED | {"draft": {"source": str(draft)}})))


# --- replay -----------------------------------------------------------------------------------------------------------------


def test_a_rejection_lies_before_the_corrected_token() -> None:
    rounds = [Round("model", 3, 1, 2), Round("model", 2, 2, 3), Round("none", 0, 0, 1), Round("model", 3, 0, 1), Round("model", 2, 2, 2)]
    trace = Trace(5, [9] * 9, rounds)
    # Emitted tokens 1 (after one accepted) and 6 were set by the target in place of a proposed one.
    assert trace.marks() == ["accepted", "corrected", "accepted", "accepted", "bonus", "plain", "corrected", "accepted", "accepted"]
    assert rejected(trace) == [5 + 1 - 1, 5 + 6 - 1]


def test_replay_holds_exactly_the_rejected_positions_of_the_trace(mixed: Path, draft: Path) -> None:
    prompts = list(read_responses(mixed.parent / "responses", "train"))[:9]
    target = Network(make_model(), vocab=REAL)
    decoder = Decoder(target, ModelDrafter(Network(disturbed(), vocab=REAL), GAMMA), sampling=Sampling(0.7), eos=(1,))
    wanted = {}
    for prompt in prompts:
        (trace,) = decoder.run([Request(prompt["prompt"], 24, seed=seed_of(0, "replay", prompt["prompt_id"]))])
        at, text = len(prompt["prompt"]), [*prompt["prompt"], *trace.tokens]
        places = []
        for r in trace.rounds:  # by hand, from the counts alone
            if r.emitted > r.accepted and r.accepted < r.proposed:
                places.append(at + r.accepted - 1)
            at += r.emitted
        places = [p for p in places if p < min(48, len(text) - (trace.finish == "eos"))]
        if places:
            wanted[tuple(text[: places[-1] + 1])] = places, text[places[-1] + 1]
    recording = Recording(mixed / "train")
    replays = [i for i in range(len(recording)) if recording.kind(i) == "replay"]
    assert {tuple(recording[i].tokens.tolist()): (recording[i].rows.tolist(), recording[i].after) for i in replays} == wanted
    count = sum(len(places) for places, _ in wanted.values())
    assert count > 20, "the draft is rejected now and then"
    batch = collate(recording, replays)
    assert batch.tokens == sum(recording.supervised(i) for i in replays) == count
    width = batch.ids_BT.shape[1]
    assert batch.rows_N.tolist() == [b * width + p for b, i in enumerate(replays) for p in recording[i].rows.tolist()]


def test_only_supervised_laws_are_kept_and_they_are_the_targets(mixed: Path) -> None:
    recording = Recording(mixed / "train")
    model: Any = make_model().double()
    for index in (i for i in range(len(recording)) if recording.kind(i) in ("replay", "rollout")):
        item = recording[index]
        assert item.ids is not None and item.p is not None and item.tail is not None
        with torch.no_grad():
            p = model(item.tokens[None], use_cache=False).logits[0, :, :REAL].softmax(-1)
        rows = item.rows
        assert torch.allclose(item.p[rows].double(), p[rows].gather(1, item.ids[rows]), rtol=4e-2, atol=1e-6)
        others = torch.ones(len(p), dtype=torch.bool)
        others[rows] = False
        assert (item.ids[others] == -1).all() and (item.p[others] == 0).all() and (item.tail[others] == 1).all()


def test_rollouts_are_the_drafts_own_texts(mixed: Path) -> None:
    prompts = list(read_responses(mixed.parent / "responses", "train"))[:7]
    decoder = Decoder(Network(disturbed(), vocab=REAL), sampling=Sampling(0.7), eos=(1,))
    wanted = []
    for prompt in prompts:
        (trace,) = decoder.run([Request(prompt["prompt"], 24, seed=seed_of(0, "rollout", prompt["prompt_id"]))])
        wanted.append([*prompt["prompt"], *(trace.tokens[:-1] if trace.finish == "eos" else trace.tokens)])
    recording = Recording(mixed / "train")
    found = [recording[i].tokens.tolist() for i in range(len(recording)) if recording.kind(i) == "rollout"]
    assert sorted(found) == sorted(wanted)
    assert recording.manifest["kinds"]["rollout"]["sequences"] == 7
    assert "of replays" in " ".join(inspect(mixed).split())


def test_a_draft_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    words = [f"w{i}" for i in range(REAL)]
    other = make_target(tmp_path / "other", vocabulary=["<unk>", "<eos>", "<user>", "<assistant>", *words[4:]])
    path = borrowed(tmp_path / "home", "corpus", "responses", record={"draft": {"source": str(other)}, "replays": 2})
    with pytest.raises(DraftstillError) as caught:
        record(*opened(path))
    assert caught.value.key == "record.draft.source"


def test_rollouts_need_a_draft_that_holds_their_prompts(draft: Path, tmp_path: Path) -> None:
    short = tmp_path / "short"
    shutil.copytree(draft, short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8}))
    path = borrowed(tmp_path / "home", "corpus", "responses", record={"rollouts": 3, "draft": {"source": str(short)}})
    with pytest.raises(DraftstillError, match="holds 8") as caught:
        record(*opened(path))
    assert (caught.value.key, caught.value.value) == ("record.draft.source", str(short))


def test_rollouts_need_a_draft(tmp_path: Path) -> None:
    with pytest.raises(DraftstillError, match=r"need record\.draft"):
        load_recipe(borrowed(tmp_path, record={"rollouts": 3}))


# --- shares -----------------------------------------------------------------------------------------------------------------


def test_shares_are_kept_and_the_scarcest_kind_decides() -> None:
    texts = [Text([0] * 10), *(Text([0] * 10, kind="document") for _ in range(30)), *(Text([0] * 10) for _ in range(9))]
    mixed = describe(in_shares(texts, {"response": 1, "document": 1}))
    assert mixed["response"]["supervised"] == mixed["document"]["supervised"] == 100
    mixed = describe(in_shares(texts, {"response": 1, "document": 3}))
    assert mixed["response"]["supervised"] == 100 and mixed["document"]["supervised"] == 300
    assert in_shares(texts, {}) == texts
    for shares in ({"response": 1}, {"response": 1, "document": 1, "replay": 1}):
        with pytest.raises(DraftstillError, match=r"record\.shares"):
            in_shares(texts, shares)


def test_texts_of_one_length_lie_together() -> None:
    texts = [Text([n] * (1 + n % 7)) for n in range(64)]
    sorted_ = bucketed(texts, 4, window=8)
    assert sorted(map(str, sorted_)) == sorted(map(str, texts)) and sorted(map(str, sorted_[:32])) == sorted(map(str, texts[:32]))
    assert all(a <= b for a, b in zip([len(t.ids) for t in sorted_[:31]], [len(t.ids) for t in sorted_[1:32]], strict=True))


# --- the mode ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "mode"), [(0.9, "topk"), (1e-6, "hidden")])
def test_auto_decides_by_the_tail_and_says_why(limit: float, mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = record(*opened(borrowed(tmp_path, "corpus", "responses", record={"mode": "auto", "auto_tail": limit, "document_tokens": 0})))
    said = capsys.readouterr().out
    assert f"record.mode auto: {mode}" in said and "mean tail" in said and f"{limit:g}" in said and "MiB" in said
    recording = Recording(folder / "train")
    assert recording.mode == mode and recording.manifest["auto"]["mode"] == mode
    assert f"took {mode}" in inspect(folder / "train")


def test_a_full_disk_is_refused_before_anything_is_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = borrowed(tmp_path, "corpus", "responses")
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(recorder.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(DraftstillError, match="the disk has 0 MiB free"):
        record(*opened(path))
    assert not list(tmp_path.rglob("shard-*"))
    monkeypatch.undo()
    assert record(*opened(path, "record.top_k=4")).exists(), "the mended recipe takes the folder over"


# --- ranks, foreign shards, elsewhere ---------------------------------------------------------------------------------------


def test_two_ranks_write_the_same_bytes(tmp_path: Path, mixed: Path, draft: Path) -> None:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    path = borrowed(tmp_path, "corpus", record=MIXED | {"draft": {"source": str(draft)}})
    processes = []
    for rank in range(2):
        extra = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                 "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}  # fmt: skip
        code = "import torch, sys; torch.set_num_threads(1); from draftstill.distill.__main__ import main; main()"
        processes.append(subprocess.Popen([sys.executable, "-c", code, str(path)], env=environment(**extra), stdout=subprocess.PIPE,
                                          stderr=subprocess.STDOUT, text=True))  # fmt: skip
    outputs = [p.communicate(timeout=100)[0] for p in processes]
    assert [p.returncode for p in processes] == [0, 0], outputs
    folder = tmp_path / "run" / "recording"
    assert hashes(folder, "*/shard-*") == hashes(mixed, "*/shard-*")
    assert hashes(tmp_path / "run" / "responses", "*-0*.json") == hashes(finished() / "run" / "responses", "*-0*.json")
    one, two = (json.loads((f / "train" / "manifest.json").read_text()) for f in (mixed, folder))
    assert one["shards"] == two["shards"] and one["mark"] == two["mark"]
    assert "recording:" in outputs[0] and "recording:" not in outputs[1], "one process speaks"


def test_a_shard_of_another_recording_is_refused(mixed: Path, tmp_path: Path) -> None:
    import shutil

    home = borrowed(tmp_path, "corpus", "responses", "recording")
    train = tmp_path / "run" / "recording" / "train"
    shutil.copy(mixed / "train" / "shard-00001.safetensors", train)
    manifest = read_json(train / "manifest.json")
    about = {k: manifest[k] for k in list(manifest)[2 : list(manifest).index("sequences")]}
    write_manifest(train, {**about, "revision": "another"})  # whole checksums: only the mark tells
    with pytest.raises(DraftstillError, match=r"shard-0000\d\.safetensors .* belongs to another recording"):
        Recording(train)
    assert home.exists()


def test_a_foreign_shard_in_a_begun_recording_is_refused(mixed: Path, tmp_path: Path) -> None:
    import shutil

    path = borrowed(tmp_path, "corpus", "responses", record={"top_k": 8})
    recipe, run = opened(path)
    from draftstill.stages import stages

    work = stages(recipe, run)["recording"].begin() / "train"
    work.mkdir()
    shutil.copy(mixed / "train" / "shard-00000.safetensors", work)
    with pytest.raises(DraftstillError, match=r"shard-00000\.safetensors .* belongs to another recording"):
        record(recipe, run)
    (work / "shard-00000.safetensors").write_bytes((work / "shard-00000.safetensors").read_bytes()[:-100])
    with pytest.raises(DraftstillError, match=r"shard-00000\.safetensors .* is damaged"):
        record(recipe, run)


def test_a_recording_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    address = "memory://bucket/one"
    folder = record(*opened(borrowed(tmp_path, "corpus", "responses", record={"mirror": address})))
    far, near = Recording(f"{address}/train"), Recording(folder / "train")
    assert far.folder != near.folder and len(far) == len(near)
    for name in ("tokens", "ids", "p", "tail"):
        assert torch.equal(getattr(far[3], name), getattr(near[3], name))
    assert inspect(address).count("checksums") == 2
    files = fsspec.filesystem("memory")
    name = near.manifest["shards"][1]["file"]
    Path(far.folder / name).unlink()
    files.pipe_file(f"/bucket/one/train/{name}", b"x" * near.manifest["shards"][1]["bytes"])
    with pytest.raises(DraftstillError, match=name):
        Recording(f"{address}/train")
    Path(far.folder / name).unlink()
    files.rm(f"/bucket/one/train/{name}")
    with pytest.raises(DraftstillError, match=f"{name} is missing from memory"):
        Recording(f"{address}/train")
    with pytest.raises(DraftstillError, match=r"no manifest\.json"):
        Recording("memory://bucket/none")
