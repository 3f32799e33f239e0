"""Private data in text: what it looks like, and placeholders in its place.

The patterns find what has a form of its own. Names, addresses and other free text they do not find.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

SECRETS = {
    "a Hugging Face token": r"\bhf_[A-Za-z0-9]{20,}",
    "an API key": r"\bsk-[A-Za-z0-9_-]{20,}",
    "an AWS access key": r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "a GitHub token": r"\b(?:gh[pousr]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{30,})",
    "a GitLab token": r"\bglpat-[A-Za-z0-9_-]{20,}",
    "a Slack token": r"\bxox[abprs]-[A-Za-z0-9-]{10,}",
    "a Google key": r"\bAIza[A-Za-z0-9_-]{35}",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
}
"""Secrets that are known by their beginning."""
# Written so that a text takes time by its length: a run of characters is gone through once, from its beginning.
EMAIL = r"(?<![\w.+-])(?P<before>[.+-]*+)(?P<value>\w[\w.+-]*+@[\w-]+(?:\.[\w-]+)*\.[A-Za-z]{2,}\b)"

_MIN_ENTROPY = 4.3
"""Bits per character. Hexadecimal digests stay below 4; a random base64 string of 40 characters has about 4.8, a long word or path about 3.5."""


class _Pattern(NamedTuple):
    expression: re.Pattern[str]
    is_one: Callable[[str], bool] = bool


def _luhn(text: str) -> bool:
    """Check digit of card numbers (ISO/IEC 7812-1)."""
    digits = [int(c) for c in text if c.isdigit()]
    doubled = [d if n % 2 == 0 else (2 * d - 9 if d > 4 else 2 * d) for n, d in enumerate(reversed(digits))]
    return 13 <= len(digits) <= 19 and len(set(digits)) > 1 and sum(doubled) % 10 == 0


def _iban(text: str) -> bool:
    """Check digits of ISO 13616: the rearranged number leaves 1 modulo 97."""
    plain = text.replace(" ", "")
    return 15 <= len(plain) <= 34 and int("".join(str(int(c, 36)) for c in plain[4:] + plain[:4])) % 97 == 1


def _phone(text: str) -> bool:
    return 8 <= sum(c.isdigit() for c in text) <= 15


def _address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _random(text: str) -> bool:
    """Many different characters of three kinds in no order: a key rather than a word."""
    kinds = [any(map(test, text)) for test in (str.islower, str.isupper, str.isdigit)]
    shares = [count / len(text) for count in Counter(text).values()]
    return all(kinds) and -sum(share * math.log2(share) for share in shares) >= _MIN_ENTROPY


_PEM = r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
_NAMES = r"api[_-]?key|access[_-]?token|auth[_-]?token|client[_-]?secret|secret(?:[_-]?key)?|password|passwd|pwd|bearer"
_WEB_TOKEN = r"(?<![\w-])(?=[\w-]++\.eyJ)(?P<before>(?:(?!\beyJ)[\w-])*+)(?P<value>eyJ[\w-]{8,}+\.eyJ[\w-]{8,}+\.[\w-]{8,}+)"
"""A JSON web token."""
_NAMED = rf"(?i:\b(?:{_NAMES})\b[\"']?(?:\s*+[:=]\s*+|\s++)[\"']?)"
PATTERNS: dict[str, tuple[_Pattern, ...]] = {
    "key": (
        _Pattern(re.compile("|".join([_PEM, *(p for name, p in SECRETS.items() if name != "a private key")]))),
        _Pattern(re.compile(_WEB_TOKEN)),
        _Pattern(re.compile(r"(?P<before>" + _NAMED + r")(?P<value>[^\s\"'<>,;]{8,})"), lambda text: any(c.isdigit() for c in text)),
        _Pattern(re.compile(r"(?<![\w/+.-])[A-Za-z0-9+/_-]{32,}={0,2}(?![\w/+-])"), _random),
    ),
    "email": (_Pattern(re.compile(EMAIL)),),
    "iban": (_Pattern(re.compile(r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?\b"), _iban),),
    "card": (_Pattern(re.compile(r"(?<![\d.-])[2-6]\d{3}(?:[ -]?\d{2,6}){2,4}(?![\d-])"), _luhn),),
    "ip": (
        _Pattern(re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?!\d|\.\d)"), _address),
        _Pattern(re.compile(r"(?<![\w:])(?:[0-9a-fA-F]{1,4}:){2,7}(?::?[0-9a-fA-F]{1,4}){1,6}(?![\w:])"), _address),
    ),
    "phone": (
        _Pattern(re.compile(r"(?<![\w+])\+\d{1,3}[ ./-]?(?:\(\d{1,4}\)[ ./-]?)?\d[\d ./-]{5,14}\d(?!\w)"), _phone),
        _Pattern(re.compile(r"(?<![\w.-])(?:\(\d{3}\) ?|\d{3}[.-])\d{3}[ .-]\d{4}(?![\w-])")),
        _Pattern(re.compile(r"(?<![\w./-])(?:\(0\d{1,4}\)|0\d{2,4})[ /-]\d{3,8}(?:[ -]\d{2,5})*(?![\w/-])"), _phone),
    ),
}  # fmt: skip
"""Kind: how its members look, tried in this order, so that a key is not taken for a number inside of it."""


class Redactor:
    """Replaces private data; one value has one placeholder throughout a document, and counts are kept, values are not."""

    def __init__(self, kinds: Iterable[str]) -> None:
        self._kinds = [kind for kind in PATTERNS if kind in set(kinds)]
        self.counts: Counter[str] = Counter()
        """Replacements by kind."""
        self.rows = 0
        """Documents in which anything was replaced."""
        self._outside = _Placeholders("")

    def replace(self, *values: Any, beside: str) -> list[Any]:
        """The values of one document with every string changed and keys kept; ``beside`` is all its text, whose own placeholders stay apart."""
        if not self._kinds:
            return list(values)
        names, before = _Placeholders(beside), self.counts.total()
        made = [_mapped(value, lambda text: self._replace(text, names)) for value in values]
        self.rows += self.counts.total() > before
        return made

    def outside(self, text: str) -> str:
        """A text beside the documents, such as a row's name. Here one value has one placeholder as long as this redactor is used, and another value
        another: names that differ still do."""
        return self._replace(text, self._outside)

    def _replace(self, text: str, names: _Placeholders) -> str:
        for kind in self._kinds:
            for pattern in PATTERNS[kind]:
                text = pattern.expression.sub(lambda m, k=kind, p=pattern: self._placeholder(m, k, p, names), text)  # type: ignore[misc]
        return text

    def _placeholder(self, found: re.Match[str], kind: str, pattern: _Pattern, names: _Placeholders) -> str:
        groups = found.groupdict()
        value = groups.get("value") or found[0]
        if value.startswith("<") or not pattern.is_one(value):
            return found[0]
        self.counts[kind] += 1
        return groups.get("before", "") + names.of(kind, value)


_PLACEHOLDER = re.compile(r"<[A-Z]+_\d+>")


class _Placeholders:
    """Numbers of one document's values; those that stand in its text already are not given again."""

    def __init__(self, beside: str) -> None:
        self._beside, self._given, self._last = set(_PLACEHOLDER.findall(beside)), dict[tuple[str, str], str](), Counter[str]()

    def of(self, kind: str, value: str) -> str:
        if (kind, value) not in self._given:
            self._last[kind] += 1
            while (name := f"<{kind.upper()}_{self._last[kind]}>") in self._beside:
                self._last[kind] += 1
            self._given[kind, value] = name
        return self._given[kind, value]


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with every string changed; keys stay."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(inner, change) for key, inner in value.items()}
    return [_mapped(inner, change) for inner in value] if isinstance(value, list) else value
