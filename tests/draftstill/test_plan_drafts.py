"""What the plan says of each draft: its size, what it costs, and where that is known from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftstill import estimates as e
from draftstill import plan as p
from draftstill.machine import describe_machine
from draftstill.recipe import Recipe
from draftstill.runfolder import RunFolder, write_json
from draftstill.sizes import size_of
from draftstill.stages import resolved_dtype, stages
from tests.draftstill.plans import SMOLLM2_135M, make, target_folder


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return target_folder(tmp_path / "target")


CANDIDATES: dict[str, Any] = {
    "wide": {"draft": {"layers": [0, 1, 2, 3]}},
    "searched-and-narrow-in-heads-and": {"draft": {"layers": "auto", "depth": 3, "keep_heads": 0.34, "keep_mlp": 0.5}},
    "fresh": {"draft": {"source": "fresh", "depth": 2, "fresh": {"hidden_size": 384}}},
    "stock": {"draft": {"source": "some/other"}},
}


def test_every_candidate_has_its_line(tmp_path: Path, target: Path) -> None:
    recipe = make(tmp_path, target={"source": str(target)}, train={"candidates": CANDIDATES}, evaluate={"gamma": 3})
    text = p.plan(recipe, RunFolder(recipe.run_dir))
    for words in ("cut from the target: layers 0, 1, 2, 3", "3 layers, chosen by measured alpha, 34% of the heads, 50% of the MLP",
                  "2 layers of its own, embedding and head from the target", "unknown until the models are downloaded", "At gamma 3."):  # fmt: skip
        assert words in " ".join(text.split()), words
    assert {f"draft-{name}" for name in CANDIDATES} <= {line.split()[0] for line in text.splitlines() if line.strip()}


@pytest.mark.parametrize("sections", [
    {}, {"train": {"candidates": CANDIDATES}}, {"draft": {"head_tokens": 4096, "layers": list(range(12))}, "adapt": {"max_tokens": 100_000}},
    {"draft": {"layers": [0, 99]}},
])  # fmt: skip
def test_eighty_columns(sections: dict[str, Any], tmp_path: Path, target: Path) -> None:
    recipe = make(tmp_path, target={"source": str(target)}, **sections)
    for line in p.plan(recipe, RunFolder(recipe.run_dir)).splitlines():
        assert len(line) <= 80 or str(tmp_path) in line, line


def planned(tmp_path: Path, target: Path, **draft: Any) -> e.Cost:
    recipe = make(tmp_path, target={"source": str(target)}, draft=draft, device="cpu")
    size = e.target_size(recipe)
    assert size is not None
    (drafted,) = e.sizes_of_drafts(recipe, size).values()
    assert drafted is not None
    return e.cost_of(recipe, size, drafted)


def test_a_step_reads_its_layers_and_the_rows_it_guesses_among(tmp_path: Path, target: Path) -> None:
    width, size = e.DTYPE_BYTES[resolved_dtype(make(tmp_path, device="cpu"))], size_of(SMOLLM2_135M)
    assert size is not None
    whole, trimmed = planned(tmp_path, target), planned(tmp_path, target, head_tokens=6144)
    assert whole.step_bytes == (2 * size.layer_parameters + 49152 * 576) * width
    assert trimmed.step_bytes == (2 * size.layer_parameters + 6144 * 576) * width
    assert trimmed.size.parameters() == whole.size.parameters() == size.parameters(2), "the published weights keep all rows"
    assert trimmed.c < whole.c < planned(tmp_path, target, layers=list(range(8))).c < 1
    assert planned(tmp_path, target, layers=list(range(30))).c == pytest.approx(1.0)


def test_the_demos_draft_costs_what_was_measured(tmp_path: Path, target: Path) -> None:
    """The figures that the constants were fitted to: .080 and .099 on 2 cores."""
    recipe = make(tmp_path, target={"source": str(target), "dtype": "bfloat16"}, draft={"head_tokens": 6144}, device="cpu")
    size = size_of(SMOLLM2_135M)
    assert size is not None
    (drafted,) = e.sizes_of_drafts(recipe, size).values()
    assert drafted is not None and 0.08 <= e.cost_of(recipe, size, drafted).c <= 0.1


# --- costs that a score measured ---------------------------------------------------------------------------------------------

CANDIDATE_COSTS: dict[str, Any] = {
    "verify_s": {"1": 0.02, "2": 0.021, "3": 0.022, "4": 0.025},
    "first_s": {"tuned": 0.004},
    "draft_s": {"tuned": 0.001},
}


def finished_score(recipe: Recipe, costs: dict[str, Any], **conditions: Any) -> None:
    """A whole score in the run folder, of this machine unless ``conditions`` says otherwise."""
    stage = stages(recipe, RunFolder(recipe.run_dir))["score"]
    about = {"machine": describe_machine(), "date": "2026-01-31", **conditions}
    write_json(stage.begin() / "score.json", {"costs": costs, "conditions": about})
    stage.finish()


def row(text: str, name: str = "tuned") -> list[str]:
    return next(line.split() for line in text.splitlines() if line.split()[:1] == [name] and "M" in line.split())


def test_a_score_of_this_machine_gives_c_and_v(tmp_path: Path, target: Path) -> None:
    from draftstill.decode import Costs
    from draftstill.decode.theory import break_even, expected_tokens, predicted_speedup

    recipe = make(tmp_path, target={"source": str(target)}, evaluate={"gamma": 3}, device="cpu")
    finished_score(recipe, CANDIDATE_COSTS)
    text = p.plan(recipe, RunFolder(recipe.run_dir))
    measured = Costs(0, 1, **CANDIDATE_COSTS)
    c, v = measured.c("tuned", 3), measured.v(4)
    assert (c, v) == (pytest.approx(0.1), 1.25)
    even = break_even(3, c, v)
    gains = [predicted_speedup(expected_tokens(a, 3), 3, c, v) for a in p.ALPHAS]
    assert even is not None and row(text)[5:] == ["0.10", f"{even:.2f}", *(f"{g:.2f}" for g in gains)]
    told = " ".join(text.split())
    assert (
        "drafts (c and v: timed on this machine by the score of 2026-01-31)" in told
        and "over a target step: 1.25." in told
        and "fitted" not in told
    )
    older = {key: value for key, value in CANDIDATE_COSTS.items() if key != "first_s"}
    write_json(Path(recipe.run_dir) / "score" / "score.json", {
        "costs": older, "conditions": {"machine": describe_machine(), "date": "2026-01-31", "accelerator": "NVIDIA X"},
    })  # fmt: skip
    text = p.plan(recipe, RunFolder(recipe.run_dir))
    assert row(text)[5] == "0.05" and "timed on this machine, NVIDIA X, by the score of 2026-01-31" in " ".join(text.split())
    assert all(len(line) <= 80 or str(tmp_path) in line for line in text.splitlines())


@pytest.mark.parametrize("why", ["another machine", "another recipe", "unfinished", "other blocks", "no costs", "none"])
def test_what_no_score_of_this_machine_tells_is_estimated(why: str, tmp_path: Path, target: Path) -> None:
    recipe = make(tmp_path, target={"source": str(target)}, evaluate={"gamma": 3}, device="cpu")
    if why == "another machine":
        finished_score(recipe, CANDIDATE_COSTS, machine={**describe_machine(), "cpu": "another"})
    elif why == "another recipe":
        finished_score(make(tmp_path, target={"source": str(target)}, evaluate={"gamma": 3}, device="cpu", seed=1), CANDIDATE_COSTS)
    elif why == "unfinished":
        finished_score(recipe, CANDIDATE_COSTS)
        (Path(recipe.run_dir) / "score" / "provenance.json").unlink()
    elif why == "other blocks":
        finished_score(recipe, {**CANDIDATE_COSTS, "verify_s": {"1": 0.02, "2": 0.021}})
    elif why == "no costs":
        finished_score(recipe, {})
    text = " ".join(p.plan(recipe, RunFolder(recipe.run_dir)).split())
    assert (
        "fitted on 2 CPU cores that multiply bfloat16" in text
        and "The score times both on this machine" in text
        and "target step: 1." in text
    )


@pytest.mark.parametrize("timed", [("one",), ()])
def test_a_candidate_that_was_not_timed_is_marked(timed: tuple[str, ...], tmp_path: Path, target: Path) -> None:
    """It failed, or the score has no arm of it."""
    recipe = make(
        tmp_path, target={"source": str(target)}, train={"candidates": {"one": {}, "two": {}}}, evaluate={"gamma": 3}, device="cpu"
    )
    finished_score(
        recipe, {"verify_s": CANDIDATE_COSTS["verify_s"], "first_s": dict.fromkeys(timed, 0.004), "draft_s": dict.fromkeys(timed, 0.001)}
    )
    text = p.plan(recipe, RunFolder(recipe.run_dir))
    assert (row(text, "one")[5] == "0.10") == bool(timed) and row(text, "two")[5].startswith("~") and "~: estimated" in text


@pytest.mark.parametrize(("device", "dtype", "says"), [
    ("cpu", "bfloat16", "verifying as one plain step. The"), ("cpu", "float32", "verifying as one plain step, though in float32 it costs more. The"),
    ("cuda", "float32", "assumed, not yet measured; verifying as one plain step. The"),
])  # fmt: skip
def test_the_estimates_say_where_they_come_from(device: str, dtype: str, says: str, tmp_path: Path, target: Path) -> None:
    recipe = make(tmp_path, target={"source": str(target), "dtype": dtype}, device=device)
    assert says in " ".join(p.plan(recipe, RunFolder(recipe.run_dir)).split())


@pytest.mark.parametrize("draft", [
    {"layers": [0, 2]}, {"layers": [1], "keep_heads": 0.4, "keep_mlp": 0.3}, {"source": "fresh", "depth": 2, "fresh": {"hidden_size": 24}},
    {"source": "fresh", "depth": 1, "fresh": {"intermediate_size": 40, "tie_word_embeddings": True}},
    {"source": "fresh", "depth": 1, "fresh": {"head_dim": 4, "num_attention_heads": 6, "num_key_value_heads": 3}},
])  # fmt: skip
def test_what_is_planned_is_what_is_built(draft: dict[str, Any], tmp_path: Path) -> None:
    from draftstill.train import build_draft
    from tests.train.drafts import recipe_of

    recipe = recipe_of(tmp_path, **draft)
    (size,) = e.sizes_of_drafts(recipe, e.target_size(recipe)).values()
    model = build_draft(recipe).model
    norms = sum(q.numel() for q in model.parameters() if q.dim() == 1)
    assert size is not None and size.parameters() == sum(q.numel() for q in model.parameters()) - norms
    assert size == size_of(model.config.to_dict())


@pytest.mark.parametrize(("draft", "says"), [
    ({"layers": [0, 30]}, "draft.layers: the target has 30 layers"), ({"layers": "auto", "depth": 31}, "draft.depth: the target has 30 layers"),
    ({"keep_heads": 0.9}, "draft.keep_heads"), ({"source": "fresh", "depth": 1, "fresh": {"num_key_value_heads": 2}}, "draft.fresh.num_key_value_heads"),
])  # fmt: skip
def test_a_draft_that_cannot_be_built_is_a_problem(draft: dict[str, Any], says: str, tmp_path: Path, target: Path) -> None:
    recipe = make(tmp_path, target={"source": str(target)}, draft=draft)
    found = p.problems(recipe)
    assert len(found) == 1 and says in found[0]
    assert "problems that would stop the run" in p.plan(recipe, RunFolder(recipe.run_dir))


def test_one_bad_candidate_hides_no_other(tmp_path: Path, target: Path) -> None:
    recipe = make(tmp_path, target={"source": str(target)}, train={"candidates": {"bad": {"draft": {"layers": [77]}}, "good": {}}})
    (found,) = p.problems(recipe)
    assert found.startswith("train.candidates.bad.draft.layers: the target has 30 layers")
    lines = [line.split() for line in p.plan(recipe, RunFolder(recipe.run_dir)).splitlines()]
    assert ["bad", "cannot", "be", "built:", "see", "the", "problems", "below"] in lines
    assert any(line[:3] == ["good", "35.4", "M"] for line in lines)


def test_keys_that_older_folders_do_not_know_change_no_fingerprint(tmp_path: Path) -> None:
    inputs = stages(make(tmp_path), RunFolder(tmp_path / "run"))["draft"].inputs["draft"]
    assert inputs == {"source": "prune", "sha256": None, "file": None, "revision": None, "layers": [0, 1]}
    asked = stages(make(tmp_path, draft={"keep_mlp": 0.5}), RunFolder(tmp_path / "run"))["draft"].inputs["draft"]
    assert asked == {**inputs, "keep_mlp": 0.5}


@pytest.mark.parametrize(("draft", "says"), [
    ({"layers": "auto"}, "needs depth"), ({"source": "fresh"}, "needs depth"), ({"depth": 4}, "depth is 4, but layers names 2"),
    ({"keep_heads": 0.0}, "greater than 0"), ({"keep_mlp": 1.5}, "less than or equal to 1"), ({"layers": "all"}, "layers"),
])  # fmt: skip
def test_draft_keys_that_contradict_each_other(draft: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says):
        make(tmp_path, draft=draft)
