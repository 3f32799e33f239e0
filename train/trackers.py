"""Trackers: wandb, tensorboard and trackio behind accelerate's interface. None of them can stop a training, and none goes online unasked."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator, PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from draftstill.decode import Decoder, ModelDrafter, Request, Sampling, load_target, make_network
from draftstill.distill import Recording, seed_of
from draftstill.errors import DraftstillError
from draftstill.progress import say
from draftstill.recipe import Recipe
from draftstill.runfolder import Stage
from draftstill.sources import load_model, resolve_model
from draftstill.stages import resolved_device, resolved_dtype

PROJECT = "draftstill"
_PROMPTS, _TOKENS = 3, 32
"""Held-out prompts decoded for the table of rounds, and tokens written for each."""


def refuse_missing(recipe: Recipe) -> None:
    """Refuse a tracker that is not installed, before anything starts: accelerate would leave it out with a debug message."""
    for name in recipe.train.report_to:
        if importlib.util.find_spec(name) is None:
            raise DraftstillError(
                "the tracker is not installed", key="train.report_to", value=name, mend=f"pip install {name}, or leave it out"
            )


class Guarded:
    """A tracker whose first failure is said and its last: the training goes on without it."""

    def __init__(self, name: str, make: Callable[[], Any], what: str = "the training") -> None:
        self.name, self._what = name, what
        self._inner: Any = None
        self._try(lambda: setattr(self, "_inner", make()))

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # whatever the library, the disk or the network makes of it
            self._inner = None
            say(f"  tracker {self.name}: {type(error).__name__}: {error}; {self._what} goes on without it")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        if self._inner is not None:
            self._try(lambda: self._inner.store_init_configuration(values))

    def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        if self._inner is not None:
            self._try(lambda: self._inner.log(values, step=step, **options))

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Rows as the tracker's own kind of table; Markdown where it has none."""
        if self._inner is not None:
            self._try(lambda: _TABLES[self.name](self._inner, title, columns, rows, step))

    def finish(self) -> None:
        if self._inner is not None:
            self._try(self._inner.finish)
        self._inner = None


