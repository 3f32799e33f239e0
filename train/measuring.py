"""A job's held-out measurement: on whole weights, with the head that the decoder drafts from, and stopped where it says nothing."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import broadcast
from torch import Tensor

from draftstill.decode import Sampling
from draftstill.errors import NonFiniteLoss
from draftstill.train.data import finite
from draftstill.train.heldout import HeldOut, measure

if TYPE_CHECKING:
    from draftstill.train.loop import Job


def held_out(job: Job) -> HeldOut:
    """The draft as it stands. Every rank calls it."""
    sampler, device = job.recipe.respond.sampler, job.accelerator.device
    half = torch.autocast(device.type, torch.bfloat16, enabled=job.compute == torch.bfloat16)
    # Off around everything, or the target's law would be rounded to the draft's precision; and a context around the draft's own keeps its
    # rounded weights from one text to the next.
    with _whole(job) as model, torch.autocast(device.type, enabled=False):

        def hidden_of(ids: Tensor) -> Tensor:
            with half:
                found: Tensor = model.model(input_ids=ids, use_cache=False).last_hidden_state
            return found

        head = model.lm_head.weight.detach()[: job.draft.vocab].to(job.compute)
        return measure(hidden_of, head, job.heldout, job.target_head, Sampling(sampler.temperature, sampler.top_k, sampler.top_p),
                       job.recipe.evaluate.gamma, guessed(job))  # fmt: skip


def guessed(job: Job) -> Tensor | None:
    """Ids that the decoder will draft from: ``draft.head_tokens`` of the ranking (None: all)."""
    count = job.recipe.draft.head_tokens
    return job.ranking[:count] if count else None


@contextlib.contextmanager
def _whole(job: Job) -> Iterator[Any]:
    """The draft in evaluation mode with all its weights on this device: where they are sharded, the twin, which every rank fills."""
    model = job.module.model if job.twin is None else job.twin.filled(job.module.model, job.accelerator.device)
    model.eval()
    try:
        yield model
    finally:
        model.train()
        if job.twin is not None:
            model.to("cpu")


def agreed(job: Job, found: HeldOut) -> HeldOut:
    """The first process's measurement: what follows from it, such as stopping, must not differ between ranks by a rounding."""
    if job.accelerator.num_processes == 1:
        return found
    values = torch.tensor(list(asdict(found).values()), dtype=torch.float64, device=job.accelerator.device)
    alpha, deploy, top1, positions, tau, gamma = broadcast(values).tolist()
    return HeldOut(alpha, deploy, top1, int(positions), tau, int(gamma))


def refuse_not_finite(job: Job, found: HeldOut) -> None:
    """Stop at a measurement that is no number.

    Raises:
        NonFiniteLoss: naming the held-out sequences that hold such values; where none does, the weights do.
    """
    if all(map(math.isfinite, (found.alpha, found.alpha_deploy, found.top1, found.tau))):
        return
    problem = f"step {job.step}: held-out alpha is not finite"
    poisoned = [i for i in range(len(job.heldout)) if not finite(job.heldout[i])]
    if poisoned:
        more = f" and {len(poisoned) - 8} more" if len(poisoned) > 8 else ""
        raise NonFiniteLoss(f"{problem}; the held-out recording itself holds such values, in sequences {', '.join(map(str, poisoned[:8]))}{more}",
                            key="run_dir", value=str(job.heldout.folder), mend="delete the recording's folder and record again")  # fmt: skip
    raise NonFiniteLoss(f"{problem}, and the held-out recording is: the weights are not", key="train.learning_rate",
                        value=job.peak,
                        mend="lower the learning rate and add --set-aside, which keeps this attempt beside the new one")  # fmt: skip
