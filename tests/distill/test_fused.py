"""The fused head against the oracles, in value and gradient, against float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from draftstill.distill import fused
from draftstill.distill.divergences import Objective, alpha, cross_entropy, divergence, kept
from draftstill.distill.fused import Confidence, Teacher, fused_loss, fused_tokens
from draftstill.distill.kernels import LOSS_TERMS
from draftstill.distill.weights import prefix_confidence
from tests.distill.laws import BASES, H, K, N, V, cast, error, oracle, per_token, problem, record, run

TOKENS = torch.randint(V, (N,), generator=torch.Generator().manual_seed(5)).index_fill_(0, torch.tensor([N - 1]), -1)
OBJECTIVES = {
    **{name: Objective(name) for name in BASES},
    "jsd .2, T .7": Objective("jsd", beta=0.2, temperature=0.7),
    "lk 10, T 1.5": Objective("lk", 10.0, 1.5),
    "ce": Objective("ce", temperature=0.7),
    "KL, TVD": Objective(mix=(("forward_kl", 0.5), ("tvd", 0.5)), temperature=0.7),
    "all": Objective(
        mix=(("ce", 0.1), ("nla", 0.2), ("jsd", 0.3), ("lk", 0.4), ("reverse_kl", 0.5), ("forward_kl", 0.6), ("tvd", 0.7)), beta=0.3
    ),
}
FORMS = ("recorded", "hidden")


def teacher_of(form: str, truth: torch.Tensor, head: torch.Tensor, temperature: float = 1.0) -> Teacher:
    teacher = record((truth @ head.T / temperature).softmax(-1), K) if form == "recorded" else Teacher(hidden_NH=truth, head_VH=head)
    teacher.token_N = TOKENS
    return teacher


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
@pytest.mark.parametrize("acceptance", [0.3, 0.9, 0.98])
@pytest.mark.parametrize("form", FORMS)
def test_value_and_gradient_against_float64(form: str, acceptance: float, objective: Objective) -> None:
    truth, hidden, head = problem(acceptance, 29)
    nearest = ((hidden @ head.T).softmax(-1) / (truth @ head.T).softmax(-1) - 1).abs().min()
    assert nearest > 50 * torch.finfo(torch.float32).eps, "p and q that count as equal have no side of TVD"
    teacher = teacher_of(form, truth, head, objective.temperature)
    value, grad_hidden, grad_head = oracle(hidden, head, teacher, objective)
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-5)):
        loss, dh, dw, stats = run(hidden.to(dtype), head.to(dtype), cast(teacher, dtype), objective)
        found = error(dh, grad_hidden), error(dw, grad_head), abs(stats["loss"] / value.sum().item() - 1)
        assert max(found) < tolerance, (dtype, found)
        assert loss.item() == pytest.approx(stats["loss"], rel=1e-6)  # the scalar itself is float32


@pytest.mark.parametrize("form", FORMS)
def test_each_term_is_told_apart(form: str) -> None:
    """The terms of the mixture of all, each with its factor, against runs of that loss alone; LK's parts count as forward KL and TVD."""
    truth, hidden, head = problem(0.6)
    teacher = teacher_of(form, truth, head)
    objective = OBJECTIVES["all"]
    _, _, _, stats = run(hidden, head, teacher, objective)
    alone = {n: f * run(hidden, head, teacher, Objective(n, beta=objective.beta))[3]["loss"] for n, f in objective.terms}
    for name in ("ce", "nla", "jsd", "reverse_kl"):
        assert stats[name] == pytest.approx(alone[name], rel=1e-9), name
    assert stats["forward_kl"] + stats["tvd"] == pytest.approx(alone["forward_kl"] + alone["tvd"] + alone["lk"], rel=1e-9)
    assert stats["forward_kl"] > alone["forward_kl"] and stats["tvd"] > alone["tvd"]
    assert sum(stats[n] for n in LOSS_TERMS) == pytest.approx(stats["loss"], rel=1e-12)
    _, _, _, single = run(hidden, head, teacher, Objective("reverse_kl"))
    assert [n for n in LOSS_TERMS if single[n]] == ["reverse_kl"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("top_k", "top_p"), [(8, 1.0), (0, 0.7), (12, 0.9)])
