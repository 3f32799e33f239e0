"""The same answers on a CUDA device as on the CPU. Run with: python -m pytest -m gpu"""

from __future__ import annotations

import pytest
import torch

from draftstill.decode import CompositeDrafter, Decoder, LookupDrafter, ModelDrafter, Network, Request, Sampling
from draftstill.distill import Objective, Teacher, fused_loss
from tests.decode.conftest import make_model, noised

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def decoder(device: str, sampling: Sampling) -> Decoder:
    target, draft = make_model().to(device), noised(make_model(), 0.3).to(device)
    drafter = CompositeDrafter(LookupDrafter(4, 96, torch.device(device)), ModelDrafter(Network(draft), 3))
    return Decoder(Network(target), drafter, gamma=4, sampling=sampling, rows=2)


@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(0.8, top_p=0.9)])
def test_texts_equal_those_of_the_cpu(sampling):
    requests = [Request([5, 6, 7, 8, 9], 24, seed=s) for s in range(5)]
    written = {device: [t.tokens for t in decoder(device, sampling).run(requests)] for device in ("cpu", "cuda")}
    assert written["cpu"] == written["cuda"]


def test_the_fused_loss_equals_that_of_the_cpu():
    g = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(40, 24, generator=g), torch.randn(211, 24, generator=g)
    p, ids = torch.randn(40, 211, generator=g).softmax(-1).topk(16, -1)
    found = {}
    for device in ("cpu", "cuda"):
        h, w = hidden.to(device).requires_grad_(), head.to(device).requires_grad_()
        teacher = Teacher(ids.to(device), p.to(device), 1 - p.sum(-1).to(device))
        loss, _ = fused_loss(h, w, teacher, Objective("lk"))
        loss.backward()
        found[device] = loss.item(), h.grad.cpu(), w.grad.cpu()
    assert found["cuda"][0] == pytest.approx(found["cpu"][0], rel=1e-5)
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(found["cuda"][1:], found["cpu"][1:], strict=True))
