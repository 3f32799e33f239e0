"""The exported weights: padding that draws nothing in every case, the real vocabulary, the size that transformers compares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftstill.errors import DraftstillError
from draftstill.evaluate.exporter import _resize, load_model_folder, logits_of
from draftstill.runfolder import hash_file, read_json
from tests.evaluate.published import Run, byte_tokenizer, make_draft


def publish_with(run: Run, model: Path, rows: int, **keys: Any) -> Path:
    run.model, run.keys = model, {"gguf": [], **keys}
    run.score["draft"]["weights_sha256"] = hash_file(model / "model.safetensors")
    run.set_rows(rows)
    return run.publish()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(("wish", "rows"), [("padded", 128), ("padded", 96), ("real", 96)])
def test_rows_and_logits(run: Run, tmp_path: Path, tied: bool, wish: str, rows: int) -> None:
    import torch

    model = make_draft(tmp_path / "draft", rows=112, tied=tied)  # 96 tokens and 16 rows of its own padding
    folder = publish_with(run, model, 128 if rows == 128 else 96, vocabulary=wish)
    ids = torch.tensor([[1, 5, 9, 90]])
    before, after = logits_of(model, ids)[..., :96], logits_of(folder, ids)
    assert read_json(folder / "config.json")["vocab_size"] == after.shape[-1] == rows
    assert torch.allclose(before, after[..., :96], atol=1e-5)
    published = load_model_folder(folder, "auto")
    assert (published.lm_head.weight is published.model.embed_tokens.weight) == tied
    facts = read_json(folder / "draft_report.json")["export"]
    assert (facts["padded_rows"], facts["real_vocabulary"], facts["tied"]) == (rows - 96, 96, tied)
    assert read_json(folder / "generation_config.json") == {"eos_token_id": 2}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_padding_that_would_win_every_argmax_is_made_inert(run: Run, tmp_path: Path, tied: bool) -> None:
    """A target's own padding can be hot: it was never trained to lose. A server does not know which ids are padding."""
    import torch

    model = make_draft(tmp_path / "draft", rows=128, tied=tied)
    hot = load_model_folder(model, torch.float32)
    ids = torch.tensor([[1, 5, 9, 90]])
    with torch.no_grad():
        # Hidden states share a direction, as trained ones do. All logits lie near -7 (a zero row, logit 0, would take most of the
        # probability), id 17 lies far below, padding far above.
        hot.model.embed_tokens.weight[:, 0] = 1.0
        if not tied:
            hot.lm_head.weight[:96, 0] = -1.0
            hot.lm_head.weight[17, 0] = -3.0
        hot.lm_head.weight[96:, 0] = 3.0
    hot.save_pretrained(model)
    assert float(logits_of(model, ids).softmax(-1)[..., 96:].sum(-1).min()) > 0.9
    folder = publish_with(run, model, 128)
    after = logits_of(folder, ids)
    assert int(after.argmax(-1).max()) < 96
    # With tied weights no random row is unlikely everywhere; a copy is never likelier than its row.
    assert float(after.softmax(-1)[..., 96:].sum(-1).max()) < (0.5 if tied else 1e-5)
    assert torch.allclose(logits_of(model, ids)[..., :96], after[..., :96], atol=1e-4)


def test_a_heads_bias_makes_padding_exactly_inert() -> None:
    import torch
    from transformers import PhiConfig, PhiForCausalLM

    torch.manual_seed(0)
    model = PhiForCausalLM(
        PhiConfig(vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    ).eval()
    before = model(torch.tensor([[3, 4]])).logits
    _resize(model, 40, 64, 0)
    after = model(torch.tensor([[3, 4]])).logits
    assert torch.allclose(before, after[..., :40], atol=1e-6) and float(after.softmax(-1)[..., 40:].detach().sum()) == 0.0


def test_fewer_rows_than_tokens_is_refused(run: Run, tmp_path: Path) -> None:
    with pytest.raises(DraftstillError, match="ids that the draft's vocabulary lacks"):
        publish_with(run, make_draft(tmp_path / "draft", rows=64), 96)


@pytest.mark.parametrize("vocabulary", ["padded", "real"])
def test_the_qwen_sizes_load_in_transformers_after_padding(tmp_path: Path, vocabulary: str) -> None:
    """Qwen2.5 7B has 152,064 rows and 0.5B 151,936: transformers refuses the pair until the draft is padded; then the text is the target's own."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    small = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 8,
    }
    tokenizer = byte_tokenizer()
    for name, rows in (("draft", 151_936), ("big", 152_064)):
        torch.manual_seed(len(name))
        model = Qwen2ForCausalLM(
            Qwen2Config(**small, vocab_size=rows, tie_word_embeddings=name == "draft", eos_token_id=None, pad_token_id=None)
        )
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    run = Run(tmp_path / "home", tmp_path / "draft", rows=152_064, gguf=[], vocabulary=vocabulary)
    folder = run.publish()
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "big").eval()
    ids = AutoTokenizer.from_pretrained(folder)("the rain", return_tensors="pt")["input_ids"]
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    greedy = target.generate(ids, **options)
    unpadded = AutoModelForCausalLM.from_pretrained(tmp_path / "draft").eval()
    with pytest.raises(ValueError, match="assistant_tokenizer"):
        target.generate(ids, assistant_model=unpadded, **options)
    draft = AutoModelForCausalLM.from_pretrained(folder).eval()
    if vocabulary == "real":
        assert draft.config.vocab_size == len(AutoTokenizer.from_pretrained(folder)) < 300
        return
    assert draft.config.vocab_size == 152_064
    draft.generation_config.num_assistant_tokens = 3
    assert torch.equal(target.generate(ids, assistant_model=draft, **options), greedy)
    checks = {c["name"]: c for c in read_json(folder / "draft_report.json")["export"]["checks"]}
    assert checks["vocabulary size"]["servers"]["vLLM"] == "pass"
