"""The agreements of the licensedcode-data wheel, and lines that were cut only because a page was narrow."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from draftstill.errors import DraftstillError
from draftstill.readers.files import name_of
from draftstill.readers.rows import Row
from draftstill.recipe import Corpus


def licences_folder(root: Path) -> Path | None:
    for folder in (root / "licensedcode" / "data" / "licenses", root / "data" / "licenses", root):
        if folder.is_dir() and next(folder.glob("*.LICENSE"), None) is not None:
            return folder
    return None


def licence_rows(folder: Path, corpus: Corpus) -> Iterator[Row]:
    known: set[str] = set()
    for path in sorted(folder.glob("*.LICENSE"), key=lambda p: p.name):
        # Versions of one agreement are keyed google-maps-tos-2020-04-02, ...-2020-05-06: the first word names the family.
        key = name_of(Path(path.stem))
        family = key.split("-", 1)[0]
        try:
            head, text = _front_matter(path.read_text(encoding="utf-8-sig"))
        except OSError as error:
            raise DraftstillError(f"cannot read {key}: {error.strerror or error}", key="corpus.source", value=corpus.source,
                                  mend="see to the disk; the same command reads anew") from None  # fmt: skip
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
