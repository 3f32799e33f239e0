"""The corpus stage: read, filter, drop exact duplicates, group near duplicates, split by group.

Writes ``documents.jsonl`` (id, split, group, text; of conversations also messages and tools) and ``rejected.jsonl`` (id, reason, detail)
and accounts for every row: read = kept + the sum over reasons. The split is decided by ``recipe.seed`` and the documents alone.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from draftstill.dedupe import group_documents, seen_shares
from draftstill.documents import Document, iter_documents, read_documents, stored_documents
from draftstill.errors import DraftstillError
from draftstill.frozen import contents_of, hash_of, refuse_other_test_set
from draftstill.gathering import Gathering, compared_text
from draftstill.progress import Progress, say
from draftstill.readers import local_path
from draftstill.recipe import Corpus, Recipe
from draftstill.runfolder import RunFolder, read_json
from draftstill.sides import SPLITS, choose_sides
from draftstill.stages import stages

__all__ = ["SPLITS", "Document", "iter_documents", "prepare_corpus", "read_documents", "stored_documents"]


def prepare_corpus(recipe: Recipe, run: RunFolder) -> Path:
    """Make the ``corpus`` stage, or reuse it; returns its folder. Kept text waits on disk while it is compared.

    Raises:
        DraftstillError: a missing source, no usable document, too many faulty rows, a file whose rest cannot be read, too few groups to hold
            any out, or a test set other than the frozen one.
    """
    corpus = recipe.corpus
    root = local_path(corpus.source)
    if root is not None and run.path.resolve().is_relative_to(root.resolve()):
        raise DraftstillError("the run folder lies inside the corpus folder, so that its own results would be read as text", key="run_dir",
                              value=str(run.path), mend=f"give a run_dir outside of {corpus.source}")  # fmt: skip
    stage = stages(recipe, run)["corpus"]
    if stage.done:
        facts = read_json(stage.folder / "provenance.json")["facts"]
        refuse_other_test_set(corpus, facts, run, lambda: contents_of(stage.folder))
        return stage.folder
    work = stage.begin()
    gathered = Gathering(corpus, work)
    gathered.gather()
    _write(work / "rejected.jsonl", gathered.rejected())
    _refuse_lost(corpus, gathered, work / "rejected.jsonl")
    _refuse_faulty(corpus, gathered, work / "rejected.jsonl")
    _refuse_none(corpus, gathered)

    with Progress("compare", 1, "bands") as progress:
        pairs = gathered.sketches.near_duplicates(corpus.near_duplicates, lambda done, all_: _shown(progress, done, all_))
    groups = group_documents(len(gathered.ids), gathered.families.pairs(), pairs)
    smallest: dict[int, bytes] = {}
    for group, digest in zip(groups, gathered.digests, strict=True):
        smallest[group] = min(digest, smallest.get(group, digest))
    side_of = choose_sides(smallest, len(groups), corpus.heldout_fraction, recipe.seed)
    sides = [side_of[g] for g in groups]
    facts = {**_facts(gathered, groups, sides, len(pairs)), "heldout_13grams_in_train": _overlap(gathered, sides)}
    refuse_other_test_set(corpus, facts, run, lambda: dict(_of_test(gathered, sides)))
    _write(work / "documents.jsonl", _documents(gathered, groups, sides))
    folder = stage.finish(**facts)
    _report(facts, folder)
    return folder


def _of_test(gathered: Gathering, sides: list[str]) -> Iterator[tuple[bytes, str]]:
    """Digests and ids of the test documents."""
    return ((digest, i) for digest, i, side in zip(gathered.digests, gathered.ids, sides, strict=True) if side == "test")


def _shown(progress: Progress, done: int, total: int) -> None:
    progress.total = total
    progress.update(done)


def _write(path: Path, lines: Iterable[bytes]) -> None:
    """Lines to a file that is there when it is whole; they may be more than the memory holds."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _documents(gathered: Gathering, groups: list[int], sides: list[str]) -> Iterator[bytes]:
    for row_id, group, side, line in zip(gathered.ids, groups, sides, gathered.kept(), strict=True):
        head = json.dumps({"id": row_id, "split": side, "group": gathered.ids[group]}, ensure_ascii=False).encode()
        yield head[:-1] + b", " + line[1:]  # what was kept is a JSON object of its own


