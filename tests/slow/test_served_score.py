"""The score of a real llama.cpp server (the one inside xllamacpp), by its own counters, with and without its metrics page and its draft."""

from __future__ import annotations

import importlib.util
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftstill.distill import Ask, Client, Prompt
from draftstill.errors import DraftstillError
from draftstill.evaluate.gguf_tokens import tokens_of_folder
from draftstill.evaluate.ggufs import write_gguf
from draftstill.evaluate.served_score import Watched, measure
from draftstill.evaluate.serving import llama_server
from draftstill.evaluate.snippets import llama_command
from draftstill.recipe import Recipe
from tests.evaluate.published import byte_tokenizer, make_draft
from tests.pipeline import borrowed, opened

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="pip install 'draftstill[served]'"),
]
PROMPTS = [Prompt(str(n), list(range(20 + 9 * n, 60 + 9 * n)), 40) for n in range(8)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target and a copy of it as GGUF."""
    folder = tmp_path_factory.mktemp("pair")
    target = make_draft(folder / "target", rows=320, tokenizer=byte_tokenizer(), spread=2.0, layers=3)
    write_gguf(target, folder / "target.gguf", "f16", tokens_of_folder(target), name="target")
    shutil.copy(folder / "target.gguf", folder / "same.gguf")
    return folder


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    return opened(borrowed(tmp_path_factory.mktemp("served")), "evaluate.max_new_tokens=48")[0]


@pytest.fixture(scope="module")
def command(pair: Path) -> str:
    return llama_command(str(pair / "target.gguf"), str(pair / "same.gguf"), 3)


@pytest.fixture(scope="module")
def plain(pair: Path) -> Iterator[str]:
    with llama_server(f"llama-server -m {pair / 'target.gguf'} -c 512 --metrics", threads=1) as address:
        yield address


def test_a_model_behind_itself_is_scored_by_answers_and_counters_alike(command: str, plain: str, recipe: Recipe) -> None:
    with llama_server(command, threads=1) as address:
        served = Watched.at(address, "--server", wants_draft=True)
        before = served.counters()
        found = measure(recipe, PROMPTS, served, Watched.at(plain, "--baseline-server", wants_draft=False))
        moved = served.adapter.delta(before, served.counters(), served.adapter.drafted)
    assert found["kind"] == "llama.cpp" and found["version"] and found["validated"] and found["watched"]
    greedy = found["temperatures"][0]
    a = greedy["acceptance"]
    assert a["acceptance"] > 0.9 and a["requests"] == len(PROMPTS) and a["drafted"] > 60, a
    assert moved is not None and moved > a["drafted"], "the page counts the warm-up and the timing, too"
    assert a["steps"] and 2.0 < a["gamma"] <= 3.0 and a["accepted_at"] is None or a["accepted_at"][0] >= a["accepted_at"][-1]
    assert greedy["speed_of"] == "decode" and greedy["speedup"]["estimate"] > 0 and greedy["same_texts"] is not None
    assert all(t["acceptance"]["acceptance"] > 0 for t in found["temperatures"])


def test_a_server_without_a_draft_is_an_error(plain: str, recipe: Recipe) -> None:
    with pytest.raises(DraftstillError, match="speculate|no drafted"):
        measure(recipe, PROMPTS, Watched.at(plain, "--server", wants_draft=True), None)


def test_another_users_request_is_noticed(command: str, recipe: Recipe) -> None:
    with llama_server(command, threads=1) as address:
        stop = threading.Event()

        def intrude() -> None:
            other = Client(address)
            while not stop.is_set():
                other.complete(Ask([40, 41, 42], 4))
                time.sleep(0.01)

        thread = threading.Thread(target=intrude)
        thread.start()
        try:
            with pytest.raises(DraftstillError, match="somebody else|not ours"):
                measure(recipe, PROMPTS, Watched.at(address, "--server", wants_draft=True), None)
        finally:
            stop.set()
            thread.join()


def test_without_its_metrics_page_the_answers_are_enough(command: str, recipe: Recipe) -> None:
    with llama_server(command.replace(" --metrics", ""), threads=1) as address:
        found = measure(recipe, PROMPTS[:2], Watched.at(address, "--server", wants_draft=True), None)
    assert not found["watched"] and found["temperatures"][0]["acceptance"]["acceptance"] > 0.9


def test_the_demos_target_with_a_draft_of_its_first_layers(tmp_path: Path) -> None:
    """The demo's pair in GGUF, its draft untrained: the server's acceptance is our decoder's, and so are its texts."""
    import torch

    from draftstill.cli import config_path
    from draftstill.corpus import prepare_corpus, read_documents
    from draftstill.decode import load_target
    from draftstill.distill import cut_prompts
    from draftstill.evaluate.exporter import target_facts
    from draftstill.evaluate.gguf_tokens import tokens_of_gguf
    from draftstill.evaluate.serving import own_acceptance
    from draftstill.recipe_io import load_recipe
    from draftstill.runfolder import RunFolder
    from draftstill.train import build_draft

    overrides = [
        f"run_dir={tmp_path / 'run'}",
        f"draft.layers={list(range(28))}",
        "evaluate.max_new_tokens=32",
        "evaluate.temperatures=[0.0, 0.7]",
    ]
    recipe = load_recipe(config_path("demo.yaml"), overrides)
    target = target_facts(recipe)
    assert target.gguf is not None
    draft = build_draft(recipe)
    draft.model.to(torch.bfloat16).save_pretrained(tmp_path / "draft")
    draft.tokenizer.save_pretrained(tmp_path / "draft")
    write_gguf(tmp_path / "draft", tmp_path / "draft.gguf", "q8_0", tokens_of_gguf(target.gguf), name="x")
    documents = read_documents(prepare_corpus(recipe, RunFolder(tmp_path / "run")), "test")
    prompts = cut_prompts(documents, 4, recipe.respond, load_target(recipe).tokenizer, recipe.seed)
    with llama_server(llama_command(str(target.gguf), str(tmp_path / "draft.gguf"), 3)) as address:
        found = measure(recipe, prompts, Watched.at(address, "--server", wants_draft=True), None)
    ours = own_acceptance(recipe, tmp_path / "draft", [p.ids for p in prompts], gamma=3, max_new_tokens=32)
    greedy = found["temperatures"][0]["acceptance"]
    assert abs(greedy["acceptance"] - ours["acceptance"]) < 0.08, (greedy, ours["acceptance"])
    assert greedy["accepted_at"] is not None and sum(greedy["accepted_at"]) == greedy["accepted"]
