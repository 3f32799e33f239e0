"""What a training refuses before it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftstill.errors import DraftstillError
from draftstill.runfolder import read_json, write_json
from draftstill.train.launch import train
from tests.pipeline import PADDED, borrowed, command, make_model, make_target, make_tokenizer, opened, words
from tests.train.jobs import RECORDED


@pytest.mark.parametrize(("overrides", "says"), [
    ({"draft": {"layers": [0, 4]}}, ["draft.layers", "[0, 4]", "between 0 and 3"]),
    ({"train": {"head_tokens": 200}}, ["train.head_tokens", "200", "0 means the whole head"]),
    ({"draft": {"head_tokens": 5000}}, ["draft.head_tokens", "5000"]),
])  # fmt: skip
def test_a_value_that_does_not_fit_the_target(overrides: dict[str, Any], says: list[str], tmp_path: Path) -> None:
    path = borrowed(tmp_path, *RECORDED, **overrides)
    with pytest.raises(DraftstillError) as caught:
        train(*opened(path))
    assert all(s in str(caught.value) for s in says)
    # Mended, the same command goes through: nothing was made yet that it could overwrite.
    assert train(*opened(borrowed(tmp_path, train={"max_steps": 1}))).exists()


def test_a_trimmed_training_head_needs_a_top_k_recording(tmp_path: Path) -> None:
    path = borrowed(tmp_path, "corpus", "responses", record={"mode": "hidden"}, train={"head_tokens": 80})
    with pytest.raises(DraftstillError, match="top-k recording") as caught:
        train(*opened(path))
    assert caught.value.key == "train.head_tokens"


def test_a_draft_of_another_vocabulary(tmp_path: Path) -> None:
    other = words()
    other[50], other[60] = other[60], other[50]
    make_target(tmp_path / "foreign", seed=3, layers=1, vocabulary=other)
    with pytest.raises(DraftstillError, match="differ at 2 ids") as caught:
        train(*opened(borrowed(tmp_path, *RECORDED, draft={"source": str(tmp_path / "foreign")})))
    assert caught.value.key == "draft.source"


def test_a_recording_of_another_vocabulary(tmp_path: Path) -> None:
    path = borrowed(tmp_path, *RECORDED)
    manifest = tmp_path / "run" / "recording" / "train" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"vocab": 200', '"vocab": 190'))
    with pytest.raises(DraftstillError, match="190") as caught:
        train(*opened(path))
    assert "distill" in str(caught.value)


@pytest.mark.parametrize("what", ["tokenizer_sha256", "revision"])
def test_a_recording_of_another_target(what: str, tmp_path: Path) -> None:
    path = borrowed(tmp_path, *RECORDED)
    manifest = tmp_path / "run" / "recording" / "train" / "manifest.json"
    write_json(manifest, {**read_json(manifest), what: "of another"})
    with pytest.raises(DraftstillError, match=f"its {what} was of another") as caught:
        train(*opened(path))
    assert caught.value.key == "target.source"


def test_a_trimmed_head_where_auto_chose(tmp_path: Path) -> None:
    """What ``auto`` makes is known once it is recorded: top-k trains a trimmed head, hidden states are refused."""
    keys = {"head_tokens": 80, "max_steps": 2, "eval_steps": 2}
    record = {"mode": "auto", "auto_tail": 0.99}
    assert train(*opened(borrowed(tmp_path / "topk", "corpus", "responses", record=record, train=keys))).exists()
    record = {"mode": "auto", "auto_tail": 1e-9}
    with pytest.raises(DraftstillError, match="auto chose hidden states") as caught:
        train(*opened(borrowed(tmp_path / "hidden", "corpus", "responses", record=record, train=keys)))
    assert caught.value.key == "train.head_tokens"


@pytest.mark.parametrize(("modules", "tied", "says"), [
    (["q_proj", "lm_head"], False, "the head takes no adapter"), (["embed_tokens"], True, "the embedding is the same matrix"),
    (["lm_head"], True, "the embedding is the same matrix"), (["wq"], False, "no such layer"),
])  # fmt: skip
def test_adapters_where_they_cannot_be(modules: list[str], tied: bool, says: str, tmp_path: Path) -> None:
    source: dict[str, Any] = {}
    if tied:
        model = make_model(3, 1)
        model.config.tie_word_embeddings = True
        model.tie_weights()
        model.save_pretrained(tmp_path / "tied")
        make_tokenizer().save_pretrained(tmp_path / "tied")
        source = {"source": str(tmp_path / "tied")}
    path = borrowed(tmp_path, *RECORDED, draft=source, train={"lora": {"target_modules": modules}})
    with pytest.raises(DraftstillError, match=says) as caught:
        train(*opened(path))
    assert caught.value.key == "train.lora.target_modules" and caught.value.value == modules[-1] and "q_proj" in str(caught.value.mend)


def test_a_batch_that_cannot_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = borrowed(tmp_path, *RECORDED, train={"per_device_train_batch_size": 10**7})
    assert command("train", path) == 1
    error = capsys.readouterr().err
    assert all(s in error for s in ("train.per_device_train_batch_size", "at least", "GiB", "activations", "gradient_accumulation_steps"))
    assert "Traceback" not in error


def test_a_draft_that_cannot_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftstill.train.memory.memory_gib", lambda: 1e-4)
    with pytest.raises(DraftstillError, match="gradients and moments") as caught:
        train(*opened(borrowed(tmp_path, *RECORDED)))
    assert caught.value.key == "draft" and "lora" in str(caught.value.mend)


def test_a_phase_without_text(tmp_path: Path) -> None:
    path = borrowed(tmp_path, *RECORDED, train={"phases": [{"share": 3}, {"share": 1, "kinds": ["replay"]}]})
    with pytest.raises(DraftstillError, match="no text of this kind") as caught:
        train(*opened(path))
    assert caught.value.key == "train.phases.1.kinds" and "document, response" in str(caught.value.mend)


@pytest.mark.parametrize(("name", "says"), [("absent", "no weights here"), ("broken.safetensors", "damaged"), ("other", "is unknown"),
                                            ("wide", "not \\[")])  # fmt: skip
def test_a_warm_start_from_what_does_not_fit(name: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "broken.safetensors").write_bytes(b"nothing")
    make_model(3, 3).save_pretrained(tmp_path / "other")
    wide = make_model(3, 2)
    wide.resize_token_embeddings(PADDED + 8, mean_resizing=False)
    wide.save_pretrained(tmp_path / "wide")
    with pytest.raises(DraftstillError, match=says) as caught:
        train(*opened(borrowed(tmp_path, *RECORDED, train={"init_from": str(tmp_path / name)})))
    assert caught.value.key == "train.init_from"
