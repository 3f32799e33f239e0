"""Pieces of the page: escaped text, tables, groups. Everything that enters a page as text goes through ``text``."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import escape
from typing import Any

_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def text(value: object) -> str:
    """Escaped for HTML; characters that cannot be seen or that turn the line around become their code point in brackets."""
    return escape(_UNSEEN.sub(lambda m: f"[U+{ord(m[0]):04X}]", str(value)))


def embedded(value: Any) -> str:
    """JSON that cannot end its script element or open a comment in it; still JSON."""
    out = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return out.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def section(title: str, *parts: str) -> str:
    """Parts under a heading; nothing where all parts are empty."""
    body = "".join(parts)
    return f"<section><h2>{text(title)}</h2>{body}</section>" if body else ""


def folded(title: str, *parts: str) -> str:
    """Parts that open on demand; nothing where all parts are empty."""
    body = "".join(parts)
    return f"<details><summary>{text(title)}</summary>{body}</details>" if body else ""


def note(line: str) -> str:
    return f'<p class="note">{text(line)}</p>' if line else ""


def bullets(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{text(line)}</li>" for line in lines) + "</ul>" if lines else ""


def small_bounds(shown: str) -> str:
    """``1.42x [1.33x, 1.50x]`` with the bounds in small type."""
    value, bracket, bounds = shown.partition(" [")
    return text(value) + (f" <small>[{text(bounds)}</small>" if bracket else "")


def figure(title: str, body: str, caption: str = "") -> str:
    """A chart with its title; nothing where there is no chart."""
    told = f"<figcaption>{text(caption)}</figcaption>" if caption else ""
    return f"<figure><h3>{text(title)}</h3>{body}{told}</figure>" if body else ""


def pair(*figures: str) -> str:
    """Charts side by side where there is room."""
    body = "".join(figures)
    return f'<div class="pair">{body}</div>' if body else ""


def table(head: Sequence[str], rows: Sequence[tuple[bool, Sequence[str]]], *, drawn: int = -1, tight: bool = False) -> str:
    """Cells are markup already. ``drawn``: the column of charts; True marks a row."""
    tag = lambda name, n, x: f"<{name}{' class=svg' if n == drawn else ''}>{x}</{name}>"  # noqa: E731
    body = "".join(
        f"<tr{' class=best' if marked else ''}>{''.join(tag('td', n, x) for n, x in enumerate(cells))}</tr>" for marked, cells in rows
    )
    top = "".join(tag("th", n, x) for n, x in enumerate(head))
    css = ' class="tight"' if tight else ""
    return f'<div class="scroll"><table{css}><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
