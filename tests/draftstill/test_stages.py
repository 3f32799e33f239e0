"""Candidates in a recipe: what a file may say, what each one's whole recipe is, and which one is published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from draftstill.errors import DraftstillError, RecipeError
from draftstill.recipe import Recipe
from draftstill.recipe_io import load_recipe
from draftstill.runfolder import FAILED, RunFolder, write_json
from draftstill.stages import TUNED, candidate_recipes, draft_stage, failure, kind_of, note_failure, published_draft, stages

BASE: dict[str, Any] = {
    "target": {"source": "some/target"},
    "corpus": {"source": "texts"},
    "train": {"learning_rate": 1e-3, "loss": {"name": "lk", "eta": 2.0}, "report_to": ["wandb"]},
}


def loaded(home: Path, candidates: Any, **sections: Any) -> Recipe:
    values = {"run_dir": str(home / "run"), **BASE, **sections}
    values["train"] = {**values["train"], "candidates": candidates}
    (home / "recipe.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    return load_recipe(home / "recipe.yaml")


def test_one_draft_without_candidates(tmp_path: Path) -> None:
    recipe = loaded(tmp_path, {})
    assert candidate_recipes(recipe) == {TUNED: recipe}
    names = list(stages(recipe, RunFolder(recipe.run_dir)))
    assert names == ["corpus", "responses", "recording", "draft", "score", "published"] and draft_stage(TUNED) == "draft"


def test_values_are_laid_over_key_by_key(tmp_path: Path) -> None:
    recipe = loaded(tmp_path, {"wide": {"draft": {"layers": [0, 1, 2]}}, "kl": {"train": {"loss": {"name": "forward_kl"}, "max_steps": 7}}})
    own = candidate_recipes(recipe)
    assert list(own) == ["wide", "kl"]
    assert own["wide"].draft.layers == (0, 1, 2) and own["wide"].train.loss == recipe.train.loss
    assert own["kl"].train.loss.name == "forward_kl" and own["kl"].train.loss.eta == 2.0, "the rest of the section stays"
    assert own["kl"].train.max_steps == 7 and own["kl"].train.learning_rate == 1e-3 and own["kl"].draft == recipe.draft
    for each in own.values():
        assert each.train.candidates == {} and each.corpus == recipe.corpus and each.train.report_to == ("wandb",)
    names = list(stages(recipe, RunFolder(recipe.run_dir)))
    assert names == ["corpus", "responses", "recording", "draft-wide", "draft-kl", "score", "published"]
    assert [kind_of(n) for n in names[3:5]] == ["draft", "draft"]


def test_a_mix_is_one_value(tmp_path: Path) -> None:
    """Merged key by key, a candidate could never leave a loss of the recipe's mix out."""
    train = {"loss": {"mix": {"tvd": 1.0, "forward_kl": 1.0}}}
    own = candidate_recipes(loaded(tmp_path, {"a": {"train": {"loss": {"mix": {"lk": 1.0}}}}}, train=train))
    assert own["a"].train.loss.mix == {"lk": 1.0}


def test_another_source_has_its_own_hash(tmp_path: Path) -> None:
    draft = {"source": "wheel:some-model==1.0", "sha256": "0" * 64, "file": "a.gguf"}
    own = candidate_recipes(
        loaded(tmp_path, {"other": {"draft": {"source": "org/model"}}, "same": {"draft": {"head_tokens": 5}}}, draft=draft)
    )
    assert own["other"].draft.sha256 is None and own["other"].draft.file is None
    assert own["same"].draft.sha256 == "0" * 64 and own["same"].draft.source == "wheel:some-model==1.0"


