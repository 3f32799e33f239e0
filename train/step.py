"""One optimizer step of a job: its micro-batches, their gradients, and the check before the weights move.

Losses are sums; they are divided once per optimizer step by the number of supervised tokens of all ranks and accumulation
steps, so that the result does not depend on how a batch is split. What a step sees follows from (seed, step) alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from draftstill.distill import STATS, seed_of
from draftstill.errors import NonFiniteLoss
from draftstill.train.data import Batch, collate, finite, trim
from draftstill.train.devices import backward, clipped, synchronised

if TYPE_CHECKING:
    from draftstill.train.loop import Job


def optimize(job: Job) -> tuple[torch.Tensor, float]:
    """One optimizer step; returns summed statistics of all ranks, float64 in the order of distill.STATS, and the gradient norm.

    The device is asked once, after all micro-batches: for the statistics, the norm, and whether any rank was told to end.

    Raises:
        NonFiniteLoss: the loss or its gradient is not finite; weights and moments are as before.
    """
    settings, accelerator = job.settings, job.accelerator
    device = accelerator.device
    job.set_objective()
    indices = job.sequences(job.step)
    tokens = sum(job.recording.supervised(i) for i in indices)
    cut = trim(job.ranking, settings.head_tokens, job.recipe.seed, job.step).to(device) if job.trimmed(job.step) else None
    for group in job.optimizer.param_groups:
        group["lr"] = job.learning_rate(job.step)
    stats = torch.zeros(len(STATS), dtype=torch.float64, device=device)
    with _own_randomness(device):
        for number, batch in enumerate(_batches(job, indices)):
            # Dropout, where there is any, follows from what is trained on, not from what came before: a restart needs no generator's state.
            torch.manual_seed(seed_of(job.recipe.seed, "forward", job.step, number, accelerator.process_index))
            last = number == job.accumulate - 1
            with synchronised(job, last=last):
                loss, part = job.wrapped(batch.to(device), cut)
                # Gradients are averaged over ranks; the loss is a sum over all tokens of all ranks.
                backward(job, loss * (accelerator.num_processes / tokens), last=last)
            stats += part.to(device)
    norm = clipped(job)
    found = _agreed(job, stats, norm)
    loss_sum, norm_now = float(found[0]), float(found[-1])
    job.ending = bool(found[len(STATS)] > 0)
    if not torch.isfinite(found[[0, -1]]).all():
        raise _not_finite(job, indices, loss_sum / tokens, norm_now)
    job.optimizer.step()
    job.optimizer.zero_grad(set_to_none=True)
    if job.average is not None:
        job.average.update(job.step)
    job.tokens += tokens
    return found[: len(STATS)], norm_now


def _agreed(job: Job, stats: torch.Tensor, norm: Any) -> torch.Tensor:
    """[statistics of all ranks, ranks told to end, gradient norm], float64 on the CPU: the same for every rank, so that all stop or none."""
    told = stats.new_tensor([float(job.told.is_set())])
    summed = job.accelerator.reduce(torch.cat([stats, told]), "sum")
    whole = norm.full_tensor() if hasattr(norm, "full_tensor") else torch.as_tensor(norm)  # of sharded gradients
    found: torch.Tensor = torch.cat([summed, whole.detach().to(summed).reshape(1)]).cpu()
    return found


@contextlib.contextmanager
def _own_randomness(device: torch.device) -> Iterator[None]:
    """Leave the process's generators as they were."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


def _not_finite(job: Job, indices: list[int], loss: float, norm: float) -> NonFiniteLoss:
    """The error, and where the fault is likely to lie."""
    problem = f"step {job.step}: the loss or its gradient is not finite (loss {loss:.3g}, gradient norm {norm:.3g})"
    # Of a sharded target every rank asks for the same ones.
    good = lambda i: finite(job.recording[i]) if job.live is None else bool(torch.isfinite(job.live.hidden(job.recording, [i])).all())  # noqa: E731
    poisoned = sorted({i for i in indices if not good(i)})
    if poisoned and job.live is not None:
        dtype = job.recording.manifest["dtype"]
        return NonFiniteLoss(f"{problem}; the target itself gives such values, in sequences {', '.join(map(str, poisoned[:8]))}", key="target.dtype",
                             value=dtype, mend="take another dtype for the target, and respond and record with it")  # fmt: skip
    if poisoned:
        return NonFiniteLoss(f"{problem}; the recording itself holds such values, in sequences {', '.join(map(str, poisoned[:8]))}", key="run_dir",
                             value=str(job.recording.folder), mend="delete the recording's folder and record again")  # fmt: skip
    return NonFiniteLoss(problem, key="train.learning_rate", value=job.peak,
                         mend="lower the learning rate and add --set-aside, which keeps this attempt beside the new one")  # fmt: skip


def _batches(job: Job, indices: list[int]) -> Iterator[Batch]:
    """This rank's micro-batches of one optimizer step."""
    size = job.settings.per_device_train_batch_size
    first = job.accelerator.process_index * size * job.accumulate
    for at in range(first, first + size * job.accumulate, size):
        mine = indices[at : at + size]
        with job.meter.reading:
            batch = collate(job.recording, mine, job.target_head, job.attention)
        if job.live is not None:
            with job.meter.scoring:
                batch.teacher.hidden_NH = job.live.hidden(job.recording, mine)
        if job.reference is not None:
            # On the very batch, every time: what a row is padded or packed with moves the last bits of its losses.
            batch = batch.to(job.accelerator.device)
            with job.accelerator.autocast():
                batch.reference_N = job.reference.losses(batch)
        yield batch
