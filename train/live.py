"""A target that scores each step's texts while the draft trains, in place of recorded laws.

It gives what a recording of mode ``hidden`` holds: final hidden states, from which the target's own head gives all of p. Its own copy of the head
is let go: a job has the target's head anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftstill.decode import load_target
from draftstill.distill import Recording
from draftstill.recipe import Recipe
from draftstill.sources import load_model, resolve_model
from draftstill.stages import resolved_dtype, served_target
from draftstill.train.agreement import together


class Live:
    """The target beside the draft.

    Args:
        forward: right-padded ids [B, T] on the device to final hidden states [B, T, H].
    """

    def __init__(self, forward: Callable[[Tensor], Tensor], device: torch.device) -> None:
        self._forward, self.device = forward, device

    def hidden(self, recording: Recording, indices: Sequence[int]) -> Tensor:
        """Final hidden states at the supervised positions of some sequences, [N, H], in the order of ``data.collate``, however that lays them out.

        Of a sharded target every rank must call it equally often, with whatever sequences.
        """
        items = [recording[i] for i in indices]
        hidden_BTH = self._forward(pad_sequence([x.tokens for x in items], batch_first=True).to(self.device))
        return torch.cat([h[x.rows.to(self.device)] for h, x in zip(hidden_BTH, items, strict=True)])


def live_target(recipe: Recipe, device: torch.device, processes: int) -> Live:
    """The recipe's target where ``train.live`` says. With ``processes`` above 1 every one of them calls it."""
    if recipe.train.live == "shard" and processes > 1:
        return sharded(recipe, device, processes)
    with together():
        return replicated(recipe)


def replicated(recipe: Recipe) -> Live:
    """All of it on this process's device, as the recorder has it."""
    network = load_target(recipe).network
    del network.stack.head

    def forward(ids_BT: Tensor) -> Tensor:
        B, T = ids_BT.shape
        with torch.inference_mode():
            return network.forward(ids_BT, network.new_cache(B, T), [0] * B)

    return Live(forward, network.device)


def sharded(recipe: Recipe, device: torch.device, processes: int) -> Live:
    """A part of each layer on every process (FSDP2), gathered for a layer's forward and let go behind it.

    Read into the CPU's memory first, so that no device ever holds it whole. The model is transformers' own: what shards it works on modules. It rounds
    in other places than ``replicated``'s, which in bfloat16 moves its law as much as bfloat16 itself does.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with together():
        model: Any = load_model(resolve_model(served_target(recipe), "target.source"), resolved_dtype(recipe), "cpu").model
    model.requires_grad_(False)
    mesh = init_device_mesh(device.type, (processes,))
    for piece in (*model.layers, model):  # the model itself takes what is left: the embedding, and a norm
        fully_shard(piece, mesh=mesh, reshard_after_forward=True)

    def forward(ids_BT: Tensor) -> Tensor:
        with torch.no_grad():  # not inference mode, whose tensors the gathered weights must not become
            found: Tensor = model(input_ids=ids_BT, use_cache=False).last_hidden_state
        return found

    return Live(forward, device)
