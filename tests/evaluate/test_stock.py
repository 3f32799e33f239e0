"""Stock drafts: existing models scored beside the tuned ones, as they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftstill.errors import DraftstillError
from draftstill.evaluate.comparing import compare
from draftstill.evaluate.load import measure_load
from draftstill.evaluate.proving import published_alpha
from draftstill.evaluate.scoring import score
from draftstill.recipe_io import load_recipe
from draftstill.runfolder import read_json, write_json
from draftstill.stages import stages
from draftstill.train import preflight_all
from tests.pipeline import borrowed, command, finished, make_target, opened, words

TRAINED = ("corpus", "responses", "recording", "draft")
KEYS = {"candidates": ["tuned"], "audit_prompts": 2, "prompts": 3, "gammas": [1, 2], "temperatures": [0.7]}


def test_an_existing_draft_is_scored_beside(tmp_path: Path) -> None:
    """The target itself and another model: one guesses right always, the other as its own law says; the tuned draft's counts stay what they are."""
    make_target(tmp_path / "other", seed=5, layers=1)
    stock = {"same": {"source": str(finished() / "target")}, "other": {"source": str(tmp_path / "other")}}
    recipe, run = opened(borrowed(tmp_path / "with", *TRAINED, evaluate={**KEYS, "stock": stock}))
    result = score(recipe, run)
    alone = score(*opened(borrowed(tmp_path / "without", *TRAINED, evaluate=KEYS)))
    assert {(r["arm"], r["kind"], r["swept"]) for r in result["sweep"]} == {
        ("plain", "plain", 0), *((f"stock:{n}", "stock", g) for n in stock for g in (1, 2)), ("tuned", "tuned", 1), ("tuned", "tuned", 2)
    }  # fmt: skip
    by = {(r["arm"], r["swept"]): r for r in result["sweep"]}
    for gamma in (1, 2):
        same, other = by["stock:same", gamma], by["stock:other", gamma]
        assert same["alpha"] == pytest.approx(1.0, abs=1e-5) and same["counts"]["metrics"]["token_acceptance"] == 1.0
        assert other["alpha"] < 0.9 and other["counts"]["metrics"]["token_acceptance"] < 0.9
        assert same["ceiling"] and same["c"] > 0
        mine = next(r for r in alone["sweep"] if (r["arm"], r["swept"]) == ("tuned", gamma))
        assert by["tuned", gamma]["counts"]["metrics"] == mine["counts"]["metrics"]
    assert result["publish"] == "tuned"
    told = result["stock"]["other"]
    assert told["name"] == "other" and told["content"] and told["parameters"] > 0 and "stock" not in alone
    # An old score whose stock draft of the same name was another model: nothing of it is compared, everything else is.
    old = {**result, "stock": {**result["stock"], "other": {**told, "content": "another"}}}
    compared = compare(result, old)
    arms = {c.arm for c in compared.changes}
    assert "stock:other" not in arms and {"stock:same", "tuned"} <= arms
    assert "stock draft other" in {d.what for d in compared.differences} and not compared.regressed
    page = (stages(recipe, run)["score"].folder / "report.html").read_text()
    assert "other (stock draft)" in page and "c-stock" in page
    json.dumps(result["audit"])
    assert result["audit"]["greedy_fp32"]["identical"] == 2


def test_under_load_a_stock_draft_may_be_the_fastest(tmp_path: Path) -> None:
    keys = {**KEYS, "candidates": ["tuned", "lookup"], "audit_prompts": 0, "gammas": [2], "stock": {"same": {"source": str(finished() / "target")}},
            "batches": [1, 2], "load_prompts": 32}  # fmt: skip
    recipe, run = opened(borrowed(tmp_path, *TRAINED, evaluate={**keys, "batches": [1]}))
    score(recipe, run)
    path = stages(recipe, run)["score"].folder / "score.json"
    found = read_json(path)
    for row in found["sweep"]:  # as if it had been
        if row["arm"] == "stock:same":
            row["speedup"] = {**row["speedup"], "estimate": 9.0, "low": 8.0, "high": 10.0}
    for row in found["arms"]:
        if row["arm"] == "stock:same":
            row["speedup"] = {**row["speedup"], "estimate": 9.0, "low": 8.0, "high": 10.0}
    found["winner"] = {**found["winner"], "arm": "stock:same", "gamma": 2, "candidate": None}
    found["best"] = {**found["best"], "arm": "stock:same", "gamma": 2, "candidate": None}
    path.write_text(json.dumps(found))
    load = measure_load(load_recipe(recipe_path(tmp_path), [f"evaluate.batches={json.dumps(keys['batches'])}"]), run)
    assert load["fixed"]["arm"] == "stock:same"


def test_what_is_published_is_compared_with_its_own_law(tmp_path: Path) -> None:
    """Beside the laws of a stock draft, of drafts before training, and of the same weights with another head: each candidate finds its own."""
    own = {"whole": {}, "narrow": {"draft": {"head_tokens": 20}}, "wide": {"draft": {"head_tokens": 60}}}
    stock = {"same": {"source": str(finished() / "target")}}
    keys = {**KEYS, "candidates": ["untuned", "tuned"], "audit_prompts": 0, "gammas": [1], "stock": stock}
    path = borrowed(tmp_path, *TRAINED[:3], train={"max_steps": 2, "eval_steps": 2, "candidates": own}, evaluate=keys)
    assert command("publish", path) == 0
    recipe, run = opened(path)
    found = stages(recipe, run)
    assert len({found[f"draft-{name}"].facts()["weights_sha256"] for name in own}) == 1
    scored = {}
    for name in own:
        result = read_json(found["score"].folder / "score.json")
        write_json(found["score"].folder / "score.json", {**result, "publish": name})
        told = published_alpha(recipe, run, found, found[f"draft-{name}"].folder / "model")
        assert told is not None and told["published"] == pytest.approx(told["scored"], abs=1e-5), name
        scored[name] = told["scored"]
    assert len(set(scored.values())) == len(own), "the heads are worth different things, so that the law of another one would be seen"


def recipe_path(home: Path) -> Path:
    return next(home.glob("*.yaml"))


@pytest.mark.parametrize("fault", ["foreign", "missing", "name"])
def test_what_cannot_be_scored_is_refused_before_anything_runs(fault: str, tmp_path: Path) -> None:
    make_target(tmp_path / "foreign", vocabulary=[*words()[::-1], "more"])
    stock = {"foreign": {"mine": {"source": str(tmp_path / "foreign")}}, "missing": {"mine": {"source": "./nowhere"}},
             "name": {"my draft": {"source": "./x"}}}[fault]  # fmt: skip
    path = borrowed(tmp_path / "home", evaluate={"stock": stock})
    with pytest.raises(DraftstillError) as caught:
        preflight_all(opened(path)[0])
    assert ("evaluate.stock: a stock draft's name" if fault == "name" else "evaluate.stock.mine.source") in str(caught.value)
