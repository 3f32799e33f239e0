"""Checkpoints: safetensors and JSON, whole or absent. With the data cursor in the step, a run resumed on CPUs, as many as before, is bit-exact."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from draftstill.errors import DraftstillError
from draftstill.runfolder import atomic_write, read_json, save_tensors, write_json

_PREFIX = "checkpoint-"
LATEST = "latest"
"""A link to the newest checkpoint."""
BEST = "best.safetensors"
"""The weights with the best held-out alpha so far."""


def save_checkpoint(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], keep: int,
                    *, average: Mapping[str, torch.Tensor] | None = None, write: bool = True) -> None:  # fmt: skip
    """Write ``checkpoint-<step>``, then drop the oldest beyond ``keep``. A full disk leaves the older ones intact, and the error names the folder.

    The best weights so far go with it: measured again after a restart, steps behind it may come out otherwise.
    Every rank of a launch calls it, and one of them writes.

    Args:
        average: averaged weights by parameter name.
    """
    files = {"model": model_tensors(model, keep=write), "optimizer": gathered(_optimizer_tensors(model, optimizer), keep=write)}
    if average is not None:
        files["average"] = gathered(average.items(), keep=write)
    if not write:
        return
    final = folder / checkpoint_name(state["step"])
    temporary = folder / f".{_PREFIX}{state['step']:07d}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        for name, tensors in files.items():
            save_tensors(temporary / f"{name}.safetensors", tensors)
        keep_best(folder, temporary)
        write_json(temporary / "state.json", state)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(temporary, final)
        point(folder / LATEST, final.name)
    except OSError as error:
        error.filename = error.filename or str(final)
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    drop_checkpoints(folder, keep)


def point(link: Path, name: str) -> None:
    """Let a link name another file beside it. It is the old one or the new one at any moment."""
    temporary = link.with_name(f".{link.name}.tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(name)
    os.replace(temporary, link)


def checkpoint_name(step: int) -> str:
    return f"{_PREFIX}{step:07d}"


def checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return sorted(p for p in folder.glob(f"{_PREFIX}*") if (p / "state.json").exists())


def drop_checkpoints(folder: Path, keep: int = 0) -> None:
    """Remove all but the newest ``keep``, and what is left of half-removed ones."""
    kept = checkpoints(folder)[-keep:] if keep else []
    if not kept:
        (folder / LATEST).unlink(missing_ok=True)
    for old in folder.glob(f"{_PREFIX}*"):
        if old not in kept:
            # What makes it whole goes first, so that a kill in between leaves nothing that would be loaded.
            (old / "state.json").unlink(missing_ok=True)
            shutil.rmtree(old)


def keep_best(folder: Path, checkpoint: Path) -> None:
    """Let a checkpoint hold the best weights as they are now."""
    if (folder / BEST).exists():
        _same_file(folder / BEST, checkpoint / BEST)


def restore_best(checkpoint: Path) -> None:
    """Take the best weights back to those that the checkpoint's state speaks of: whatever was found later will be measured again, and where
    sums round otherwise it need not be the best again."""
    if (checkpoint / BEST).exists():
        _same_file(checkpoint / BEST, checkpoint.parent / BEST)


def _same_file(source: Path, name: Path) -> None:
    """Another name for a file, or a copy where the file system knows no such thing. What had the name is there until the new one is."""
    temporary = name.with_name(f".{name.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError:
        atomic_write(name, source.read_bytes())
        return
    os.replace(temporary, name)
    temporary.unlink(missing_ok=True)  # it is still there if both were names of one file already


def load_checkpoint(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, write: bool = True) -> dict[str, Any]:
    """Restore weights and optimizer, and beside the checkpoint the best weights of its time; returns the state.

    Every rank of a launch calls it, and one of them writes.
    """
    if write:
        restore_best(folder)
    load_tensors(model, load_file(folder / "model.safetensors"))
    stored = load_file(folder / "optimizer.safetensors")
    groups = optimizer.state_dict()["param_groups"]
    names, parameters = _names(model, optimizer), dict(model.named_parameters())
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key, tensor in stored.items():
        name, slot = key.rsplit("|", 1)
        place = parameters[name]
        state.setdefault(names[name], {})[slot] = alike(tensor, place) if tensor.shape == place.shape else tensor
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    return read_json(folder / "state.json")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """On the CPU, and gathered from all ranks where it is sharded."""
    if hasattr(tensor, "ds_id") or getattr(tensor, "_hp_mapping", None) is not None:  # DeepSpeed's marks: its float32 weights lie elsewhere
        from deepspeed.utils import safe_get_full_fp32_param

        tensor = safe_get_full_fp32_param(tensor)
    full: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().cpu()


def alike(tensor: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """A whole tensor, the same on every rank, laid out as ``place`` is: this rank's piece of it where that is sharded."""
    if isinstance(place, DTensor):
        return distribute_tensor(tensor.to(place.device), place.device_mesh, place.placements)
    return tensor


