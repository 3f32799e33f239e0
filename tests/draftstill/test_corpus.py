import gzip
import json
import random

import pytest

from draftstill.corpus import SPLITS, prepare_corpus, read_documents
from draftstill.dedupe import Groups, Shingler, group_documents, near_duplicates, seen_share
from draftstill.errors import DraftstillError
from draftstill.readers import read_rows, unwrap
from draftstill.recipe import Corpus, Recipe, Target
from draftstill.runfolder import RunFolder


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


def test_text_folder_end_to_end(tmp_path):
    docs = write_texts(tmp_path / "docs")
    (docs / "sub").mkdir()
    (docs / "sub" / "more.md").write_bytes(b"\xef\xbb\xbf" + prose(98).replace(" ", "\r\n").encode())
    with gzip.open(docs / "zipped.txt.gz", "wt") as file:
        file.write(prose(99))
    (docs / "same.txt").write_text(prose(0) + "\n")
    (docs / "tiny.txt").write_text("too short")
    (docs / "latin.txt").write_bytes(b"caf\xe9 " * 100)
    (docs / "blank.txt").write_text(" \n")
    (docs / "picture.png").write_bytes(b"\x89PNG")
    (docs / ".git").mkdir()
    (docs / ".git" / "x.txt").write_text(prose(97))
    folder, facts, splits = prepare(recipe_for(tmp_path, docs))

    assert facts["read"] == 26 and facts["kept"] == 22 == sum(len(d) for d in splits.values())
    assert facts["rejected"] == {"empty": 1, "exact duplicate": 1, "not UTF-8": 1, "too short": 1}
    assert facts["read"] == facts["kept"] + sum(facts["rejected"].values())
    assert rejected_in(folder) == {"blank.txt": "empty", "latin.txt": "not UTF-8", "same.txt": "exact duplicate", "tiny.txt": "too short"}
    assert facts["groups"] == 22 and facts["near_duplicate_pairs"] == 0
    by_id = {d.id: d for d in sum(splits.values(), [])}
    assert by_id["sub/more.md"].text == prose(98).replace(" ", "\n")  # no BOM, no CR
    assert by_id["zipped.txt.gz"].text == prose(99)
    for name, documents in splits.items():
        assert all(d.split == name for d in documents)
        assert facts["splits"][name] == {"documents": len(documents), "characters": sum(len(d.text) for d in documents)}
    assert len(splits["validation"]) == len(splits["test"]) == 1
    assert not (tmp_path / "run" / "corpus.partial").exists()


def test_second_call_reuses_the_stage(tmp_path):
    recipe = recipe_for(tmp_path, write_texts(tmp_path / "docs"))
    folder, _, _ = prepare(recipe)
    before = (folder / "documents.jsonl").stat().st_mtime_ns
    prepare_corpus(recipe, RunFolder(recipe.run_dir))
    assert (folder / "documents.jsonl").stat().st_mtime_ns == before


def test_same_seed_same_bytes_and_other_seed_other_split(tmp_path):
    docs = write_texts(tmp_path / "docs", 60)
    made = {}
    for name, seed in (("one", 3), ("two", 3), ("three", 4)):
        recipe = recipe_for(tmp_path / name, docs, seed, heldout_fraction=0.3)
        folder, _, splits = prepare(recipe)
        made[name] = (folder / "documents.jsonl").read_bytes(), {d.id for d in splits["test"]}
    assert made["one"] == made["two"]
    assert made["one"][1] != made["three"][1]


