"""Near duplicates: what resembles each other is found, and stays on one side."""

import random

import numpy as np
import pytest

from draftstill import dedupe
from draftstill.dedupe import Groups, Shingler, Sketches, group_documents, seen_shares
from tests.draftstill.corpora import chat, prepare, prose, recipe_for, write_chats


def near(text: str, seed: int, share: float) -> str:
    words, rng = text.split(), random.Random(seed)
    start = rng.randrange(int(len(words) * (1 - share)))
    words[start : start + int(len(words) * share)] = [f"{words[0]}new{seed}x{i}" for i in range(int(len(words) * share))]
    return " ".join(words)


def test_near_duplicates_stay_on_one_side_for_every_seed(tmp_path):
    docs = tmp_path / "docs"
    docs.mkdir()
    for i in range(12):
        for version in range(3):
            (docs / f"{version}-{i:02d}.txt").write_text(near(prose(i, 400), version, 0.1) if version else prose(i, 400))
    for seed in range(5):
        _, facts, splits = prepare(recipe_for(tmp_path / str(seed), docs, seed, heldout_fraction=0.4))
        assert facts["groups"] == 12 and facts["near_duplicate_pairs"] >= 24 and facts["largest_group"] == 3
        sides = {}
        for d in sum(splits.values(), []):
            assert sides.setdefault(d.id.split("-")[1], (d.split, d.group)) == (d.split, d.group)
        assert facts["heldout_13grams_in_train"] == {"validation": 0.0, "test": 0.0}


def near_duplicates(texts, threshold):
    sketches = Sketches()
    for text in texts:
        sketches.add(text)
    return sketches.near_duplicates(threshold)


def test_near_duplicate_threshold():
    base = prose(1, 400)
    texts = [base, near(base, 2, 0.1), near(base, 3, 0.7), prose(2, 400)]
    pairs = {(i, j): s for i, j, s in near_duplicates(texts, 0.5)}
    assert pairs.keys() == {(0, 1)} and pairs[0, 1] == pytest.approx(0.8, abs=0.12)
    assert near_duplicates(texts, 1.0) == [] and near_duplicates([base, base], 1.0) == [(0, 1, 1.0)]


def test_pairs_at_the_threshold_are_found():
    # 40 pairs of similarity .55 to .65: almost none may be missed for want of a common band.
    texts = [t for i in range(40) for t in (prose(i, 300), near(prose(i, 300), 7, 0.24))]
    found = {(i, j) for i, j, _ in near_duplicates(texts, 0.4)}
    assert len(found) >= 39 and all(j == i + 1 and i % 2 == 0 for i, j in found)


def test_texts_without_spaces_are_compared_by_character():
    rng = random.Random(1)
    one = "".join(chr(0x4E00 + rng.randrange(3000)) for _ in range(400))
    assert len(Shingler()(one)) > 350
    assert [p[:2] for p in near_duplicates([one, one[:380] + one[:20]], 0.5)] == [(0, 1)]


def test_shingles_are_the_same_in_every_process():
    high = lambda text: (Shingler()(text) >> np.uint64(32)).tolist()  # noqa: E731
    assert high("The quick brown fox jumps over") == high("the QUICK, brown fox: jumps over!") == FIXED


FIXED = [2710685447, 2978692819]  # fixed numbers: hash() would give others in each process


def test_shingles_see_word_order_and_short_texts():
    shingler = Shingler()
    assert shingler("a b c d e").tolist() != shingler("b a c d e").tolist()
    assert len(shingler("a b")) == 1 and len(shingler("")) == 0


def test_groups_are_transitive_and_families_join():
    groups = Groups(5)
    groups.join(3, 4)
    groups.join(4, 1)
    assert groups.roots() == [0, 1, 2, 1, 1]
    assert group_documents(5, [(0, 3)], [(3, 4, 0.9)]) == [0, 1, 2, 0, 0]


def test_seen_share():
    words = prose(1, 40).split()
    shares = seen_shares(
        [prose(2), " ".join(words[:26])], {"part": [" ".join(words[:20])], "more": [" ".join(words)], "other": [prose(3)], "none": []}
    )
    assert shares == {"part": 1.0, "more": 14 / 28, "other": 0.0, "none": 0.0}


def test_a_system_prompt_that_all_share_makes_no_duplicates(tmp_path):
    rows = [chat(n, system=prose(999, 300)) for n in range(20)]
    _, facts, _ = prepare(recipe_for(tmp_path, write_chats(tmp_path / "log.jsonl", [*rows, rows[5]]), heldout_fraction=0.3))
    assert facts["groups"] == 20 and facts["rejected"] == {"exact duplicate": 1}
    assert facts["heldout_13grams_in_train"] == {"validation": 0.0, "test": 0.0}


def test_a_crowded_bucket_is_compared_in_part_and_still_finds_duplicates(monkeypatch):
    monkeypatch.setattr(dedupe, "_CROWDED", 50)
    phrase = prose(7, 60)  # in every text, so that most of them meet in some band
    texts = [f"{phrase} {prose(n, 90)}" for n in range(200)]
    texts += [near(texts[n], 3, 0.1) for n in range(0, 200, 10)]
    sketches = Sketches()
    for text in texts:
        sketches.add(text)
    joined = {frozenset(pair[:2]) for pair in sketches.near_duplicates(0.55)}
    assert sketches.crowded > 0
    assert {frozenset((10 * n, 200 + n)) for n in range(20)} <= joined


def test_texts_without_words_are_no_duplicates():
    assert near_duplicates(["!!! ???", "...", "\U0001f600 \U0001f601", prose(1)], 0.5) == []


@pytest.mark.parametrize(("block", "crowded", "compared"), [(16, 20, 4), (16, 1024, 32), (7, 10, 32), (1, 1, 1)])
def test_a_bucket_of_several_blocks_is_one_group(monkeypatch, block, crowded, compared):
    """Copies that lie blocks apart, and texts like them further on; what resembles none of them stays apart."""
    for name, value in (("_BLOCK", block), ("_CROWDED", crowded), ("_COMPARED", compared)):
        monkeypatch.setattr(dedupe, name, value)
    base = prose(1, 300)
    texts = [base] * 40 + [near(base, 5, 0.05), prose(2, 300)] + [base]
    assert group_documents(len(texts), [], near_duplicates(texts, 0.5)) == [0] * 41 + [41, 0]
