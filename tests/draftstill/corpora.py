"""Corpora and their recipes: shared by the tests of the corpus stage."""

import json
import random

import pytest

from draftstill.corpus import SPLITS, prepare_corpus, read_documents
from draftstill.errors import DraftstillError
from draftstill.recipe import Corpus, Recipe, Target
from draftstill.runfolder import RunFolder
from draftstill.stages import stages


def prose(seed: int, words: int = 120) -> str:
    """Text of its own vocabulary, so that no two seeds are near duplicates."""
    rng = random.Random(seed)
    return " ".join(f"w{rng.randrange(5000)}x{seed}" for _ in range(words))


def recipe_for(tmp_path, source, seed=0, **corpus) -> Recipe:
    return Recipe(run_dir=str(tmp_path / "run"), seed=seed, target=Target(source="a/b"), corpus=Corpus(source=str(source), **corpus))


def prepare(recipe: Recipe):
    folder = prepare_corpus(recipe, RunFolder(recipe.run_dir))
    facts = json.loads((folder / "provenance.json").read_text())["facts"]
    return folder, facts, {s: read_documents(folder, s) for s in SPLITS}


def write_texts(folder, count=20):
    folder.mkdir()
    for i in range(count):
        (folder / f"{i:03d}.txt").write_text(prose(i))
    return folder


def rejected_in(folder):
    return {r["id"]: r["reason"] for r in map(json.loads, (folder / "rejected.jsonl").read_text().splitlines())}


def fault(recipe: Recipe) -> DraftstillError:
    with pytest.raises(DraftstillError) as caught:
        prepare(recipe)
    assert caught.value.mend
    return caught.value


def write_chats(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def chat(seed, system=""):
    turns = [{"role": "user", "content": prose(seed, 30)}, {"role": "assistant", "content": prose(seed + 10_000, 30)}]
    return {"messages": [{"role": "system", "content": system}, *turns] if system else turns}


def fingerprint(recipe):
    return stages(recipe, RunFolder(recipe.run_dir))["corpus"].fingerprint