def _refuse_lost(corpus: Corpus, gathered: Gathering, listing: Path) -> None:
    """A file that ends early may lack one row or most of them; the share of rejected rows would not show it."""
    if not gathered.lost or corpus.damaged == "keep":
        return
    first = gathered.lost[0]
    problem = f"the rest of {len(gathered.lost):,} {'file' if len(gathered.lost) == 1 else 'files'} cannot be read, from {first.id} on: {first.reason}"
    raise DraftstillError(problem + (f", {first.detail}" if first.detail else ""), key="corpus.damaged", value=corpus.damaged,
                          mend=f"fetch or write the file again; or set it to keep, and do without the rest; all rejected rows are in {listing}")  # fmt: skip


def _refuse_faulty(corpus: Corpus, gathered: Gathering, listing: Path) -> None:
    if gathered.read == 0:
        raise DraftstillError("the corpus holds no row at all", key="corpus.source", value=corpus.source,
                              mend="give a file or folder with documents in it")  # fmt: skip
    faults = sum(gathered.faults.values())
    first = gathered.first_fault
    if first is None or faults <= corpus.max_rejected * gathered.read:
        return
    found = ", ".join(f"{count:,} {reason}" for reason, count in gathered.faults.items())
    problem = f"{faults:,} of {gathered.read:,} rows cannot be used ({found}); the first is {first.id}: {first.reason}, {first.detail}"
    where = f"; all rejected rows are in {listing}"
    if "missing field" in gathered.faults and 2 * gathered.faults["missing field"] > faults:
        key, value = ("corpus.fields", corpus.fields) if corpus.fields else ("corpus.field", corpus.field)
        mend = "set corpus.field to the field that holds the text, or corpus.fields for prompts, answers and conversations"
        raise DraftstillError(problem, key=key, value=value, mend=mend + where)
    lenient = 2 * faults <= gathered.read
    raise DraftstillError(problem, key="corpus.max_rejected" if lenient else "corpus.source", value=corpus.max_rejected if lenient else corpus.source,
                          mend=("mend the rows, or set it higher" if lenient else "mend the file") + where)  # fmt: skip


def _refuse_none(corpus: Corpus, gathered: Gathering) -> None:
    if gathered.ids:
        return
    found = ", ".join(f"{count:,} {reason}" for reason, count in sorted(gathered.reasons.items()))
    key, value, mend = "corpus.source", corpus.source, "choose other corpus.categories, corpus.where or corpus.include"
    if "too short" in gathered.reasons:
        key, value, mend = "corpus.min_chars", corpus.min_chars, "lower corpus.min_chars, or join short texts into longer documents"  # type: ignore[assignment]
    elif "too long" in gathered.reasons:
        key, value, mend = "corpus.max_chars", corpus.max_chars, "raise corpus.max_chars, or cut long texts where they have their own ends"  # type: ignore[assignment]
    elif gathered.faults:
        mend = "mend the file"
    raise DraftstillError(f"none of {gathered.read:,} rows was kept ({found})", key=key, value=value, mend=mend)


