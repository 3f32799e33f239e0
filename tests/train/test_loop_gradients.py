"""A step's gradient is the same however its batch is cut, padded, packed or spread over processes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from draftstill.train import step
from draftstill.train.data import Batch, collate
from tests.pipeline import borrowed
from tests.train.jobs import RECORDED, WEIGHED, assert_same, gradients, job_of, moved


def test_written_tokens_stand_at_the_law_that_they_were_drawn_from(tmp_path: Path) -> None:
    """What ``ce`` learns. Part of the text is the target's own: it gives those tokens more than the ones before and after them."""
    job = job_of(borrowed(tmp_path, *RECORDED))
    batch = collate(job.recording, range(len(job.recording)))
    teacher = batch.teacher
    assert teacher.ids_NK is not None and teacher.p_NK is not None and teacher.token_N is not None and batch.place_N is not None
    given = lambda token_N: float((teacher.p_NK * (teacher.ids_NK == token_N[:, None])).sum(-1).mean())  # noqa: E731
    assert given(teacher.token_N) > 1.3 * max(given(teacher.token_N.roll(n)) for n in (-1, 1))
    assert int((teacher.token_N < 0).sum()) <= len(job.recording) == int((batch.place_N == 0).sum())


@pytest.mark.parametrize("extra", [{}, {"head_tokens": 80}], ids=["whole", "trimmed"])
@pytest.mark.parametrize(("size", "accumulate"), [(1, 8), (2, 4), (4, 2)])
def test_accumulation_gives_the_gradient_of_one_batch(
    size: int, accumulate: int, extra: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"max_grad_norm": 1e9, **extra}
    whole = gradients(job_of(borrowed(tmp_path / "whole", *RECORDED, train=keys)), monkeypatch)
    cut = {**keys, "per_device_train_batch_size": size, "gradient_accumulation_steps": accumulate}
    assert_same(whole, gradients(job_of(borrowed(tmp_path / "cut", *RECORDED, train=cut)), monkeypatch))


def test_weighed_positions_do_not_depend_on_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixed losses, position filters, prefix confidence and selection: the same gradient for 8 sequences as for 2 times 4."""
    keys = {"max_grad_norm": 1e9, **WEIGHED}
    whole = gradients(moved(borrowed(tmp_path / "whole", *RECORDED, train=keys)), monkeypatch)
    cut = {**keys, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    assert_same(whole, gradients(moved(borrowed(tmp_path / "cut", *RECORDED, train=cut)), monkeypatch))
    plain = gradients(moved(borrowed(tmp_path / "plain", *RECORDED, train={"max_grad_norm": 1e9, "loss": WEIGHED["loss"]})), monkeypatch)
    head = "lm_head.weight"
    assert float((plain[head] - whole[head]).norm() / plain[head].norm()) > 0.1, "weights count"


@pytest.mark.parametrize("weighed", [False, True])
def test_padding_changes_nothing(weighed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = borrowed(tmp_path, *RECORDED, train={"max_grad_norm": 1e9, **(WEIGHED if weighed else {})})
    tight = gradients(moved(path), monkeypatch)

    def padded(*arguments: Any) -> Batch:
        batch = collate(*arguments)
        B, T = batch.ids_BT.shape
        noise = torch.randint(200, (B, 13), generator=torch.Generator().manual_seed(1))
        return dataclasses.replace(batch, ids_BT=torch.cat([batch.ids_BT, noise], 1), rows_N=batch.rows_N + batch.rows_N // T * 13)

    monkeypatch.setattr(step, "collate", padded)
    assert_same(tight, gradients(moved(path), monkeypatch))


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("key", ["packing", "gradient_checkpointing"])
def test_another_way_to_compute_a_step_changes_nothing(key: str, weighed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"max_grad_norm": 1e9, **(WEIGHED if weighed else {})}
    plain = gradients(moved(borrowed(tmp_path / "plain", *RECORDED, train=keys)), monkeypatch)
    rows: list[int] = []
    real = collate

    def seen(*arguments: Any) -> Batch:
        batch = real(*arguments)
        rows.append(len(batch.ids_BT))
        return batch

    monkeypatch.setattr(step, "collate", seen)
    other = gradients(moved(borrowed(tmp_path / "other", *RECORDED, train={**keys, key: True})), monkeypatch)
    assert_same(plain, other, 1e-5)
    assert (rows[-1] < 8) == (key == "packing"), "nothing was packed"


def test_the_gradient_is_the_mean_over_all_supervised_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against autograd through transformers' own logits and the float64 oracle."""
    from draftstill.distill.divergences import bucketed, forward_kl

    job = job_of(borrowed(tmp_path, *RECORDED, train={"max_grad_norm": 1e9}))
    model, total, tokens = job.module.model, 0.0, 0
    for index in job.sequences(0):
        item = job.recording[index]
        assert item.ids is not None and item.p is not None and item.tail is not None
        logits = model(item.tokens[None], use_cache=False).logits[0, item.start :, : job.draft.vocab].double()
        p, q = bucketed(logits.softmax(-1), item.ids[item.start :], item.p[item.start :].double(), item.tail[item.start :].double())
        total = total + forward_kl(p, q).sum()
        tokens += len(item.tokens) - item.start
    assert isinstance(total, torch.Tensor)
    (total / tokens).backward()
    truth = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    assert_same(truth, gradients(job, monkeypatch), 2e-5)
    assert job.tokens == tokens
