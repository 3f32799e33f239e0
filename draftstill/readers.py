"""Readers of the user's text: plain text, JSONL, and the agreements of the licensedcode-data wheel.

A reader yields one ``Row`` for everything it looked at; what cannot be used carries a reason, so that nothing goes missing
without being counted. JSONL is read by us, line by line: general loaders fail a whole file on one cut line and turn texts
that look like dates into dates.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import yaml

from draftstill.errors import DraftstillError
from draftstill.recipe import Corpus
from draftstill.sources import is_wheel, wheel_files


class Row(NamedTuple):
    """One document as read, or the reason why there is none."""

    id: str
    text: str | None
    reason: str | None = None
    detail: str = ""
    family: str | None = None
    """Rows of one family stay on one side of the split."""


UNUSABLE = ("not UTF-8", "damaged gzip", "bad JSON", "not an object", "missing field", "not a string", "lone surrogate", "empty",
            "bad front matter")  # fmt: skip
"""Reasons that are faults of the input. Others (too short, duplicate, another category) are choices of the recipe."""

_TEXT, _JSONL = (".txt", ".md"), (".jsonl", ".ndjson")


def read_rows(corpus: Corpus) -> Iterator[Row]:
    """Every row of ``corpus.source``, in an order that depends on names only.

    Raises:
        DraftstillError: the source is missing, or holds no file of the wanted format.
    """
    root = _root(corpus)
    licences = _licences_folder(root) if corpus.format in ("auto", "licensedcode") else None
    if licences is not None:
        yield from _licensedcode(licences, corpus)
        return
    if corpus.format == "licensedcode":
        raise DraftstillError("no licensedcode/data/licenses folder with .LICENSE files here", key="corpus.source", value=corpus.source,
                              mend="use the licensedcode-data wheel, or another corpus.format")  # fmt: skip
    files = _files(root, corpus)
    for path in files:
        name = path.relative_to(root).as_posix() if root.is_dir() else path.name
        yield from _jsonl(path, name, corpus.field) if _kind(path, corpus) == "jsonl" else _text(path, name)


def _root(corpus: Corpus) -> Path:
    if is_wheel(corpus.source):
        return wheel_files(corpus.source, corpus.sha256, "corpus.source")
    root = Path(corpus.source).expanduser()
    if not root.exists():
        raise DraftstillError("no such file or folder", key="corpus.source", value=corpus.source,
                              mend=f"check the spelling; it was looked for at {root.absolute()}")  # fmt: skip
    return root


def _suffix(path: Path) -> str:
    return Path(path.stem).suffix.lower() if path.suffix.lower() == ".gz" else path.suffix.lower()


def _kind(path: Path, corpus: Corpus) -> str | None:
    if corpus.format in ("text", "jsonl"):
        return corpus.format
    return "text" if _suffix(path) in _TEXT else "jsonl" if _suffix(path) in _JSONL else None


def _files(root: Path, corpus: Corpus) -> list[Path]:
    if root.is_file():
        if _kind(root, corpus) is None:
            raise DraftstillError("cannot tell the format from the file's name", key="corpus.source", value=corpus.source,
                                  mend="set corpus.format to text or jsonl")  # fmt: skip
        return [root]
    wanted = {"text": _TEXT, "jsonl": _JSONL}.get(corpus.format, _TEXT + _JSONL)
    # Hidden folders (.git, .ipynb_checkpoints) and a wheel's own records are not the user's text.
    skip = lambda p: any(part.startswith(".") or part.endswith(".dist-info") for part in p.relative_to(root).parts)  # noqa: E731
    files = sorted((p for p in root.rglob("*") if p.is_file() and _suffix(p) in wanted and not skip(p)),
                   key=lambda p: p.relative_to(root).as_posix())  # fmt: skip
    if not files:
        raise DraftstillError(f"no file in this folder ends in {', '.join(wanted)} (or these with .gz)", key="corpus.source",
                              value=corpus.source, mend="give a folder that holds documents, or set corpus.format")  # fmt: skip
    return files


def _open(path: Path) -> gzip.GzipFile | object:
    return gzip.open(path, "rb") if path.suffix.lower() == ".gz" else open(path, "rb")


def _text(path: Path, name: str) -> Iterator[Row]:
    try:
        with _open(path) as file:  # type: ignore[attr-defined]
            text = file.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        yield Row(name, None, "not UTF-8", f"byte {error.start}")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        yield Row(name, None, "damaged gzip", str(error))
    else:
        yield Row(name, text.replace("\r\n", "\n").replace("\r", "\n"))


def _jsonl(path: Path, name: str, field: str) -> Iterator[Row]:
    number = 0
    try:
        with _open(path) as file:  # type: ignore[attr-defined]
            # Bytes split at \n only: str.splitlines would also cut at U+2028, which JSON allows inside a string.
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _json_row(line, f"{name}:{number}", field)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        yield Row(f"{name}:{number + 1}", None, "damaged gzip", str(error))


def _json_row(line: bytes, row_id: str, field: str) -> Row:
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return Row(row_id, None, "not UTF-8", f"byte {error.start}")
    except (ValueError, RecursionError) as error:
        return Row(row_id, None, "bad JSON", str(error))
    if not isinstance(value, dict):
        return Row(row_id, None, "not an object", type(value).__name__)
    if field not in value:
        return Row(row_id, None, "missing field", f"this row has {', '.join(map(repr, list(value)[:8])) or 'no field'}")
    text = value[field]
    if not isinstance(text, str):
        return Row(row_id, None, "not a string", type(text).__name__)
    try:
        text.encode()
    except UnicodeEncodeError:
        return Row(row_id, None, "lone surrogate", "half of a UTF-16 pair, which no UTF-8 file can hold")
    return Row(row_id, text.replace("\r\n", "\n").replace("\r", "\n"))


def _licences_folder(root: Path) -> Path | None:
    for folder in (root / "licensedcode" / "data" / "licenses", root / "data" / "licenses", root):
        if folder.is_dir() and next(folder.glob("*.LICENSE"), None) is not None:
            return folder
    return None


def _licensedcode(folder: Path, corpus: Corpus) -> Iterator[Row]:
    known: set[str] = set()
    for path in sorted(folder.glob("*.LICENSE"), key=lambda p: p.name):
        # Versions of one agreement are keyed google-maps-tos-2020-04-02, ...-2020-05-06: the first word names the family.
        key, family = path.stem, path.stem.split("-", 1)[0]
        try:
            head, text = _front_matter(path.read_text(encoding="utf-8-sig"))
        except UnicodeDecodeError as error:
            yield Row(key, None, "not UTF-8", f"byte {error.start}")
            continue
        except (ValueError, yaml.YAMLError) as error:
            yield Row(key, None, "bad front matter", str(error).splitlines()[0])
            continue
        known.add(str(head.get("category")))
        if corpus.categories and head.get("category") not in corpus.categories:
            yield Row(key, None, "other category", str(head.get("category")))
        elif str(head.get("language") or "en") != "en":
            yield Row(key, None, "other language", str(head["language"]))
        elif head.get("is_deprecated"):
            yield Row(key, None, "deprecated")
        else:
            yield Row(key, unwrap(text), family=family)
    unknown = [c for c in corpus.categories if c not in known]
    if unknown:
        raise DraftstillError(f"no agreement has the category {unknown[0]!r}", key="corpus.categories", value=list(corpus.categories),
                              mend=f"choose from {', '.join(sorted(known))}")  # fmt: skip


_HEAD_LINE = re.compile(r"^(category|language|is_deprecated)\s*:", re.MULTILINE)


def _front_matter(content: str) -> tuple[dict[str, object], str]:
    parts = re.split(r"^---[ \t]*$\n?", content.replace("\r\n", "\n"), maxsplit=2, flags=re.MULTILINE)
    if len(parts) != 3 or parts[0].strip():
        raise ValueError("no head between two --- lines")
    # Only three keys matter; parsing whole heads of thousands of files would take longer than everything else here.
    wanted = "\n".join(line for line in parts[1].splitlines() if _HEAD_LINE.match(line))
    head = yaml.safe_load(wanted) or {}
    if not isinstance(head, dict):
        raise ValueError("the head is not a mapping")
    return head, parts[2]


_ITEM = re.compile(r"^\s*(?:[-*\u2022\u00b7o]\s|\(?(?:\d+(?:\.\d+)*|[a-zA-Z]|[ivxIVX]{1,5})[.)]\s|\d+(?:\.\d+)+\s)")
_WRAPPED_WIDTHS = range(50, 121)
"""Longest line of a paragraph that was wrapped by hand or tool. Narrower blocks are addresses and lists; wider ones are not wrapped."""


def unwrap(text: str) -> str:
    """Join lines that were cut only because the page was narrow; keep paragraphs, list items and short lines.

    A break counts as a wrap when the next line's first word would not have fitted the paragraph's own width.
    """
    blocks = re.split(r"\n[ \t]*\n+", text.replace("\r\n", "\n").strip("\n"))
    return "\n\n".join("\n".join(_unwrap_block(b.split("\n"))) for b in blocks)


def _unwrap_block(lines: list[str]) -> list[str]:
    lines = [line.expandtabs(4).rstrip() for line in lines]
    width = max(map(len, lines), default=0)
    if width not in _WRAPPED_WIDTHS:
        return lines
    joined, previous = [lines[0]], lines[0]
    for line in lines[1:]:
        word = line.split(maxsplit=1)[0] if line.strip() else ""
        if word and not _ITEM.match(line) and len(previous) + 1 + len(word) > width:
            joined[-1] += " " + line.strip()
        else:
            joined.append(line)
        previous = line
    return joined