def _facts(gathered: Gathering, groups: list[int], sides: list[str], pairs: int) -> dict[str, Any]:
    lengths, side = np.array(gathered.lengths), np.array(sides)
    low, middle, high = np.percentile(lengths, [10, 50, 90]).astype(int).tolist()
    reasons = dict(sorted(gathered.reasons.items()))
    facts = {
        "read": gathered.read,
        "kept": len(gathered.ids),
        "rejected": reasons,
        "exact_duplicates": reasons.get("exact duplicate", 0),
        "near_duplicate_pairs": pairs,
        "crowded_buckets": gathered.sketches.crowded,
        "commonplace_prompts": gathered.families.commonplace,
        "groups": len(set(groups)),
        "largest_group": max(Counter(groups).values()),
        "splits": {s: {"documents": int((side == s).sum()), "characters": int(lengths[side == s].sum())} for s in SPLITS},
        "characters": {"p10": low, "median": middle, "p90": high, "longest": int(lengths.max())},
        "test_sha256": hash_of(digest for digest, _ in _of_test(gathered, sides)),
    }
    if gathered.meter.files:
        facts["files"] = {"read": gathered.meter.files, "left_alone": dict(sorted(gathered.meter.others.items()))}
    if gathered.meter.revision:
        facts["revision"] = gathered.meter.revision
    if gathered.lost:
        facts["damaged"] = [row.id for row in gathered.lost]
    if gathered.meter.guesses:
        facts["shapes"] = dict(sorted(gathered.meter.guesses.items()))
    if gathered.conversations:
        facts["conversations"] = {"count": gathered.conversations, "turns": gathered.turns, "with_tools": gathered.with_tools}
    if gathered.corpus.redact:
        counts = {kind: gathered.redactor.counts[kind] for kind in gathered.corpus.redact}
        facts["redacted"] = {"documents": gathered.redactor.rows, "replaced": counts}
    return facts


def _overlap(gathered: Gathering, sides: list[str]) -> dict[str, float]:
    texts = lambda split: (compared_text(line) for side, line in zip(sides, gathered.kept(), strict=True) if side == split)  # noqa: E731
    return {s: round(share, 4) for s, share in seen_shares(texts("train"), {s: texts(s) for s in SPLITS[1:]}).items()}


def _report(facts: dict[str, Any], folder: Path) -> None:
    rejected = ", ".join(f"{count:,} {reason}" for reason, count in facts["rejected"].items()) or "none"
    say(f"corpus: {facts['read']:,} rows read, {facts['kept']:,} kept; rejected: {rejected}")
    if "damaged" in facts:
        damaged = facts["damaged"]
        say(
            f"  DAMAGED: what stood from these rows on could not be read and is missing: {', '.join(damaged[:8])}"
            + (", ..." if len(damaged) > 8 else "")
        )
    if "revision" in facts:
        say(f"  commit {facts['revision']}; corpus.dataset_revision pins it")
    left = facts.get("files", {}).get("left_alone")
    if left:
        say(f"  files of other kinds, left alone: {', '.join(f'{count:,} {end}' for end, count in left.items())}")
    if "conversations" in facts:
        c = facts["conversations"]
        say(f"  {c['count']:,} conversations of {c['turns']:,} turns, {c['with_tools']:,} with tools")
    if "redacted" in facts:
        replaced = ", ".join(f"{count:,} {kind}" for kind, count in facts["redacted"]["replaced"].items())
        say(f"  redacted in {facts['redacted']['documents']:,} rows: {replaced}")
    say(f"  {facts['groups']:,} groups ({facts['near_duplicate_pairs']:,} near-duplicate pairs), the largest of {facts['largest_group']:,} documents; "
        "no group stands on two sides")  # fmt: skip
    if facts["commonplace_prompts"]:
        say(f"  {facts['commonplace_prompts']:,} prompts that very many others go on from (a greeting, say) join none of them")
    if facts["crowded_buckets"]:
        say(f"  {facts['crowded_buckets']:,} times over a thousand documents shared a phrase and were compared in part")
    for split, counted in facts["splits"].items():
        say(f"  {split:<10} {counted['documents']:>8,} documents {counted['characters']:>14,} characters")
    shares = ", ".join(f"{share:.1%} ({split})" for split, share in facts["heldout_13grams_in_train"].items())
    say(f"  held-out runs of 13 words that also stand in training documents: {shares}")
    say(f"  corpus.test_sha256: {facts['test_sha256']}  freezes the test documents")
    say(f"  in {folder}")
