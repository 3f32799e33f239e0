"""The fused head against the oracles, in value and gradient, against float64."""

from __future__ import annotations

import itertools

import pytest
import torch

from draftstill.distill.divergences import LOSSES, alpha, alpha_bounds, bucketed, divergence
from draftstill.distill.fused import STATS, Objective, Teacher, fused_loss

N, H, V, K = 37, 24, 211, 16


def problem(closeness: float, seed: int = 0, dtype=torch.float64):
    """Teacher logits, draft hidden states and head; closeness 1 makes the draft equal to the teacher."""
    g = torch.Generator().manual_seed(seed)
    head = torch.randn(V, H, generator=g, dtype=torch.float64)
    truth = torch.randn(N, H, generator=g, dtype=torch.float64)
    hidden = truth + (1 - closeness) * 2 * torch.randn(N, H, generator=g, dtype=torch.float64)
    return truth.to(dtype), hidden.to(dtype), (head * 0.6).to(dtype)


def record(p, k):
    values, ids = p.topk(k, -1)
    return Teacher(ids, values, 1 - values.sum(-1))


def run(hidden, head, teacher, objective, **kw):
    hidden, head = hidden.clone().requires_grad_(), head.clone().requires_grad_()
    loss, stats = fused_loss(hidden, head, teacher, objective, **kw)
    loss.backward()
    return loss.detach(), hidden.grad, head.grad, dict(zip(STATS, stats.tolist(), strict=True))


def oracle(hidden, head, p, name, *, eta=3.0, temperature=1.0, teacher=None, weight=None):
    hidden, head = hidden.clone().requires_grad_(), head.clone().requires_grad_()
    q = (hidden @ head.T / temperature).softmax(-1)
    outcomes = (p, q) if teacher is None else bucketed(q, teacher.ids_NK, teacher.p_NK, teacher.tail_N)
    per_token = divergence(name, *outcomes, eta)
    (per_token * (1 if weight is None else weight)).sum().backward()
    return per_token.detach(), hidden.grad, head.grad


def close(a, b, tolerance):
    return ((a - b).norm() / b.norm().clamp_min(1e-12)).item() < tolerance


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("closeness", [0.3, 0.85, 0.97])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("form", ["recorded", "hidden"])
def test_value_and_gradient_against_float64(name, closeness, temperature, form):
    truth, hidden, head = problem(closeness)
    p = (truth @ head.T / temperature).softmax(-1)
    teacher64 = record(p, K) if form == "recorded" else None
    value, grad_hidden, grad_head = oracle(hidden, head, p, name, temperature=temperature, teacher=teacher64)
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 2e-5)):
        teacher = Teacher(hidden_NH=truth.to(dtype), head_VH=head.to(dtype))
        if teacher64 is not None:
            teacher = Teacher(teacher64.ids_NK, teacher64.p_NK.to(dtype), teacher64.tail_N.to(dtype))
        loss, dh, dw, stats = run(hidden.to(dtype), head.to(dtype), teacher, Objective(name, 3.0, temperature))
        assert abs(loss.item() / value.sum().item() - 1) < max(tolerance, 1e-6)  # the scalar itself is float32
        assert close(dh.double(), grad_hidden, tolerance) and close(dw.double(), grad_head, max(tolerance, 1e-6))
        assert stats["loss"] == pytest.approx(value.sum().item(), rel=1e-4)


@pytest.mark.parametrize("name", LOSSES)
def test_small_blocks_change_nothing(name, monkeypatch):
    from draftstill.distill import fused

    truth, hidden, head = problem(0.8)
    teacher = record((truth @ head.T).softmax(-1), K)
    whole = run(hidden, head, teacher, Objective(name))
    monkeypatch.setattr(fused, "_BLOCK_ELEMENTS", 10 * V)
    monkeypatch.setattr(fused, "_TILE_ELEMENTS", 3 * V)
    parts = run(hidden, head, teacher, Objective(name))
    assert all(close(a, b, 1e-6) for a, b in zip(parts[:3], whole[:3], strict=True))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("form", ["recorded", "hidden"])
