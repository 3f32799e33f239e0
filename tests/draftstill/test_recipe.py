import json
import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from draftstill.errors import RecipeError
from draftstill.recipe import Recipe, Train
from draftstill.recipe_io import (
    apply_overrides,
    dump_recipe,
    fingerprint,
    load_recipe,
    parse_yaml,
    recipe_schema,
)

MINIMAL = "run_dir: runs/x\ntarget: {source: owner/name}\ncorpus: {source: texts}\n"


@pytest.fixture
def write(tmp_path: Path):
    def _write(text: str) -> Path:
        path = tmp_path / "recipe.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return _write


def fault(write, text: str, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(text), overrides)
    return str(caught.value)


def test_minimal_recipe_has_the_defaults(write):
    recipe = load_recipe(write(MINIMAL))
    assert recipe.target.source == "owner/name"
    assert recipe.draft.source == "prune" and recipe.train == Train()


def test_unknown_key_names_the_nearest_known_one(write):
    message = fault(write, MINIMAL + "train: {learning_rte: 0.1}\n")
    assert "train.learning_rte: unknown key" in message and "'learning_rate'" in message


def test_key_of_another_section_is_found(write):
    message = fault(write, MINIMAL + "train: {lookup_gamma: 3}\n")
    assert "'evaluate.lookup_gamma'" in message


def test_all_faults_of_a_file_are_shown_at_once(write):
    message = fault(write, MINIMAL + "seed: -1\ntrain: {learning_rate: fast}\n")
    assert "2 faults" in message
    assert "seed: " in message and "found -1" in message
    assert "train.learning_rate: " in message and "found 'fast'" in message


@pytest.mark.parametrize(
    ("text", "key", "says"),
    [
        ("train: {learning_rate: fast}", "train.learning_rate", "input should be a valid number, or input should be 'auto' (found 'fast')"),
        ("train: {learning_rate: -1}", "train.learning_rate", "input should be greater than 0, or input should be 'auto' (found -1)"),
        ("draft: {layers: some}", "draft.layers", "or input should be 'auto' (found 'some')"),
        ("publish: {gguf: f32}", "publish.gguf", "input should be 'auto'"),
        ("train: {lora: {target_modules: some}}", "train.lora.target_modules", "input should be 'all-linear'"),
        ("train: {bf16: maybe}", "train.bf16", "or input should be 'auto' (found 'maybe')"),
    ],
)
def test_a_value_of_several_kinds_has_one_fault(write, text, key, says):
    message = fault(write, MINIMAL + text + "\n")
    assert "1 fault in" in message and f"  {key}: " in message and says in message


def test_missing_key(write):
    assert "corpus: missing" in fault(write, "run_dir: x\ntarget: {source: a/b}\n")


def test_repeated_key_names_both_lines(write):
    message = fault(write, MINIMAL + "seed: 1\nseed: 2\n")
    assert "line 5" in message and "'seed'" in message and "line 4" in message


def test_repeated_key_in_a_section(write):
    assert "'gamma'" in fault(write, MINIMAL + "evaluate:\n  gamma: 2\n  gamma: 3\n")


def test_yaml_syntax_error_names_the_line(write):
    message = fault(write, "run_dir: x\nseed: ]\n")
    assert "line 2" in message and "not valid YAML" in message


@pytest.mark.parametrize(("text", "value"), [("1e-4", 1e-4), ("2.5E3", 2500.0), ("1_000", 1000), ("-3", -3), (".5", 0.5), ("true", True)])
def test_yaml_numbers(text, value):
    found = parse_yaml(f"x: {text}", "test")["x"]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("text", ["off", "on", "yes", "no", "y", "2024-01-01", "012", "1:30"])
def test_yaml_words_stay_words(text):
    assert parse_yaml(f"x: {text}", "test")["x"] == text


def test_off_is_no_bool(write):
    assert "publish.private" in fault(write, MINIMAL + "publish: {private: off}\n")


