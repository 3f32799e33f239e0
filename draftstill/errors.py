"""Errors that a user can cause, and can mend."""

from __future__ import annotations


class DraftstillError(Exception):
    """A fault in the user's input: shown without a traceback, exit code 1.

    Name the recipe key, the value that was found, and what to do about it.
    """

    def __init__(
        self,
        problem: str,
        *,
        key: str | None = None,
        value: object = None,
        mend: str | None = None,
    ) -> None:
        self.problem, self.key, self.value, self.mend = problem, key, value, mend
        head = problem if key is None else f"{key}: {problem}"
        lines = [head]
        if value is not None:
            lines.append(f"  found: {value!r}" if isinstance(value, str) else f"  found: {value}")
        if mend:
            lines.append(f"  mend:  {mend}")
        super().__init__("\n".join(lines))


class RecipeError(DraftstillError):
    """The recipe does not say what it must; lists every fault of the file at once."""


class NonFiniteLoss(DraftstillError):
    """A loss was NaN or infinite; raised before the optimizer step that it would have poisoned."""
