"""The draft stage of a run: the launch it runs in, every candidate in turn, and each one's beginning and end."""

from __future__ import annotations

import gc
import os
import sys
import traceback
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState

from draftstill.decode import set_threads
from draftstill.distill import Recording, record
from draftstill.errors import DraftstillError
from draftstill.launching import make_way
from draftstill.progress import say
from draftstill.recipe import Recipe
from draftstill.runfolder import FAILED, RunFolder, Stage
from draftstill.stages import candidate_recipes, draft_stage, failure, note_failure, resolved_device, stages, trains_in_bf16
from draftstill.train.agreement import EndedElsewhere, together
from draftstill.train.build import preflight
from draftstill.train.checkpoint import BEST, drop_checkpoints
from draftstill.train.devices import refuse_environment, refuse_launch, repeatable, shard_on_cpu
from draftstill.train.heldout import MEASURED
from draftstill.train.loop import Job
from draftstill.train.trackers import close_trackers, log_rounds, open_trackers, refuse_missing


def train(recipe: Recipe, run: RunFolder) -> Path:
    """Train every candidate's draft on the one recording; returns the folder of the first, with the draft as a transformers folder in ``model``.

    Raises:
        NonFiniteLoss: the only draft diverged; before the optimizer step that it would have poisoned.
        DraftstillError: as ``train_all``.
    """
    return next(iter(train_all(recipe, run, retry=True).values()))


def train_all(recipe: Recipe, run: RunFolder, *, retry: bool = False) -> dict[str, Path]:
    """Train what is missing; returns the finished stage folder of every candidate that has one, by name, in the recipe's order.

    With several candidates one that fails is written down and said, and the others go on. With one, its error is raised.

    Args:
        retry: try those again whose last attempt failed.

    Raises:
        DraftstillError: every candidate failed, a folder belongs to another recipe, or a launch of many processes finds no recording.
    """
    set_threads()
    own, found = candidate_recipes(recipe), stages(recipe, run)
    drafts = {name: found[draft_stage(name)] for name in own}
    if _first():
        for stage in drafts.values():
            if stage.done:
                _clear(stage.folder)  # an attempt may have been killed before it did
    missing = [name for name, stage in drafts.items() if not stage.done and (retry or failure(stage) is None)]
    if missing:
        _train_missing(recipe, run, {name: (own[name], drafts[name]) for name in missing})
    finished = {name: stage.folder for name, stage in drafts.items() if stage.done}
    if not finished:
        said = "\n".join(f"  {name}: {failure(stage)}" for name, stage in drafts.items())
        raise DraftstillError(
            f"every candidate failed\n{said}", key="train.candidates", mend="mend the recipe and give the same command again"
        )
    return finished


def set_others_aside(recipe: Recipe, run: RunFolder) -> None:
    """``--set-aside`` of a launch: the first process moves what other recipes made, before any other looks at the run folder."""
    launch = _launch(recipe)
    with together():
        if launch.is_main_process:
            make_way(recipe, run, "draft")


def _launch(recipe: Recipe) -> PartialState:
    """This process's place in its launch."""
    refuse_environment()
    return PartialState(cpu=resolved_device(recipe) == "cpu")


def preflight_all(recipe: Recipe, *, here: bool = True) -> None:
    """Check every candidate, from configs and tokenizers alone, before hours of responding and recording.

    Args:
        here: the training follows on this machine, and must fit it.

    Raises:
        DraftstillError: with the key under the candidate's own name.
    """
    for name, own in candidate_recipes(recipe).items():
        refuse_missing(own)
        try:
            preflight(own, memory=here)
        except DraftstillError as error:
            if not recipe.train.candidates or str(error.key).partition(".")[0] not in ("draft", "train"):
                raise
            key = f"train.candidates.{name}.{error.key}"
            raise DraftstillError(error.problem, key=key, value=error.value, mend=error.mend) from None