def test_student_equal_to_teacher(name, form):
    truth, _, head = problem(1.0)
    teacher = record((truth @ head.T).softmax(-1), K) if form == "recorded" else Teacher(hidden_NH=truth, head_VH=head)
    loss, dh, dw, stats = run(truth, head, teacher, Objective(name))
    assert abs(loss.item()) < 1e-6
    if name == "forward_kl":  # TVD's subgradient at p = q may be anything in its cone
        assert dh.norm() < 1e-6 and dw.norm() < 1e-6
    assert stats["alpha_high"] == pytest.approx(N, abs=1e-6) and stats["top1"] == N


def test_weights_mask_and_scale():
    truth, hidden, head = problem(0.6)
    teacher = record((truth @ head.T).softmax(-1), K)
    weight = torch.rand(N, dtype=torch.float64).round(decimals=2)
    weight[::3] = 0
    value, grad_hidden, _ = oracle(hidden, head, None, "lk", teacher=teacher, weight=weight)
    loss, dh, _, stats = run(hidden, head, teacher, Objective("lk"), weight_N=weight)
    assert loss.item() == pytest.approx((value * weight).sum().item(), rel=1e-6)
    assert close(dh, grad_hidden, 1e-9) and (dh[::3] == 0).all() and stats["weight"] == pytest.approx(weight.sum().item())
    nothing = run(hidden, head, teacher, Objective("lk"), weight_N=torch.zeros(N))
    assert nothing[0] == 0 and (nothing[1] == 0).all() and (nothing[2] == 0).all()


