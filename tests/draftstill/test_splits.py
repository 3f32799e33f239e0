"""The sides of a corpus: none is empty, none moves, and what is frozen stays."""

import pytest

from draftstill.corpus import SPLITS, read_documents, stored_documents
from draftstill.sides import choose_sides
from tests.draftstill.corpora import chat, fault, prepare, prose, recipe_for, write_chats, write_texts


@pytest.mark.parametrize(("count", "fraction", "word"), [(1, 0.5, "documents that differ"), (5, 0.1, "at least 0.4"), (10, 0.0, "at least 0.2"),
                                                         (4, 0.99, "lower")])  # fmt: skip
def test_empty_split(tmp_path, count, fraction, word):
    error = fault(recipe_for(tmp_path, write_texts(tmp_path / "docs", count), heldout_fraction=fraction))
    assert error.key == "corpus.heldout_fraction" and error.value == fraction and word in str(error)


def test_the_suggested_share_works(tmp_path):
    docs = write_texts(tmp_path / "docs", 5)
    mend = fault(recipe_for(tmp_path / "a", docs)).mend
    share = float(mend.split("at least ")[1].split()[0])
    _, _, splits = prepare(recipe_for(tmp_path / "b", docs, heldout_fraction=share))
    assert all(splits[s] for s in SPLITS)


def test_read_documents_knows_its_splits(tmp_path):
    with pytest.raises(ValueError, match="split is one of"):
        read_documents(tmp_path, "heldout")


def test_rows_of_one_conversation_stay_together(tmp_path):
    rows = [{**chat(n), "conversation_id": n // 4} for n in range(40)]
    _, facts, splits = prepare(recipe_for(tmp_path, write_chats(tmp_path / "log.jsonl", rows), heldout_fraction=0.4))
    assert facts["groups"] == 10 and facts["largest_group"] == 4
    assert all(len(documents) % 4 == 0 for documents in splits.values())


def sides(folder_splits):
    return {d.text: split for split, documents in folder_splits.items() for d in documents}


def test_a_growing_corpus_moves_no_document(tmp_path):
    docs = write_texts(tmp_path / "docs", 200)
    _, facts, before = prepare(recipe_for(tmp_path / "a", docs, heldout_fraction=0.4))
    for n in range(200):  # sorted in between, in front and behind
        (docs / f"{n:03d}-{n % 3}.txt").write_text(prose(1000 + n))
        (docs / f"a{n}.txt").write_text(prose(2000 + n))
    (docs / "000.txt").rename(docs / "zzz.txt")
    _, more, after = prepare(recipe_for(tmp_path / "b", docs, heldout_fraction=0.4))
    old, new = sides(before), sides(after)
    assert more["kept"] == 600 and {text: new[text] for text in old} == old
    for split in ("validation", "test"):
        assert 80 <= len(after[split]) <= 160, "a fifth of 600, within four standard deviations"
    assert more["test_sha256"] != facts["test_sha256"]


@pytest.mark.parametrize("count", [3, 4, 5, 8])
@pytest.mark.parametrize("fraction", [0.7, 0.5])
def test_no_side_is_empty(count, fraction):
    for seed in range(60):
        groups = {n: bytes([n]) for n in range(count)}
        made = choose_sides(groups, count, fraction, seed)
        assert set(made.values()) == set(SPLITS) and made.keys() == groups.keys()


def test_the_frozen_test_set(tmp_path):
    docs = write_texts(tmp_path / "docs", 40)
    recipe = recipe_for(tmp_path, docs, heldout_fraction=0.4)
    folder, facts, _ = prepare(recipe)
    frozen = recipe_for(tmp_path, docs, heldout_fraction=0.4, test_sha256=facts["test_sha256"])
    assert prepare(frozen)[0] == folder, "freezing makes nothing anew"
    other = fault(recipe_for(tmp_path, docs, heldout_fraction=0.4, test_sha256="0" * 64))
    assert other.key == "corpus.test_sha256" and facts["test_sha256"] in other.mend
    # Other names, another order and another copy are the same set; another seed, share or text is not.
    (docs / "000.txt").rename(docs / "zzz.txt")
    same = {"heldout_fraction": 0.4, "test_sha256": facts["test_sha256"]}
    prepare(recipe_for(tmp_path / "b", docs, **same))
    assert fault(recipe_for(tmp_path / "c", docs, seed=5, **same)).key == "corpus.test_sha256"
    assert not (tmp_path / "c" / "run" / "corpus").exists()


def test_documents_can_stay_on_the_disk(tmp_path):
    rows = [
        chat(n) if n % 2 else {"messages": chat(n)["messages"], "tools": [{"type": "function", "function": {"name": f"f{n}"}}]}
        for n in range(30)
    ]
    folder, _, splits = prepare(recipe_for(tmp_path, write_chats(tmp_path / "log.jsonl", rows), heldout_fraction=0.3))
    for split, whole in splits.items():
        stored = stored_documents(folder, split)
        fields = lambda d: (d.id, d.split, d.group, d.messages, d.tools, d.text)  # noqa: E731
        assert [fields(d) for d in reversed(stored)] == [fields(d) for d in reversed(whole)] and isinstance(stored[0], type(whole[0]))
        assert not any("text" in vars(d) or "messages" in vars(d) for d in stored)