def _train_missing(recipe: Recipe, run: RunFolder, missing: dict[str, tuple[Recipe, Stage]]) -> None:
    many = int(os.environ.get("WORLD_SIZE", "1")) > 1
    recording = stages(recipe, run)["recording"]
    recorded = recording.done
    if many and not recorded:
        # The others would wait at a barrier until the launcher or the collective's own patience ended them all.
        raise DraftstillError("the recording is not there yet, and a launch of many processes must not make it", key="run_dir",
                              value=recipe.run_dir, mend="first run, in one process: draftstill distill RECIPE")  # fmt: skip
    for own, _ in missing.values():
        refuse_missing(own)
    if not recorded:
        preflight_all(recipe)
        record(recipe, run)
    _verify(recording.folder, _launch(recipe))
    several = bool(recipe.train.candidates)
    failed = []
    for number, (name, (own, stage)) in enumerate(missing.items(), 1):
        accelerator = _accelerator(own)
        if accelerator.is_main_process:
            stage.begin()
            if several:
                say(f"  candidate {name} ({number} of {len(missing)})")
        accelerator.wait_for_everyone()
        try:
            with repeatable(accelerator.device.type):
                _train_one(own, stage, recording.folder, accelerator)
        except (OSError, EndedElsewhere):
            raise  # a full disk or a refused file is no fault of the candidate
        except Exception as error:
            # Of a launch only what every rank knows of may be passed over: the others would wait for a rank that failed alone.
            if not several or (many and not isinstance(error, DraftstillError)):
                raise
            failed.append(name)
            if accelerator.is_main_process:
                _tell_failure(name, stage, error)
        finally:
            close_trackers(accelerator)
            accelerator.free_memory()
            AcceleratorState._reset_state()  # the next candidate may multiply in another precision; the process group stays
            gc.collect()
    if failed and _first():
        say(
            f"  failed: {', '.join(failed)} (above, and in {FAILED} of the stage); the training tries them again when it is asked for again"
        )


def _verify(recorded: Path, launch: PartialState) -> None:
    """Compare both recordings with their checksums, once per command: candidates need not read them whole again. The processes of a launch share
    the shards out: one alone would take longer over hundreds of GB than the others have patience to wait at a barrier.

    Raises:
        DraftstillError: a missing, damaged or foreign shard, by name.
    """
    with together():
        for side in ("train", "heldout"):
            Recording(recorded / side, share=(launch.process_index, launch.num_processes))


def _first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _tell_failure(name: str, stage: Stage, error: Exception) -> None:
    """Write down and say why a candidate failed. What the recipe can bring about speaks for itself; of anything else the traceback is needed."""
    # torch's CPU allocator has no error of its own
    no_room = isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
    trace = None if no_room or isinstance(error, DraftstillError) else "".join(traceback.format_exception(error))
    note_failure(stage, error, trace)
    say(f"  candidate {name} failed: {failure(stage)}")
    if trace is not None:
        print(trace, file=sys.stderr, flush=True)


def _train_one(recipe: Recipe, stage: Stage, recorded: Path, accelerator: Accelerator) -> None:
    open_trackers(accelerator, recipe, stage)
    job = Job(recipe, recorded, stage.work, accelerator)
    job.run()
    job.release_target()
    with together():
        if accelerator.is_main_process:
            _finish(recipe, stage, recorded, accelerator, job)


def _finish(recipe: Recipe, stage: Stage, recorded: Path, accelerator: Accelerator, job: Job) -> None:
    facts = job.save(stage.work / "model")
    log_rounds(accelerator, recipe, recorded, stage.work / "model", job.step)
    (stage.work / FAILED).unlink(missing_ok=True)
    folder = stage.finish(**facts)
    _clear(folder)  # not before: after a kill the next attempt must still find them
    best = facts["best"]
    what = MEASURED[job.heldout.mode]
    say(f"  {stage.name}: {facts['parameters'] / 1e6:.1f} M parameters; held-out {what} {facts['curve'][0]['alpha_deploy']:.3f} -> "
        f"{best['alpha_deploy']:.3f} at the deployment's sampler, {best['alpha']:.3f} at temperature 1")  # fmt: skip


def _clear(folder: Path) -> None:
    """Of a finished stage nothing needs the checkpoints any more."""
    drop_checkpoints(folder)
    (folder / BEST).unlink(missing_ok=True)


def _accelerator(recipe: Recipe) -> Accelerator:
    accelerator = Accelerator(mixed_precision="bf16" if trains_in_bf16(recipe) else "no", cpu=resolved_device(recipe) == "cpu")
    shard_on_cpu(accelerator)
    refuse_launch(accelerator, recipe)
    if accelerator.num_processes > 1 and accelerator.is_main_process:
        say(f"  training on {accelerator.num_processes} processes, {accelerator.device.type}, {accelerator.distributed_type.value}")
    return accelerator