@pytest.mark.parametrize(("candidates", "says"), [
    ({"wide": {"draft": {"layerz": [0]}}}, ["train.candidates.wide.draft.layerz", "did you mean 'layers'?"]),
    ({"wide": {"train": {"loss": {"etta": 1}}}}, ["train.candidates.wide.train.loss.etta", "did you mean 'eta'?"]),
    ({"wide": {"trian": {}}}, ["train.candidates.wide.trian", "did you mean 'train'?"]),
    ({"wide": {"train": {"learning_rate": -1}}}, ["train.candidates.wide.train.learning_rate", "greater than 0", "found -1"]),
    ({"wide": {"train": {"learning_rate": "fast"}}}, ["train.candidates.wide.train.learning_rate", "found 'fast'"]),
    ({"wide": {"draft": {"layers": [3, 1]}}}, ["train.candidates.wide.draft", "ascend"]),
    ({"wide": {"train": {"candidates": {}}}}, ["train.candidates.wide.train.candidates", "no candidates of its own"]),
    ({"wide": {"train": {"loss": {"temperature": 0.5}}}}, ["train.candidates.wide", "record.temperature"]),
    ({"wide": None}, ["train.candidates.wide"]),
    ({"a_b": {}}, ["train.candidates", "'a_b'", "letters, digits"]),
    ({"-a": {}}, ["train.candidates", "'-a'"]),
    ({"": {}}, ["train.candidates", "''"]),
    ({"../a": {}}, ["train.candidates", "'../a'"]),
    ({"a" * 33: {}}, ["train.candidates", "32 at most"]),
    ({"Tuned": {}}, ["train.candidates", "'Tuned'", "arm of the score"]),
    ({"plain": {}}, ["train.candidates", "'plain'"]),
    ({"a": {}, "A": {}}, ["train.candidates", "differ in case only"]),
])  # fmt: skip
def test_refused_when_the_recipe_is_read(candidates: Any, says: list[str], tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        loaded(tmp_path, candidates)
    assert all(s in str(caught.value) for s in says), caught.value


def test_all_faults_of_all_candidates_at_once(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="3 faults") as caught:
        loaded(tmp_path, {"a": {"draft": {"x": 1}, "train": {"max_steps": 0}}, "ok": {}, "b": {"train": {"y": 2}}})
    assert all(s in str(caught.value) for s in ("a.draft.x", "max_steps must be", "b.train.y"))


def test_an_override_reaches_into_a_candidate(tmp_path: Path) -> None:
    loaded(tmp_path, {"a": {}})
    recipe = load_recipe(tmp_path / "recipe.yaml", ["train.candidates.a.draft.layers=[0, 5]", "train.max_steps=3"])
    assert candidate_recipes(recipe)["a"].draft.layers == (0, 5) and candidate_recipes(recipe)["a"].train.max_steps == 3


def test_a_candidate_that_is_the_recipe_itself_is_the_same_draft(tmp_path: Path) -> None:
    alone, several = loaded(tmp_path, {}), loaded(tmp_path, {"a": {}, "b": {"train": {"max_steps": 5}}})
    run = RunFolder(alone.run_dir)
    one, two = stages(alone, run), stages(several, run)
    assert one["draft"].fingerprint == two["draft-a"].fingerprint != two["draft-b"].fingerprint
    assert one["recording"].fingerprint == two["recording"].fingerprint
    renamed = stages(loaded(tmp_path, {"c": {}, "b": {"train": {"max_steps": 5}}}), run)
    assert renamed["score"].fingerprint != two["score"].fingerprint, "the score names its candidates"


# --- which one is published --------------------------------------------------------------------------------------------------


def finish(recipe: Recipe, name: str, **files: Any) -> None:
    stage = stages(recipe, RunFolder(recipe.run_dir))[name]
    stage.begin()
    for file, value in files.items():
        write_json(stage.work / f"{file}.json", value)
    stage.finish()


def test_the_only_draft_is_published(tmp_path: Path) -> None:
    recipe = loaded(tmp_path, {})
    assert published_draft(recipe, RunFolder(recipe.run_dir))[0] == TUNED
    one = loaded(tmp_path, {"only": {"draft": {"layers": [3]}}})
    name, own, stage = published_draft(one, RunFolder(one.run_dir))
    assert (name, stage.name, own.draft.layers) == ("only", "draft-only", (3,))


def test_of_several_the_one_that_the_score_names(tmp_path: Path) -> None:
    recipe = loaded(tmp_path, {"a": {}, "b": {"train": {"max_steps": 5}}})
    run = RunFolder(recipe.run_dir)
    with pytest.raises(DraftstillError, match="no score says") as caught:
        published_draft(recipe, run)
    assert caught.value.key == "train.candidates" and "evaluate" in str(caught.value)
    finish(recipe, "score", score={"publish": "b"})
    name, own, stage = published_draft(recipe, run)
    assert (name, own.train.max_steps, stage.name) == ("b", 5, "draft-b")


@pytest.mark.parametrize("score", [{}, {"publish": None}, {"publish": "gone"}])
def test_a_score_that_names_none(score: dict[str, Any], tmp_path: Path) -> None:
    recipe = loaded(tmp_path, {"a": {}, "b": {"train": {"max_steps": 5}}})
    finish(recipe, "score", score=score)
    with pytest.raises(DraftstillError, match="no score says"):
        published_draft(recipe, RunFolder(recipe.run_dir))


def test_a_failure_belongs_to_the_recipe_that_failed(tmp_path: Path) -> None:
    recipe = loaded(tmp_path, {"a": {}, "b": {"train": {"learning_rate": 9.0}}})
    run = RunFolder(recipe.run_dir)
    note_failure(stages(recipe, run)["draft-b"], ValueError("too fast"))
    assert failure(stages(recipe, run)["draft-b"]) == "too fast" and failure(stages(recipe, run)["draft-a"]) is None
    mended = stages(loaded(tmp_path, {"a": {}, "b": {"train": {"learning_rate": 1e-4}}}), run)["draft-b"]
    assert failure(mended) is None and mended.begin() == run.path / "draft-b.partial", "a note is no result that would be in the way"
    assert (mended.work / FAILED).exists() and not mended.worked
