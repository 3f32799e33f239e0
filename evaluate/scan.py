"""What must not leave with a draft: secrets, e-mail addresses, paths of this machine, sentences of the corpus."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from draftstill.errors import DraftstillError
from draftstill.evaluate.ggufs import read_header
from draftstill.redact import EMAIL, SECRETS

RUN_WORDS = 13
"""A run of this many words of a corpus document is a copy: the length that GPT-3's contamination study used for the same purpose."""

_PERSONAL = {
    "an e-mail address": EMAIL,
    "a home path": r"(?<![\w.])(?:/home/|/Users/|/root/)[\w.-]+|[A-Za-z]:\\+Users\\+[\w.-]+|(?<!\w)~/[\w.-]+",
}
VOCABULARIES = {"tokenizer.json", "vocab.json", "merges.txt", "added_tokens.json", "tokenizer.model", "spiece.model"}
"""Lists of word pieces, the target's own and public with it: only secrets are looked for."""


def scan(folder: Path, documents: Path, *, private_paths: tuple[str, ...] = ()) -> None:
    """Refuse the folder if any file holds what must not leave.

    Args:
        folder: what would be published, flat.
        documents: the corpus stage's ``documents.jsonl``.
        private_paths: literal paths of this machine.

    Raises:
        DraftstillError: naming every file and finding (secrets are not repeated in full).
    """
    findings: list[str] = []
    runs: dict[tuple[str, ...], str] = {}
    for path in sorted(folder.iterdir()):
        for piece, is_vocabulary in _pieces(path):
            patterns = SECRETS if is_vocabulary else {**SECRETS, **_PERSONAL}
            for what, pattern in patterns.items():
                findings += [f"{path.name}: {what} ({_hint(what, m[0])})" for m in re.finditer(pattern, piece)][:3]
            if not is_vocabulary:
                findings += [f"{path.name}: a path of this machine ({p})" for p in private_paths if p in piece]
                words = _words(piece)
                runs.update({tuple(words[i : i + RUN_WORDS]): path.name for i in range(len(words) - RUN_WORDS + 1)})
    findings += _copies(runs, documents)
    if findings:
        findings = list(dict.fromkeys(findings))
        more = f"\n  and {len(findings) - 10} more" if len(findings) > 10 else ""
        raise DraftstillError(
            "the folder holds what must not be published, so nothing was published:\n  " + "\n  ".join(findings[:10]) + more,
            mend="remove it from the file named (in the run folder's draft/model, or in the recipe) and publish again",
        )


def _pieces(path: Path) -> Iterator[tuple[str, bool]]:
    """The texts in a file, each with whether it is a vocabulary: strings of JSON one by one (escapes would hide words), the header of
    weights without its tensors, else all of it."""
    if path.suffix == ".gguf":
        for name, value in read_header(path).items():
            # Token by token would take seconds; a secret does not stretch over several.
            yield "\n".join(_strings(value)), name.startswith("tokenizer.ggml.")
        return
    is_vocabulary = path.name in VOCABULARIES
    yield from ((text, is_vocabulary) for text in _texts(path))


def _texts(path: Path) -> Iterator[str]:
    if path.suffix == ".safetensors":
        with open(path, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        yield from _strings(header.get("__metadata__", {}))
        return
    text = path.read_bytes().decode("utf-8", "replace")
    yield text
    if path.suffix == ".json":
        try:
            yield from _strings(json.loads(text))
        except ValueError:
            raise DraftstillError(f"{path.name} is not JSON", mend="train the draft again") from None


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield str(key)
            yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)


def _hint(what: str, found: str) -> str:
    secret = what not in _PERSONAL
    return f"begins with {found[:6]!r}" if secret and not found.startswith("--") else found


def _words(text: str) -> list[str]:
    # Case and punctuation are left out: a table's bars or an HTML escape must not hide a sentence.
    return re.findall(r"\w+", text.casefold())


def _copies(runs: dict[tuple[str, ...], str], documents: Path) -> list[str]:
    if not documents.exists():
        raise DraftstillError(f"{documents} is missing, so the folder cannot be searched for corpus text",
                              mend="run `draftstill distill` with this recipe, then publish again")  # fmt: skip
    first = {run[0] for run in runs}
    found: dict[str, str] = {}
    with open(documents, encoding="utf-8", newline="\n") as file:
        for line in file:
            row = json.loads(line)
            words = _words(row["text"])
            for i in range(len(words) - RUN_WORDS + 1):
                if words[i] in first and (run := tuple(words[i : i + RUN_WORDS])) in runs and runs[run] not in found:
                    found[runs[run]] = f"{runs[run]}: text of the corpus document {row['id']} ({' '.join(run[:6])} ...)"
    return list(found.values())
