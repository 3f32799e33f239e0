"""Reading a recipe: strict YAML, overrides, every error at once, JSON schema."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from draftstill.errors import RecipeError
from draftstill.recipe import Recipe
from draftstill.recipe.candidates import candidate_values


class _StrictLoader(yaml.SafeLoader):
    """YAML 1.2 scalars (``1e-4`` is a number, ``off`` a word) and no repeated keys."""


_StrictLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rules if tag not in ("tag:yaml.org,2002:bool", "tag:yaml.org,2002:float",
                                                                    "tag:yaml.org,2002:int", "tag:yaml.org,2002:timestamp")]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}  # fmt: skip
_StrictLoader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(true|false|True|False)$"), list("tfTF"))
_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*\.\d*|\.\d+|\d[\d_]*(?=[eE]))([eE][-+]?\d+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$"),
    list("-+.0123456789"),
)
_StrictLoader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?(0|[1-9][\d_]*)$"), list("-+0123456789"))


def _mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: dict[Any, int] = {}
    for key_node, _ in node.value:
        key = loader.construct_object(key_node)
        line = key_node.start_mark.line + 1
        if key in seen:
            raise RecipeError(f"line {line}: the key {key!r} stands a second time (first on line {seen[key]})",
                              mend="keep one of the two; YAML would silently take the last")  # fmt: skip
        seen[key] = line
    return loader.construct_mapping(node, deep=True)


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def parse_yaml(text: str, name: str) -> Any:
    """Parse strict YAML; a syntax error or repeated key becomes a RecipeError that names file and line."""
    try:
        return yaml.load(text, Loader=_StrictLoader)  # noqa: S506 - a SafeLoader subclass
    except RecipeError as error:
        raise RecipeError(f"{name}, {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise RecipeError(f"{name}{where}: not valid YAML: {getattr(error, 'problem', error)}") from None


def apply_overrides(data: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Lay ``section.key=value`` over the file's values; values are read as YAML."""
    data = json.loads(json.dumps(data))
    for item in overrides:
        path, sign, value = item.partition("=")
        if not sign or not path:
            raise RecipeError("an override reads section.key=value", value=item, mend="for example train.learning_rate=2e-4")
        *parents, last = path.split(".")
        here = data
        for part in parents:
            here = here.setdefault(part, {})
            if not isinstance(here, dict):
                raise RecipeError(f"override {path}: {part!r} is a value, not a section", value=item)
        here[last] = parse_yaml(value, f"override {path}")
    return data


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, override and check a recipe.

    Raises:
        RecipeError: with every fault of the file, by dotted path, each with the value found.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise RecipeError(
            f"cannot read the recipe {path}: {error.strerror}", mend="give the path of a recipe, for example configs/demo.yaml"
        ) from None
    except UnicodeDecodeError:
        raise RecipeError(f"{path} is not UTF-8 text") from None
    data = parse_yaml(text, str(path))
    if not isinstance(data, dict):
        raise RecipeError(f"{path} holds no recipe", value=data, mend="start from configs/demo.yaml")
    try:
        plain = json.dumps(apply_overrides(data, overrides))
    except TypeError as error:
        raise RecipeError(f"{path}: {error}") from None
    try:
        recipe = Recipe.model_validate_json(plain, strict=True)
    except ValidationError as error:
        raise _refusal(str(path), _faults(error)) from None
    candidate_recipes(recipe, str(path))
    return recipe


def candidate_recipes(recipe: Recipe, name: str = "the recipe") -> dict[str, Recipe]:
    """The recipe of each of ``train.candidates`` by name, with its own draft and train sections and no further candidates.

    Raises:
        RecipeError: with every fault of every candidate, by dotted path. ``name`` is what the message calls the recipe.
    """
    found: dict[str, Recipe] = {}
    faults: list[str] = []
    for candidate, values in candidate_values(recipe):
        key = f"train.candidates.{candidate}"
        if "candidates" in values["train"]:
            faults.append(f"{key}.train.candidates: a candidate has no candidates of its own")
            continue
        try:
            found[candidate] = Recipe.model_validate_json(json.dumps(values), strict=True)
        except ValidationError as error:
            faults += _faults(error, key)
    if faults:
        raise _refusal(name, faults)
    return found


def _refusal(name: str, faults: list[str]) -> RecipeError:
    count = f"{len(faults)} faults" if len(faults) > 1 else "1 fault"
    return RecipeError(f"{name}: {count} in the recipe\n" + "\n".join(f"  {f}" for f in faults))


def _faults(error: ValidationError, under: str = "") -> list[str]:
    """A line for each faulty key; what the branches of a union say of one value is one fault. ``under``: the key that all of them stand under."""
    said: dict[tuple[str, str], list[str]] = {}
    for each in error.errors():
        where, message, found = _fault(each, under)
        said.setdefault((where, found), []).append(message)
    return [(f"{where}: " if where else "") + ", or ".join(messages) + found for (where, found), messages in said.items()]


_BRANCHES = ("literal[", "bool", "tuple[", "constrained-")
"""What a union's branches add to a fault's location; only real keys belong in a dotted path."""


def _fault(error: Any, under: str) -> tuple[str, str, str]:
    """The key, what is wrong, and what was found there."""
    location = [str(p) for p in error["loc"] if not str(p).startswith(_BRANCHES)]
    where, found = ".".join([*([under] if under else []), *location]), error.get("input")
    if error["type"] == "extra_forbidden":
        known = list(_model_at(location[:-1]).model_fields)
        near = difflib.get_close_matches(location[-1], known, 1, 0.5)
        if not near:
            near_path = difflib.get_close_matches(location[-1], [k.rsplit(".", 1)[-1] for k in recipe_keys()], 1, 0.7)
            near = [k for k in recipe_keys() if near_path and k.endswith("." + near_path[0])][:1]
        hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(known)}"
        return where, f"unknown key; {hint}", ""
    if error["type"] == "missing":
        return where, "missing; the recipe must set it", ""
    message = error["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    # A dict: a rule over several keys; the message names them.
    return where, message, "" if isinstance(found, dict) else f" (found {found!r})"


def _model_at(path: Sequence[str]) -> type[BaseModel]:
    model: type[BaseModel] = Recipe
    parts = iter(path)
    for part in parts:
        field = model.model_fields.get(part)
        kinds = () if field is None else (field.annotation, *typing.get_args(field.annotation))
        inner = next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)
        if inner is None:
            break
        if inner is not kinds[0] and typing.get_origin(kinds[0]) in (dict, tuple):
            next(parts, None)  # the name of one of several sections
        model = inner
    return model


def recipe_keys(model: type[BaseModel] = Recipe, prefix: str = "") -> list[str]:
    """Every dotted key of the recipe, in file order."""
    return [path for path, _ in _fields(model, prefix)]


def _fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _fields(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def recipe_schema() -> str:
    """JSON schema for editors; put ``# yaml-language-server: $schema=...`` on a recipe's first line to use it."""
    return json.dumps(Recipe.model_json_schema(), indent=2, ensure_ascii=False) + "\n"


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML: every key, defaults included."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


def fingerprint(*parts: object) -> str:
    """SHA-256 of the parts' canonical JSON; models are dumped first. Equal inputs, equal fingerprint, on any machine."""
    plain = [p.model_dump(mode="json") if isinstance(p, BaseModel) else p for p in parts]
    return hashlib.sha256(json.dumps(plain, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
