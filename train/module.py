"""The draft with its loss inside, so that wrappers (DDP, autocast) see one forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from draftstill.distill import Objective, fused_loss
from draftstill.train.data import Batch, Trim


class DistilledDraft(nn.Module):
    """A transformers model whose forward returns a summed divergence to a teacher.

    Args:
        model: the draft.
        vocab: real tokens; padded head rows are never scored.
        objective: the divergence.
        compute: dtype of the head's matrix products.
    """

    def __init__(self, model: Any, vocab: int, objective: Objective, compute: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self.vocab, self.objective, self.compute = vocab, objective, compute

    def forward(self, batch: Batch, trim: Trim | None = None) -> tuple[Tensor, Tensor]:
        """Returns (loss sum, float64 statistics in the order of distill.STATS) over the batch's supervised positions."""
        hidden_BTH = self.model.model(input_ids=batch.ids_BT, use_cache=False).last_hidden_state
        hidden_NH = hidden_BTH.flatten(0, 1)[batch.rows_N]
        head, teacher, offset = self.model.lm_head.weight[: self.vocab], batch.teacher, None
        if trim is not None:
            head, teacher, offset = head[trim.rows_V], trim.teach(teacher), trim.offset_V
        return fused_loss(hidden_NH, head, teacher, self.objective, offset_V=offset, compute=self.compute)
