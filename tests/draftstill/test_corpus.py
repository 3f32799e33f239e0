"""The corpus stage: what is read, kept, rejected and named."""

import gzip
import json
import os

import pytest

from draftstill import hashes
from draftstill.corpus import prepare_corpus
from draftstill.errors import DraftstillError
from draftstill.readers import read_rows
from draftstill.recipe import Corpus
from draftstill.runfolder import RunFolder
from draftstill.stages import stages
from tests.draftstill.corpora import chat, fault, fingerprint, prepare, prose, recipe_for, rejected_in, write_chats, write_texts


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


def test_auto_reads_text_and_jsonl_of_one_folder(tmp_path):
    docs = write_texts(tmp_path / "docs", 3)
    (docs / "rows.jsonl").write_text(json.dumps({"text": prose(50)}))
    assert [r.id for r in read_rows(Corpus(source=str(docs)))] == ["000.txt", "001.txt", "002.txt", "rows.jsonl:1"]
    assert [r.id for r in read_rows(Corpus(source=str(docs), format="jsonl"))] == ["rows.jsonl:1"]


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


def test_a_stopped_reading_leaves_no_claim(tmp_path):
    docs = write_texts(tmp_path / "docs", 4)
    recipe = recipe_for(tmp_path, docs, heldout_fraction=0.1)
    fault(recipe)
    left = [p.name for p in (tmp_path / "run" / "corpus.partial").rglob("*")]
    assert sorted(left) == ["rejected.jsonl", "stage.json"]
    prepare(recipe_for(tmp_path, docs, heldout_fraction=0.5))  # the mended recipe, in the same folder


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


def test_what_is_only_refused_makes_no_other_stage(tmp_path):
    docs = write_texts(tmp_path / "docs", 3)
    names = lambda recipe: {n: s.fingerprint for n, s in stages(recipe, RunFolder(recipe.run_dir)).items()}  # noqa: E731
    made = []
    for limits in ({}, {"damaged": "keep"}, {"max_rejected": 0.1, "test_sha256": "0" * 64}):
        recipe = recipe_for(tmp_path, docs, **limits)
        domain = Corpus(source=str(docs), damaged=limits.get("damaged", "refuse"))
        made.append(names(recipe.model_copy(update={"evaluate": recipe.evaluate.model_copy(update={"domains": {"x": domain}})})))
    assert made[0] == made[1] == made[2]