def gathered(tensors: Iterable[tuple[str, torch.Tensor]], *, keep: bool) -> dict[str, torch.Tensor]:
    """Whole tensors by name. Every rank of a launch calls it, since gathering takes all; one that does not write keeps none of them, and never
    holds more than one."""
    found = {}
    for name, tensor in tensors:
        if keep:
            found[name] = whole(tensor)
        else:
            whole(tensor)
    return found


def model_tensors(model: nn.Module, *, keep: bool = True) -> dict[str, torch.Tensor]:
    """Trained parameters by name; tied ones once. Frozen ones are what they were built as. ``keep`` as in ``gathered``."""
    return gathered(trained(model), keep=keep)


def trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """By name, tied ones once."""
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)


def load_tensors(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Restore what ``model_tensors`` gave."""
    with torch.no_grad():
        for name, p in trained(model):
            p.copy_(alike(tensors[name], p))


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Parameter name to its number in the optimizer's state."""
    places = {id(p): i for i, p in enumerate(p for g in optimizer.param_groups for p in g["params"])}
    return {name: places[id(p)] for name, p in trained(model)}


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    state = optimizer.state_dict()["state"]
    for name, place in _names(model, optimizer).items():
        for slot, value in state.get(place, {}).items():
            yield f"{name}|{slot}", torch.as_tensor(value)


def warm_start(model: nn.Module, source: str) -> None:
    """Put the weights of a safetensors file, or of a folder's ``model*.safetensors``, in place of the model's own.

    Raises:
        DraftstillError: as ``check_start``.
    """
    own = dict(model.named_parameters())
    for file in check_start(model, source):
        with torch.no_grad():
            for name, tensor in load_file(file).items():
                if name in own:  # a tied head may stand there beside its embedding
                    own[name].copy_(tensor)


def check_start(model: nn.Module, source: str) -> list[Path]:
    """The files of a warm start, after a look at their headers. The model may lie on the meta device.

    Raises:
        DraftstillError: no such file, or tensors of other names or shapes.
    """
    refuse = lambda problem, mend: DraftstillError(problem, key="train.init_from", value=source, mend=mend)  # noqa: E731
    path = Path(source).expanduser()
    files = sorted(path.glob("model*.safetensors")) if path.is_dir() else [path] if path.is_file() and path.suffix == ".safetensors" else []
    if not files:
        raise refuse("there are no weights here", "name a .safetensors file, or a folder with model.safetensors")
    found: dict[str, list[int]] = {}
    try:
        for file in files:
            with safe_open(file, "pt") as opened:
                found |= {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118 - not a dict
    except SafetensorError as error:
        raise refuse(f"the file is damaged: {error}", "name another") from None
    own = dict(model.named_parameters())
    tied = dict(model.named_parameters(remove_duplicate=False)).keys() - own.keys()
    wrong = [f"{n} is missing" for n in own.keys() - found.keys()] + [f"{n} is unknown" for n in found.keys() - own.keys() - tied]
    wrong += [f"{n} is {found[n]}, not {list(p.shape)}" for n, p in own.items() if n in found and found[n] != list(p.shape)]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise refuse(
            f"not the draft's weights: {'; '.join(sorted(wrong)[:3])}{more}", "name weights of a draft of the same kind, or leave it out"
        )
    return files
