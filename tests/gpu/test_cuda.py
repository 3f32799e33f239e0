"""The same answers on a CUDA device as on the CPU. Run with: python -m pytest -m gpu"""

from __future__ import annotations

import pytest
import torch

from draftstill.decode import CompositeDrafter, Decoder, LookupDrafter, ModelDrafter, Network, Request, Sampling
from draftstill.distill import Objective, Teacher, fused_loss
from tests.decode.conftest import make_model, noised

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def decoder(device: str, sampling: Sampling, kind: str = "composite", backend: str = "auto", rows: int = 2) -> Decoder:
    target, draft = make_model().to(device), noised(make_model(), 0.3).to(device)
    model, lookup = ModelDrafter(Network(draft), 3), LookupDrafter(4, 96, torch.device(device))
    drafter = {"composite": CompositeDrafter(lookup, model), "model": model, "lookup": lookup, "plain": None}[kind]
    return Decoder(Network(target), drafter, sampling=sampling, rows=rows, backend=backend)


LAWS = [Sampling(0.0), Sampling(0.8, top_p=0.9), Sampling(0.8, repetition_penalty=1.3, no_repeat_ngram=3)]


@pytest.mark.parametrize("sampling", LAWS, ids=["greedy", "sampled", "penalised"])
@pytest.mark.parametrize("kind", ["plain", "model", "lookup", "composite"])
@pytest.mark.parametrize("backend", ["graphs", "compile"])
def test_captured_rounds_equal_eager_ones(backend, kind, sampling):
    """Prompts of changing lengths, more requests than rows, and a second call: the same texts, and graphs were really replayed."""
    if backend == "compile" and (kind not in ("plain", "model") or sampling is LAWS[2]):
        pytest.skip("compiled programs: one kind each is enough")
    requests = [Request([5 + s % 3, 6, 7] * n, 3 if s % 2 else 24, seed=s) for s, n in enumerate([2, 6, 20, 2, 1])]
    captured, eager = (decoder("cuda", sampling, kind, b, rows=3) for b in (backend, "eager"))
    for _ in range(2):
        first, second = captured.run(requests), eager.run(requests)
        assert [t.tokens for t in first] == [t.tokens for t in second]
        assert [[(r.proposed, r.accepted) for r in t.rounds] for t in first] == [
            [(r.proposed, r.accepted) for r in t.rounds] for t in second
        ]
    engine = first[0].engine
    assert engine["graphs_captured"] > 0 and engine["graphs_replayed"] > 0 and "fallback" not in engine


def test_a_later_replay_leaves_earlier_results_alone():
    made = decoder("cuda", Sampling(0.0), "model", "graphs")
    (first,) = made.run([Request([1, 2, 3], 20)])
    kept = list(first.tokens)
    made.run([Request([9, 8, 7, 6], 20)])
    assert first.tokens == kept == made.run([Request([1, 2, 3], 20)])[0].tokens


def test_memory_does_not_grow():
    made = decoder("cuda", Sampling(0.7), "model", "graphs")
    sizes = []
    for call in range(40):
        made.run([Request([3] * (1 + call % 17), 5, seed=call)])
        sizes.append(torch.cuda.memory_allocated())
    assert sizes[-1] <= sizes[20]


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