def test_jsonl_rows(tmp_path):
    good = [prose(i) for i in range(24)]
    rows = [json.dumps({"text": t, "extra": 1}).encode() for t in good]
    rows[1] = json.dumps({"text": good[1][:300] + "\u2028" + good[1][300:]}, ensure_ascii=False).encode()
    rows[2] = rows[2] + b"\r"  # CRLF
    rows[3] = json.dumps({"text": "2024-01-01 " + good[3]}).encode()
    bad = [b'{"text": "cut off', b'{"words": "x"}', b'{"text": 5}', b'{"text": null}', b'{"text": ""}', b"[1]", b'{"text": "\xff"}',
           b'{"text": "' + b"x" * 300 + b'\\ud800"}', b"[" * 100_000]  # fmt: skip
    (tmp_path / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\n".join([*rows, b"", *bad]))
    folder, facts, splits = prepare(recipe_for(tmp_path, tmp_path / "rows.jsonl"))

    assert facts["read"] == 33 and facts["kept"] == 24
    counts = {"bad JSON": 2, "empty": 1, "lone surrogate": 1, "missing field": 1, "not UTF-8": 1, "not a string": 2, "not an object": 1}
    assert facts["rejected"] == counts
    assert rejected_in(folder)["rows.jsonl:26"] == "bad JSON" and rejected_in(folder)["rows.jsonl:27"] == "missing field"
    texts = {d.id: d.text for d in sum(splits.values(), [])}
    assert "\u2028" in texts["rows.jsonl:2"] and len(texts["rows.jsonl:2"]) == len(good[1]) + 1
    assert not texts["rows.jsonl:3"].endswith("\r") and texts["rows.jsonl:4"].startswith("2024-01-01 ")


def test_gzipped_jsonl_that_was_cut_keeps_what_could_be_read(tmp_path):
    rows = [json.dumps({"body": prose(i, 600)}) for i in range(400)]
    packed = gzip.compress("\n".join(rows).encode())
    (tmp_path / "rows.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    _, facts, _ = prepare(recipe_for(tmp_path, tmp_path / "rows.jsonl.gz", field="body", max_documents=None))
    assert facts["rejected"] == {"damaged gzip": 1} and 50 < facts["kept"] < 400


def test_mostly_unusable_rows_are_refused_by_field(tmp_path):
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"content": prose(i), "n": 1}) for i in range(5)))
    with pytest.raises(DraftstillError, match="5 of 5 rows cannot be used") as caught:
        prepare(recipe_for(tmp_path, tmp_path / "rows.jsonl"))
    message = str(caught.value)
    assert caught.value.key == "corpus.field" and "'content', 'n'" in message and "rows.jsonl:1" in message
    listing = tmp_path / "run" / "corpus.partial" / "rejected.jsonl"
    assert str(listing) in message and len(listing.read_text().splitlines()) == 5


def test_half_bad_rows_are_still_used(tmp_path):
    lines = [json.dumps({"text": prose(i)}) for i in range(20)] + ["{"] * 20
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    _, facts, _ = prepare(recipe_for(tmp_path, tmp_path / "rows.jsonl"))
    assert facts["kept"] == 20 and facts["rejected"] == {"bad JSON": 20}


def test_max_documents_counts_kept_ones(tmp_path):
    docs = write_texts(tmp_path / "docs", 40)
    (docs / "000.txt").write_text("short")
    _, facts, _ = prepare(recipe_for(tmp_path, docs, max_documents=25))
    assert facts["kept"] == 25 and facts["read"] == 26


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
    assert Shingler()("The quick brown fox jumps over").tolist() == Shingler()("the QUICK, brown fox: jumps over!").tolist() == FIXED


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
    assert group_documents(["x", None, None, "x", None], [(3, 4, 0.9)]) == [0, 1, 2, 0, 0]


def test_seen_share():
    words = prose(1, 40).split()
    assert seen_share([" ".join(words)], [" ".join(words[:20])]) == 1.0
    assert seen_share([" ".join(words[:26])], [" ".join(words)]) == 14 / 28


@pytest.fixture
def licences(tmp_path):
    folder = tmp_path / "wheel" / "licensedcode" / "data" / "licenses"
    folder.mkdir(parents=True)

    def add(key, category, text, extra=""):
        (folder / f"{key}.LICENSE").write_text(
            f"---\nkey: {key}\nshort_name: 'a: b'\ncategory: {category}\nurls:\n    - http://x\n{extra}---\n\n{text}\n"
        )

    for i in range(20):
        add(f"firm{i}-eula", "Commercial", prose(i))
    add("maps-tos-2020", "Commercial", prose(30))
    add("maps-tos-2021", "Commercial", prose(31))
    add("mit", "Permissive", prose(32))
    add("old", "Commercial", prose(33), "is_deprecated: yes\n")
    add("deutsch", "Commercial", prose(34), "language: de\n")
    add("dashes", "CLA", prose(35) + "\n---\n" + prose(36))
    (folder / "broken.LICENSE").write_text("no head\n" * 50)
    return tmp_path / "wheel"


