"""The arms of ``make bench-distill``: one loss and its gradients, computed in several ways from the same tensors.

trl 1.16.0 (``trl/kernels/chunked_divergence.py``) and liger-kernel 0.8.5 (``chunked_loss/jsd_loss.py``) come from .venv-bench. Without CUDA
trl runs its own PyTorch twin of its kernels. Liger's chunked loss is plain PyTorch; here without torch.compile, which would need a C++
compiler, and without its default half of cross-entropy. Its Triton kernels (``ops/fused_linear_jsd.py``) do not run on a CPU.

In bfloat16 weights and hidden states stay float32, as they do in training, and only matrix products are bfloat16: ours by ``compute``, eager
by autocast with its logits made float32 before the softmax, the others from bfloat16 copies that are part of their step.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from draftstill.distill import Objective, Teacher, fused_loss

OURS, EAGER, TRL, LIGER, PRODUCTS = "ours", "eager", "trl chunked", "liger chunked", "products alone"
FORMS = ("recorded", "hidden")
K = 64


@dataclass(frozen=True)
class Shape:
    V: int
    H: int
    N: int
    dtype: str = "float32"
    """Of the matrix products."""


@dataclass
class Inputs:
    """What a training step has anyway: hidden states and head of both sides, and a recording of the target's law."""

    hidden_NH: Tensor
    head_VH: Tensor
    truth_NH: Tensor
    target_VH: Tensor
    teacher: Teacher
    dtype: torch.dtype

    def zero(self) -> None:
        self.hidden_NH.grad = self.head_VH.grad = None

    def logits(self, hidden_NH: Tensor, head_VH: Tensor) -> Tensor:
        """Whole and in float32."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            return (hidden_NH @ head_VH.T).float()


def inputs_of(shape: Shape, form: str) -> Inputs:
    g = torch.Generator().manual_seed(0)
    randn = lambda *size, scale=1.0: torch.randn(*size, generator=g).mul_(scale)  # noqa: E731
    truth, head = randn(shape.N, shape.H), randn(shape.V, shape.H, scale=2.5 / shape.H**0.5)
    hidden = truth + 0.5 * randn(shape.N, shape.H)
    target = head.clone() if form == "hidden" else head[:0].clone()
    teacher = Teacher(hidden_NH=truth, head_VH=target)
    if form == "recorded":
        parts = [_top(truth[at : at + 64], head) for at in range(0, shape.N, 64)]
        teacher = Teacher(*(torch.cat(x) for x in zip(*parts, strict=True)))
    return Inputs(hidden.requires_grad_(), head.requires_grad_(), truth, target, teacher, getattr(torch, shape.dtype))


def _top(truth_NH: Tensor, head_VH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    p, ids = (truth_NH @ head_VH.T).softmax(-1).topk(K, -1)
    return ids, p, 1 - p.sum(-1)


def ours(x: Inputs) -> Tensor:
    return fused_loss(x.hidden_NH, x.head_VH, x.teacher, Objective("forward_kl"), compute=x.dtype)[0]


def eager_recorded(x: Inputs) -> Tensor:
    """KL on K + 1 outcomes as one writes it with whole logits."""
    assert x.teacher.ids_NK is not None and x.teacher.p_NK is not None and x.teacher.tail_N is not None
    lq = torch.log_softmax(x.logits(x.hidden_NH, x.head_VH), -1).gather(1, x.teacher.ids_NK)
    tail = torch.log1p(-lq.exp().sum(-1).clamp_max(1 - 1e-7))
    p, rest = x.teacher.p_NK, x.teacher.tail_N
    return (torch.xlogy(p, p) - p * lq).sum() + (torch.xlogy(rest, rest) - rest * tail).sum()


def eager_hidden(x: Inputs) -> Tensor:
    with torch.no_grad():
        lp = torch.log_softmax(x.logits(x.truth_NH, x.target_VH), -1)
    return F.kl_div(torch.log_softmax(x.logits(x.hidden_NH, x.head_VH), -1), lp, log_target=True, reduction="sum")


@torch.no_grad()
def products(x: Inputs) -> None:
    """The matrix products of a step and nothing else: what no arm can be faster than."""
    hidden, head = x.hidden_NH.to(x.dtype), x.head_VH.to(x.dtype)
    if len(x.target_VH):
        x.truth_NH.to(x.dtype) @ x.target_VH.to(x.dtype).T
    z = hidden @ head.T
    z @ head
    z.T @ hidden


def trl(x: Inputs) -> Tensor:
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    hidden, head, truth, target = (t.to(x.dtype) for t in (x.hidden_NH, x.head_VH, x.truth_NH, x.target_VH))
    return ChunkedDivergenceFunction.apply(hidden, head, None, truth, target, None, 0.0)[0].sum()


def liger(x: Inputs) -> Tensor:
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    loss = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.0, compiled=False)
    labels = torch.zeros(len(x.hidden_NH), dtype=torch.int64)
    hidden, head, truth, target = (t.to(x.dtype) for t in (x.hidden_NH, x.head_VH, x.truth_NH, x.target_VH))
    return loss(hidden, head, truth, target, labels) * len(labels)  # it takes the mean


def arms(form: str) -> dict[str, Callable[[Inputs], Tensor]]:
    """By name; eager second, peers only against whole laws (neither reads a recording)."""
    if form == "recorded":
        return {OURS: ours, EAGER: eager_recorded}
    found = {OURS: ours, EAGER: eager_hidden}
    found |= {name: arm for name, module, arm in ((TRL, "trl", trl), (LIGER, "liger_kernel", liger)) if importlib.util.find_spec(module)}
    return found
