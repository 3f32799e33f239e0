"""GGUF of a draft: written and read back with the same logits, the target's tokenizer in it, refusals by name."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from draftstill.convert import convert_gguf
from draftstill.errors import DraftstillError
from draftstill.evaluate.exporter import logits_of
from draftstill.evaluate.gguf_tokens import SPLITS, pre_tokenizer_name, tokens_of_folder, tokens_of_gguf
from draftstill.evaluate.ggufs import gguf_fault, read_header, write_gguf
from draftstill.runfolder import hash_file, read_json, write_json
from tests.evaluate.published import REAL, Run, byte_tokenizer, make_draft


def back(path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return convert_gguf(path, hash_file(path), "draft.source")[0]


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("llama", False), ("mistral", False), ("qwen2", True), ("qwen3", False)])
def test_written_and_read_back_the_logits_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, tied: bool, kind: str
) -> None:
    import torch

    folder = make_draft(tmp_path / "draft", rows=320, tied=tied, family=family, tokenizer=byte_tokenizer(), spread=4.0)
    facts = write_gguf(folder, tmp_path / "draft.gguf", kind, tokens_of_folder(folder), name="x", licence="apache-2.0")
    assert facts["largest_rounding"] < (1e-3 if kind == "f16" else 0.01)
    again = back(tmp_path / "draft.gguf", monkeypatch, tmp_path / "cache")
    ids = torch.arange(12)[None] * 17 % REAL
    before, after = logits_of(folder, ids), logits_of(again, ids)
    scale = float(before.abs().max())
    assert float((before - after).abs().max()) < scale * (2e-3 if kind == "f16" else 0.05), (before - after).abs().max() / scale
    config = read_json(again / "config.json")
    assert (config["max_position_embeddings"], config["vocab_size"], bool(config.get("tie_word_embeddings"))) == (512, 320, tied)
    # In the file, as llama.cpp reads it, and in the tokenizer that transformers makes of it.
    header = read_header(tmp_path / "draft.gguf")
    assert (
        header["tokenizer.ggml.pre"] == "gpt-2"
        and header["tokenizer.ggml.add_bos_token"] is False
        and header["general.license"] == "apache-2.0"
    )
    assert header["tokenizer.ggml.tokens"][REAL] == f"[PAD{REAL}]" and header["tokenizer.ggml.token_type"][REAL] == 5
    assert header["tokenizer.ggml.token_type"][REAL - 1] == 3 and len(header["tokenizer.ggml.tokens"]) == 320


def test_publishing_copies_the_tokenizer_of_the_targets_gguf(byte_run: Run, tmp_path: Path) -> None:
    theirs = tmp_path / "target.gguf"
    tokens = tokens_of_folder(byte_run.model)
    tokens.fields["tokenizer.ggml.add_bos_token"] = True  # what only the file knows
    tokens.fields["tokenizer.ggml.pre"] = "smollm"
    write_gguf(byte_run.model, theirs, "f16", tokens, name="target")
    byte_run.keys = {"target_gguf": str(theirs), "gguf": ["q8_0"]}
    folder = byte_run.publish()
    assert not (folder / "draft-f16.gguf").exists()
    ours = tokens_of_gguf(folder / "draft-q8_0.gguf")
    assert (ours.tokens, ours.types, ours.merges, ours.fields) == ((t := tokens_of_gguf(theirs)).tokens, t.types, t.merges, t.fields)
    export = read_json(folder / "draft_report.json")["export"]
    assert export["gguf"][0]["tokens_from"] == "the target's GGUF"
    assert {c["name"]: c["servers"]["llama.cpp"] for c in export["checks"]}["GGUF vocabulary"] == "pass"
    assert str(tmp_path) not in (folder / "provenance.json").read_text(), "the path of the target's file leaves"


def test_both_are_written_where_nothing_forbids_it(byte_run: Run) -> None:
    folder = byte_run.publish()
    assert {p.name for p in folder.glob("*.gguf")} == {"draft-f16.gguf", "draft-q8_0.gguf"}
    assert "tokenizer.json (gpt-2)" in (folder / "README.md").read_text()


def test_auto_says_why_there_is_none_and_a_demand_is_refused(run: Run) -> None:
    folder = run.publish()
    assert not list(folder.glob("*.gguf")) and "no GGUF file was written" in (folder / "README.md").read_text()
    run.keys = {"gguf": ["f16"], "name": "another"}
    with pytest.raises(DraftstillError, match="publish.gguf: how this tokenizer splits text") as caught:
        from draftstill.evaluate import publish
        from draftstill.runfolder import RunFolder

        publish(run.recipe(), RunFolder(run.make().path, set_aside=True))
    assert "publish.target_gguf" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "fault"),
    [({"model_type": "gemma3_text"}, "its family is gemma3_text"), ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, r"scaled \(llama3\)"),
     ({"model_type": "mistral", "sliding_window": 64}, "window of 64"), ({"hidden_act": "gelu"}, "activation is gelu")],
)  # fmt: skip
def test_what_cannot_be_written_is_refused_by_name(tiny_bytes: Path, tmp_path: Path, change: dict[str, Any], fault: str) -> None:
    write_json(tmp_path / "config.json", {**read_json(tiny_bytes / "config.json"), **change})
    with pytest.raises(DraftstillError, match=fault):
        write_gguf(tmp_path, tmp_path / "x.gguf", "f16", tokens_of_folder(tiny_bytes), name="x")
    assert gguf_fault(tiny_bytes) is None


def test_tensors_without_a_place_and_wild_values_are_refused(tiny_bytes: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(tiny_bytes / "model.safetensors")
    for name, value, fault in (
        ("model.layers.0.extra.weight", None, "no place for the tensor model.layers.0.extra"),
        ("model.norm.weight", float("nan"), "not finite"),
    ):
        folder = tmp_path / fault[:5]
        folder.mkdir()
        write_json(folder / "config.json", read_json(tiny_bytes / "config.json"))
        changed = tensors["model.norm.weight"].clone()
        save_file({**tensors, name: changed if value is None else changed * value}, folder / "model.safetensors")
        with pytest.raises(DraftstillError, match=fault):
            write_gguf(folder, folder / "x.gguf", "f16", tokens_of_folder(tiny_bytes), name="x")


def test_only_known_ways_of_splitting_have_a_name() -> None:
    level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    qwen, llama = SPLITS
    assert "{1,3}" in llama and [SPLITS[qwen], SPLITS[llama]] == ["qwen2", "llama-bpe"]

    def split(pattern: str) -> dict[str, Any]:
        step = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
        return {"type": "Sequence", "pretokenizers": [step, {**level, "use_regex": False}]}

    assert pre_tokenizer_name({"pre_tokenizer": level}) == "gpt-2"
    digits = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, level]}
    assert pre_tokenizer_name({"pre_tokenizer": digits}) == "smollm"
    assert pre_tokenizer_name({"pre_tokenizer": split(qwen), "normalizer": {"type": "NFC"}}) == "qwen2"
    assert pre_tokenizer_name({"pre_tokenizer": split(llama)}) == "llama-bpe"
    for unsure in ({"pre_tokenizer": split(qwen + "x")}, {"pre_tokenizer": level, "normalizer": {"type": "Lowercase"}},
                   {"pre_tokenizer": {**level, "add_prefix_space": True}}, {"pre_tokenizer": None}, {}):  # fmt: skip
        assert pre_tokenizer_name(unsure) is None


def test_a_tokenizer_that_puts_bos_first_says_so(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", tokenizer.bos_token_id)]
    )
    folder = make_draft(tmp_path / "draft", rows=320, tokenizer=tokenizer)
    table = tokens_of_folder(folder)
    assert table.fields["tokenizer.ggml.add_bos_token"] is True and table.fields["tokenizer.ggml.bos_token_id"] == tokenizer.bos_token_id
    assert json.dumps(table.fields["tokenizer.chat_template"])


def test_what_a_text_tells_to_install_exists() -> None:
    root = Path(__file__).parents[2]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    code = (p for folder in ("draftstill", "decode", "distill", "train", "evaluate") for p in (root / folder).rglob("*.py"))
    texts = [p.read_text() for p in (root / "README.md", *(root / "docs").glob("*.md"), *code)]
    named = {extra.strip() for text in texts for found in re.findall(r"draftstill\[([\w, -]+)\]", text) for extra in found.split(",")}
    assert named and named <= set(extras)
