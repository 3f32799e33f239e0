"""Checkpoints: safetensors and JSON, whole or absent. With the data cursor in the step, a resumed run is bit-exact."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from draftstill.runfolder import read_json, save_tensors, write_json

_PREFIX = "checkpoint-"


def save_checkpoint(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], keep: int) -> None:
    """Write ``checkpoint-<step>``, then drop the oldest beyond ``keep``. A full disk leaves the older ones intact."""
    temporary = folder / f".{_PREFIX}{state['step']:07d}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        save_tensors(temporary / "model.safetensors", model_tensors(model))
        save_tensors(temporary / "optimizer.safetensors", _optimizer_tensors(model, optimizer))
        write_json(temporary / "state.json", state)
        final = folder / f"{_PREFIX}{state['step']:07d}"
        shutil.rmtree(final, ignore_errors=True)
        os.replace(temporary, final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    drop_checkpoints(folder, keep)


def checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return sorted(p for p in folder.glob(f"{_PREFIX}*") if (p / "state.json").exists())


def drop_checkpoints(folder: Path, keep: int = 0) -> None:
    """Remove all but the newest ``keep``, and what is left of half-removed ones."""
    kept = checkpoints(folder)[-keep:] if keep else []
    for old in folder.glob(f"{_PREFIX}*"):
        if old not in kept:
            # What makes it whole goes first, so that a kill in between leaves nothing that would be loaded.
            (old / "state.json").unlink(missing_ok=True)
            shutil.rmtree(old)


def load_checkpoint(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Restore weights and optimizer; returns the state."""
    load_tensors(model, load_file(folder / "model.safetensors"))
    stored = load_file(folder / "optimizer.safetensors")
    groups = optimizer.state_dict()["param_groups"]
    names = _names(model, optimizer)
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key, tensor in stored.items():
        name, slot = key.rsplit("|", 1)
        state.setdefault(names[name], {})[slot] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    return read_json(folder / "state.json")


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters by name; tied ones once."""
    return {name: p.detach().cpu() for name, p in model.named_parameters()}


def load_tensors(model: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(tensors[name])


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Parameter name to its number in the optimizer's state."""
    places = {id(p): i for i, p in enumerate(p for g in optimizer.param_groups for p in g["params"])}
    return {name: places[id(p)] for name, p in model.named_parameters()}


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    state = optimizer.state_dict()["state"]
    tensors = {}
    for name, place in _names(model, optimizer).items():
        for slot, value in state.get(place, {}).items():
            tensors[f"{name}|{slot}"] = torch.as_tensor(value).cpu()
    return tensors