@pytest.mark.parametrize("name", [*BASES, "ce"])
def test_laws_cut_as_the_deployment_cuts_them(name: str, top_k: int, top_p: float, form: str) -> None:
    """Values, and gradients that flow through the kept entries only."""
    truth, hidden, head = problem(0.6)
    objective = Objective(name, temperature=0.7, top_k=top_k, top_p=top_p)
    teacher, whole = teacher_of(form, truth, head, 0.7), (truth @ head.T / 0.7).softmax(-1).float().double()
    if form == "recorded":
        teacher = record(whole, 9 * K)
        teacher.token_N = TOKENS
        assert (kept(whole.log(), top_k, top_p).sum(-1) <= 9 * K).all(), "test_cuts.py has what reaches beyond the record"
    value, grad_hidden, grad_head = oracle(hidden, head, teacher, objective, whole_NV=whole)
    loss, dh, dw, _ = run(hidden, head, teacher, objective)
    assert loss.item() == pytest.approx(value.sum().item(), rel=1e-6)
    assert error(dh, grad_hidden) < 1e-9 and error(dw, grad_head) < 1e-9
    never = ~(hidden @ head.T / 0.7).masked_fill(~fused_kept(hidden, head, objective), -torch.inf).isfinite().any(0)
    assert never.any() and (dw[never] == 0).all()


def fused_kept(hidden: torch.Tensor, head: torch.Tensor, objective: Objective) -> torch.Tensor:
    return kept(hidden @ head.T / objective.temperature, objective.top_k, objective.top_p)