def _wandb_table(tracker: Any, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
    tracker.log_table(title, columns=list(columns), data=[list(r) for r in rows], step=step)


def _tensorboard_table(tracker: Any, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
    tracker.log({title: markdown(columns, rows)}, step=step)


def _trackio_table(tracker: Any, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
    import pandas
    import trackio

    tracker.log({title: trackio.Table(dataframe=pandas.DataFrame([list(r) for r in rows], columns=list(columns)))}, step=step)


_TABLES = {"wandb": _wandb_table, "tensorboard": _tensorboard_table, "trackio": _trackio_table}


def markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table; what would break a cell is escaped."""
    cell = lambda x: str(x).replace("\\", "\\\\").replace("|", "\\|").replace("\n", "\\n")  # noqa: E731
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in lines)


def open_trackers(accelerator: Accelerator, recipe: Recipe, stage: Stage) -> None:
    """Start the recipe's trackers on the main process; ``accelerator.log`` then writes to them. The resolved recipe is their configuration.

    wandb goes by WANDB_MODE and stays offline without it; an attempt that goes on where one stopped writes into the same wandb run.
    """
    if not (recipe.train.report_to and accelerator.is_main_process):
        return
    folder = stage.run.path / "trackers"
    name = recipe.train.run_name or f"{stage.run.path.resolve().name}-{stage.name}"
    settings = flat(recipe.model_dump(mode="json", exclude={"train": {"candidates"}}))
    for kind in recipe.train.report_to:
        tracker = Guarded(kind, _maker(kind, folder, name, stage))
        tracker.store_init_configuration(settings)
        accelerator.trackers.append(tracker)


def _maker(kind: str, folder: Path, name: str, stage: Stage) -> Callable[[], Any]:
    options: dict[str, Any] = {"name": name}
    places: tuple[str, ...] = ()
    if kind == "wandb":
        identity = hashlib.sha256(f"{stage.run.path.resolve()} {stage.fingerprint}".encode()).hexdigest()[:16]
        options |= {"dir": str(folder), "mode": os.environ.get("WANDB_MODE", "offline"), "id": identity, "resume": "allow"}
    elif kind == "tensorboard":
        options, places = {}, (str(folder / "tensorboard" / name),)

    def make() -> Any:
        folder.mkdir(parents=True, exist_ok=True)
        made = LOGGER_TYPE_TO_CLASS[kind](PROJECT, *places, **options)
        made.start()
        return made

    return make


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys with plain values, as trackers compare runs by."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value if isinstance(value, str | int | float | bool) else str(value)
    return found


def close_trackers(accelerator: Accelerator) -> None:
    """End this training's trackers; the process group stays."""
    for tracker in accelerator.trackers:
        tracker.finish()
    accelerator.trackers.clear()


def log_summary(recipe: Recipe, stage: Stage, values: Mapping[str, Any]) -> None:
    """Tell the recipe's trackers the figures of a finished stage, in a run of their own named after the stage; none can stop it.

    Made again, a stage of the same inputs writes into the same wandb run.
    """
    name = f"{recipe.train.run_name or stage.run.path.resolve().name}-{stage.name}"
    PartialState()  # accelerate's trackers ask it whether they are the main process
    for kind in recipe.train.report_to:
        tracker = Guarded(kind, _maker(kind, stage.run.path / "trackers", name, stage), f"the {stage.name}")
        tracker.log(flat(values), step=0)
        tracker.finish()


ROUND_COLUMNS = ("prompt", "round", "proposed", "accepted", "text")


def log_rounds(accelerator: Accelerator, recipe: Recipe, recorded: Path, model: Path, step: int) -> None:
    """Decode a few held-out prompts with the finished draft and show the rounds as a table, where a tracker listens.

    In one process only: the ranks of a launch would wait, and its main process may not have the room for the target.
    """
    trackers = [t for t in accelerator.trackers if isinstance(t, Guarded)]
    if not trackers or accelerator.num_processes > 1:
        return
    try:
        rows = sample_rounds(recipe, recorded, model)
    except Exception as error:  # a table is no reason to lose a finished draft
        say(f"  trackers: no table of rounds ({type(error).__name__}: {error})")
        return
    for tracker in trackers:
        tracker.table("rounds", ROUND_COLUMNS, rows, step)


def sample_rounds(recipe: Recipe, recorded: Path, model: Path) -> list[tuple[int, int, int, int, str]]:
    """Rows in the order of ROUND_COLUMNS at the deployment's sampler; a ``|`` in the text stands where the target took over."""
    target, heldout = load_target(recipe), Recording(recorded / "heldout", verify=False)
    source = resolve_model(recipe.draft.model_copy(update={"source": str(model), "sha256": None, "file": None}), "draft.source")
    network = make_network(load_model(source, resolved_dtype(recipe), resolved_device(recipe)), vocab=target.vocab, key="draft.source")
    sampler = recipe.respond.sampler
    decoder = Decoder(target.network, ModelDrafter(network, recipe.evaluate.gamma), eos=target.eos,
                      sampling=Sampling(sampler.temperature, sampler.top_k, sampler.top_p))  # fmt: skip
    rows = []
    for index in range(min(_PROMPTS, len(heldout))):
        prompt = heldout[index].tokens[: heldout.start(index) + 1].tolist()
        (trace,) = decoder.run([Request(prompt, _TOKENS, seed=seed_of(recipe.seed, "rounds", index))])
        at = 0
        for number, done in enumerate(trace.rounds, 1):
            own, rest = trace.tokens[at : at + done.accepted], trace.tokens[at + done.accepted : at + done.emitted]
            rows.append((index, number, done.proposed, done.accepted, f"{target.tokenizer.decode(own)}|{target.tokenizer.decode(rest)}"))
            at += done.emitted
    return rows
