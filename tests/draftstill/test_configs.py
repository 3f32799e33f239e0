"""Recipes that ship with Draftstill: each loads and plans, and so does each line in it that is only a comment."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from draftstill import plan as p
from draftstill.recipe_io import load_recipe
from draftstill.runfolder import RunFolder

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs").glob("*.yaml"))
OWN = {"traffic"}
"""Recipes for text that only the user has."""
_SECTION = re.compile(r"^(\w+):\s*(#.*)?$")
_OFFERED = re.compile(r"^  # (\w+): (.+?)(?:\s{2,}#.*)?$")


def offered(path: Path) -> list[str]:
    """Keys that a recipe shows in a comment, as overrides of the section they stand in."""
    found, section = [], ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if match := _SECTION.match(line):
            section = match[1]
        elif match := _OFFERED.match(line):
            found.append(f"{section}.{match[1]}={match[2].split(' #')[0].strip()}")
    return found


def test_there_are_some() -> None:
    assert {path.stem for path in CONFIGS} >= {"demo", "contracts", "biology", "traffic"}
    assert any(len(offered(path)) > 3 for path in CONFIGS)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_it_plans(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe(path, [f"run_dir={tmp_path / 'run'}"])
    missing = [q for q in p.problems(recipe) if not q.startswith("corpus.source: there is no file")]
    assert not missing and bool(p.problems(recipe)) == (path.stem in OWN)
    assert recipe.corpus.source in p.plan(recipe, RunFolder(recipe.run_dir))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_what_a_comment_offers_is_taken(path: Path) -> None:
    for line in offered(path):
        load_recipe(path, [line])


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_sequences_hold_prompt_and_response(path: Path) -> None:
    recipe = load_recipe(path)
    r = recipe.respond
    longest = r.chat_tokens if path.stem in OWN else r.prompt_tokens
    assert recipe.record.sequence_length >= longest + r.max_new_tokens