@pytest.mark.parametrize("name", ["all", "lk 10, T 1.5"])
@pytest.mark.parametrize("form", FORMS)
def test_small_blocks_change_nothing(form: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    truth, hidden, head = problem(0.9)
    teacher = teacher_of(form, truth, head)
    confidence = Confidence(4, torch.cat([torch.arange(20), torch.arange(N - 20)]))
    whole = run(hidden, head, teacher, OBJECTIVES[name], confidence=confidence)
    cut_up(monkeypatch, 10, 3)
    parts = run(hidden, head, teacher, OBJECTIVES[name], confidence=confidence)
    assert all(error(a, b) < 1e-6 for a, b in zip(parts[:3], whole[:3], strict=True))
    assert parts[3] == pytest.approx(whole[3])


@pytest.mark.parametrize("compute", [torch.bfloat16, None])
@pytest.mark.parametrize("form", FORMS)
def test_a_float32_head_in_pieces(form: str, compute: torch.dtype | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products in bfloat16 go by columns; weights that are bfloat16 themselves are used whole. Rounding apart, both are the oracle's."""
    truth, hidden, head = problem(0.6)
    teacher = cast(teacher_of(form, truth, head), torch.float32)
    value, grad_hidden, grad_head = oracle(hidden, head, teacher_of(form, truth, head), OBJECTIVES["lk 10, T 1.5"])
    cut_up(monkeypatch, 12, 5)
    monkeypatch.setattr(fused, "_COLUMNS", 64)
    seen: list[int] = []
    real = fused._product
    monkeypatch.setattr(fused, "_product", lambda a, b: seen.append(a.shape[0]) or real(a, b))
    dtype = torch.float32 if compute else torch.bfloat16
    loss, dh, dw, _ = run(hidden.to(dtype), head.to(dtype), cast(teacher, dtype), OBJECTIVES["lk 10, T 1.5"], compute=compute)
    # Where q is near p, rounding decides on which side of TVD an id is.
    assert max(error(dh, grad_hidden), error(dw, grad_head)) < 0.1 and loss.item() == pytest.approx(value.sum().item(), rel=0.02)
    assert max(seen) == (64 if compute else V)


def cut_up(monkeypatch: pytest.MonkeyPatch, block: int, tile: int) -> None:
    """Blocks and tiles of at most so many rows (of numbers of 8 bytes)."""
    monkeypatch.setattr(fused, "_BLOCK_BYTES", 8 * block * V)
    monkeypatch.setattr(fused, "_TILE_ELEMENTS", tile * V)


@pytest.mark.parametrize("sizes", [None, (10, 3), (4, 4), (N, 1)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("form", FORMS)
def test_student_equal_to_teacher(
    form: str, name: str, dtype: torch.dtype, sizes: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the products are cut, and whatever the order of their sums: the last bits of the logits differ, and that pushes nowhere."""
    if sizes is not None:
        cut_up(monkeypatch, *sizes)
    truth, _, head = problem(0.9)
    teacher = teacher_of(form, truth, head)
    if form == "recorded":  # to the last bit of float64
        values, ids = (truth @ head.T).softmax(-1).sort(descending=True)
        teacher = Teacher(ids[:, :K], values[:, :K], values[:, K:].sum(1))
    loss, dh, dw, stats = run(truth.flip(1).to(dtype), head.flip(1).to(dtype), cast(teacher, dtype), Objective(name))
    far = run(problem(0.9)[1].to(dtype), head.to(dtype), cast(teacher, dtype), Objective(name))
    assert abs(loss.item()) < 1e-5 and dh.norm() < 1e-4 * far[1].norm() and dw.norm() < 1e-4 * far[2].norm()
    assert stats["alpha_high"] == pytest.approx(N, rel=1e-6) and stats["top1"] == N


def test_weights_mask_and_scale() -> None:
    truth, hidden, head = problem(0.6)
    weight = torch.rand(N, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).round(decimals=2)
    weight[::3] = 0
    for form, objective in itertools.product(FORMS, (OBJECTIVES["all"], Objective("nla"))):
        teacher = teacher_of(form, truth, head)
        value, grad_hidden, _ = oracle(hidden, head, teacher, objective, weight_N=weight)
        loss, dh, _, stats = run(hidden, head, teacher, objective, weight_N=weight)
        assert loss.item() == pytest.approx((value * weight).sum().item(), rel=1e-6)
        assert error(dh, grad_hidden) < 1e-9 and (dh[::3] == 0).all() and stats["weight"] == pytest.approx(weight.sum().item())
        nothing = run(hidden, head, teacher, objective, weight_N=torch.zeros(N))
        assert nothing[0] == 0 and (nothing[1] == 0).all() and (nothing[2] == 0).all() and nothing[3]["weight"] == 0
        none = run(hidden[:0], head, cast(part_of(teacher, slice(0, 0)), torch.float64), objective)
        assert none[0] == 0 and (none[2] == 0).all()


def part_of(teacher: Teacher, rows: slice) -> Teacher:
    cut = lambda x: None if x is None else x[rows]  # noqa: E731
    return Teacher(
        cut(teacher.ids_NK), cut(teacher.p_NK), cut(teacher.tail_N), cut(teacher.hidden_NH), teacher.head_VH, cut(teacher.token_N)
    )


@pytest.mark.parametrize("form", FORMS)
def test_prefix_confidence_comes_from_the_pass_itself(form: str) -> None:
    truth, hidden, head = problem(0.6)
    teacher, place = teacher_of(form, truth, head), torch.cat([torch.arange(11), torch.arange(N - 11)])
    objective = Objective("forward_kl")
    seen = fused_tokens(hidden, head, teacher, objective)
    weight = prefix_confidence(seen["alpha_high"], place, 4)
    loss, dh, _, stats = run(hidden, head, teacher, objective, confidence=Confidence(4, place))
    value, grad_hidden, _ = oracle(hidden, head, teacher, objective, weight_N=weight)
    assert loss.item() == pytest.approx((value * weight).sum().item(), rel=1e-6) and error(dh, grad_hidden) < 1e-9
    assert stats["weight"] == pytest.approx(weight.sum().item())


@pytest.mark.parametrize("form", FORMS)
def test_gradient_is_a_sum_over_any_split(form: str) -> None:
    truth, hidden, head = problem(0.7)
    teacher, objective = teacher_of(form, truth, head), OBJECTIVES["all"]
    whole = run(hidden, head, teacher, objective)
    total = torch.zeros_like(head)
    for rows in (slice(0, 5), slice(5, 30), slice(30, N)):
        total += run(hidden[rows], head, part_of(teacher, rows), objective)[2]
    assert error(total, whole[2]) < 1e-9


@pytest.mark.parametrize("form", FORMS)
def test_what_is_told_of_each_token(form: str) -> None:
    truth, hidden, head = problem(0.6)
    teacher, objective = teacher_of(form, truth, head), OBJECTIVES["all"]
    p, q = (truth @ head.T).softmax(-1), (hidden @ head.T).softmax(-1)
    seen = fused_tokens(hidden, head, teacher, objective)
    assert torch.allclose(seen["loss"], per_token(hidden, head, teacher, objective))
    assert torch.equal(seen["top1"].bool(), p.argmax(-1) == q.argmax(-1)) and 0 < seen["top1"].sum() < N
    if form == "hidden":
        assert torch.allclose(seen["alpha_low"], alpha(p, q)) and (seen["tail"] == 0).all()
    else:
        from draftstill.distill.divergences import bucketed

        assert teacher.ids_NK is not None and teacher.p_NK is not None and teacher.tail_N is not None
        p, q = bucketed(q, teacher.ids_NK, teacher.p_NK, teacher.tail_N)
        assert torch.allclose(seen["tail"], teacher.tail_N)
    for law, key in ((p, "entropy_p"), (q, "entropy_q")):
        assert torch.allclose(seen[key], torch.special.entr(law).sum(-1))
    assert torch.allclose(seen["alpha_high"], alpha(p, q))


EXTREME = [
    *OBJECTIVES.values(),
    Objective("forward_kl", top_p=0.5),
    Objective("reverse_kl", top_k=2),
    Objective("nla", top_k=1, temperature=0.5),
]


@pytest.mark.parametrize("objective", EXTREME, ids=range(len(EXTREME)))
def test_extreme_teachers_are_finite(objective: Objective) -> None:
    _, hidden, head = problem(0.5)
    hidden, head = hidden.float() * 30, head.float()  # logits in the hundreds
    one_hot = Teacher(
        torch.full((N, 3), -1).index_fill_(1, torch.tensor([0]), 7), torch.tensor([[1.0, 0.0, 0.0]]).expand(N, 3), torch.zeros(N)
    )
    flat = Teacher(torch.arange(V).expand(N, V), torch.full((N, V), 1 / V), torch.zeros(N))
    # K larger than the vocabulary: places that can only be unused.
    wide = Teacher(torch.cat([torch.arange(V), torch.full((9,), -1)]).expand(N, -1), torch.full((N, V + 9), 1 / V), torch.zeros(N))
    peaked = Teacher(hidden_NH=-hidden, head_VH=head)
    for teacher in (one_hot, flat, wide, peaked):
        teacher.token_N = TOKENS
        loss, dh, dw, stats = run(hidden, head, teacher, objective)
        assert torch.isfinite(loss) and torch.isfinite(dh).all() and torch.isfinite(dw).all() and loss >= 0
        assert 0 <= stats["alpha_low"] <= stats["alpha_high"] <= N * (1 + 1e-6)
    a, b = run(hidden, head, flat, objective), run(hidden, head, wide, objective)
    assert error(b[1], a[1].double()) < 1e-6 and a[3] == pytest.approx(b[3])


def test_a_one_hot_teacher_makes_kl_and_nla_the_cross_entropy() -> None:
    _, hidden, head = problem(0.5)
    token = TOKENS.clamp_min(0)
    teacher = Teacher(token[:, None], torch.ones(N, 1, dtype=torch.float64), torch.zeros(N, dtype=torch.float64), token_N=token)
    value = cross_entropy((hidden @ head.T).softmax(-1), token).sum().item()
    truth = run(hidden, head, teacher, Objective("ce"))
    for name in ("forward_kl", "nla"):
        loss, dh, _, _ = run(hidden, head, teacher, Objective(name))
        assert loss.item() == pytest.approx(value, rel=1e-6) and error(dh, truth[1]) < 1e-6


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("form", FORMS)
def test_padding_columns_of_minus_infinity(form: str, name: str) -> None:
    """Rows past the real vocabulary, blanked: the same loss and gradient as without them, and none for them."""
    truth, hidden, head = problem(0.7)
    teacher, objective = teacher_of(form, truth, head), OBJECTIVES[name]
    _, wanted, _, stats = run(hidden, head, teacher, objective)
    padded = torch.cat([head, torch.randn(13, H, dtype=torch.float64, generator=torch.Generator().manual_seed(0))])
    blank = torch.zeros(V + 13, dtype=torch.float64).index_fill_(0, torch.arange(V, V + 13), -torch.inf)
    both = Teacher(teacher.ids_NK, teacher.p_NK, teacher.tail_N, teacher.hidden_NH, None, teacher.token_N)
    if form == "hidden":  # the target's padded rows: a column of its hidden states that blanks them
        both.hidden_NH = torch.cat([truth, torch.ones(N, 1, dtype=torch.float64)], 1)
        both.head_VH = torch.cat([padded, torch.where(torch.isfinite(blank), blank, -1e30)[:, None]], 1)
    _, dh, dw, found = run(hidden, padded, both, objective, offset_V=blank)
    assert error(dh, wanted) < 1e-9 and (dw[V:] == 0).all() and found == pytest.approx(stats)


@pytest.mark.parametrize(
    "objective", [o for n, o in OBJECTIVES.items() if n not in ("ce", "all")], ids=[n for n in OBJECTIVES if n not in ("ce", "all")]
)
def test_trimmed_head_is_the_law_over_kept_rows(objective: Objective) -> None:
    """Recorded ids outside the kept rows fall into the bucket; offsets stand for the rows that were not sampled."""
    truth, hidden, head = problem(0.6)
    whole = teacher_of("recorded", truth, head, objective.temperature)
    assert whole.ids_NK is not None and whole.p_NK is not None
    rows = torch.cat([torch.arange(0, V, 2), torch.arange(1, V, 4)])
    place = torch.full((V,), -1)
    place[torch.arange(0, V, 2)] = torch.arange((V + 1) // 2)
    offset = torch.zeros(len(rows), dtype=torch.float64)
    offset[(V + 1) // 2 :] = torch.log(torch.tensor(2.0, dtype=torch.float64))
    ids = place[whole.ids_NK]
    inside = whole.p_NK * (ids >= 0)
    teacher = Teacher(ids, inside, 1 - inside.sum(-1))
    value, grad_hidden, grad_head = oracle(hidden, head[rows], teacher, objective, offset_V=offset)
    loss, dh, dw, _ = run(hidden, head[rows], teacher, objective, offset_V=offset)
    assert loss.item() == pytest.approx(value.sum().item(), rel=1e-6) and error(dh, grad_hidden) < 1e-9 and error(dw, grad_head) < 1e-9


def test_bfloat16_products_stay_near() -> None:
    truth, hidden, head = problem(0.6)
    for form in FORMS:
        teacher = teacher_of(form, truth, head)
        exact = run(hidden, head, teacher, Objective(temperature=0.7))
        rough = run(hidden.float(), head.float(), cast(teacher, torch.float32), Objective(temperature=0.7), compute=torch.bfloat16)
        assert error(rough[1], exact[1]) < 0.05 and rough[1].dtype == rough[2].dtype == torch.float32


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("scale", [1.5, 3.0, 5.0])
def test_drafts_sharper_than_the_target_keep_their_gradient(name: str, scale: float) -> None:
    """The draft's bucket is thin, down to 1e-9: its mass and the gradient at the K ids must not come from differences of near-equals."""
    truth, hidden, head = problem(0.95)
    teacher = teacher_of("recorded", truth, head)
    hidden = (hidden * scale).float().double()
    _, grad_hidden, grad_head = oracle(hidden, head, teacher, Objective(name))
    _, dh, dw, _ = run(hidden.float(), head.float(), cast(teacher, torch.float32), Objective(name))
    assert error(dh, grad_hidden) < 2e-5 and error(dw, grad_head) < 2e-5


@pytest.mark.parametrize("name", OBJECTIVES)
def test_unused_places_anywhere_in_a_row(name: str) -> None:
    """-1 before, between and after used ids, and a row without any, against the oracle."""
    _, hidden, head = problem(0.6)
    g = torch.Generator().manual_seed(4)
    ids = torch.stack([torch.randperm(V, generator=g)[:K] for _ in range(N)])
    used = torch.rand(N, K, generator=g) < 0.5
    used[0], used[1, 0] = False, False
    p_k = torch.rand(N, K, generator=g, dtype=torch.float64) * used / K
    teacher = Teacher(torch.where(used, ids, -1), p_k, 1 - p_k.sum(-1), token_N=TOKENS)
    value, grad_hidden, grad_head = oracle(hidden, head, teacher, OBJECTIVES[name])
    loss, dh, dw, _ = run(hidden, head, teacher, OBJECTIVES[name])
    assert loss.item() == pytest.approx(value.sum().item(), rel=1e-6) and error(dh, grad_hidden) < 1e-9 and error(dw, grad_head) < 1e-9


def test_rounded_records_are_laws_to_a_loss() -> None:
    """8-bit log-probabilities miss the sum of 1: no loss goes below 0, and gradients are the oracle's."""
    truth, hidden, head = problem(0.98)
    teacher = teacher_of("recorded", truth, head)
    assert teacher.p_NK is not None
    teacher.p_NK = (teacher.p_NK.log() * 30).round().div(30).exp()
    for name in ("forward_kl", "reverse_kl", "jsd", "nla"):
        value, grad_hidden, _ = oracle(hidden, head, teacher, Objective(name))
        loss, dh, _, _ = run(hidden, head, teacher, Objective(name))
        assert (value >= 0).all() and loss.item() == pytest.approx(value.sum().item(), rel=1e-6) and error(dh, grad_hidden) < 1e-9


def test_half_of_the_gradient_is_not_formed() -> None:
    truth, hidden, head = problem(0.7)
    teacher = teacher_of("hidden", truth, head)
    one, two = hidden.clone().requires_grad_(), head.clone().requires_grad_()
    fused_loss(one, head, teacher, Objective())[0].mul(3).backward()
    fused_loss(hidden, two, teacher, Objective())[0].mul(3).backward()
    _, dh, dw, _ = run(hidden, head, teacher, Objective())
    assert one.grad is not None and two.grad is not None and error(one.grad, 3 * dh) < 1e-9 and error(two.grad, 3 * dw) < 1e-9
    loss = fused_loss(hidden.clone().requires_grad_(), head, teacher, Objective())[0]
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="formed once"):
        loss.backward()


def test_ce_asks_for_tokens() -> None:
    truth, hidden, head = problem(0.7)
    with pytest.raises(ValueError, match=r"Teacher\.token_N"):
        fused_loss(hidden, head, Teacher(hidden_NH=truth, head_VH=head), Objective(mix=(("ce", 1.0),)))


# --- the tests themselves ----------------------------------------------------------------------------------------------------


def _mutants() -> dict[str, Any]:
    """Faults that other projects have shipped, planted in the kernels' own text."""
    recorded = "kernels.recorded"
    return {
        "sign of KL": (recorded, 'h -= _column(scale["forward_kl"])', 'h += _column(scale["forward_kl"])'),
        "no 1/T": (recorded, "weight.double() / objective.temperature", "weight.double()"),
        "renormalised top K": (recorded, "tail_N.double()[:, None]], 1)", "0 * tail_N.double()[:, None]], 1)"),
        "bucket left out of sum h": (recorded, "h.sum(1, keepdim=True)", "h[:, :-1].sum(1, keepdim=True)"),
        "beta on the wrong side": (recorded, "L = torch.log1p(objective.beta *", "L = torch.log1p((1 - objective.beta) *"),
        "dense sign": ("kernels.dense", '-w * scale["tvd"]', 'w * scale["tvd"]'),
        "dense no 1/T": ("kernels.dense", "weight.to(z_NV.dtype) / objective.temperature", "weight.to(z_NV.dtype)"),
        "dense cross": ("kernels.dense", "r.sub_(_column(cross))", "r"),
        "dense beta": ("kernels.dense", "_expm1(far).mul_(beta)", "_expm1(far).mul_(1 - beta)"),
    }


@pytest.mark.parametrize("fault", _mutants())
def test_planted_faults_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import inspect

    from draftstill.distill import kernels

    where, old, new = _mutants()[fault]
    function = where.removeprefix("kernels.")
    text = inspect.getsource(getattr(kernels, function))
    assert text.count(old) >= 1, "the kernel has changed: plant the fault anew"
    scope = dict(vars(kernels))
    exec(text.replace(old, new), scope)
    monkeypatch.setattr(fused, function, scope[function])
    form = "recorded" if function == "recorded" else "hidden"
    with pytest.raises(AssertionError):
        for name in ("forward_kl", "tvd", "reverse_kl", "jsd .2, T .7", "all", "lk 10, T 1.5"):
            test_value_and_gradient_against_float64(form, 0.9, OBJECTIVES[name])


def test_divergence_of_the_bucket_is_what_is_trained() -> None:
    """Reverse KL and JSD on a recording are those of the K + 1 outcomes: at most the whole ones."""
    truth, hidden, head = problem(0.5)
    p, q = (truth @ head.T).softmax(-1), (hidden @ head.T).softmax(-1)
    for name in ("reverse_kl", "jsd"):
        seen = fused_tokens(hidden, head, teacher_of("recorded", truth, head), Objective(name))["loss"]
        assert (seen <= divergence(name, p, q) + 1e-6).all()