def test_gradient_is_a_sum_over_any_split():
    truth, hidden, head = problem(0.7)
    teacher = record((truth @ head.T).softmax(-1), K)
    whole = run(hidden, head, teacher, Objective("lk"))
    total = torch.zeros_like(head)
    for part in (slice(0, 5), slice(5, 30), slice(30, N)):
        piece = Teacher(teacher.ids_NK[part], teacher.p_NK[part], teacher.tail_N[part])
        total += run(hidden[part], head, piece, Objective("lk"))[2]
    assert close(total, whole[2], 1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_extreme_teachers_are_finite(name):
    _, hidden, head = problem(0.5)
    hidden = hidden.float() * 30  # logits in the hundreds
    one_hot = Teacher(
        torch.full((N, 3), -1).index_fill_(1, torch.tensor([0]), 7), torch.tensor([[1.0, 0.0, 0.0]]).expand(N, 3), torch.zeros(N)
    )
    whole = Teacher(torch.arange(V).expand(N, V), torch.full((N, V), 1 / V), torch.zeros(N))
    for teacher, objective in itertools.product((one_hot, whole), (Objective(name), Objective(name, 10.0, 0.5))):
        loss, dh, dw, stats = run(hidden, head.float(), teacher, objective)
        assert torch.isfinite(loss) and torch.isfinite(dh).all() and torch.isfinite(dw).all() and loss >= 0
        assert 0 <= stats["alpha_low"] <= stats["alpha_high"] <= N * (1 + 1e-6)


def test_bounds_hold_the_true_alpha():
    truth, hidden, head = problem(0.5)
    p, q = (truth @ head.T).softmax(-1), (hidden @ head.T).softmax(-1)
    true = alpha(p, q)
    for k in (1, 4, 16, 64, V):
        teacher = record(p, k)
        low, high = alpha_bounds(*bucketed(q, teacher.ids_NK, teacher.p_NK, teacher.tail_N))
        assert (low <= true + 1e-12).all() and (true <= high + 1e-9).all()
    _, _, _, stats = run(hidden, head, record(p, 16), Objective())
    assert stats["alpha_low"] <= true.sum().item() <= stats["alpha_high"]


def test_a_bucket_is_never_worse_than_the_whole():
    """Merging outcomes cannot raise a divergence, and with K = V it is the divergence itself."""
    truth, hidden, head = problem(0.5)
    p, q = (truth @ head.T).softmax(-1), (hidden @ head.T).softmax(-1)
    for name in ("forward_kl", "tvd"):
        full = divergence(name, p, q)
        for k in (1, 16, V):
            t = record(p, k)
            merged = divergence(name, *bucketed(q, t.ids_NK, t.p_NK, t.tail_N))
            assert (merged <= full + 1e-9).all()
        assert torch.allclose(merged, full, atol=1e-9)


def test_trimmed_head_is_the_law_over_kept_rows():
    """Recorded ids outside the kept rows fall into the bucket; sampled rows estimate the rest of the sum."""
    truth, hidden, head = problem(0.6)
    p = (truth @ head.T).softmax(-1)
    whole = record(p, K)
    kept = torch.arange(0, V, 2)
    place = torch.full((V,), -1)
    place[kept] = torch.arange(len(kept))
    ids = place[whole.ids_NK]
    inside = whole.p_NK * (ids >= 0)
    teacher = Teacher(ids, inside, 1 - inside.sum(-1))
    loss, dh, _, _ = run(hidden, head[kept], teacher, Objective())
    q = (hidden @ head[kept].T).softmax(-1)
    value = divergence("forward_kl", *bucketed(q, ids, inside, teacher.tail_N))
    assert loss.item() == pytest.approx(value.sum().item(), rel=1e-6)
    # all other rows "sampled": offset log 1 = 0 makes the trimmed head the whole one
    rest = torch.arange(1, V, 2)
    loss, dh, _, _ = run(hidden, head[torch.cat([kept, rest])], teacher, Objective(), offset_V=torch.zeros(V, dtype=torch.float64))
    q = (hidden @ head.T).softmax(-1)
    _, truth_grad, _ = oracle(
        hidden, head, None, "forward_kl", teacher=Teacher(torch.where(ids >= 0, whole.ids_NK, -1), inside, teacher.tail_N)
    )
    assert close(dh, truth_grad, 1e-9)


def test_bfloat16_products_stay_near():
    truth, hidden, head = problem(0.6)
    teacher = record((truth @ head.T).softmax(-1), K)
    exact = run(hidden, head, teacher, Objective("lk"))
    rough = run(hidden.float(), head.float(), Teacher(teacher.ids_NK, teacher.p_NK.float(), teacher.tail_N.float()), Objective("lk"),
                compute=torch.bfloat16)  # fmt: skip
    assert close(rough[1].double(), exact[1], 0.05) and rough[1].dtype == torch.float32


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("scale", [1.5, 3.0, 5.0])
def test_drafts_sharper_than_the_target_keep_their_gradient(name, scale):
    """The draft's bucket is thin, down to 1e-9: its mass and the gradient at the K ids must not come from differences of near-equals."""
    truth, hidden, head = problem(0.98)
    p = (truth @ head.T).softmax(-1)
    teacher64 = record(p, K)
    _, grad_hidden, grad_head = oracle(hidden * scale, head, p, name, teacher=teacher64)
    teacher = Teacher(teacher64.ids_NK, teacher64.p_NK.float(), teacher64.tail_N.float())
    _, dh, dw, _ = run(hidden.float() * scale, head.float(), teacher, Objective(name))
    assert close(dh.double(), grad_hidden, 1e-4) and close(dw.double(), grad_head, 1e-4)


def test_unused_places_anywhere_in_a_row():
    """-1 before, between and after used ids, and a row without any, against the oracle."""
    _, hidden, head = problem(0.6)
    g = torch.Generator().manual_seed(4)
    ids = torch.stack([torch.randperm(V, generator=g)[:K] for _ in range(N)])
    used = torch.rand(N, K, generator=g) < 0.5
    used[0], used[1, 0] = False, False
    p_k = torch.rand(N, K, generator=g, dtype=torch.float64) * used / K
    ids = torch.where(used, ids, -1)
    teacher = Teacher(ids, p_k, 1 - p_k.sum(-1))
    for name in LOSSES:
        value, grad_hidden, grad_head = oracle(hidden, head, None, name, teacher=teacher)
        loss, dh, dw, _ = run(hidden, head, teacher, Objective(name))
        assert loss.item() == pytest.approx(value.sum().item(), rel=1e-6)
        assert close(dh, grad_hidden, 1e-9) and close(dw, grad_head, 1e-6)
