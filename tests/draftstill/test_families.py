"""What stands on one side of the split: prompts, histories that grow, copies; whatever the names of files and the order of reading."""

from __future__ import annotations

import json
import random
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from draftstill.corpus import SPLITS, prepare_corpus, read_documents
from draftstill.errors import DraftstillError
from draftstill.families import Families
from draftstill.readers import prompt_keys
from draftstill.recipe import Corpus, Recipe, Target
from draftstill.runfolder import RunFolder, read_json


def prose(seed: object, words: int = 40) -> str:
    rng = random.Random(str(seed))
    return " ".join(f"w{rng.randrange(5000)}x{seed}" for _ in range(words))


def turns(*contents: str) -> list[dict[str, Any]]:
    """User and assistant in turn."""
    return [{"role": "assistant" if n % 2 else "user", "content": text} for n, text in enumerate(contents)]


def split_of(home: Path, rows: list[dict[str, Any]] | None = None, **corpus: Any) -> tuple[dict[str, str], dict[str, Any]]:
    """Side of each id, and the facts."""
    if rows is not None:
        home.mkdir(parents=True, exist_ok=True)
        (home / "log.jsonl").write_text("\n".join(map(json.dumps, rows)))
        corpus["source"] = str(home / "log.jsonl")
    settings = Corpus(**{"heldout_fraction": 0.5, **corpus})
    recipe = Recipe(run_dir=str(home / "run"), target=Target(source="a/b"), corpus=settings)
    folder = prepare_corpus(recipe, RunFolder(recipe.run_dir))
    return {d.id: d.split for s in SPLITS for d in read_documents(folder, s)}, read_json(folder / "provenance.json")["facts"]


def groups_of(conversations: list[list[dict[str, Any]]]) -> list[set[int]]:
    families, parent = Families(), list(range(len(conversations)))
    for number, messages in enumerate(conversations):
        families.prompts(number, list(prompt_keys(messages)))
    for one, other in families.pairs():
        low, high = sorted((parent[one], parent[other]))
        parent = [low if p == high else p for p in parent]
    return sorted(({n for n, p in enumerate(parent) if p == root} for root in set(parent)), key=min)


# --- prompts ----------------------------------------------------------------------------------------------------------------------


