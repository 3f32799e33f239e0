"""What of a model a pruned draft keeps, measured on the run's recording, once.

The choice is written into the run folder under a fingerprint of all that decides it. Whoever builds the draft again, be it another
candidate, the score's untuned arm or another rank of the launch, takes it from there: the same draft on every machine.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftstill.distill import Recording, seed_of
from draftstill.errors import DraftstillError
from draftstill.progress import say
from draftstill.recipe import Recipe
from draftstill.recipe_io import fingerprint
from draftstill.runfolder import read_json, write_json
from draftstill.sizes import draft_size, size_of
from draftstill.stages import content_of, resolved_device
from draftstill.train.layer_search import search_layers
from draftstill.train.live import Live, replicated
from draftstill.train.pruning import importance, largest, only_layers

FOLDER = "calibration"
_VERSION = 1
"""Raised when the same inputs would give another choice."""
_IDS = 256
"""Ids per position that a law is compared on. On the demo's recording the likeliest 64 hold .90 of the mass at temperature 1; subsets
of layers differ by more than what lies beyond."""
_TABLE = 12
"""Subsets that the stage tells of; the run folder has all of them."""


@dataclass(slots=True)
class Piece:
    """Part of a recording: a text, its supervised positions and the target's law there."""

    tokens: Tensor
    rows_N: Tensor
    ids_NK: Tensor
    """By falling probability; -1: unused place."""
    p_NK: Tensor


@dataclass(frozen=True, slots=True)
class Choice:
    """What is kept. None: everything."""

    layers: tuple[int, ...]
    groups: list[list[int]] | None
    units: list[list[int]] | None
    facts: dict[str, Any]
    """For the stage: how it was chosen."""


def choose(recipe: Recipe, model: Any, target_head: Tensor) -> Choice:
    """What the recipe's pruned draft keeps of ``model``; measured where the recipe asks for it and no earlier choice is there.

    Args:
        model: transformers model to cut, on the CPU, with the target's vocabulary. Comes back as it was.
        target_head: the target's head over the real tokens, [V, H].

    Raises:
        DraftstillError: there is no recording yet.
    """
    draft = recipe.draft
    if not draft.calibrated:
        assert draft.layers != "auto"
        return Choice(draft.layers, None, None, {})
    recorded = Path(recipe.run_dir) / "recording"
    if not (recorded / "provenance.json").exists():
        raise DraftstillError("what this draft keeps is measured on the recording, and there is none yet", key=_asking(recipe), value=recipe.run_dir,
                              mend="first run: draftstill distill RECIPE")  # fmt: skip
    deciding = {
        "version": _VERSION, "recording": read_json(recorded / "provenance.json")["fingerprint"],
        "content": content_of(draft.source) if draft.existing else None,
        "draft": draft.deciding(), "seed": recipe.seed,
    }  # fmt: skip
    path = Path(recipe.run_dir) / FOLDER / f"{fingerprint(deciding)[:16]}.json"
    with _one_at_a_time(path):
        if not path.exists():
            write_json(path, {"decided_by": deciding, **_measure(recipe, model, target_head, Recording(recorded / "train", verify=False))})
    found = read_json(path)
    return Choice(tuple(found["layers"]), found["groups"], found["units"], _facts(found))


def _asking(recipe: Recipe) -> str:
    return "draft.layers" if recipe.draft.layers == "auto" else "draft.keep_heads" if recipe.draft.keep_heads < 1 else "draft.keep_mlp"


@contextlib.contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """Ranks of a launch build at the same time: the first one measures, the others wait for what it finds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    path.with_suffix(".lock").unlink(missing_ok=True)


def _measure(recipe: Recipe, model: Any, target_head: Tensor, recording: Recording) -> dict[str, Any]:
    draft, device = recipe.draft, resolved_device(recipe)
    base = size_of(model.config.to_dict())
    size = draft_size(draft, base, base)
    assert base is not None and size is not None
    temperature = float(recording.manifest.get("temperature", recipe.record.temperature))
    live = replicated(recipe) if recording.mode == "live" else None
    pieces = sample(recording, draft.search.positions, target_head.to(device), temperature, recipe.seed, live)
    del live  # before the model to cut takes its place
    positions = sum(len(p.rows_N) for p in pieces)
    found: dict[str, Any] = {"positions": positions, "temperature": temperature, "groups": None, "units": None}
    model.to(device)
    if draft.layers == "auto":
        say(f"  choosing {size.layers} of {base.layers} layers by alpha at {positions:,} recorded positions")
        tried = search_layers(model, size.layers, pieces, len(target_head), temperature, draft.search.beam)
        found |= {"layers": list(tried[0][0]), "tried": [{"layers": list(layers), "alpha": alpha} for layers, alpha in tried]}
    else:
        found["layers"] = list(draft.layers)
    if size.kv_heads < base.kv_heads or size.inner < base.inner:
        with only_layers(model, tuple(found["layers"])):
            groups, units = importance(model, [p.tokens for p in pieces])
        found["groups"] = largest(groups, size.kv_heads) if size.kv_heads < base.kv_heads else None
        found["units"] = largest(units, size.inner) if size.inner < base.inner else None
        share = lambda worth, kept: round(float(worth.gather(1, torch.tensor(kept)).sum() / worth.sum()), 4)  # noqa: E731
        found["importance_kept"] = {name: share(worth, kept) for name, worth, kept in
                                    (("groups", groups, found["groups"]), ("units", units, found["units"])) if kept is not None}  # fmt: skip
    model.to("cpu")
    return found


def sample(
    recording: Recording, positions: int, target_head: Tensor, temperature: float, seed: int, live: Live | None = None
) -> list[Piece]:
    """Recorded sequences drawn by the seed until they hold ``positions`` supervised positions; what the target wrote where there is any.

    Args:
        live: the target, for a recording that holds no laws.
    """
    indices = [i for i in range(len(recording)) if recording.kind(i) == "response" and recording.supervised(i)]
    indices = indices or [i for i in range(len(recording)) if recording.supervised(i)]
    order = torch.randperm(len(indices), generator=torch.Generator().manual_seed(seed_of(seed, FOLDER))).tolist()
    pieces: list[Piece] = []
    for place in order:
        if positions <= 0:
            break
        item = recording[indices[place]]
        rows = item.rows[:positions]
        hidden = None if item.hidden is None else item.hidden[rows]
        if live is not None:
            hidden = live.hidden(recording, [indices[place]])[: len(rows)]
        if hidden is None:
            assert item.ids is not None and item.p is not None
            ids, p = item.ids[rows, :_IDS], item.p[rows, :_IDS]
        else:
            with torch.inference_mode():
                law = ((hidden.to(target_head) @ target_head.T).float() / temperature).softmax(-1)
                p, ids = (x.cpu() for x in law.topk(min(_IDS, law.shape[-1]), -1))
        pieces.append(Piece(item.tokens, rows, ids.long(), p.float()))
        positions -= len(rows)
    return pieces


def _facts(found: dict[str, Any]) -> dict[str, Any]:
    facts: dict[str, Any] = {"calibration": {"positions": found["positions"], "temperature": found["temperature"]}}
    if "tried" in found:
        facts["calibration"] |= {"subsets": len(found["tried"]), "tried": found["tried"][:_TABLE]}
    if "importance_kept" in found:
        facts["calibration"]["importance_kept"] = found["importance_kept"]
    return facts
