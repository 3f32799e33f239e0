"""The recording against transformers' own logits in float64, its access by sequence, and its safety."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from draftstill.corpus import read_documents
from draftstill.decode import Network
from draftstill.distill import Hidden, Recording, Text, TopK, encode, inspect, read_responses, record, score_texts, scoring
from draftstill.distill.divergences import alpha, alpha_bounds, bucketed
from draftstill.distill.recording import write_manifest, write_shard
from draftstill.errors import DraftstillError
from draftstill.runfolder import read_json
from tests.pipeline import REAL, borrowed, command, finished, hashes, make_model, make_tokenizer, opened

K = 16
TRAIN = "recording/train"


@pytest.fixture(scope="module")
def done() -> Path:
    return finished() / "run"


@pytest.fixture(scope="module")
def recording(done: Path) -> Recording:
    return Recording(done / TRAIN)


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model().double()


@torch.no_grad()
def law(model: Any, tokens: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """float64 probabilities over the real tokens, by transformers."""
    return (model(tokens[None], use_cache=False).logits[0, :, :REAL] / temperature).softmax(-1)


# --- content ----------------------------------------------------------------------------------------------------------------


def test_kept_and_tail_are_the_law(recording: Recording, model: Any) -> None:
    for index in range(0, len(recording), 5):
        item = recording[index]
        assert item.ids is not None and item.p is not None and item.tail is not None
        p = law(model, item.tokens)
        top = p.topk(K, -1)
        assert item.ids.shape == (len(item.tokens), K)
        assert torch.allclose(item.p.sum(-1) + item.tail, torch.ones(len(p)), atol=1e-6), "what is kept has exactly the rest of the mass"
        # 8-bit log-probabilities: distill/packing.py
        assert torch.allclose(item.p.double(), p.gather(1, item.ids), rtol=4e-2, atol=1e-6)
        assert torch.allclose(item.p.double(), top.values, rtol=4e-2, atol=1e-5)
        assert float((item.p.double() - top.values).abs().sum(-1).max()) / 2 < recording.manifest["rounding"] + 1e-5 < 0.02
        exact = 1 - p.gather(1, item.ids).sum(-1)
        assert torch.allclose(item.tail.double(), exact, atol=2e-5), "the tail is measured, not what rounding left over"
        assert (item.p.diff(dim=-1) <= 0).all()


def test_a_thin_tail_keeps_its_digits() -> None:
    """1 - sum(kept) in float32 would give 0 or a negative number here."""

    class Sharp:
        vocab = 30

        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden.clone()

    z = torch.zeros(2, 30)
    z[:, 0], z[:, 1] = 25.0, 24.0
    found = TopK(Sharp(), 2)(z)  # type: ignore[arg-type]
    exact = 1 - z.double().softmax(-1)[:, :2].sum(-1)
    assert torch.allclose(found["tail"].double(), exact, rtol=1e-4, atol=0) and float(exact[0]) < 1e-9
    warm = TopK(Sharp(), 2, temperature=5.0)(z)  # type: ignore[arg-type]
    assert torch.allclose(warm["tail"].double(), 1 - (z.double() / 5).softmax(-1)[:, :2].sum(-1), rtol=1e-4)
    assert TopK(Sharp(), 64)(z)["tail"].tolist() == [0.0, 0.0], "nothing is left out"  # type: ignore[arg-type]


def test_the_bounds_hold_alpha(recording: Recording, model: Any) -> None:
    """For drafts near and far, the true alpha lies between the two bounds of the recording."""
    generator = torch.Generator().manual_seed(0)
    widths = []
    for index in range(0, len(recording), 7):
        item = recording[index]
        assert item.ids is not None and item.p is not None and item.tail is not None
        p = law(model, item.tokens)
        for scale in (0.0, 0.5, 3.0):
            q = (p.log() + scale * torch.randn(p.shape, generator=generator, dtype=torch.float64)).softmax(-1)
            low, high = alpha_bounds(*bucketed(q, item.ids, item.p.double(), item.tail.double()))
            true = alpha(p, q)
            rounding = recording.manifest["rounding"]
            assert 0 < rounding < 0.01
            assert (low <= true + rounding).all() and (true <= high + rounding).all()
            widths.append(float((high - low).mean()))
    assert max(widths) < 0.6 and min(widths) > 0.0


def written(done: Path, side: str) -> list[list[int]]:
    """Prompt and response, without the EOS: nobody asks what follows it."""
    rows = list(read_responses(done / "responses", side))
    assert any(r["finish"] == "eos" for r in rows) or side == "heldout"
    return [[*r["prompt"], *(r["response"][:-1] if r["finish"] == "eos" else r["response"])] for r in rows]


def test_the_recorded_text_is_the_responses_and_the_documents(done: Path, recording: Recording) -> None:
    texts = written(done, "train")
    documents = [encode(make_tokenizer(), d.text) for d in read_documents(done / "corpus", "train")]
    held = [encode(make_tokenizer(), d.text) for s in ("validation", "test") for d in read_documents(done / "corpus", s)]
    recorded = [recording[i].tokens.tolist() for i in range(len(recording))]
    pieces = [r for r in recorded if r not in texts]
    assert all(t in recorded for t in texts) and len(recorded) == len(texts) + len(pieces)
    assert sum(map(len, pieces)) == 1200, "record.document_tokens"
    inside = lambda piece, whole: any(whole[i : i + len(piece)] == piece for i in range(len(whole) - len(piece) + 1))  # noqa: E731
    assert all(any(inside(p, d) for d in documents) and not any(inside(p, d) for d in held) for p in pieces)
    assert len({i for p in pieces for i, d in enumerate(documents) if inside(p, d)}) > 8, "pieces come from everywhere"
    heldout = Recording(done / "recording" / "heldout")
    assert [heldout[i].tokens.tolist() for i in range(len(heldout))] == written(done, "heldout")
    assert {heldout.start(i) for i in range(len(heldout))} == {8 - 1}, "alpha is measured on what the target wrote"
    assert {recording.start(i) for i in range(len(recording))} == {0}


def test_hidden_states_give_the_models_logits(done: Path, model: Any) -> None:
    heldout = Recording(done / "recording" / "heldout")
    head = model.lm_head.weight[:REAL]
    for index in range(len(heldout)):
        item = heldout[index]
        assert item.hidden is not None
        p = law(model, item.tokens)
        assert torch.allclose((item.hidden.double() @ head.T).softmax(-1), p, atol=1e-4)


def test_a_recording_at_another_temperature(tmp_path: Path, model: Any) -> None:
    folder = record(*opened(borrowed(tmp_path, "corpus", "responses", record={"temperature": 0.7, "document_tokens": 0})))
    item = Recording(folder / "train")[0]
    assert item.p is not None and item.ids is not None and item.tail is not None
    p = law(model, item.tokens, 0.7)
    assert torch.allclose(item.p.double(), p.gather(1, item.ids), rtol=4e-2, atol=1e-6)
    assert torch.allclose(item.tail.double(), 1 - p.gather(1, item.ids).sum(-1), atol=2e-5)
    assert Recording(folder / "train").manifest["temperature"] == 0.7


# --- access -----------------------------------------------------------------------------------------------------------------


def test_random_access_equals_reading_through(done: Path) -> None:
    one, two = Recording(done / TRAIN), Recording(done / TRAIN)
    through = [one[i] for i in range(len(one))]
    assert len(one.manifest["shards"]) > 3
    order = torch.randperm(len(two), generator=torch.Generator().manual_seed(0)).tolist()
    for index in order:
        item, same = two[index], through[index]
        for name in ("tokens", "ids", "p", "tail"):
            assert torch.equal(getattr(item, name), getattr(same, name))
        assert item.start == same.start == two.start(index) and len(item.tokens) == two.length(index)
    assert sum(len(x.tokens) for x in through) == one.manifest["positions"]
    for index in (-1, len(one)):
        with pytest.raises(IndexError):
            one[index]


@pytest.mark.parametrize(("vocab", "width"), [(1 << 16, 2), ((1 << 16) + 1, 3)])
@pytest.mark.parametrize("bits", [8, 16])
def test_large_ids_survive(vocab: int, width: int, bits: int, tmp_path: Path) -> None:
    class Wide:
        def __init__(self) -> None:
            self.vocab = vocab

        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            z = torch.full((len(hidden), vocab), -20.0)
            z[:, vocab - 1], z[:, 40_000], z[:, 3] = 3.0, 2.0, 1.0
            return z

    columns = TopK(Wide(), 3)(torch.zeros(4, 1))  # type: ignore[arg-type]
    write_shard(tmp_path / "shard-00000.safetensors", [[vocab - 1, 40_000, 3, 0]], [1], columns, vocab=vocab, logp_bits=bits)
    write_manifest(tmp_path, {"mode": "topk", "vocab": vocab, "top_k": 3})
    recording = Recording(tmp_path)
    ids = recording.columns(0)["ids"]
    assert ids.numel() * ids.element_size() == 4 * 3 * width
    assert recording[0].ids is not None and recording[0].ids.tolist() == [[vocab - 1, 40_000, 3]] * 4
    assert recording[0].tokens.tolist() == [vocab - 1, 40_000, 3, 0]
    weights = recording.token_weights(vocab)
    assert weights[vocab - 1] > weights[40_000] > weights[3] > 1 > weights[0] - 1e-9


def test_token_weights_count_text_and_probability(recording: Recording) -> None:
    weights = torch.zeros(REAL, dtype=torch.float64)
    for index in range(len(recording)):
        item = recording[index]
        assert item.ids is not None and item.p is not None
        weights += torch.bincount(item.tokens, minlength=REAL)
        if item.after >= 0:
            weights[item.after] += 1
        weights.index_add_(0, item.ids.flatten(), item.p.double().flatten())
    assert torch.allclose(recording.token_weights(REAL), weights, rtol=1e-4)


@pytest.mark.parametrize("mode", ["topk", "hidden", "live"])
def test_an_end_that_only_stands_behind_a_text_counts(mode: str, tmp_path: Path) -> None:
    """Without it a draft of few ids could never propose one: every finished answer would end in a rejection."""
    eos, columns = 7, {"hidden": {"hidden": torch.zeros(6, 4)}, "live": {}}
    laws = {"ids": torch.full((6, 1), 3, dtype=torch.int32), "logp": torch.zeros(6, 1), "tail": torch.zeros(6)}
    write_shard(tmp_path / "shard-00000.safetensors", [[5, 6], [5, 6, 9], [8]], [0, 0, 0], columns.get(mode, laws), vocab=12,
                after=[eos, -1, eos])  # fmt: skip
    write_manifest(tmp_path, {"mode": mode, "vocab": 12, "top_k": 1})
    expected = [0.0, 0.0, 0.0, 6.0 * (mode == "topk"), 0.0, 2.0, 2.0, 2.0, 1.0, 1.0, 0.0, 0.0]
    assert Recording(tmp_path).token_weights(12).tolist() == expected
    assert Recording(tmp_path).token_weights(10).tolist() == expected[:10]


# --- stopping ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [1, 3, 6])
def test_stopped_and_started_again_keeps_whole_shards(stop: int, done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = borrowed(tmp_path, "corpus", "responses")
    calls, real = [0], scoring.write_shard

    def counted(*arguments: Any, **options: Any) -> None:
        calls[0] += 1
        if calls[0] > stop:
            raise KeyboardInterrupt
        real(*arguments, **options)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(scoring, "write_shard", counted)
        record(*opened(path))
    work = tmp_path / "run" / "recording.partial"
    kept = {p.relative_to(work): p.stat().st_mtime_ns for p in work.rglob("shard-*")}
    assert len(kept) == stop
    folder = record(*opened(path))
    assert {p: (folder / p).stat().st_mtime_ns for p in kept} == kept
    assert hashes(folder, "*/shard-*") == hashes(done / "recording", "*/shard-*")
    assert read_json(folder / "train" / "manifest.json")["shards"] == read_json(done / TRAIN / "manifest.json")["shards"]


def test_a_shard_does_not_depend_on_the_others(tmp_path: Path) -> None:
    """A shard scored alone equals the same shard of the whole."""
    network = Network(make_model(), vocab=REAL)
    generator = torch.Generator().manual_seed(0)
    texts = [Text(torch.randint(REAL, (n,), generator=generator).tolist()) for n in (9, 4, 30, 12, 7, 22)]
    score_texts(texts, Hidden(network), tmp_path / "all", 2, 3, "all")
    score_texts(texts[3:], Hidden(network), tmp_path / "rest", 2, 3, "rest")
    assert (tmp_path / "all" / "shard-00001.safetensors").read_bytes() == (tmp_path / "rest" / "shard-00000.safetensors").read_bytes()


def test_there_must_be_something_to_record(tmp_path: Path) -> None:
    path = borrowed(tmp_path, "corpus", respond={"prompts": 0, "heldout_prompts": 1}, record={"document_tokens": 0})
    with pytest.raises(DraftstillError, match="nothing to record") as caught:
        record(*opened(path))
    assert "respond.prompts or record.document_tokens" in str(caught.value)
    assert record(*opened(path, "record.document_tokens=100")).exists()


# --- damage -----------------------------------------------------------------------------------------------------------------


def damaged(tmp_path: Path) -> tuple[Path, Path]:
    path = borrowed(tmp_path, "corpus", "responses", "recording")
    return path, tmp_path / "run" / TRAIN / "shard-00002.safetensors"


@pytest.mark.parametrize("fault", ["flipped", "cut", "missing"])
def test_a_damaged_shard_is_named(fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, shard = damaged(tmp_path)
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    if fault == "missing":
        shard.unlink()
    else:
        shard.write_bytes(content if fault == "flipped" else content[:-8])
    assert command("train", path) == 1
    error = capsys.readouterr().err
    assert shard.name in error and "record again" in error and "Traceback" not in error
    assert ("is missing" in error) == (fault == "missing")
    assert not (tmp_path / "run" / "draft").exists()
    with pytest.raises(DraftstillError, match=shard.name):
        inspect(tmp_path / "run" / "recording")


def test_the_mend_of_a_damaged_recording_works(tmp_path: Path) -> None:
    import shutil

    path, shard = damaged(tmp_path)
    shard.unlink()
    shutil.rmtree(tmp_path / "run" / "recording")
    assert command("distill", path) == 0
    assert hashes(tmp_path / "run" / "recording", "*/shard-*") == hashes(finished() / "run" / "recording", "*/shard-*")


def test_a_folder_without_a_recording_and_one_of_another_format(tmp_path: Path, done: Path) -> None:
    with pytest.raises(DraftstillError, match=r"no manifest\.json"):
        Recording(tmp_path)
    with pytest.raises(DraftstillError, match=r"no manifest\.json"):
        inspect(tmp_path)
    (tmp_path / "manifest.json").write_text('{"format": 99, "shards": []}')
    with pytest.raises(DraftstillError, match="format 99"):
        Recording(tmp_path)


def test_inspect_says_what_there_is(done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("recording", "inspect", done / "recording") == 0
    shown = capsys.readouterr().out
    sizes = read_json(done / "recording" / "provenance.json")["facts"]["sizes"]
    for side in ("train", "heldout"):
        assert f"{sizes[side]['sequences']:,} sequences, {sizes[side]['positions']:,} positions" in shown
    assert f"topk, K = {K}, temperature 1.0, 8-bit" in shown and "hidden" in shown and shown.count("checksums   all right") == 2
    assert max(map(len, shown.splitlines())) <= 80 or len(str(done)) > 60
    tail = float(re.search(r"tail mass\s+mean ([\d.]+)", shown)[1])  # type: ignore[index]
    recording = Recording(done / TRAIN)
    mean = torch.cat([recording[i].tail for i in range(len(recording))]).mean()  # type: ignore[misc]
    assert tail == pytest.approx(float(mean), abs=1e-4)
