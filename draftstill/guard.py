"""Between the user and a traceback: library defaults, exit codes, and errors that say what to do."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable

from draftstill.errors import DraftstillError

ENVIRONMENT = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # our own progress lines say more, and survive a log file
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",  # its threads fight with torch's, and it warns when a process forks
    "WANDB_MODE": "offline",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # cuBLAS repeats itself to the bit with one of fixed size only; this is torch's own on Hopper
}
"""Defaults for libraries that read them when imported; a value the user has set stands."""

_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST)


class GateMissed(Exception):
    """The score is below --min-speedup or --min-alpha: exit code 2."""


def prepare_environment() -> None:
    """Set ENVIRONMENT's defaults, and let output escape what its encoding lacks; call before torch or transformers are imported."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a decoded text, a path or a server's words must not end a run
            stream.reconfigure(errors="backslashreplace")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def guarded(action: Callable[[], object]) -> int:
    """Run a command. Exit codes: 0 pass, 1 an error, 2 a missed gate, 130 stopped by the user, 143 by SIGTERM."""
    try:
        action()
    except SystemExit as stop:
        # A wrong command line exits 2 in typer; here 2 means a missed gate.
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if code == 130:
            return _stopped()
        return 1 if code == 2 else code
    except GateMissed as miss:
        print(f"gate missed: {miss}", file=sys.stderr)
        return 2
    except DraftstillError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _stopped()
    except Exception as error:
        told = _environment_fault(error)
        if told is None:
            raise
        print(told, file=sys.stderr)
        return 1
    return 0


def _environment_fault(error: Exception) -> str | None:
    """What to tell about a full disk or a refused file; None for what is our own fault."""
    number = getattr(error, "errno", None)
    # safetensors reports a full disk in words only
    if number in _FULL or "No space left on device" in str(error) or "(os error 28)" in str(error):
        where = getattr(error, "filename", None) or os.getcwd()
        return f"disk full: {where}\n  mend:  free some space; the same command goes on where it stopped"
    if isinstance(error, OSError) and number in _REFUSED and error.filename:
        return f"{error.strerror}: {error.filename}"
    return None


def _stopped() -> int:
    print("\nstopped; the same command goes on where it stopped", file=sys.stderr)
    return 130
