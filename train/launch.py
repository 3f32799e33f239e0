"""The draft stage of a run: the launch it runs in, its trackers, and the stage's beginning and end."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import DistributedType

from draftstill.decode import set_threads
from draftstill.distill import record
from draftstill.errors import DraftstillError
from draftstill.progress import say
from draftstill.recipe import Recipe
from draftstill.runfolder import RunFolder
from draftstill.stages import resolved_device, stages, trains_in_bf16
from draftstill.train.checkpoint import drop_checkpoints
from draftstill.train.loop import Job


def train(recipe: Recipe, run: RunFolder) -> Path:
    """Train the draft on the recording; returns the stage's folder, with the draft as a transformers folder in ``model``.

    Raises:
        NonFiniteLoss: before the optimizer step that it would have poisoned.
    """
    set_threads()
    stage = stages(recipe, run)["draft"]
    if stage.done:
        return stage.folder
    accelerator = _accelerator(recipe, run)
    many = accelerator.num_processes > 1
    if many and not stages(recipe, run)["recording"].done:
        raise DraftstillError("the recording is not there yet, and a launch of many processes must not make it", key="run_dir",
                              value=recipe.run_dir, mend="first run, in one process: draftstill distill RECIPE")  # fmt: skip
    recorded = stages(recipe, run)["recording"].folder if many else record(recipe, run)
    if accelerator.is_main_process:
        stage.begin()
    accelerator.wait_for_everyone()
    job = Job(recipe, recorded, stage.work, accelerator)
    job.run()
    if accelerator.is_main_process:
        facts = job.save(stage.work / "model")
        folder = stage.finish(**facts)
        drop_checkpoints(folder)  # not before: after a kill the next attempt must still find them
        (folder / "best.safetensors").unlink()
        best = facts["best"]
        say(f"  draft: {facts['parameters'] / 1e6:.1f} M parameters; held-out alpha {facts['curve'][0]['alpha_deploy']:.3f} -> "
            f"{best['alpha_deploy']:.3f} at the deployment's sampler, {best['alpha']:.3f} at temperature 1")  # fmt: skip
    accelerator.wait_for_everyone()
    accelerator.end_training()  # the last thing: it ends the process group, too
    return stage.folder


def _accelerator(recipe: Recipe, run: RunFolder) -> Accelerator:
    trackers = list(recipe.train.report_to)
    for name in trackers:  # accelerate would leave it out with a debug message
        if importlib.util.find_spec(name) is None:
            raise DraftstillError(
                "the tracker is not installed", key="train.report_to", value=name, mend=f"pip install {name}, or leave it out"
            )
    accelerator = Accelerator(
        mixed_precision="bf16" if trains_in_bf16(recipe) else "no", cpu=resolved_device(recipe) == "cpu",
        log_with=trackers or None, project_dir=str(run.path / "trackers") if trackers else None,
    )  # fmt: skip
    if accelerator.distributed_type not in (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU):
        raise DraftstillError(f"training under {accelerator.distributed_type.value} is not supported yet", key="accelerate launch",
                              mend="use one process, or data parallel: configs/accelerate/ddp.yaml")  # fmt: skip
    if accelerator.num_processes > 1 and accelerator.is_main_process:
        say(f"  training on {accelerator.num_processes} processes, {accelerator.device.type}")
    if trackers:
        (run.path / "trackers").mkdir(parents=True, exist_ok=True)
        wandb = {"dir": str(run.path / "trackers"), **({"name": recipe.train.run_name} if recipe.train.run_name else {})}
        accelerator.init_trackers("draftstill", init_kwargs={"wandb": wandb})
    return accelerator
