"""The demo's target and real agreements: greedy identity on 50 held-out prompts, self-pair, sampling. Minutes long."""

from __future__ import annotations

import pytest

from draftstill.cli import config_path
from draftstill.corpus import prepare_corpus, read_documents
from draftstill.distill import cut_prompts
from draftstill.evaluate.arms import open_bench
from draftstill.evaluate.audit import greedy, sampling, self_pair
from draftstill.recipe_io import load_recipe
from draftstill.runfolder import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def bench_and_prompts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("real")
    overrides = [f"run_dir={folder}", "draft.head_tokens=0", "evaluate.candidates=[untuned, lookup]"]
    recipe = load_recipe(config_path("demo.yaml"), overrides)
    bench = open_bench(recipe, folder, dtype="float32")
    bench.drafts["tuned"] = bench.drafts["untuned"]  # the composite arm, too: identity holds whatever the draft
    recipe = load_recipe(config_path("demo.yaml"), [*overrides[:2], "evaluate.candidates=[untuned, lookup, composite]"])
    bench.recipe = recipe
    documents = read_documents(prepare_corpus(recipe, RunFolder(folder)), "test")
    return bench, cut_prompts(documents, 50, recipe.respond, bench.target.tokenizer, recipe.seed)


def test_greedy_is_identical_on_fifty_prompts(bench_and_prompts):
    bench, prompts = bench_and_prompts
    found = greedy(bench, prompts)
    assert found["prompts"] == 50 == found["identical"], found
    assert set(found["arm_names"]) == {"untuned", "lookup", "composite", "transformers"}


def test_self_pair_is_exactly_one(bench_and_prompts):
    bench, prompts = bench_and_prompts
    assert self_pair(bench, prompts[:2])["token_acceptance"] == 1.0


def test_sampling_follows_the_exact_law(bench_and_prompts):
    bench, prompts = bench_and_prompts
    for prompt in prompts[:3]:
        assert sampling(bench, prompt)["p_value"] > 1e-4
