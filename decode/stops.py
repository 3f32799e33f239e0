"""Stop strings: where a text ends because of what it says. Token by token, so that a block is cut where plain decoding cuts it."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class StopText:
    """Watches the emitted tokens of one row.

    A stop string may be split over tokens in any way, rounds included. Only emitted text counts, not the prompt's.
    """

    def __init__(self, stops: Sequence[str], detokenize: Callable[[list[int]], str]) -> None:
        self.stops, self.detokenize = tuple(stops), detokenize
        # A token is at least one byte, a character at most 4; the rest for a character that begins before the window.
        self._window = 4 * max(map(len, stops)) + 4
        self._tail: list[int] = []

    def feed(self, new: Sequence[int]) -> int | None:
        """Take emitted tokens in; returns the index of the one that completes a stop string."""
        for i, token in enumerate(new):
            self._tail = [*self._tail, token][-self._window :]
            text = self.detokenize(self._tail)
            if any(s in text for s in self.stops):
                return i
        return None
