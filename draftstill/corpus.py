"""The corpus stage: read, filter, drop exact duplicates, group near duplicates, split by group.

Writes ``documents.jsonl`` (id, split, group, text) and ``rejected.jsonl`` (id, reason, detail) and accounts for every row:
read = kept + the sum over reasons. The split is decided by ``recipe.seed`` and the documents alone.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from draftstill.dedupe import group_documents, near_duplicates, seen_share
from draftstill.errors import DraftstillError
from draftstill.progress import Progress, say
from draftstill.readers import UNUSABLE, Row, read_rows
from draftstill.recipe import Corpus, Recipe
from draftstill.runfolder import RunFolder, atomic_write
from draftstill.stages import stages

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Document:
    """One document; ``group`` is the id of the first document of its group, and a group has one split."""

    id: str
    split: str
    group: str
    text: str


@dataclass
class _Reading:
    """What reading found: kept rows, rejected rows, and the number of rows looked at."""

    kept: list[Row]
    rejected: list[Row]
    read: int = 0

    def reasons(self) -> dict[str, int]:
        return dict(sorted(Counter(str(r.reason) for r in self.rejected).items()))


def prepare_corpus(recipe: Recipe, run: RunFolder) -> Path:
    """Make the ``corpus`` stage, or reuse it; returns its folder. All kept text is held in memory while it is compared.

    Raises:
        DraftstillError: a missing source, no usable document, mostly unusable rows, or too few groups to hold any out.
    """
    if run.path.resolve().is_relative_to(Path(recipe.corpus.source).expanduser().resolve()):
        raise DraftstillError("the run folder lies inside the corpus folder, so that its own results would be read as text", key="run_dir",
                              value=str(run.path), mend=f"give a run_dir outside of {recipe.corpus.source}")  # fmt: skip
    stage = stages(recipe, run)["corpus"]
    if stage.done:
        return stage.folder
    work = stage.begin()
    reading = _read(recipe.corpus)
    _write_jsonl(work / "rejected.jsonl", ({"id": r.id, "reason": r.reason, "detail": r.detail} for r in reading.rejected))
    _refuse_unusable(recipe.corpus, reading, work / "rejected.jsonl")

    rows, texts = reading.kept, [str(r.text) for r in reading.kept]
    with Progress("comparing documents", len(rows), "documents") as progress:
        pairs = near_duplicates(texts, recipe.corpus.near_duplicates, progress.update)
    groups = group_documents([r.family for r in rows], pairs)
    split_of = _split(groups, [r.id for r in rows], recipe)
    documents = [Document(r.id, split_of[g], rows[g].id, t) for r, g, t in zip(rows, groups, texts, strict=True)]
    _write_jsonl(work / "documents.jsonl", (asdict(d) for d in documents))

    facts = _facts(reading, documents, len(pairs))
    folder = stage.finish(**facts)
    _report(facts, folder)
    return folder


def read_documents(folder: str | Path, split: str) -> list[Document]:
    """The documents of one split (``train``, ``validation`` or ``test``) of a finished corpus stage, in reading order."""
    if split not in SPLITS:
        raise ValueError(f"split is one of {SPLITS}, not {split!r}")
    with open(Path(folder) / "documents.jsonl", encoding="utf-8", newline="\n") as file:
        documents = (Document(**json.loads(line)) for line in file)
        return [d for d in documents if d.split == split]


def _read(corpus: Corpus) -> _Reading:
    reading = _Reading([], [])
    first: dict[bytes, str] = {}
    for row in read_rows(corpus):
        reading.read += 1
        if row.reason is not None:
            reading.rejected.append(row)
            continue
        text = str(row.text).strip()
        digest = hashlib.sha256(text.encode()).digest()
        if not text:
            reading.rejected.append(Row(row.id, None, "empty"))
        elif len(text) < corpus.min_chars:
            reading.rejected.append(Row(row.id, None, "too short", f"{len(text)} characters"))
        elif digest in first:
            reading.rejected.append(Row(row.id, None, "exact duplicate", f"of {first[digest]}"))
        else:
            first[digest] = row.id
            reading.kept.append(row._replace(text=text))
            if len(reading.kept) == corpus.max_documents:
                break
    if reading.read != len(reading.kept) + len(reading.rejected):
        raise AssertionError("a row was neither kept nor rejected")
    return reading


def _refuse_unusable(corpus: Corpus, reading: _Reading, listing: Path) -> None:
    found = ", ".join(f"{count} {reason}" for reason, count in reading.reasons().items())
    faults = [r for r in reading.rejected if r.reason in UNUSABLE]
    if reading.read == 0:
        raise DraftstillError("the corpus holds no row at all", key="corpus.source", value=corpus.source,
                              mend="give a file or folder with documents in it")  # fmt: skip
    if 2 * len(faults) > reading.read:
        first = faults[0]
        missing = first.reason == "missing field"
        raise DraftstillError(
            f"{len(faults)} of {reading.read} rows cannot be used ({found}); the first is {first.id}: {first.reason}, {first.detail}",
            key="corpus.field" if missing else "corpus.source", value=corpus.field if missing else corpus.source,
            mend=("set corpus.field to the field that holds the text" if missing else "mend the file") + f"; all rejected rows are in {listing}",
        )  # fmt: skip
    if not reading.kept:
        short = all(r.reason in (*UNUSABLE, "too short", "exact duplicate") for r in reading.rejected)
        key, value = ("corpus.min_chars", corpus.min_chars) if short else ("corpus.source", corpus.source)
        raise DraftstillError(
            f"none of {reading.read} rows was kept ({found})", key=key, value=value,
            mend=("lower corpus.min_chars, or join short texts into longer documents" if short else "choose other corpus.categories"),
        )  # fmt: skip


def _split(groups: Sequence[int], ids: Sequence[str], recipe: Recipe) -> dict[int, str]:
    """Split of each group: shuffled by the seed, the first half of the held-out share validates and the second half tests."""
    roots = sorted(set(groups), key=lambda g: (ids[g], g))  # by name, so that the split does not hang on reading order
    fraction = recipe.corpus.heldout_fraction
    side = round(len(roots) * fraction / 2)
    if side == 0 or len(roots) <= 2 * side:
        least = 2 / len(roots)
        raise DraftstillError(
            f"{len(groups)} documents in {len(roots)} groups of near duplicates leave an empty split at this share",
            key="corpus.heldout_fraction", value=fraction,
            mend="give more documents that differ (a group of near duplicates stays on one side)" if len(roots) < 3
            else f"set it to at least {min(least + 0.005, 0.99):.2f} and below 1, or give more documents" if side == 0
            else "set it lower, so that something is left to train on",
        )  # fmt: skip
    random.Random(recipe.seed).shuffle(roots)
    return {g: "validation" if n < side else "test" if n < 2 * side else "train" for n, g in enumerate(roots)}


def _facts(reading: _Reading, documents: Sequence[Document], pairs: int) -> dict[str, Any]:
    chosen = {s: [d for d in documents if d.split == s] for s in SPLITS}
    reasons = reading.reasons()
    return {
        "read": reading.read,
        "kept": len(documents),
        "rejected": reasons,
        "exact_duplicates": reasons.get("exact duplicate", 0),
        "near_duplicate_pairs": pairs,
        "groups": len({d.group for d in documents}),
        "largest_group": max(Counter(d.group for d in documents).values()),
        "splits": {s: {"documents": len(ds), "characters": sum(len(d.text) for d in ds)} for s, ds in chosen.items()},
        "heldout_13grams_in_train": {
            s: round(seen_share((d.text for d in chosen["train"]), (d.text for d in chosen[s])), 4) for s in SPLITS[1:]
        },
    }


def _report(facts: dict[str, Any], folder: Path) -> None:
    rejected = ", ".join(f"{count:,} {reason}" for reason, count in facts["rejected"].items()) or "none"
    say(f"corpus: {facts['read']:,} rows read, {facts['kept']:,} kept; rejected: {rejected}")
    say(f"  {facts['groups']:,} groups ({facts['near_duplicate_pairs']:,} near-duplicate pairs); no group stands on two sides")
    for split, counted in facts["splits"].items():
        say(f"  {split:<10} {counted['documents']:>8,} documents {counted['characters']:>14,} characters")
    say(f"  in {folder}")


def _write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    atomic_write(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
