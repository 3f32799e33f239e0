"""Batches, their order, and the trimmed head: every index once, no mass lost, the same for the same (seed, step)."""

from __future__ import annotations

import pytest
import torch

from draftstill.distill import Recording, Teacher
from draftstill.distill.recording import write_manifest, write_shard
from draftstill.train.data import Order, collate, trim

LENGTHS, STARTS = [5, 9, 2, 7, 4], [0, 3, 1, 6, 0]


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """Five short sequences over 40 ids, K = 6, in two shards."""
    folder = tmp_path_factory.mktemp("recording")
    generator = torch.Generator().manual_seed(0)
    for number, part in enumerate((slice(0, 3), slice(3, 5))):
        count = sum(LENGTHS[part])
        p, ids = torch.randn(count, 40, generator=generator).mul(2).softmax(-1).topk(6)
        write_shard(
            folder / f"shard-{number:05d}.safetensors",
            [torch.randint(40, (n,), generator=generator).tolist() for n in LENGTHS[part]],
            STARTS[part],
            {"ids": ids.to(torch.uint16), "logp": p.log().half(), "tail": 1 - p.sum(-1)},
        )
    write_manifest(folder, {"mode": "topk", "vocab": 40, "top_k": 6, "temperature": 1.0})
    return Recording(folder)


# --- order ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 7, 64])
def test_every_index_once_per_epoch(count: int) -> None:
    order = Order(count, seed=3)
    for epoch in range(4):
        assert sorted(order.take(epoch * count, count)) == list(range(count))


def test_any_start_reads_the_same_stream() -> None:
    whole = Order(11, seed=3).take(0, 60)
    for start in (0, 1, 10, 11, 12, 37, 59):
        assert Order(11, seed=3).take(start, 60 - start) == whole[start:]
    jumping = Order(11, seed=3)
    assert [jumping.take(i, 1)[0] for i in (40, 2, 25, 41, 0)] == [whole[i] for i in (40, 2, 25, 41, 0)]


def test_epochs_and_seeds_are_shuffled_differently() -> None:
    order = Order(50, seed=3)
    assert order.take(0, 50) != order.take(50, 50)
    assert order.take(0, 50) != Order(50, seed=4).take(0, 50)
    assert order.take(0, 50) != list(range(50))


# --- batches ----------------------------------------------------------------------------------------------------------------


def test_a_batch_holds_exactly_the_supervised_positions(recording: Recording) -> None:
    indices = [3, 0, 2, 1]
    batch = collate(recording, indices)
    assert batch.ids_BT.shape == (4, 9)
    assert batch.tokens == sum(recording.supervised(i) for i in indices) == sum(LENGTHS[i] - STARTS[i] for i in indices)
    teacher = batch.teacher
    assert teacher.ids_NK is not None and teacher.p_NK is not None and teacher.tail_N is not None
    n = 0
    for b, index in enumerate(indices):
        item = recording[index]
        assert item.ids is not None and item.p is not None and item.tail is not None
        assert batch.ids_BT[b, : len(item.tokens)].tolist() == item.tokens.tolist()
        for t in range(item.start, len(item.tokens)):
            assert int(batch.rows_N[n]) == b * 9 + t
            assert torch.equal(teacher.ids_NK[n], item.ids[t]) and torch.equal(teacher.p_NK[n], item.p[t])
            assert teacher.tail_N[n] == item.tail[t]
            n += 1
    assert n == batch.tokens


# --- the trimmed head --------------------------------------------------------------------------------------------------------


def test_trimming_loses_no_mass(recording: Recording) -> None:
    teacher = collate(recording, range(5)).teacher
    assert teacher.ids_NK is not None and teacher.p_NK is not None and teacher.tail_N is not None
    ranking = recording.token_weights(40).argsort(descending=True, stable=True)
    cut = trim(ranking, 12, seed=0, step=3)
    taught = cut.teach(teacher)
    assert taught.ids_NK is not None and taught.p_NK is not None and taught.tail_N is not None
    assert torch.allclose(taught.p_NK.sum(-1) + taught.tail_N, teacher.p_NK.sum(-1) + teacher.tail_N, atol=1e-6)
    kept = set(ranking[:12].tolist())
    inside = torch.tensor([[int(i) in kept for i in row] for row in teacher.ids_NK])
    assert inside.any() and not inside.all()
    assert torch.equal(taught.ids_NK >= 0, inside)
    assert torch.equal(cut.rows_V[taught.ids_NK[inside]], teacher.ids_NK[inside]), "a row stands for another id"
    assert torch.equal(taught.p_NK, teacher.p_NK * inside)


def test_kept_rows_come_first_and_the_sample_is_drawn_from_the_others() -> None:
    ranking = torch.randperm(100, generator=torch.Generator().manual_seed(1))
    cut = trim(ranking, 20, seed=0, step=0)
    assert cut.rows_V[:20].tolist() == ranking[:20].tolist()
    sample = cut.rows_V[20:].tolist()
    assert len(sample) == 5 == len(set(sample)) and not set(sample) & set(ranking[:20].tolist())
    assert cut.offset_V[:20].tolist() == [0.0] * 20
    assert torch.allclose(cut.offset_V[20:].exp(), torch.full((5,), 80 / 5))
    assert (cut.place >= 0).sum() == 20, "recorded mass on sampled rows belongs to the tail they stand for"


def test_the_sample_is_fresh_each_step_and_the_same_for_the_same_step() -> None:
    ranking = torch.arange(200)
    draws = [trim(ranking, 40, seed=0, step=s).rows_V[40:].tolist() for s in range(20)]
    assert len({tuple(d) for d in draws}) == 20
    assert [trim(ranking, 40, seed=0, step=s).rows_V[40:].tolist() for s in range(20)] == draws
    assert trim(ranking, 40, seed=1, step=0).rows_V[40:].tolist() != draws[0]


def test_the_normaliser_is_estimated_without_bias() -> None:
    """Mean over steps of sum exp(z + offset) against the sum over the whole vocabulary."""
    z = torch.randn(120, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ranking = z.argsort(descending=True)
    cuts = [trim(ranking, 24, seed=0, step=s) for s in range(1500)]
    found = torch.stack([(z[c.rows_V] + c.offset_V).exp().sum() for c in cuts])
    error = found.std() / len(cuts) ** 0.5
    assert abs(float(found.mean() - z.exp().sum())) < 4 * float(error)


def test_a_trim_that_keeps_nearly_everything() -> None:
    cut = trim(torch.arange(10), 9, seed=0, step=0)
    assert cut.rows_V.tolist() == list(range(10)) and cut.offset_V.tolist() == [0.0] * 10
    taught = cut.teach(Teacher(torch.tensor([[9, 0]]), torch.tensor([[0.5, 0.25]]), torch.tensor([0.25])))
    assert taught.p_NK is not None and taught.tail_N is not None
    assert taught.p_NK.tolist() == [[0.0, 0.25]] and taught.tail_N.tolist() == [0.75]
