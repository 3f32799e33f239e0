"""Bytes of a recorded law against float64: stated errors, exact mass, and the bracket of alpha on a sharp law."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from draftstill.decode import Network
from draftstill.distill import Hidden, Recording, Text, TopK, score_texts
from draftstill.distill.divergences import alpha, alpha_bounds, bucketed
from draftstill.distill.packing import FALLS, decode_falls, decode_hidden, encode_falls, encode_hidden, pack_ids, unpack_ids
from draftstill.distill.scoring import top_k
from draftstill.distill.shards import digest, mark_of, write_manifest
from tests.pipeline import REAL, make_model


def rows(count: int, vocab: int, scale: float, seed: int = 0) -> torch.Tensor:
    """float64 laws by falling probability."""
    z = torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale
    return z.softmax(-1).sort(-1, descending=True).values


# --- 8 bits -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 3.0, 10.0, 40.0])
@pytest.mark.parametrize("k", [1, 2, 16, 64])
def test_falls_keep_the_mass_and_the_stated_error(scale: float, k: int) -> None:
    p = rows(200, 500, scale)
    kept, tail = p[:, :k], p[:, k:].sum(-1).float()
    used = torch.ones(kept.shape, dtype=torch.bool)
    read = decode_falls(encode_falls(kept.log()), used, tail).double()
    assert torch.allclose(read.sum(-1) + tail, torch.ones(200, dtype=torch.float64), atol=2e-6)
    assert (read.diff(dim=-1) <= 0).all(), "the order stays"
    # Relative to its row's first id, a probability is off by at most half the step at the deepest single fall before it.
    known = kept[:, :1].log() - kept.log() < 15
    off = ((read / read[:, :1]).log() - (kept / kept[:, :1]).log()).abs()
    deepest = (kept.log()[:, :1] - kept.log()).diff(dim=-1, prepend=torch.zeros(200, 1, dtype=torch.float64)).cummax(-1).values
    step = 3 * 16 ** (1 / 3) * (deepest + 0.1) ** (2 / 3) / 255
    assert (off <= step / 2)[known].all() and float(off[known].max()) < 0.095
    moved = (read - kept).abs().sum(-1) / 2
    assert float(moved.max()) < 0.015 and float(moved.mean()) < 0.004


def test_errors_do_not_add_up_along_a_row() -> None:
    """Each step is a little off, the 1000th id no more than the second."""
    logp = -torch.linspace(0.5, 15, 1000, dtype=torch.float64)[None]
    known = FALLS[encode_falls(logp).long()].cumsum(-1)
    assert float((known + (logp - logp[:, :1])).abs().max()) < 0.002


def test_unused_places_and_empty_rows() -> None:
    codes = torch.tensor([[0, 10, 99], [0, 0, 0]], dtype=torch.uint8)
    read = decode_falls(codes, torch.tensor([[True, True, False], [False, False, False]]), torch.tensor([0.25, 1.0]))
    assert read[0, :2].sum() == pytest.approx(0.75) and read[0, 2] == 0 and read[1].tolist() == [0, 0, 0]


def test_hidden_states_of_eight_bits() -> None:
    h = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.1, 20, 50)[:, None]
    codes, scale = encode_hidden(torch.cat([h, torch.zeros(1, 64)]))
    read = decode_hidden(codes, scale)
    assert codes.dtype == torch.int8 and (read[-1] == 0).all()
    assert ((read[:-1] - h).abs() <= scale[:-1].repeat_interleave(32, 1) / 2 * 1.001).all()


def test_packed_ids() -> None:
    ids = torch.tensor([0, 1, 255, 256, 65_535, 65_536, 151_935, (1 << 24) - 1], dtype=torch.int32)
    packed, table = pack_ids(ids)
    assert packed.dtype == torch.uint8 and packed.shape == (8, 3) and table is None and unpack_ids(packed).tolist() == ids.tolist()
    assert unpack_ids(ids[:5].to(torch.uint16)).tolist() == ids[:5].tolist()
    assert unpack_ids(pack_ids(ids[:0])[0]).tolist() == []
    with pytest.raises(ValueError, match="3 bytes"):
        pack_ids(torch.tensor([1 << 24]))


def test_the_digest_is_stable() -> None:
    import hashlib

    ids = [3, 70_000, 1]
    first = hashlib.sha256(b"".join(i.to_bytes(4, "little") for i in ids)).digest()[:8]
    assert digest(ids) == digest(torch.tensor(ids)) == int.from_bytes(first, "little", signed=True)


# --- the search -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [3, 64, 200, 997, 4096, 49_152])
@pytest.mark.parametrize("k", [1, 3, 64])
def test_the_search_is_exact(vocab: int, k: int) -> None:
    k = min(k, vocab)
    z = torch.randn(7, vocab, generator=torch.Generator().manual_seed(vocab + k))
    values, ids = top_k(z, k)
    true = z.topk(k, -1)
    assert torch.equal(values, true.values) and torch.equal(ids, true.indices)
    z[:, 1::2] = -torch.inf
    many_equal = (z * 2).round()
    values, ids = top_k(many_equal, k)
    assert torch.equal(values, many_equal.topk(k, -1).values) and torch.equal(many_equal.gather(1, ids), values)
    assert all(len(set(row)) == k for row in ids.tolist())


# --- alpha ------------------------------------------------------------------------------------------------------------------


class Scaled(Network):
    """A sharper target: most of the mass on a few ids, as trained models have it."""

    sharpness = 1.0

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().logits(hidden) * self.sharpness


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize(("k", "kept_mass"), [(1, 1.0), (4, 1.0), (16, 1.0), (64, 1.0), (16, 0.9), (64, 0.995)])
@pytest.mark.parametrize("sharpness", [0.3, 1.0, 3.0])
def test_the_bounds_hold_alpha_against_a_whole_softmax(k: int, kept_mass: float, bits: int, sharpness: float, tmp_path: Path) -> None:
    network = Scaled(make_model(), vocab=REAL)
    network.sharpness = sharpness
    generator = torch.Generator().manual_seed(k)
    texts = [Text(torch.randint(REAL, (n,), generator=generator).tolist()) for n in (40, 23, 31)]
    about = {"mode": "topk", "vocab": REAL, "top_k": k}
    score_texts(texts, TopK(network, k, 1.0, kept_mass, bits), tmp_path, 2, 8, "test", mark=mark_of(about))
    write_manifest(tmp_path, about)
    recording = Recording(tmp_path, verify=False)
    rounding = recording.manifest["rounding"]
    assert rounding < (0.012 if bits == 8 else 0.002)
    model: Any = make_model().double()
    for index, text in enumerate(texts):
        item = recording[index]
        assert item.tokens.tolist() == text.ids and item.ids is not None and item.p is not None and item.tail is not None
        with torch.no_grad():
            z = model(item.tokens[None], use_cache=False).logits[0, :, :REAL] * sharpness
        p = z.softmax(-1)
        kept = torch.where(item.ids >= 0, p.gather(1, item.ids.clamp_min(0)), 0.0)
        assert torch.allclose(item.tail.double(), 1 - kept.sum(-1), atol=1e-5), "the tail is exact for what was kept"
        assert torch.allclose(item.p.sum(-1) + item.tail, torch.ones(len(p)), atol=2e-6 if bits == 8 else 2e-3)
        count = (item.ids >= 0).sum(-1)
        if kept_mass < 1:
            short = count < k
            assert (short.any() or sharpness < 3) and (kept.sum(-1)[short] >= kept_mass - 1e-6).all()
            last = kept.gather(1, (count - 1)[:, None]).squeeze(1)
            assert (kept.sum(-1) - last < kept_mass).all(), "one id more than needed"
        else:
            assert (count == k).all()
        for noise in (0.0, 0.7, 3.0):
            q = (z + noise * torch.randn(z.shape, generator=generator, dtype=torch.float64)).softmax(-1)
            low, high = alpha_bounds(*bucketed(q, item.ids, item.p.double(), item.tail.double()))
            true = alpha(p, q)
            assert (low <= true + rounding + 1e-5).all() and (true <= high + rounding + 1e-5).all()
            assert (high - low <= item.tail + 1e-6).all(), "the width that inspect states"


@pytest.mark.parametrize(("bits", "limit"), [(None, 1e-5), (16, 0.02), (8, 0.05)])
def test_alpha_of_packed_hidden_states(bits: int | None, limit: float, tmp_path: Path) -> None:
    """1 - alpha between the law of the packed states and the true one: all that packing can take from a perfect draft."""
    network = Network(make_model(), vocab=REAL)
    texts = [Text(torch.randint(REAL, (48,), generator=torch.Generator().manual_seed(0)).tolist())]
    score_texts(texts, Hidden(network, bits), tmp_path, 1, 8, "test")
    write_manifest(tmp_path, {"mode": "hidden", "vocab": REAL})
    item = Recording(tmp_path)[0]
    model: Any = make_model().double()
    with torch.no_grad():
        p = model(item.tokens[None], use_cache=False).logits[0, :, :REAL].softmax(-1)
        assert item.hidden is not None
        read = (item.hidden.double() @ model.lm_head.weight[:REAL].T).softmax(-1)
    assert float((1 - alpha(p, read)).mean()) < limit