def test_licensedcode(tmp_path, licences):
    _, facts, splits = prepare(recipe_for(tmp_path, licences, categories=("Commercial", "CLA"), heldout_fraction=0.2))
    documents = {d.id: d for d in sum(splits.values(), [])}
    assert facts["read"] == 27 and facts["kept"] == 23
    assert facts["rejected"] == {"bad front matter": 1, "deprecated": 1, "other category": 1, "other language": 1}
    assert documents["maps-tos-2021"].group == "maps-tos-2020" and facts["groups"] == 22
    assert documents["dashes"].text == prose(35) + "\n---\n" + prose(36)


def test_unknown_category_lists_the_known_ones(tmp_path, licences):
    with pytest.raises(DraftstillError, match="CLA, Commercial, Permissive") as caught:
        prepare(recipe_for(tmp_path, licences, categories=("Comercial",)))
    assert caught.value.key == "corpus.categories"


def test_unwrap():
    wrapped = "This agreement is made between the two parties named below, who have\nread it and agree to all of its terms and conditions without any further\nreservation.\n\n"  # noqa: E501
    items = "   1. The first item is as long as a line of this page may be, or a bit\n      longer;\n   2. second item\n\nSigned:\nA. Person\nSome Street 5"
    assert unwrap(wrapped + items) == (
        "This agreement is made between the two parties named below, who have read it and agree to all of its terms and conditions "
        "without any further reservation.\n\n"
        "   1. The first item is as long as a line of this page may be, or a bit longer;\n   2. second item\n\n"
        "Signed:\nA. Person\nSome Street 5"
    )
    long_line = "word " * 60 + "\nshort\n" + "word " * 60
    assert unwrap(long_line).count("\n") == 2


def fault(recipe: Recipe) -> DraftstillError:
    with pytest.raises(DraftstillError) as caught:
        prepare(recipe)
    assert caught.value.mend
    return caught.value


def test_missing_source(tmp_path):
    error = fault(recipe_for(tmp_path, tmp_path / "absent"))
    assert error.key == "corpus.source" and "no such file" in str(error)


def test_empty_sources(tmp_path):
    (tmp_path / "none").mkdir()
    assert "no file in this folder" in str(fault(recipe_for(tmp_path / "a", tmp_path / "none")))
    (tmp_path / "empty.jsonl").write_text("\n\n")
    assert "no row at all" in str(fault(recipe_for(tmp_path / "b", tmp_path / "empty.jsonl")))
    (tmp_path / "data.csv").write_text("x")
    assert fault(recipe_for(tmp_path / "c", tmp_path / "data.csv")).mend == "set corpus.format to text or jsonl"
    assert "licenses folder" in str(fault(recipe_for(tmp_path / "d", tmp_path / "none", format="licensedcode")))


def test_all_too_short(tmp_path):
    error = fault(recipe_for(tmp_path, write_texts(tmp_path / "docs", 3), min_chars=10**6))
    assert error.key == "corpus.min_chars" and error.value == 10**6 and "3 too short" in str(error)


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
    assert [len(splits[s]) for s in SPLITS] == [3, 1, 1]


def test_read_documents_knows_its_splits(tmp_path):
    with pytest.raises(ValueError, match="split is one of"):
        read_documents(tmp_path, "heldout")


def test_auto_reads_text_and_jsonl_of_one_folder(tmp_path):
    docs = write_texts(tmp_path / "docs", 3)
    (docs / "rows.jsonl").write_text(json.dumps({"text": prose(50)}))
    assert [r.id for r in read_rows(Corpus(source=str(docs)))] == ["000.txt", "001.txt", "002.txt", "rows.jsonl:1"]
    assert [r.id for r in read_rows(Corpus(source=str(docs), format="jsonl"))] == ["rows.jsonl:1"]
