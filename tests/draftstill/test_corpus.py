import gzip
import json
import os
import random

import numpy as np
import pytest

from draftstill import dedupe, hashes
from draftstill.corpus import SPLITS, prepare_corpus, read_documents, stored_documents
from draftstill.dedupe import Groups, Shingler, Sketches, group_documents, seen_shares
from draftstill.errors import DraftstillError
from draftstill.readers import read_rows, unwrap
from draftstill.recipe import Corpus, Recipe, Target
from draftstill.runfolder import RunFolder
from draftstill.sides import choose_sides
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
    counts = {"bad JSON": 1, "empty": 1, "lone surrogate": 1, "missing field": 1, "nested too deeply": 1, "not UTF-8": 1, "not a string": 2,
              "not an object": 1}  # fmt: skip
    assert facts["rejected"] == counts
    assert rejected_in(folder)["rows.jsonl:26"] == "bad JSON" and rejected_in(folder)["rows.jsonl:27"] == "missing field"
    texts = {d.id: d.text for d in sum(splits.values(), [])}
    assert "\u2028" in texts["rows.jsonl:2"] and len(texts["rows.jsonl:2"]) == len(good[1]) + 1
    assert not texts["rows.jsonl:3"].endswith("\r") and texts["rows.jsonl:4"].startswith("2024-01-01 ")


def test_gzipped_jsonl_that_was_cut_keeps_what_could_be_read(tmp_path):
    rows = [json.dumps({"body": prose(i, 600)}) for i in range(400)]
    packed = gzip.compress("\n".join(rows).encode())
    (tmp_path / "rows.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    _, facts, _ = prepare(recipe_for(tmp_path, tmp_path / "rows.jsonl.gz", field="body", max_documents=None, damaged="keep"))
    assert facts["rejected"] == {"damaged gzip": 1} and 50 < facts["kept"] < 400


def test_mostly_unusable_rows_are_refused_by_field(tmp_path):
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"words": prose(i), "n": 1}) for i in range(5)))
    with pytest.raises(DraftstillError, match="5 of 5 rows cannot be used") as caught:
        prepare(recipe_for(tmp_path, tmp_path / "rows.jsonl"))
    message = str(caught.value)
    assert caught.value.key == "corpus.field" and "'words', 'n'" in message and "rows.jsonl:1" in message
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
    assert fault(recipe_for(tmp_path / "c", tmp_path / "data.csv")).mend == "set corpus.format to text, jsonl, json or parquet"
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
    assert all(splits[s] for s in SPLITS)


def test_read_documents_knows_its_splits(tmp_path):
    with pytest.raises(ValueError, match="split is one of"):
        read_documents(tmp_path, "heldout")


def test_auto_reads_text_and_jsonl_of_one_folder(tmp_path):
    docs = write_texts(tmp_path / "docs", 3)
    (docs / "rows.jsonl").write_text(json.dumps({"text": prose(50)}))
    assert [r.id for r in read_rows(Corpus(source=str(docs)))] == ["000.txt", "001.txt", "002.txt", "rows.jsonl:1"]
    assert [r.id for r in read_rows(Corpus(source=str(docs), format="jsonl"))] == ["rows.jsonl:1"]