def test_one_question_with_many_answers_has_one_side(tmp_path: Path) -> None:
    rows = [{"messages": turns(prose(n // 5, 8), prose(f"a{n}", 60))} for n in range(100)]
    sides, facts = split_of(tmp_path, rows)
    assert facts["kept"] == 100 and facts["groups"] == 20 and facts["near_duplicate_pairs"] == 0
    assert all(len({sides[f"log.jsonl:{5 * n + k + 1}"] for k in range(5)}) == 1 for n in range(20)) and len(set(sides.values())) == 3


def test_a_history_that_grows_has_one_side(tmp_path: Path) -> None:
    rows = []
    for n in range(20):
        whole = [prose(f"{n}-{t}", 30) for t in range(9)]
        rows += [{"messages": turns(*whole[: 2 * k + 1])} for k in range(5)]
    random.Random(1).shuffle(rows)
    sides, facts = split_of(tmp_path, rows, near_duplicates=1.0)
    assert facts["groups"] == 20 and facts["largest_group"] == 5 and len(set(sides.values())) == 3


@pytest.mark.parametrize(("one", "other", "together"), [
    (turns("a", "b", "c"), turns("a", "b", "c", "d"), True),
    (turns("a", "b", "c", "d"), turns("a", "b", "c", "e", "f"), True),
    ([{"role": "system", "content": "x"}, *turns("a")], turns("a", "b"), True),
    (turns("a", "b"), [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}], True),
    (turns(" a\n"), turns("a", "b"), True),
    (turns("a", "b"), turns("a", "b", "c", "d"), True),
    (turns("x", "b", "c"), turns("a", "b", "c"), False),
    (turns("a", "b", "c"), turns("a", "x", "c"), False),
    (turns("a", "b", "c"), turns("a", "b", "d"), False),
    ([{"role": "user", "content": "a"}], [{"role": "tool", "content": "a"}, {"role": "user", "content": "b"}], False),
])  # fmt: skip
def test_which_prompts_are_one(one: Any, other: Any, together: bool) -> None:
    assert (len(groups_of([one, other])) == 1) == (len(groups_of([other, one])) == 1) == together


def test_examples_before_every_question_and_greetings_join_nothing() -> None:
    shots = [turns("example", "so", "second example", "so", f"question {n}", "answer") for n in range(50)]
    assert len(groups_of(shots)) == 50
    greeted = [turns("hello", "how can I help?", f"question {n}", "answer") for n in range(50)]
    assert len(groups_of([*greeted, turns("hello", "bye")])) == 51, "one who only said hello is no part of the others' conversations"
    again = [turns("hello", f"answer {n}") for n in range(50)]
    assert len(groups_of(again)) == 1, "but the same prompt is the same prompt"
    assert len(groups_of([turns("a", "b", "c", f"answer {n}") for n in range(50)] + [turns("a", "b")])) == 1


def test_families_of_nothing() -> None:
    assert list(Families().pairs()) == []
    assert list(prompt_keys([{"role": "assistant", "content": "x"}])) == []


def test_a_copy_joins_what_it_belongs_to(tmp_path: Path) -> None:
    """A row that is dropped as a copy was part of a conversation, whose other rows are now held together with the one that was kept."""
    rows = []
    for n in range(12):
        shared = {"messages": turns(prose(f"q{n}"), prose(f"a{n}"))}
        rows += [{**shared, "conversation_id": f"first {n}"}, {"messages": turns(prose(f"r{n}"), "x"), "conversation_id": f"first {n}"},
                 {**shared, "conversation_id": f"second {n}"}, {"messages": turns(prose(f"s{n}"), "x"), "conversation_id": f"second {n}"}]  # fmt: skip
    sides, facts = split_of(tmp_path, rows)
    assert facts["rejected"] == {"exact duplicate": 12} and facts["groups"] == 12 and facts["largest_group"] == 3
    assert all(len({sides[f"log.jsonl:{4 * n + k}"] for k in (1, 2, 4)}) == 1 for n in range(12))


# --- the side of a group ----------------------------------------------------------------------------------------------------------


def near(text: str, version: int) -> str:
    words = text.split()
    words[version : version + 20] = [f"new{version}x{i}" for i in range(20)]
    return " ".join(words)


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_the_side_of_a_group_does_not_hang_on_names(tmp_path: Path, order: tuple[int, ...]) -> None:
    expected: dict[str, str] = {}
    for attempt, names in enumerate(((0, 1, 2), order)):
        docs = tmp_path / str(attempt) / "docs"
        docs.mkdir(parents=True)
        for n in range(24):
            for version, name in enumerate(names):
                (docs / f"{name}-{n:02d}.txt").write_text(near(prose(n, 300), 40 * version + 20))
        sides, facts = split_of(docs.parent, source=str(docs))
        assert facts["groups"] == 24 and facts["largest_group"] == 3
        found = {(docs / name).read_text(): side for name, side in sides.items()}
        expected = expected or found
        assert found == expected and len(set(found.values())) == 3


# --- the frozen test set ----------------------------------------------------------------------------------------------------------


def test_what_came_and_went_is_said(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    for n in range(40):
        (docs / f"{n:02d}.txt").write_text(prose(n, 100))
    before, facts = split_of(tmp_path, source=str(docs), heldout_fraction=0.4)
    for n in range(40, 120):
        (docs / f"{n}.txt").write_text(prose(n, 100))
    gone = next(name for name, side in sorted(before.items()) if side == "test")
    (docs / gone).unlink()

    def again(home: Path, aside: bool) -> DraftstillError:
        settings = Corpus(source=str(docs), heldout_fraction=0.4, test_sha256=facts["test_sha256"])
        recipe = Recipe(run_dir=str(home / "run"), target=Target(source="a/b"), corpus=settings)
        with pytest.raises(DraftstillError) as caught:
            prepare_corpus(recipe, RunFolder(recipe.run_dir, set_aside=aside))
        return caught.value

    told = again(tmp_path, True)
    came = [w for w in str(told).split() if w.endswith((".txt", ".txt,", ".txt)"))]
    assert told.key == "corpus.test_sha256" and f"1 ({gone}) went" in str(told) and "since corpus.old-1" in str(told)
    assert came and "none came" not in str(told)
    assert "holds no corpus with the frozen ones" in str(again(tmp_path / "elsewhere", False))
