"""A real llama.cpp server (the one inside xllamacpp) serves the demo's target with a published draft: its acceptance beside ours."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from pathlib import Path

import pytest

from draftstill.cli import config_path
from draftstill.errors import DraftstillError
from draftstill.evaluate import served_acceptance
from draftstill.evaluate.gguf_tokens import tokens_of_folder
from draftstill.evaluate.ggufs import write_gguf
from draftstill.evaluate.serving import llama_server, own_acceptance
from draftstill.evaluate.snippets import llama_command, snippets
from draftstill.recipe_io import load_recipe
from draftstill.sources import resolve_model
from tests.evaluate.published import byte_tokenizer, make_draft

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="pip install 'draftstill[served]'"),
]
OPTIONS = json.loads((Path(__file__).parents[1] / "evaluate" / "data" / "server_options.json").read_text())["llama.cpp"]
PROMPTS = [list(range(20, 60)), list(range(100, 150))]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target and its own first layers as GGUF."""
    folder = tmp_path_factory.mktemp("pair")
    target = make_draft(folder / "target", rows=320, tokenizer=byte_tokenizer(), spread=2.0, layers=3)
    write_gguf(target, folder / "target.gguf", "f16", tokens_of_folder(target), name="target")
    shutil.copy(folder / "target.gguf", folder / "same.gguf")
    return folder


def test_a_model_behind_itself_is_accepted(pair: Path) -> None:
    """Not exactly 1: llama.cpp computes one token and several in other orders."""
    found = served_acceptance(llama_command(str(pair / "target.gguf"), str(pair / "same.gguf"), 3), PROMPTS, max_new_tokens=48, threads=1)
    assert found["acceptance"] > 0.9 and found["drafted"] > 60, found
    assert all(len(t) == 48 for t in found["tokens"])


def test_without_the_type_it_is_an_error_and_no_zero(pair: Path) -> None:
    command = llama_command(str(pair / "target.gguf"), str(pair / "same.gguf"), 3).replace(" --spec-type draft-simple", "")
    with pytest.raises(DraftstillError, match="no drafted tokens"):
        served_acceptance(command, PROMPTS[:1], max_new_tokens=16, threads=1)


def test_a_vocabulary_that_differs_is_an_error_and_no_zero(pair: Path, tmp_path: Path) -> None:
    tokens = tokens_of_folder(pair / "target")
    tokens.tokens[50] = "other"
    write_gguf(pair / "target", tmp_path / "wrong.gguf", "f16", tokens, name="x")
    with pytest.raises(DraftstillError):
        served_acceptance(
            llama_command(str(pair / "target.gguf"), str(tmp_path / "wrong.gguf"), 3), PROMPTS[:1], max_new_tokens=16, threads=1
        )


def test_a_file_that_is_no_model_says_so(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_text("no")
    with (
        pytest.raises(DraftstillError, match="did not start"),
        llama_server(llama_command(str(tmp_path / "x.gguf"), str(tmp_path / "x.gguf"), 2)),
    ):
        pass


def test_the_stored_options_stand_in_the_built_server() -> None:
    import xllamacpp

    built = b"".join(p.read_bytes() for p in Path(xllamacpp.__file__).parent.glob("*.so"))
    # Names of up to 15 characters may be kept inside the machine code.
    assert not [o for o in OPTIONS["options"] if len(o) > 15 and o.encode() not in built]
    code = next(s.code for s in snippets("t", "d", 2, gguf="draft-q8_0.gguf") if s.server == "llama.cpp")
    assert not [w for w in re.findall(r"(?<!\S)--?[a-z][a-z-]*", code) if w not in OPTIONS["options"]]


def test_the_demos_target_with_a_draft_of_its_first_layers(tmp_path: Path) -> None:
    """28 of the target's 30 layers: accepted often enough without training. The demo's trained draft stands in docs/publishing.md."""
    import torch

    from draftstill.corpus import prepare_corpus, read_documents
    from draftstill.decode import load_target
    from draftstill.distill import cut_prompts
    from draftstill.evaluate.exporter import target_facts
    from draftstill.evaluate.gguf_tokens import tokens_of_gguf
    from draftstill.runfolder import RunFolder
    from draftstill.train import build_draft

    recipe = load_recipe(
        config_path("demo.yaml"),
        [f"run_dir={tmp_path / 'run'}", f"draft.layers={list(range(28))}"],
    )
    target = target_facts(recipe)
    assert target.gguf is not None
    draft = build_draft(recipe)
    draft.model.to(torch.bfloat16).save_pretrained(tmp_path / "draft")
    draft.tokenizer.save_pretrained(tmp_path / "draft")
    write_gguf(tmp_path / "draft", tmp_path / "draft.gguf", "q8_0", tokens_of_gguf(target.gguf), name="x")
    documents = read_documents(prepare_corpus(recipe, RunFolder(tmp_path / "run")), "test")
    prompts = [p.ids for p in cut_prompts(documents, 6, recipe.respond, load_target(recipe).tokenizer, recipe.seed)]
    served = served_acceptance(llama_command(str(target.gguf), str(tmp_path / "draft.gguf"), 3), prompts, max_new_tokens=48)
    ours = own_acceptance(recipe, tmp_path / "draft", prompts, gamma=3, max_new_tokens=48)
    assert resolve_model(recipe.target, "target.source").origin["gguf"] == target.gguf.name
    assert abs(served["acceptance"] - ours["acceptance"]) < 0.05, (served["acceptance"], ours["acceptance"])