def write_chats(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def chat(seed, system=""):
    turns = [{"role": "user", "content": prose(seed, 30)}, {"role": "assistant", "content": prose(seed + 10_000, 30)}]
    return {"messages": [{"role": "system", "content": system}, *turns] if system else turns}


def test_conversations_keep_their_turns(tmp_path):
    tools = [{"type": "function", "function": {"name": "f"}}]
    rows = [{**chat(n), "tools": tools} if n == 3 else chat(n) for n in range(20)]
    folder, facts, splits = prepare(recipe_for(tmp_path, write_chats(tmp_path / "log.jsonl", rows), heldout_fraction=0.3))
    documents = {d.id: d for d in sum(splits.values(), [])}
    assert [documents[f"log.jsonl:{n + 1}"].messages for n in range(20)] == [r["messages"] for r in rows]
    assert documents["log.jsonl:4"].tools == tools and documents["log.jsonl:5"].tools is None
    assert documents["log.jsonl:1"].text == f"User: {prose(0, 30)}\n\nAssistant: {prose(10_000, 30)}"
    assert facts["conversations"] == {"count": 20, "turns": 40, "with_tools": 1} and facts["shapes"] == {"messages": 1}
    assert '"messages": null' not in (folder / "documents.jsonl").read_text()


def test_a_system_prompt_that_all_share_makes_no_duplicates(tmp_path):
    rows = [chat(n, system=prose(999, 300)) for n in range(20)]
    _, facts, _ = prepare(recipe_for(tmp_path, write_chats(tmp_path / "log.jsonl", [*rows, rows[5]]), heldout_fraction=0.3))
    assert facts["groups"] == 20 and facts["rejected"] == {"exact duplicate": 1}
    assert facts["heldout_13grams_in_train"] == {"validation": 0.0, "test": 0.0}


def test_rows_of_one_conversation_stay_together(tmp_path):
    rows = [{**chat(n), "conversation_id": n // 4} for n in range(40)]
    _, facts, splits = prepare(recipe_for(tmp_path, write_chats(tmp_path / "log.jsonl", rows), heldout_fraction=0.4))
    assert facts["groups"] == 10 and facts["largest_group"] == 4
    assert all(len(documents) % 4 == 0 for documents in splits.values())


ODD = [
    ({"text": prose(1) + "\x00"}, "NUL character"),
    ({"text": prose(1) + "\ud800"}, "lone surrogate"),
    ({"text": "x" * 3000}, "too long"),
    ({"text": "   "}, "empty"),
    ({"text": "short"}, "too short"),
]


@pytest.mark.parametrize(("row", "reason"), ODD)
def test_a_text_that_cannot_be_kept_is_named(tmp_path, row, reason):
    rows = [{"text": prose(n)} for n in range(20)]
    folder, facts, _ = prepare(recipe_for(tmp_path, write_chats(tmp_path / "rows.jsonl", [*rows, row]), max_chars=2500))
    assert facts["rejected"] == {reason: 1} and rejected_in(folder) == {"rows.jsonl:21": reason}


def test_odd_characters_inside_a_conversation_are_found(tmp_path):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "\udfff"}}
    bad = [{"messages": [{"role": "user", "content": "a\ud800"}]}, {"messages": [{"role": "user", "content": "a\x00"}]},
           {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [call]}]}]  # fmt: skip
    _, facts, _ = prepare(recipe_for(tmp_path, write_chats(tmp_path / "log.jsonl", [chat(n) for n in range(20)] + bad), max_chars=2500))
    assert facts["rejected"] == {"NUL character": 1, "lone surrogate": 2}


def test_too_many_faults_are_refused_by_reason(tmp_path):
    source = tmp_path / "rows.jsonl"
    source.write_text("\n".join([json.dumps({"text": prose(n)}) for n in range(20)] + ["{", '{"text": ""}', '{"text": "short"}']))
    _, facts, _ = prepare(recipe_for(tmp_path / "a", source, max_rejected=0.09))  # 2 of 23; too short is no fault
    assert facts["kept"] == 20
    error = fault(recipe_for(tmp_path / "b", source, max_rejected=0.05))
    assert error.key == "corpus.max_rejected" and error.value == 0.05
    assert "2 of 23 rows cannot be used (1 bad JSON, 1 empty); the first is rows.jsonl:21" in str(error) and "rejected.jsonl" in error.mend
    assert "max_rejected" in str(fault(recipe_for(tmp_path / "c", source, max_rejected=0.0)))


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


def test_a_stopped_reading_leaves_no_claim(tmp_path):
    docs = write_texts(tmp_path / "docs", 4)
    recipe = recipe_for(tmp_path, docs, heldout_fraction=0.1)
    fault(recipe)
    left = [p.name for p in (tmp_path / "run" / "corpus.partial").rglob("*")]
    assert sorted(left) == ["rejected.jsonl", "stage.json"]
    prepare(recipe_for(tmp_path, docs, heldout_fraction=0.5))  # the mended recipe, in the same folder


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


def test_a_large_file_is_hashed_once_until_it_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"a" * (5 << 20))
    os.utime(path, ns=(1, 1))
    calls, real = [], hashes.hash_file
    monkeypatch.setattr(hashes, "hash_file", lambda p: calls.append(p) or real(p))
    monkeypatch.setattr(hashes, "_SETTLED_NS", 0)
    first = hashes.remembered_hash(path)
    assert hashes.remembered_hash(path) == first and len(calls) == 1
    with open(path, "r+b") as file:  # one byte in the middle, the same size, the old time set back
        file.seek(2 << 20)
        file.write(b"b")
    os.utime(path, ns=(1, 1))
    assert hashes.remembered_hash(path) != first and len(calls) == 2
    next((tmp_path / "cache" / "draftstill" / "hashes").iterdir()).write_text("{}")
    assert hashes.remembered_hash(path) == real(path)
    monkeypatch.setattr(hashes, "_SETTLED_NS", 10**12)  # changed just now: it may change again unseen
    path.write_bytes(b"c" * (5 << 20))
    hashes.remembered_hash(path)
    hashes.remembered_hash(path)
    assert len(calls) == 5


def fingerprint(recipe):
    return stages(recipe, RunFolder(recipe.run_dir))["corpus"].fingerprint


