"""What differs between one process, DDP, FSDP2 and DeepSpeed: which launches are served, how gradients are reduced, what is measured.

All of them average gradients over the ranks. FSDP2 keeps each parameter, gradient and moment as a DTensor, of which a rank holds a piece; what
is written is gathered, so that a checkpoint is the same for every kind of launch. DeepSpeed keeps its own: its engine steps inside the backward
pass, and writes its own checkpoints. Nothing here was run under DeepSpeed yet.
"""

from __future__ import annotations

import contextlib
import copy
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, is_deepspeed_available
from torch import Tensor, nn

from draftstill.errors import DraftstillError, NonFiniteLoss
from draftstill.recipe import Recipe
from draftstill.runfolder import read_json, write_json
from draftstill.train.checkpoint import LATEST, drop_checkpoints, keep_best, point, restore_best, trained, whole

if TYPE_CHECKING:
    from draftstill.train.loop import Job

_SERVED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.FSDP, DistributedType.DEEPSPEED)
_ENGINE = "deepspeed"
"""Folder of the engine's own files in a checkpoint."""


def _asked(name: str) -> bool:
    """What accelerate launch made of a configuration."""
    return os.environ.get(name, "false").lower() in ("true", "1")


def shard_on_cpu(accelerator: Accelerator) -> None:
    """Let FSDP2 be what the launch asks for on CPUs, too: accelerate would quietly train data-parallel there, while torch can shard."""
    if _asked("ACCELERATE_USE_FSDP") and accelerator.distributed_type == DistributedType.MULTI_CPU:
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()
        accelerator.state.distributed_type = DistributedType.FSDP


def refuse_environment() -> None:
    """Before an Accelerator is made, which would end in another library's error, or load models half."""
    if _asked("ACCELERATE_USE_DEEPSPEED") and not is_deepspeed_available():
        raise DraftstillError("DeepSpeed is not installed", key="accelerate launch",
                              mend="pip install deepspeed, or use configs/accelerate/fsdp2.yaml, which shards with torch alone")  # fmt: skip
    if _asked("ACCELERATE_USE_FSDP") and _asked("FSDP_CPU_RAM_EFFICIENT_LOADING"):
        raise DraftstillError("every process builds the draft from the target, so every process must load it", key="accelerate launch",
                              mend="set fsdp_cpu_ram_efficient_loading: false, as configs/accelerate/fsdp2.yaml does")  # fmt: skip


def refuse_launch(accelerator: Accelerator, recipe: Recipe) -> None:
    """Refuse what a training is not made for."""
    kind = accelerator.distributed_type
    if kind not in _SERVED:
        raise DraftstillError(f"training under {kind.value} is not supported", key="accelerate launch",
                              mend="use one of configs/accelerate: single, ddp, fsdp2, zero2, zero3, two_nodes")  # fmt: skip
    if kind == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise DraftstillError("FSDP of version 1 is not supported", key="accelerate launch",
                              mend="set fsdp_version: 2, as configs/accelerate/fsdp2.yaml does")  # fmt: skip
    if kind == DistributedType.DEEPSPEED and recipe.train.ema_decay:
        raise DraftstillError("DeepSpeed keeps the weights where an average of them cannot follow", key="train.ema_decay",
                              value=recipe.train.ema_decay, mend="set it to 0, or use configs/accelerate/fsdp2.yaml")  # fmt: skip


@contextlib.contextmanager
def repeatable(device: str) -> Iterator[None]:
    """On CUDA take kernels that give the same bits every time, and warn where there is none. CPU kernels do so anyway.

    cuBLAS also needs CUBLAS_WORKSPACE_CONFIG in the environment before it is first used (``guard.ENVIRONMENT``).
    """
    if device != "cuda":
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic  # a module with a property, which its stubs do not tell of
    filled = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = False  # nothing here reads it, and filling every new tensor takes time
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = filled


def sharded(accelerator: Accelerator) -> bool:
    """Whether a rank may hold only a part of the weights or moments."""
    return accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)


def is_deepspeed(accelerator: Accelerator) -> bool:
    return bool(accelerator.distributed_type == DistributedType.DEEPSPEED)


