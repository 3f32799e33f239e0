"""Datasets of the Hub (from a folder), parquet, and ontologies."""

from __future__ import annotations

import gzip
import json
import sqlite3
import types

import pyarrow
import pyarrow.parquet
import pytest

from draftstill.corpus import prepare_corpus
from draftstill.errors import DraftstillError
from draftstill.plan import problems
from draftstill.readers import FAULTS, hub, read_rows
from draftstill.recipe import Corpus, Recipe, Target
from draftstill.runfolder import RunFolder
from draftstill.stages import stages


def rows_of(source, **corpus):
    return list(read_rows(Corpus(source=str(source), **corpus)))


@pytest.fixture
def dataset(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "data"
    folder.mkdir()
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text(
            "\n".join(json.dumps({"prompt": f"{split} 2024-01-0{n}", "response": "2024-01-01"}) for n in range(1, 4))
        )
    return folder


def test_a_dataset_on_disk_by_split(dataset):
    assert [row.messages[0]["content"] for row in rows_of(f"hf:{dataset}")] == [f"train 2024-01-0{n}" for n in range(1, 4)]
    rows = rows_of(f"hf:{dataset}", dataset_split="test")
    assert [row.id for row in rows] == [f"test.jsonl:{n}" for n in range(1, 4)] and rows[0].messages[1]["content"] == "2024-01-01"


@pytest.mark.parametrize(("keys", "key"), [({"dataset_split": "dev"}, "corpus.dataset_split"), ({"dataset_config": "german"}, "corpus.dataset_config"),
                                           ({"include": ("x/*",)}, "corpus.include")])  # fmt: skip
def test_what_a_dataset_has_not(dataset, keys, key):
    with pytest.raises(DraftstillError) as caught:
        rows_of(f"hf:{dataset}", **keys)
    assert caught.value.key == key and caught.value.mend


def test_no_dataset_and_no_network(tmp_path, monkeypatch):
    import datasets

    with pytest.raises(DraftstillError) as caught:
        rows_of(f"hf:{tmp_path / 'absent'}")
    assert caught.value.key == "corpus.source"
    with pytest.raises(DraftstillError, match="names no dataset"):
        rows_of("hf:")

    def unreachable(*_, **__):
        raise ConnectionError("Couldn't reach 'a/b' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset_builder", unreachable)
    with pytest.raises(DraftstillError, match="the Hub cannot be reached") as caught:
        rows_of("hf:a/b")
    assert "hf:FOLDER" in caught.value.mend


@pytest.mark.parametrize("streaming", [False, True])
def test_remote_files_are_fetched_or_streamed_by_our_readers(tmp_path, monkeypatch, streaming):
    """The Hub itself stands in for: names of its files as ``datasets`` gives them, fetched from a folder."""
    import datasets
    import fsspec
    import huggingface_hub

    asked = []
    rows = [{"text": f"2024-01-0{n}"} for n in range(1, 4)]
    (tmp_path / "part.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    files = {"train": ["hf://datasets/own/name@abc/data/part.jsonl.gz"]}

    def builder(name, config, revision):
        asked.append((name, config, revision))
        return types.SimpleNamespace(config=types.SimpleNamespace(data_files=files))

    def download(repo, name, *, repo_type, revision):
        asked.append((repo, name, repo_type, revision))
        return str(tmp_path / "part.jsonl.gz")

    local = fsspec.filesystem("file")
    monkeypatch.setattr(datasets, "load_dataset_builder", builder)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda path: (local, str(tmp_path / path.rsplit("/", 1)[1])))
    read = rows_of("hf:own/name", dataset_revision="v1", streaming=streaming)
    assert [(row.id, row.text) for row in read] == [(f"data/part.jsonl.gz:{n}", f"2024-01-0{n}") for n in range(1, 4)]
    assert asked == [("own/name", None, "v1"), *([] if streaming else [("own/name", "data/part.jsonl.gz", "dataset", "abc")])]
    files["train"] = ["hf://datasets/own/name@abc/data/part.arrow"]
    with pytest.raises(DraftstillError, match="neither JSONL"):
        list(hub.hub_files(Corpus(source="hf:own/name")))


@pytest.mark.parametrize("include", [(), ("de/*",)])
def test_files_of_one_name_in_two_folders(tmp_path, monkeypatch, include):
    """Rows are named by their place in the dataset, and patterns are matched against it."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    for language in ("en", "de"):
        (tmp_path / "data" / language).mkdir(parents=True)
        (tmp_path / "data" / language / "train.jsonl").write_text(json.dumps({"prompt": f"question in {language}", "response": "yes"}))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("data")
    for source in (f"hf:{tmp_path / 'data'}", "hf:data", "hf:link"):
        names = [row.id for row in rows_of(source, include=include)]
        assert names == [f"{language}/train.jsonl:1" for language in ("de", "en") if not include or language == "de"], source


def test_a_folder_by_hf_is_watched_like_any_other(dataset, tmp_path):
    make = lambda run: Recipe(run_dir=str(run), target=Target(source="a/b"), corpus=Corpus(source=f"hf:{dataset}", heldout_fraction=0.7))  # noqa: E731
    fingerprint = lambda: stages(make(tmp_path / "run"), RunFolder(tmp_path / "run"))["corpus"].fingerprint  # noqa: E731
    before = fingerprint()
    assert fingerprint() == before
    with open(dataset / "train.jsonl", "a") as file:
        file.write("\n" + json.dumps({"prompt": "one more", "response": "yes"}))
    assert fingerprint() != before
    inside = make(dataset / "run")
    with pytest.raises(DraftstillError) as caught:
        prepare_corpus(inside, RunFolder(inside.run_dir))
    assert caught.value.key == "run_dir"
    assert any(problem.startswith("run_dir") for problem in problems(inside))


def test_the_commit_of_a_dataset_is_noted(tmp_path, monkeypatch, capsys):
    import datasets
    import huggingface_hub

    rows = [{"text": " ".join(f"w{n}x{k}" for k in range(80))} for n in range(12)]
    (tmp_path / "part.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = types.SimpleNamespace(data_files={"train": ["hf://datasets/own/name@0123abc/part.jsonl"]})
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_, **__: types.SimpleNamespace(config=config))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: str(tmp_path / "part.jsonl"))
    recipe = Recipe(run_dir=str(tmp_path / "run"), target=Target(source="a/b"), corpus=Corpus(source="hf:own/name", heldout_fraction=0.5))
    folder = prepare_corpus(recipe, RunFolder(recipe.run_dir))
    assert json.loads((folder / "provenance.json").read_text())["facts"]["revision"] == "0123abc"
    assert "0123abc" in capsys.readouterr().out

    def broken(*_, **__):
        raise RuntimeError("peer closed connection")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", broken)
    with pytest.raises(DraftstillError, match="peer closed connection") as caught:
        rows_of("hf:own/name")
    assert caught.value.key == "corpus.source"


def test_parquet_by_row_groups(tmp_path):
    rows = [{"id": n, "text": f"2024-01-01 {n}", "when": None} for n in range(1000)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=100)
    read = rows_of(tmp_path)
    assert [row.text for row in read] == [r["text"] for r in rows] and read[999].id == "a.parquet:1000"


def test_parquet_that_is_damaged_or_typed(tmp_path):
    import datetime

    table = pyarrow.table({"text": [datetime.datetime(2024, 1, 1)]})
    pyarrow.parquet.write_table(table, tmp_path / "b.parquet")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 nothing")
    data = (tmp_path / "b.parquet").read_bytes()
    (tmp_path / "c.parquet").write_bytes(data[: len(data) // 2])
    rows = rows_of(tmp_path)
    assert [(row.id, row.reason) for row in rows] == [
        ("a.parquet:1", "damaged parquet"), ("b.parquet:1", "not a string"), ("c.parquet:1", "damaged parquet")]  # fmt: skip
    assert rows[1].detail == "datetime"


def test_times_and_numbers_beside_a_turn_become_text(tmp_path):
    """Public logs keep a timestamp and scores in every turn."""
    import datetime

    turn = {
        "role": "user",
        "content": "Who?",
        "timestamp": datetime.datetime(2024, 1, 1),
        "score": float("nan"),
        "turn": 7,
        "redacted": False,
    }
    table = pyarrow.Table.from_pylist([{"conversation": [turn], "tools": [{"since": datetime.date(2024, 1, 2)}]}])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    (row,) = rows_of(tmp_path)
    assert row.messages == [{**turn, "timestamp": "2024-01-01 00:00:00", "score": "nan"}] and row.tools == [{"since": "2024-01-02"}]
    json.dumps([row.messages, row.tools], allow_nan=False)


OBO = r"""format-version: 1.2
def: "not a term" []

[Term]
id: HP:1
name: Short stature
def: "A height \"below\" that\nof peers." [HPO:x, PMID:1]
def: "a second one" []

[Term]
id: HP:2
name: No words

[Term]
id: HP:3
name: obsolete thing
def: "Gone." []

[Term]
id: HP:4
name: Old
def: "Gone, too." []
is_obsolete: true

[Typedef]
id: part_of
name: part of
def: "No term." []

[Term]
id: HP:5
name: Long bone
def: "A bone." []"""


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_obo(tmp_path, end):
    (tmp_path / "hp.obo").write_bytes(OBO.replace("\n", end).encode())
    rows = rows_of(tmp_path, format="ontology")
    texts = ['Short stature: A height "below" that\nof peers.', "Long bone: A bone."]
    assert [row.text for row in rows if row.text] == texts
    assert [(row.id, row.reason) for row in rows if row.reason] == [
        ("hp.obo:HP:2", "no definition"),
        ("hp.obo:HP:3", "deprecated"),
        ("hp.obo:HP:4", "deprecated"),
    ]
    assert [row.text for row in rows_of(tmp_path, format="ontology", terms_per_document=2) if row.text] == ["\n\n".join(texts)]
    assert {row.reason for row in rows if row.reason}.isdisjoint(FAULTS)


def test_gene_ontology_and_json_terms(tmp_path):
    base = sqlite3.connect(tmp_path / "GO.sqlite")
    base.execute("create table go_term (_id integer, go_id text, term text, ontology text, definition text)")
    base.executemany(
        "insert into go_term values (?, ?, ?, 'BP', ?)",
        [(1, "GO:2", "growth", "Getting larger."), (2, "GO:1", "all", None), (3, "GO:0", "x", "y")],
    )
    base.commit()
    base.close()
    terms = {"CL:1": {"label": "cell", "description": "A <em>small</em> &amp; living thing.", "deprecated": False},
             "CL:2": {"label": "old", "description": "x", "deprecated": True}, "CL:3": {"label": "bare"}, "CL:4": {"name": "strange"}}  # fmt: skip
    (tmp_path / "cl.json.zst").write_bytes(pyarrow.compress(json.dumps(terms).encode(), codec="zstd", asbytes=True))
    (tmp_path / "readme.txt").write_text("not this")
    rows = rows_of(tmp_path, format="ontology")
    assert [row.text for row in rows if row.text] == ["x: y", "growth: Getting larger.", "cell: A small & living thing."]
    assert [row.reason for row in rows if row.reason] == ["no definition", "deprecated", "no definition", "missing field"]
    with pytest.raises(DraftstillError, match="an ontology is read from"):
        rows_of(tmp_path / "readme.txt", format="ontology")
    (tmp_path / "GO.sqlite").write_bytes(b"no database" * 100)
    assert rows_of(tmp_path, format="ontology")[0].reason == "damaged database"
