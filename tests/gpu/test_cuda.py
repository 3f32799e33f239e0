"""The same answers on a CUDA device as on the CPU. Run with: python -m pytest -m gpu"""

from __future__ import annotations

import pytest
import torch

from draftstill.decode import CompositeDrafter, Decoder, LookupDrafter, ModelDrafter, Network, Request, Sampling
from draftstill.distill import Objective, Teacher, fused, fused_loss
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


@pytest.mark.parametrize("name", ["forward_kl", "lk", "nla", "jsd"])
@pytest.mark.parametrize("form", ["recorded", "hidden"])
def test_the_gradient_of_bfloat16_products_is_summed_in_float32(form, name, monkeypatch):
    """Block by block into one sum, in place; blocks of a few rows, so that there are many."""
    g = torch.Generator().manual_seed(0)
    V, H, N = 1024, 64, 200
    head, truth, noise = (0.3 * torch.randn(rows, H, generator=g) for rows in (V, N, N))
    p, ids = (truth @ head.T).softmax(-1).topk(64, -1)
    wanted = gradients_of(truth + noise, head, form, truth, p, ids, name, "cpu", torch.float32)
    monkeypatch.setattr(fused, "_CUDA_ELEMENTS", (16 * V, 4 * V))
    small = gradients_of(truth + noise, head, form, truth, p, ids, name, "cuda", torch.bfloat16)
    monkeypatch.undo()
    large = gradients_of(truth + noise, head, form, truth, p, ids, name, "cuda", torch.bfloat16)
    for a, b, c in zip(small, large, wanted, strict=True):
        assert a.dtype == torch.float32 and (a - b).norm() < 1e-5 * b.norm() and (a - c).norm() < 0.05 * c.norm()


def gradients_of(hidden, head, form, truth, p, ids, name, device, compute):
    h, w = hidden.to(device).requires_grad_(), head.to(device).requires_grad_()
    on = lambda x: x.to(device)  # noqa: E731
    recorded = form == "recorded"
    teacher = Teacher(on(ids), on(p), on(1 - p.sum(-1))) if recorded else Teacher(hidden_NH=on(truth), head_VH=on(head))
    fused_loss(h, w, teacher, Objective(name), compute=compute)[0].backward()
    return h.grad.cpu(), w.grad.cpu()


@pytest.mark.parametrize("name", ["tvd", "nla", "lk"])
def test_a_draft_that_equals_its_target_is_not_pushed(name):
    g = torch.Generator().manual_seed(0)
    truth, head = torch.randn(300, 64, generator=g).cuda(), (0.3 * torch.randn(5000, 64, generator=g)).cuda()
    pushes = []
    for hidden in (truth, truth + 0.3 * torch.randn(300, 64, generator=g).cuda()):
        h = hidden.clone().requires_grad_()
        fused_loss(h, head.requires_grad_(), Teacher(hidden_NH=truth, head_VH=head.detach()), Objective(name))[0].backward()
        pushes.append(h.grad.norm().item())
    assert pushes[0] < 1e-3 * pushes[1]