def prepare(job: Job, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """The job's module and its optimizer as the launch needs them."""
    accelerator, settings = job.accelerator, job.settings
    if accelerator.is_fsdp2 and job.compute == torch.bfloat16:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        # accelerate would reduce in bfloat16, too, which sums of many ranks do not bear.
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
        accelerator.state.fsdp_plugin.mixed_precision_policy = policy
    if is_deepspeed(accelerator):
        config = accelerator.state.deepspeed_plugin.deepspeed_config
        config |= {"train_micro_batch_size_per_gpu": settings.per_device_train_batch_size, "gradient_accumulation_steps": 1,
                   "gradient_clipping": settings.max_grad_norm}  # fmt: skip
    wrapped, prepared = accelerator.prepare(job.module, optimizer)
    if is_deepspeed(accelerator) and accelerator.state.deepspeed_plugin.zero_stage == 3:
        import deepspeed

        # The head's rows are used by the loss, outside of the head's own forward.
        deepspeed.zero.register_external_parameter(job.module, job.module.model.lm_head.weight)
    return wrapped, prepared


def backward(job: Job, loss: Tensor, *, last: bool) -> None:
    """A micro-batch's backward pass; gradients are reduced with the last one of a step. Under DeepSpeed that one is also the optimizer step.

    Raises:
        NonFiniteLoss: under DeepSpeed, where nothing can be looked at between the gradients and the step: a loss that is not finite on any rank.
    """
    accelerator = job.accelerator
    if is_deepspeed(accelerator):
        bad = accelerator.reduce((~torch.isfinite(loss.detach())).float().reshape(1), "sum")
        if float(bad) > 0:
            raise NonFiniteLoss(f"step {job.step}: the loss is not finite", key="train.learning_rate", value=job.peak,
                                mend="lower the learning rate and add --set-aside, which keeps this attempt beside the new one")  # fmt: skip
        accelerator.sync_gradients = last
    accelerator.backward(loss)


def clipped(job: Job) -> Any:
    """The gradients' norm before they were clipped to train.max_grad_norm; DeepSpeed has done so inside the backward pass."""
    norm = job.accelerator.clip_grad_norm_(job.wrapped.parameters(), job.settings.max_grad_norm)
    return torch.zeros(()) if norm is None else norm


def synchronised(job: Job, *, last: bool) -> contextlib.AbstractContextManager[Any]:
    """Around forward and backward of a micro-batch: only the last of a step sends gradients to the other ranks."""
    return contextlib.nullcontext() if last else job.accelerator.no_sync(job.wrapped)


class Twin:
    """A whole copy of a draft that is about to be sharded, in the CPU's memory: what is measured and saved.

    Args:
        model: not sharded yet.
        adapted: peft's wrapper around it, if there is one.
    """

    def __init__(self, model: Any, adapted: Any) -> None:
        self.model, self.adapted = copy.deepcopy((model, adapted))

    def filled(self, model: nn.Module, device: torch.device) -> Any:
        """The copy with the present weights of what is trained, gathered from all ranks one by one, on a device. Every rank calls it."""
        own = dict(trained(self.model))
        with torch.no_grad():
            for name, p in trained(model):
                own[name].copy_(whole(p))
        return self.model.to(device)


def save_engine(job: Job, final: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint of DeepSpeed's engine, each rank its part, whole or absent. Every rank calls it."""
    accelerator = job.accelerator
    temporary = final.with_name(f".{final.name}.tmp")
    if accelerator.is_main_process:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    accelerator.wait_for_everyone()
    job.wrapped.save_checkpoint(str(temporary / _ENGINE), tag="engine")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        keep_best(final.parent, temporary)
        write_json(temporary / "state.json", state)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(temporary, final)
        point(final.parent / LATEST, final.name)
        drop_checkpoints(final.parent, job.settings.save_total_limit)


def load_engine(job: Job, folder: Path) -> dict[str, Any]:
    """Restore DeepSpeed's engine; returns the state.

    Raises:
        DraftstillError: the checkpoint is of another kind of launch, or of another number of processes.
    """
    state: dict[str, Any] = read_json(folder / "state.json")
    count = job.accelerator.num_processes
    if not (folder / _ENGINE).is_dir():
        raise DraftstillError("the checkpoint was not made under DeepSpeed", key="accelerate launch", value=str(folder),
                              mend="go on with the launch that began it, or give another run_dir")  # fmt: skip
    if state["processes"] != count:
        raise DraftstillError(f"DeepSpeed's checkpoint was made by {state['processes']} processes, and this launch has {count}",
                              key="accelerate launch", mend="go on with as many processes as before")  # fmt: skip
    job.wrapped.load_checkpoint(str(folder / _ENGINE), tag="engine")
    if job.accelerator.is_main_process:
        restore_best(folder)
    return state


def refuse_engine_checkpoint(folder: Path) -> None:
    """Refuse to go on without DeepSpeed from a checkpoint that it made."""
    if (folder / _ENGINE).is_dir():
        raise DraftstillError("the checkpoint was made under DeepSpeed, which alone can read it", key="accelerate launch", value=str(folder),
                              mend="go on with the launch that began it, or give another run_dir")  # fmt: skip