def test_scientific_notation_reaches_the_recipe(write):
    assert load_recipe(write(MINIMAL + "train: {learning_rate: 1e-4}\n")).train.learning_rate == 1e-4


def test_strict_types(write):
    assert "evaluate.gamma" in fault(write, MINIMAL + "evaluate: {gamma: '3'}\n")
    assert "evaluate.gamma" in fault(write, MINIMAL + "evaluate: {gamma: 3.0}\n")


@pytest.mark.parametrize("value", [".nan", ".inf"])
def test_non_finite_numbers_are_refused(write, value):
    assert "learning_rate" in fault(write, MINIMAL + f"train: {{learning_rate: {value}}}\n")


def test_override_wins_and_is_read_as_yaml(write):
    recipe = load_recipe(
        write(MINIMAL + "train: {learning_rate: 0.1}\n"), ["train.learning_rate=2e-4", "evaluate.temperatures=[0.0, 0.7]", "seed=7"]
    )
    assert recipe.train.learning_rate == 2e-4 and recipe.evaluate.temperatures == (0.0, 0.7) and recipe.seed == 7


def test_override_of_an_unknown_key(write):
    assert "train.learning_rte" in fault(write, MINIMAL, "train.learning_rte=1")


@pytest.mark.parametrize("item", ["train.learning_rate", "=3", ""])
def test_override_syntax(write, item):
    assert "section.key=value" in fault(write, MINIMAL, item)


def test_override_below_a_value():
    with pytest.raises(RecipeError, match="is a value, not a section"):
        apply_overrides({"seed": 1}, ["seed.deep=2"])


def test_overrides_leave_the_file_values_alone():
    data = {"train": {"learning_rate": 1.0}}
    apply_overrides(data, ["train.learning_rate=2"])
    assert data == {"train": {"learning_rate": 1.0}}


def test_layers_must_ascend(write):
    assert "ascend" in fault(write, MINIMAL + "draft: {layers: [3, 1]}\n")


def test_empty_and_missing_files(write, tmp_path):
    assert "no recipe" in fault(write, "")
    with pytest.raises(RecipeError, match="cannot read"):
        load_recipe(tmp_path / "absent.yaml")


def test_byte_order_mark(write):
    assert load_recipe(write("\ufeff" + MINIMAL)).run_dir == "runs/x"


def test_dump_reads_back_the_same(write):
    recipe = load_recipe(write(MINIMAL + "train: {learning_rate: 1e-5}\n"))
    assert load_recipe(write(dump_recipe(recipe))) == recipe


def test_recipe_is_frozen(write):
    with pytest.raises(Exception, match="frozen"):
        load_recipe(write(MINIMAL)).seed = 3  # type: ignore[misc]


def sections(model: type[BaseModel]) -> set[type[BaseModel]]:
    found = {model}
    for field in model.model_fields.values():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= sections(field.annotation)
    return found


def test_every_field_has_a_docstring():
    missing = [f"{m.__name__}.{n}" for m in sections(Recipe) for n, f in m.model_fields.items() if not (f.description or "").strip()]
    assert not missing


def test_schema_is_json_and_closed():
    schema = json.loads(recipe_schema())
    objects = [schema, *schema["$defs"].values()]
    assert all(o["additionalProperties"] is False for o in objects if o.get("type") == "object")
    assert schema["required"] == ["run_dir", "target", "corpus"]
    assert schema["$defs"]["Train"]["properties"]["learning_rate"]["description"]


def test_fingerprint_does_not_depend_on_key_order():
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": 2})
    assert re.fullmatch(r"[0-9a-f]{64}", fingerprint(Train()))


def test_the_deployments_temperature_must_be_scored(write):
    with pytest.raises(RecipeError, match=r"evaluate\.temperatures must contain .* \(0\.3\)") as error:
        load_recipe(write(MINIMAL), ["respond.sampler.temperature=0.3"])
    assert "{" not in str(error.value), "the whole recipe is no value to show"