@pytest.mark.parametrize("format", ["auto", "text"])
def test_names_that_are_no_utf8_go_through(tmp_path, format):
    docs = write_texts(tmp_path / "docs")
    for name, seed in ((b"caf\xe9.txt", 200), (b"caf\xe8.txt", 201), (b"\xff/sub.txt", 202), (b".hidden\xff.txt", 203)):
        path = os.path.join(os.fsencode(docs), name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as file:
            file.write(prose(seed))
    folder, facts, splits = prepare(recipe_for(tmp_path, docs, format=format, heldout_fraction=0.3))
    assert facts["kept"] == 23 and facts["rejected"] == {}
    names = {d.id for documents in splits.values() for d in documents}
    assert {"caf\\xe9.txt", "caf\\xe8.txt", "\\xff/sub.txt"} <= names


def test_licences_with_names_that_are_no_utf8(tmp_path, licences):
    folder = licences / "licensedcode" / "data" / "licenses"
    with open(os.fsencode(folder) + b"/caf\xe9.LICENSE", "w") as file:
        file.write(f"---\ncategory: Commercial\n---\n\n{prose(77)}\n")
    _, _, splits = prepare(recipe_for(tmp_path, licences, heldout_fraction=0.3))
    assert "caf\\xe9" in {d.id for documents in splits.values() for d in documents}


def test_a_key_that_is_half_a_pair_names_a_row(tmp_path):
    (tmp_path / "rows.json").write_text(json.dumps({f"\ud800{n}": {"text": prose(n)} for n in range(20)}))
    _, _, splits = prepare(recipe_for(tmp_path, tmp_path / "rows.json", heldout_fraction=0.3))
    assert "rows.json:\\ud8003" in {d.id for documents in splits.values() for d in documents}


def test_only_what_is_read_makes_another_stage(tmp_path):
    docs = write_texts(tmp_path / "docs", 3)
    recipe = recipe_for(tmp_path, docs, include=("0*",))
    before = fingerprint(recipe)
    for name in (".git/index", ".cache.txt", "scan.pdf", "a/.ipynb_checkpoints/x.txt", "9-not-included.txt"):
        (docs / name).parent.mkdir(parents=True, exist_ok=True)
        (docs / name).write_text("x")
        assert fingerprint(recipe) == before, name
    assert fingerprint(recipe_for(tmp_path, docs)) != before
    for name, change in (("000.txt", "other"), ("03.txt", "new"), ("0.jsonl.gz", "new")):
        (docs / name).write_text(change)
        assert fingerprint(recipe) != before, name
        before = fingerprint(recipe)


def test_the_licences_of_a_folder_decide(tmp_path, licences):
    recipe = recipe_for(tmp_path, licences)
    before = fingerprint(recipe)
    (licences / "readme.txt").write_text("not read")
    assert fingerprint(recipe) == before
    (licences / "licensedcode" / "data" / "licenses" / "mit.LICENSE").write_text("other")
    assert fingerprint(recipe) != before


def test_two_rows_of_one_name_are_not_both_kept(tmp_path):
    term = '[Term]\nid: HP:{n}\nname: thing {k}\ndef: "{text}" []\n\n'
    (tmp_path / "a.obo").write_text("".join(term.format(n=n, k=k, text=prose(100 * n + k)) for n in range(20) for k in range(1 + (n == 7))))
    folder, facts, _ = prepare(recipe_for(tmp_path, tmp_path / "a.obo", format="ontology", heldout_fraction=0.3))
    assert facts["kept"] == 20 and facts["rejected"] == {"repeated id": 1} and rejected_in(folder) == {"a.obo:HP:7": "repeated id"}


def test_details_of_rejected_rows_are_redacted(tmp_path):
    secret = "anna.bell@mail.example.org"
    rows = [chat(n) for n in range(40)]
    rows += [{"messages": [{"role": f"I am {secret}", "content": "x"}]}, {"messages": [{"role": "user", "content": "x"}], "tools": secret},
             {"messages": [{"role": "user", "content": [{"type": f"{'long ' * 8}{secret}", "text": "x"}]}]}, {"note": "x", secret: 1}]  # fmt: skip
    source = write_chats(tmp_path / "log.jsonl", rows)
    for redact in ((), ("email",)):
        folder, facts, _ = prepare(recipe_for(tmp_path / str(len(redact)), source, redact=redact, heldout_fraction=0.3))
        listing = (folder / "rejected.jsonl").read_text()
        assert ("anna.bell" in listing) == (not redact) and len(rejected_in(folder)) == 4
    assert "<EMAIL_1>" in listing and facts["redacted"]["replaced"] == {"email": 0}


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


def test_what_is_only_refused_makes_no_other_stage(tmp_path):
    docs = write_texts(tmp_path / "docs", 3)
    names = lambda recipe: {n: s.fingerprint for n, s in stages(recipe, RunFolder(recipe.run_dir)).items()}  # noqa: E731
    made = []
    for limits in ({}, {"damaged": "keep"}, {"max_rejected": 0.1, "test_sha256": "0" * 64}):
        recipe = recipe_for(tmp_path, docs, **limits)
        domain = Corpus(source=str(docs), damaged=limits.get("damaged", "refuse"))
        made.append(names(recipe.model_copy(update={"evaluate": recipe.evaluate.model_copy(update={"domains": {"x": domain}})})))
    assert made[0] == made[1] == made[2]
