"""The draft with its loss inside, so that wrappers (DDP, autocast) see one forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from draftstill.distill import Confidence, Objective, Teacher, fused_loss, fused_tokens, largest_gaps, runs, within
from draftstill.recipe import Tokens
from draftstill.train.data import Batch, Trim


class DistilledDraft(nn.Module):
    """A transformers model whose forward returns a summed divergence to a teacher.

    Args:
        model: the draft.
        vocab: real tokens; padded head rows are never scored.
        objective: the divergence.
        compute: dtype of the head's matrix products.
        weights: which positions count, and how much.
    """

    def __init__(self, model: Any, vocab: int, objective: Objective, compute: torch.dtype, weights: Tokens | None = None) -> None:
        super().__init__()
        self.model = model
        self._no_split_modules = getattr(
            model, "_no_split_modules", None
        )  # what FSDP2 shards as a piece: accelerate looks on the outermost module
        self.vocab, self.objective, self.compute = vocab, objective, compute
        self.weights = weights or Tokens()

    def forward(self, batch: Batch, trim: Trim | None = None) -> tuple[Tensor, Tensor]:
        """Returns (loss sum, float64 statistics in the order of distill.STATS) over the batch's supervised positions."""
        hidden_NH, head, teacher = self._hidden(batch), self._head(), batch.teacher
        offset = None
        if trim is not None:
            head, teacher, offset = head[trim.rows_V], trim.teach(teacher), trim.offset_V
        weight_N, confidence = self._weights(batch, hidden_NH, head, teacher)
        return fused_loss(hidden_NH, head, teacher, self.objective, weight_N=weight_N, offset_V=offset, compute=self.compute,
                          confidence=confidence)  # fmt: skip

    @torch.no_grad()
    def losses(self, batch: Batch) -> Tensor:
        """The loss of each supervised position, float64 [N]."""
        return fused_tokens(self._hidden(batch), self._head(), batch.teacher, self.objective, compute=self.compute)["loss"]

    def _hidden(self, batch: Batch) -> Tensor:
        # transformers takes a position that does not follow the one before it for the start of another sequence, and masks accordingly.
        packed = {} if batch.at_BT is None else {"position_ids": batch.at_BT}
        return self.model.model(input_ids=batch.ids_BT, use_cache=False, **packed).last_hidden_state.flatten(0, 1)[batch.rows_N]

    def _head(self) -> Tensor:
        head = self.model.lm_head.weight
        return head if len(head) == self.vocab else head[: self.vocab]  # a slice's gradient is a second copy of all rows

    def _weights(self, batch: Batch, hidden_NH: Tensor, head_VH: Tensor, teacher: Teacher) -> tuple[Tensor | None, Confidence | None]:
        """Weights of the positions, and those that follow from alpha of the pass itself."""
        asked = self.weights
        if asked == Tokens():
            return None, None
        assert batch.place_N is not None
        weight_N = within(batch.place_N, asked.first, asked.last)
        if asked.keep < 1:
            assert batch.reference_N is not None
            now = fused_tokens(hidden_NH.detach(), head_VH.detach(), teacher, self.objective, compute=self.compute)["loss"]
            # Rounded, or rounding noise would decide between equals, as all are at the first step, and differ with the batch.
            gap_N = ((now - batch.reference_N) * 1e4).round().masked_fill(weight_N == 0, -torch.inf)
            weight_N = weight_N * largest_gaps(gap_N, batch.place_N, asked.keep)
        confidence = Confidence(asked.prefix_gamma, runs(batch.rows_N, batch.place_N)) if asked.prefix_gamma else None
        return weight_N, confidence


def attention_share(config: Any) -> float:
    """What one more column adds to a token's multiplications, over those of a layer's matrices: two products of a head's width per head,
    against attention's and a gated MLP's projections."""
    heads, hidden = config.num_attention_heads, config.hidden_size
    width = getattr(config, "head_dim", None) or hidden // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return 2 * heads * width / (hidden * (2 * heads + 2 * kv_heads) * width + 3 * hidden * config.intermediate_size)
