"""The frozen test set: whether it is still the one that scores were measured on, and what came or went where it is not."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from draftstill.documents import iter_documents
from draftstill.errors import DraftstillError
from draftstill.gathering import content_digest
from draftstill.recipe import Corpus
from draftstill.runfolder import RunFolder, read_json

_NAMED = 3
"""Documents that a message names."""


def hash_of(digests: Iterable[bytes]) -> str:
    """SHA-256 over the contents of the test documents, whatever their names and order."""
    return hashlib.sha256(b"".join(sorted(digests))).hexdigest()


def refuse_other_test_set(corpus: Corpus, facts: Mapping[str, Any], run: RunFolder, test: Callable[[], Mapping[bytes, str]]) -> None:
    """Raise where the test set is another than the frozen one.

    Args:
        facts: of the corpus stage.
        test: ids of the test documents by the digest of their content.

    Raises:
        DraftstillError: it is, and what changed as far as the run folder still knows the old one.
    """
    found = facts.get("test_sha256")
    if corpus.test_sha256 is None or found == corpus.test_sha256:
        return
    raise DraftstillError(
        f"the test documents are not the frozen ones, so scores could not be compared: {_changes(corpus.test_sha256, run, test())}",
        key="corpus.test_sha256", value=corpus.test_sha256,
        mend=f"restore the corpus, the seed and the settings they came from; or, to begin a new series, set it to {found}",
    )  # fmt: skip


def contents_of(folder: Path) -> dict[bytes, str]:
    """Ids of the test documents of a finished stage by the digest of their content."""
    return {content_digest(d.text, d.messages, d.tools): d.id for d in iter_documents(folder, "test")}


def _changes(frozen: str, run: RunFolder, now: Mapping[bytes, str]) -> str:
    for path in sorted(run.path.glob("corpus*/provenance.json")):
        if read_json(path)["facts"].get("test_sha256") == frozen:
            before = contents_of(path.parent)
            came, went = ([those[d] for d in those.keys() - others.keys()] for those, others in ((now, before), (before, now)))
            return f"since {path.parent.name} {_named(came)} came and {_named(went)} went"
    return f"they are {len(now):,} now, and this run folder holds no corpus with the frozen ones to compare them with"


def _named(ids: list[str]) -> str:
    if not ids:
        return "none"
    return f"{len(ids):,} ({', '.join(sorted(ids)[:_NAMED])}{', ...' if len(ids) > _NAMED else ''})"
