"""Recorded laws after top-k and top-p, against whole softmaxes that the decoder itself processes: what is known of them is exact, what is not is bracketed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftstill.decode import Sampling, probabilities
from draftstill.distill.divergences import Objective, cut_bounds, cut_record
from draftstill.distill.fused import Teacher, fused_loss, fused_tokens
from draftstill.errors import DraftstillError
from draftstill.recipe_io import load_recipe
from tests.distill.laws import BASES
from tests.pipeline import write_recipe

ROWS, WIDE = 60, 1500
CUTS = [(5, 1.0), (40, 1.0), (200, 1.0), (0, 0.6), (0, 0.9), (0, 0.99), (20, 0.95), (100, 0.97)]
RECORDS = [(4, 1.0), (16, 1.0), (64, 1.0), (64, 0.9), (64, 0.99), (WIDE, 0.999)]


def logits(noise: float = 0.0, seed: int = 1) -> Tensor:
    """Laws as models have them: a few ids hold most of the mass in some rows, hundreds share it in others; noise makes a draft of them."""
    g = torch.Generator().manual_seed(seed)
    usual = -1.1 * torch.arange(1, WIDE + 1).float().log()
    z = (usual + 2 * torch.randn(ROWS, WIDE, generator=g)) * torch.linspace(0.6, 2.5, ROWS)[:, None]
    return z + noise * torch.randn(ROWS, WIDE, generator=g)


def recorded(z_NV: Tensor, k: int, kept_mass: float) -> Teacher:
    """As the scorer keeps it: k ids at most, and none once they hold ``kept_mass``."""
    p_NK, ids_NK = z_NV.double().softmax(-1).topk(k, -1)
    used_NK = p_NK.cumsum(-1) - p_NK < kept_mass
    p_NK = p_NK * used_NK
    return Teacher(torch.where(used_NK, ids_NK, -1), p_NK, (1 - p_NK.sum(-1)).clamp_min(0))


@pytest.mark.parametrize(("k", "kept_mass"), RECORDS)
@pytest.mark.parametrize(("top_k", "top_p"), CUTS)
def test_the_cut_law_is_the_decoders_or_bracketed(top_k: int, top_p: float, k: int, kept_mass: float) -> None:
    z = logits()
    teacher, true = recorded(z, k, kept_mass), probabilities(z, Sampling(1.0, top_k, top_p)).double()
    assert teacher.ids_NK is not None and teacher.p_NK is not None and teacher.tail_N is not None
    p, tail = cut_record(teacher.p_NK, teacher.tail_N, top_k, top_p)
    least, most, rest = cut_bounds(teacher.p_NK, teacher.tail_N, top_k, top_p)
    used = teacher.ids_NK >= 0
    at_ids = true.gather(1, teacher.ids_NK.clamp_min(0)) * used
    beyond = true.sum(-1) - at_ids.sum(-1)
    assert (least <= at_ids + 1e-6).all() and (at_ids <= most + 1e-6).all() and (beyond <= rest + 1e-5).all()
    assert (least <= p + 1e-9).all() and torch.allclose(p.sum(-1) + tail, torch.ones(ROWS, dtype=torch.float64), atol=1e-9)
    known = (most - least).amax(-1) < 1e-12
    assert torch.allclose(p[known], at_ids[known], atol=1e-6) and torch.allclose(tail[known], beyond[known], atol=1e-5)
    if top_k and kept_mass == 1 and k >= top_k:
        assert known.all() and (tail == 0).all(), "all that the sampler leaves was recorded"
    short = used.sum(-1) < top_k
    bucket = torch.minimum(teacher.tail_N, (top_k - used.sum(-1)) * least_of(teacher.p_NK))[short]
    assert torch.equal(tail[short] > 0, bucket > 0) or top_p < 1, "scaled back without its tail"
    if top_p == 1:
        assert torch.allclose(tail[short] / (1 - tail[short]), bucket / teacher.p_NK.sum(-1)[short])


def least_of(p_NK: Tensor) -> Tensor:
    return torch.where(p_NK > 0, p_NK, torch.inf).amin(-1)


@pytest.mark.parametrize("noise", [0.0, 0.3, 1.5])
@pytest.mark.parametrize(("k", "kept_mass"), RECORDS)
@pytest.mark.parametrize(("top_k", "top_p"), CUTS)
def test_the_bracket_holds_the_true_alpha(top_k: int, top_p: float, k: int, kept_mass: float, noise: float) -> None:
    z, guessed = logits(), logits(noise)
    sampling = Sampling(1.0, top_k, top_p)
    true = torch.minimum(probabilities(z, sampling), probabilities(guessed, sampling)).sum(-1).double()
    seen = fused_tokens(guessed, torch.eye(WIDE), cast32(recorded(z, k, kept_mass)), Objective("tvd", top_k=top_k, top_p=top_p))
    assert (seen["alpha_low"] <= true + 1e-5).all() and (true <= seen["alpha_high"] + 1e-5).all()
    assert (seen["alpha_high"] <= 1 + 1e-9).all()
    if noise == 0:
        assert (seen["alpha_high"] > 1 - 1e-5).all(), "a perfect draft"


def cast32(teacher: Teacher) -> Teacher:
    assert teacher.p_NK is not None and teacher.tail_N is not None
    return Teacher(teacher.ids_NK, teacher.p_NK.float(), teacher.tail_N.float())


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.9), (0, 0.99), (50, 0.97), (40, 1.0)])
def test_a_perfect_draft_is_hardly_pushed(name: str, top_k: int, top_p: float) -> None:
    """Where the nucleus reaches beyond the record, its mass is known to within one id. TVD and what is made of it take no side inside of that."""
    teacher, objective = cast32(recorded(logits(), 64, 1.0)), Objective(name, top_k=top_k, top_p=top_p)
    beyond = (probabilities(logits(), Sampling(1.0, top_k, top_p)) > 0).sum(-1) > 64
    pushes = {}
    for noise in (0.0, 0.3):
        z = logits(noise).requires_grad_()
        loss, _ = fused_loss(z, torch.eye(WIDE), teacher, objective)
        loss.backward()
        assert z.grad is not None
        pushes[noise] = z.grad.norm(dim=1)
    limit = {"tvd": 1e-4, "nla": 1e-4}.get(name, 0.05)
    for rows in (beyond, ~beyond):
        assert not rows.any() or float(pushes[0.0][rows].max()) < limit * float(pushes[0.3][rows].mean())
    assert top_k or beyond.sum() > 5, "there are such"


# --- the recipe -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["topk", "auto", "hidden"])
@pytest.mark.parametrize("where", ["loss", "phases", "candidates"])
def test_a_cut_of_more_ids_than_are_recorded_is_refused(where: str, mode: str, tmp_path: Path) -> None:
    loss = {"top_k": 17}
    train = {"loss": loss, "phases": [{"loss": loss}], "candidates": {"a": {"train": {"loss": loss}}}}
    path = write_recipe(tmp_path, record={"mode": mode}, train={where: train[where]})
    if mode == "hidden":
        assert load_recipe(path).record.top_k == 16
        return
    with pytest.raises(DraftstillError) as caught:
        load_recipe(path)
    shown = str(caught.value)
    assert "train.loss.top_k (17)" in shown and "record.top_k (16)" in shown and "record.mode: hidden" in shown
    assert load_recipe(path, ["record.top_k=17"]).record.top_k == 17
