"""The matrix of servers: what each refuses, what it takes without a word, and the mend."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftstill.errors import DraftstillError
from draftstill.evaluate import check_published
from draftstill.evaluate.exporter import target_facts
from draftstill.evaluate.gguf_tokens import tokens_of_folder
from draftstill.evaluate.ggufs import write_gguf
from draftstill.evaluate.validator import SERVERS, Check, failures, matrix_text, validate
from draftstill.runfolder import RunFolder, read_json, write_json
from tests.evaluate.published import Run


def looked_at(run: Run, folder: Path) -> dict[str, Check]:
    return {c.name: c for c in validate(folder, target_facts(run.recipe()), read_json(folder / "draft_report.json")["export"])}


@pytest.fixture
def whole(byte_run: Run, tmp_path: Path) -> tuple[Run, Path]:
    """Published beside a target that has a GGUF."""
    write_gguf(byte_run.model, tmp_path / "target.gguf", "f16", tokens_of_folder(byte_run.model), name="target")
    byte_run.keys = {"target_gguf": str(tmp_path / "target.gguf")}
    return byte_run, byte_run.publish()


def test_a_fresh_publication_passes_everywhere(whole: tuple[Run, Path], capsys: pytest.CaptureFixture[str]) -> None:
    run, folder = whole
    found = looked_at(run, folder)
    assert not failures(list(found.values()))
    assert {n for n, c in found.items() if c.passed is None} == {"alpha as scored", "served acceptance"}, "tiny runs keep no decoded texts"
    stored = read_json(folder / "draft_report.json")["export"]["checks"]
    assert [c["name"] for c in stored] == list(found) and all(set(c["servers"]) == set(SERVERS) for c in stored)
    assert str(folder.parents[2]) not in json.dumps(stored)


def edit(name: str, **keys: Any) -> Callable[[Run, Path], None]:
    return lambda run, folder: write_json(folder / name, {**read_json(folder / name), **keys})


def another_token(run: Run, folder: Path) -> None:
    spec = read_json(folder / "tokenizer.json")
    spec["model"]["vocab"] = {("zz" if t == "te" else t): i for t, i in spec["model"]["vocab"].items()}
    spec["model"]["merges"] = [m for m in spec["model"]["merges"] if "".join(m).replace(" ", "") != "te"]
    write_json(folder / "tokenizer.json", spec)


def other_bos(run: Run, folder: Path) -> None:
    tokens = tokens_of_folder(run.model)
    tokens.fields["tokenizer.ggml.add_bos_token"] = True
    write_gguf(folder, folder / "draft-q8_0.gguf", "q8_0", tokens, name="x")


def other_texts(run: Run, folder: Path) -> None:
    tokens = tokens_of_folder(run.model)
    tokens.tokens[7] = "other"
    write_gguf(folder, folder / "draft-q8_0.gguf", "q8_0", tokens, name="x")


def smaller(run: Run, folder: Path) -> None:
    run.set_rows(640)


@pytest.mark.parametrize(
    ("fault", "name", "cells", "found"),
    [
        (smaller, "vocabulary size", {"vLLM": "FAIL", "SGLang": "FAIL", "transformers": "FAIL", "TensorRT-LLM": "SILENT", "llama.cpp": "-"}, "target 640"),
        (another_token, "token ids", {"SGLang": "FAIL", "vLLM": "SILENT"}, "tokens differ, for example"),
        (edit("tokenizer_config.json", eos_token="<|user|>"), "special ids", {"vLLM": "SILENT"}, "eos_token_id"),
        (edit("config.json", max_position_embeddings=128), "context length", {"SGLang": "FAIL", "vLLM": "SILENT"}, "draft 128, target 512"),
        (edit("config.json", num_attention_heads=1), "tensor parallel", {"vLLM": "FAIL", "llama.cpp": "-"}, r"splits over \[2, 4\]"),
        (edit("config.json", dtype="float32"), "16-bit weights", {"vLLM": "SILENT"}, "float32"),
        (edit("config.json", tie_word_embeddings=False), "tied weights", {"transformers": "SILENT"}, "says untied, the file lacks"),
        (edit("config.json", auto_map={"AutoModel": "x"}), "plain safetensors", {"vLLM": "FAIL"}, "auto_map"),
        (lambda run, folder: (folder / "adapter_config.json").write_text("{}"), "plain safetensors", {"SGLang": "FAIL"}, "adapter_config.json"),
        (edit("generation_config.json", repetition_penalty=1.3), "neutral generation", {"transformers": "SILENT", "vLLM": "-"}, "repetition_penalty"),
        (lambda run, folder: (folder / "chat_template.jinja").write_text("x"), "chat template", {"transformers": "SILENT"}, "not the target's"),
        (other_bos, "GGUF vocabulary", {"llama.cpp": "SILENT"}, "add_bos_token is True, the target's False"),
        (other_texts, "GGUF vocabulary", {"llama.cpp": "SILENT"}, "1 token texts differ, the first at id 7"),
    ],
    ids=lambda x: x if isinstance(x, str) and " " in x else None,
)  # fmt: skip
def test_each_fault_is_seen_with_its_mend(whole: tuple[Run, Path], fault: Any, name: str, cells: dict[str, str], found: str) -> None:
    import re

    run, folder = whole
    fault(run, folder)
    check = looked_at(run, folder)[name]
    assert check.passed is False and check.mend and re.search(found, check.found), check
    assert {s: check.cell(s) for s in cells} == cells


def test_a_folder_without_gguf_is_no_fault_and_says_so(whole: tuple[Run, Path]) -> None:
    run, folder = whole
    for file in folder.glob("*.gguf"):
        file.unlink()
    found = looked_at(run, folder)
    assert found["GGUF file"].cell("llama.cpp") == "not run" and not failures(list(found.values()))
    assert "not run: GGUF file: the folder has none" in matrix_text(list(found.values()))


def test_measured_figures_decide(whole: tuple[Run, Path]) -> None:
    run, folder = whole
    target, export = target_facts(run.recipe()), read_json(folder / "draft_report.json")["export"]
    for alpha, served, passed in ((0.405, 0.279, True), (0.411, 0.281, False)):
        facts = {**export, "alpha": {"published": alpha, "scored": 0.4, "positions": 99}, "served": {"acceptance": served, "ours": 0.26}}
        found = {c.name: c.passed for c in validate(folder, target, facts)}
        assert found["alpha as scored"] is passed and found["served acceptance"] is passed
    assert {c.name: c.passed for c in validate(folder, target, {**export, "padded_mass": 0.02})}["padding is inert"] is False


def test_the_matrix_fits_eighty_columns(whole: tuple[Run, Path]) -> None:
    run, folder = whole
    smaller(run, folder)
    text = matrix_text(list(looked_at(run, folder).values()))
    assert max(map(len, text.splitlines())) <= 80
    assert "mend: set publish.vocabulary: padded" in text and "vocabulary size" in text


def test_check_looks_again_and_keeps_what_it_found(whole: tuple[Run, Path], capsys: pytest.CaptureFixture[str]) -> None:
    run, folder = whole
    assert check_published(run.recipe(), run.make())
    edit("generation_config.json", repetition_penalty=1.3)(run, folder)
    capsys.readouterr()
    assert not check_published(run.recipe(), run.make())
    assert "repetition_penalty" in capsys.readouterr().out
    stored = {c["name"]: c for c in read_json(folder / "draft_report.json")["export"]["checks"]}
    assert stored["neutral generation"]["servers"]["transformers"] == "SILENT" and "SILENT" in (folder / "README.md").read_text()


def test_check_without_a_publication_names_the_command(run: Run) -> None:
    run.make()
    with pytest.raises(DraftstillError, match="draftstill publish"):
        check_published(run.recipe(), RunFolder(run.recipe().run_dir))
