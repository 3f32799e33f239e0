"""The run folder: stages that are whole or absent, and go on where they stopped.

A stage works in ``<name>.partial`` and is renamed to ``<name>`` when whole. Its fingerprint covers everything that
decides its content, so that a later command reuses it, continues it, or refuses a folder that another recipe made.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from draftstill.errors import DraftstillError
from draftstill.machine import describe_machine
from draftstill.recipe_io import fingerprint

_LIBRARIES = ("draftstill", "torch", "transformers", "accelerate", "tokenizers", "safetensors", "numpy", "gguf")
FAILED = "failed.json"
"""In a stage's work folder: why its last attempt failed."""


def atomic_write(path: Path, data: bytes | str) -> None:
    """Write under a temporary name in the same folder, then rename: readers see the old file or the new one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Atomic, readable, UTF-8; refuses NaN, which is not JSON."""
    atomic_write(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise DraftstillError(f"{path} is damaged: {error}", mend="delete it and run the same command again") from None


def save_tensors(path: Path, tensors: Mapping[str, Any], info: Mapping[str, str] | None = None) -> None:
    """Atomic safetensors file."""
    from safetensors.torch import save

    atomic_write(path, save({k: v.contiguous() for k, v in tensors.items()}, dict(info or {})))


def hash_file(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_weights(folder: Path) -> str:
    """SHA-256 of a model folder's weights: of the file, or of the names and hashes of several.

    Raises:
        DraftstillError: there are none.
    """
    found = {path.name: hash_file(path) for path in sorted(folder.glob("*.safetensors"))}
    if not found:
        raise DraftstillError("the folder holds no weights (*.safetensors)", value=str(folder), mend="make it again with --set-aside")
    return fingerprint(found) if len(found) > 1 else next(iter(found.values()))


def share_weights(folder: Path) -> None:
    """Let those read the weights who may read their config: safetensors writes 0600, which a server under another user cannot open."""
    for path in folder.glob("*.safetensors"):
        path.chmod((folder / "config.json").stat().st_mode & 0o777)


class RunFolder:
    """A folder for one run; see the module's docstring."""

    def __init__(self, path: str | Path, *, set_aside: bool = False) -> None:
        self.path = Path(path)
        self.set_aside = set_aside

    def stage(self, name: str, inputs: Mapping[str, Any]) -> Stage:
        """The stage ``name`` whose content is decided by ``inputs`` (recipe sections, upstream fingerprints, versions)."""
        return Stage(self, name, inputs)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder: a second command on the same run is refused instead of mixing its files in."""
        self.path.mkdir(parents=True, exist_ok=True)
        with open(self.path / ".lock", "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise DraftstillError(
                    "another draftstill command is working in this run folder",
                    key="run_dir", value=str(self.path), mend="wait for it, or give another run_dir",
                ) from None  # fmt: skip
            yield


class Stage:
    """One stage of a run: absent, partial, or whole."""

    def __init__(self, run: RunFolder, name: str, inputs: Mapping[str, Any]) -> None:
        self.run, self.name = run, name
        self.inputs = json.loads(json.dumps(dict(inputs), sort_keys=True, default=_plain))
        self.fingerprint = fingerprint(self.inputs)
        self.folder = run.path / name
        self.work = run.path / f"{name}.partial"
        self._started, self._spent = time.time(), 0.0

    @property
    def done(self) -> bool:
        """Whole, and made from the same inputs. Raises where the folder was made from others."""
        if not (self.folder / "provenance.json").exists():
            return False
        self._same(self.folder / "provenance.json", self.folder)
        return self.folder.exists()

    @property
    def begun(self) -> bool:
        return (self.work / "stage.json").exists()

    @property
    def worked(self) -> bool:
        """Whether the work folder holds a result. An attempt that a wrong path or value stopped before the first one claims nothing:
        the mended recipe takes its place unasked."""
        return any(p.is_file() and p.name not in ("stage.json", "rejected.jsonl", FAILED) for p in self.work.rglob("*"))

    def make_way(self) -> None:
        """Refuse what another recipe made of this stage, finished or begun; or move it aside, where the run folder was told to."""
        _ = self.done
        if self.begun and self.worked:
            self._same(self.work / "stage.json", self.work)

    def begin(self) -> Path:
        """The folder to work in, new or as the last attempt left it."""
        self._started, self._spent = time.time(), 0.0
        if self.begun and self.worked:
            self._same(self.work / "stage.json", self.work)
        if self.begun and self.worked:
            self._spent = self._spent_before()
        else:
            self.work.mkdir(parents=True, exist_ok=True)
        write_json(self.work / "stage.json", {"stage": self.name, "fingerprint": self.fingerprint, "inputs": self.inputs,
                                              "started": self._started, "spent": self._spent})  # fmt: skip
        for left in [*self.work.rglob(".*.tmp")]:  # a killed process could not clear its half-written files away
            shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)
        return self.work

    def _spent_before(self) -> float:
        """Seconds that earlier attempts worked: a killed one at least until it last wrote something."""
        before = read_json(self.work / "stage.json")
        started = before.get("started", self._started)  # absent: begun by a version that kept no time
        last = max((p.stat().st_mtime for p in self.work.rglob("*") if p.is_file()), default=started)
        return float(before.get("spent", 0.0) + max(0.0, last - started))

    def finish(self, **facts: Any) -> Path:
        """Write the provenance and rename the work folder into place."""
        write_json(self.work / "provenance.json", {**self.provenance(), "facts": facts})
        # In this order: a work folder without its stage.json, left by a kill, would be taken over by any recipe.
        os.replace(self.work, self.folder)
        (self.folder / "stage.json").unlink()
        return self.folder

    def provenance(self) -> dict[str, Any]:
        return {
            "stage": self.name,
            "fingerprint": self.fingerprint,
            "inputs": self.inputs,
            "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            "seconds": round(self._spent + time.time() - self._started, 1),
            "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "versions": versions(),
            "git": git_state(),
            "machine": describe_machine(),
        }

    def facts(self) -> dict[str, Any]:
        """What ``finish`` was told."""
        return read_json(self.folder / "provenance.json")["facts"]

    def _same(self, record: Path, folder: Path) -> None:
        old = read_json(record)
        if old["fingerprint"] == self.fingerprint:
            return
        if self.run.set_aside:
            number = 1
            while (kept := self.run.path / f"{self.name}.old-{number}").exists():
                number += 1
            os.replace(folder, kept)
            return
        changed = ", ".join(_differences(old["inputs"], self.inputs)) or "its inputs"
        raise DraftstillError(
            f"the stage {self.name!r} in this run folder was made by another recipe: {changed}",
            key="run_dir", value=str(self.run.path),
            mend="give another run_dir, or add --set-aside to keep the old stage beside the new one; nothing was overwritten",
        )  # fmt: skip


def _plain(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot stand in a fingerprint")


def _differences(old: Any, new: Any, path: str = "") -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        keys = list(new) + [k for k in old if k not in new]
        return [d for k in keys for d in _differences(old.get(k), new.get(k), f"{path}.{k}" if path else k)]
    if old == new:
        return []
    short = lambda v: v[:12] + "..." if isinstance(v, str) and len(v) > 40 else v  # noqa: E731
    return [f"{path} was {short(old)!r}, is {short(new)!r}"]


def versions() -> dict[str, str]:
    """Versions of what decides results."""
    found = {"python": platform.python_version()}
    for name in _LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def git_state() -> dict[str, Any] | None:
    """Commit of the source tree that this code runs from, where it is one."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    ask = lambda *a: subprocess.run(["git", "-C", str(root), *a], capture_output=True, text=True, check=False).stdout.strip()  # noqa: E731
    return {"commit": ask("rev-parse", "HEAD"), "dirty": bool(ask("status", "--porcelain", "--untracked-files=no"))}
