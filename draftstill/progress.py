"""Progress that a person can read in a terminal and in a log file."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

_EVERY_SECONDS = 15.0
_CLEAR = "\r\x1b[2K"
_drawn: list[str] = []
"""The line of a step that stands in the terminal, if any: what is said takes its place."""


def say(text: str = "") -> None:
    """One line on standard output, at once; what its encoding cannot hold (half of a surrogate pair, another script) stands escaped."""
    print(_CLEAR * bool(_drawn) + _encodable(text), flush=True)
    _drawn.clear()


def _encodable(text: str) -> str:
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def duration(seconds: float) -> str:
    """``43 s``, ``2:05 min``, ``1:02 h``."""
    seconds = max(0, round(seconds))
    if seconds < 60:
        return f"{seconds} s"
    minutes, rest = divmod(seconds, 60)
    return f"{minutes}:{rest:02d} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d} h"


def is_live() -> bool:
    """A terminal that can redraw a line (CI, NO_COLOR and dumb terminals get plain lines)."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("CI") and not os.environ.get("NO_COLOR")


class Progress:
    """A counted step: label, share done, rate, time left. One redrawn line in a terminal, else a line every 15 s.

    ``done`` may start above zero when a step goes on where it stopped; the rate counts this attempt only.
    """

    def __init__(self, label: str, total: float, unit: str = "", *, done: float = 0, quiet: bool = False,
                 clock: Callable[[], float] = time.monotonic) -> None:  # fmt: skip
        self.label, self.total, self.unit, self.done, self.quiet = label, total, unit, done, quiet
        self._clock, self._first, self._start = clock, done, clock()
        self._shown, self._live = self._start, is_live() and not quiet

    def __enter__(self) -> Progress:
        if self._first:
            say(f"  {self.label}: going on at {self._first:,.0f} of {self.total:,.0f} {self.unit}") if not self.quiet else None
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._live:
            print(_CLEAR, end="")
            _drawn.clear()
        if kind is None and not self.quiet:
            spent = self._clock() - self._start
            rate = (self.done - self._first) / spent if spent > 0 else 0.0
            say(f"  {self.label}: {self.done:,.0f} {self.unit} in {duration(spent)} ({rate:,.0f} {self.unit}/s)")

    def update(self, done: float, note: str = "") -> None:
        """Set the count done so far; ``note`` stands at the line's end."""
        self.done = done
        now = self._clock()
        if self.quiet or (now - self._shown < (0.2 if self._live else _EVERY_SECONDS)):
            return
        self._shown = now
        line = self.line(now, note)
        if not self._live:
            say(line)
            return
        _drawn[:] = [_encodable(line)[:79]]
        print(_CLEAR + _drawn[0], end="", flush=True)

    def line(self, now: float, note: str = "") -> str:
        spent, fresh = now - self._start, self.done - self._first
        rate = fresh / spent if spent > 0 else 0.0
        left = duration((self.total - self.done) / rate) + " left" if rate > 0 else "starting"
        share = 100 * self.done / self.total if self.total else 100
        return f"  {self.label} {share:3.0f}%  {rate:,.0f} {self.unit}/s  {left}  {note}".rstrip()
