"""Shards and manifest: which ones there must be, what each says of itself, and what an id takes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from draftstill import estimates
from draftstill.decode import Network
from draftstill.distill import Hidden, Recording, Text, TopK, score_texts, shards
from draftstill.distill.packing import pack_ids, read_table, unpack_ids
from draftstill.distill.recorder import _size
from draftstill.distill.scoring import sharded
from draftstill.distill.shards import mark_of, read_info, shard_name, write_manifest, write_shard
from draftstill.errors import DraftstillError
from draftstill.recipe import Recipe
from draftstill.recording_size import bytes_per_position
from draftstill.runfolder import hash_file, read_json, write_json
from tests.pipeline import REAL, finished, make_model

ABOUT = {"mode": "topk", "vocab": REAL, "top_k": 4}
LENGTHS = (9, 4, 30, 12, 7, 22, 5)


def texts(seed: int = 0) -> list[Text]:
    generator = torch.Generator().manual_seed(seed)
    return [Text(torch.randint(REAL, (n,), generator=generator).tolist()) for n in LENGTHS]


def scored(folder: Path, some: list[Text] | None = None, form: str = "topk") -> list[int]:
    """Three shards; returns the positions of each."""
    network, some = Network(make_model(), vocab=REAL), some or texts()
    scorer = TopK(network, 4, logp_bits=8) if form == "topk" else Hidden(network, {"hidden": None, "8 bits": 8, "16 bits": 16}[form])
    score_texts(some, scorer, folder, 2, 3, "test", mark=mark_of(ABOUT))
    return [sum(len(t.ids) for t in group) for group in sharded(some, 3)]


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_PAUSE_S", 0.0)


# --- the shards that there must be ---------------------------------------------------------------------------------------------


def test_a_manifest_lists_the_expected_shards(tmp_path: Path) -> None:
    expected = scored(tmp_path)
    made = write_manifest(tmp_path, ABOUT, expected)
    assert [s["file"] for s in made["shards"]] == [shard_name(n) for n in range(3)] and made["positions"] == sum(expected) == sum(LENGTHS)
    assert len(Recording(tmp_path)) == len(LENGTHS)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_shard_that_the_main_process_does_not_see_is_missed_by_name(number: int, tmp_path: Path, at_once: None) -> None:
    expected = scored(tmp_path)
    (tmp_path / shard_name(number)).unlink()
    with pytest.raises(DraftstillError, match=f"{shard_name(number)} is missing"):
        write_manifest(tmp_path, ABOUT, expected)
    assert not (tmp_path / "manifest.json").exists()


def test_a_shard_that_shows_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = scored(tmp_path)
    late = tmp_path / shard_name(1)
    late.rename(tmp_path / "elsewhere")
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            (tmp_path / "elsewhere").rename(late)

    monkeypatch.setattr(shards.time, "sleep", sleep)
    assert len(write_manifest(tmp_path, ABOUT, expected)["shards"]) == 3 and len(waits) == 3


@pytest.mark.parametrize("name", [shard_name(3), shard_name(12), "shard-99999.safetensors"])
def test_a_number_beyond_the_last_is_foreign(name: str, tmp_path: Path) -> None:
    expected = scored(tmp_path)
    shutil.copy(tmp_path / shard_name(0), tmp_path / name)
    with pytest.raises(DraftstillError, match=f"{name} .* none of this recording's 3 shards"):
        write_manifest(tmp_path, ABOUT, expected)


def test_a_shard_of_another_size_is_refused(tmp_path: Path) -> None:
    first, middle, last = scored(tmp_path)
    with pytest.raises(DraftstillError, match=rf"{shard_name(1)} .* {middle} positions, not {middle + 1}"):
        write_manifest(tmp_path, ABOUT, [first, middle + 1, last])


# --- what lies there already ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["a token", "two texts of one length", "other tokens"])
def test_a_shard_of_other_texts_of_the_same_lengths_is_refused(change: str, tmp_path: Path) -> None:
    before = texts()
    if change == "two texts of one length":
        before[4] = Text(before[3].ids[:5] + before[4].ids[5:7] + before[3].ids[7:])
    scored(tmp_path, before)
    if change == "a token":
        after = [*before[:-1], Text([*before[-1].ids[:-1], (before[-1].ids[-1] + 1) % REAL])]
    elif change == "two texts of one length":
        after = [*before[:3], before[4], before[3], *before[5:]]
    else:
        after = texts(1)
    with pytest.raises(DraftstillError, match=r"shard-0000\d\.safetensors .* holds other texts"):
        scored(tmp_path, after)
    scored(tmp_path, before)


@pytest.mark.parametrize("form", ["topk", "hidden", "8 bits", "16 bits"])
def test_no_tensor_of_a_shard_can_change_unseen(form: str, tmp_path: Path, at_once: None) -> None:
    """On going on, and when the manifest is made: after it the file's own checksum holds."""
    expected = scored(tmp_path, form=form)
    path = tmp_path / shard_name(1)
    whole = path.read_bytes()
    names = load_file(path)
    assert {"tokens", "offsets", "start", "digest", "kind", "after"} < names.keys()
    start = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:start])
    for name in names:
        first, end = header[name]["data_offsets"]
        damaged = bytearray(whole)
        damaged[start + (first + end) // 2] ^= 1
        path.write_bytes(damaged)
        for attempt in (lambda: scored(tmp_path, form=form), lambda: write_manifest(tmp_path, ABOUT, expected)):
            with pytest.raises(DraftstillError, match=rf"{shard_name(1)} .* is damaged"):
                attempt()
    path.write_bytes(whole)
    scored(tmp_path, form=form)
    write_manifest(tmp_path, ABOUT, expected)


# --- older recordings ----------------------------------------------------------------------------------------------------------


def as_format_2(folder: Path) -> Path:
    """A recording as the version before wrote it: no ``after``, no checksum within."""
    manifest = read_json(folder / "manifest.json")
    for shard in manifest["shards"]:
        path = folder / shard["file"]
        with safe_open(path, "pt") as file:
            info = json.loads(file.metadata()["draftstill"])
        tensors = load_file(path)
        del tensors["after"], info["sha256"]
        save_file(tensors, path, {"draftstill": json.dumps(info | {"format": 2})})
        shard["bytes"], shard["sha256"] = path.stat().st_size, hash_file(path)
    write_json(folder / "manifest.json", manifest | {"format": 2})
    return folder


@pytest.mark.parametrize("side", ["train", "heldout"])
def test_a_recording_of_format_2_reads_as_before(side: str, tmp_path: Path) -> None:
    shutil.copytree(finished() / "run" / "recording" / side, tmp_path / side)
    old, new = Recording(as_format_2(tmp_path / side)), Recording(finished() / "run" / "recording" / side)
    assert len(old) == len(new)
    for index in range(len(new)):
        one, two = old[index], new[index]
        assert one.after == -1 and one.written[-1] == -1
        for name in ("tokens", "ids", "p", "tail", "lse", "hidden", "rows"):
            a, b = getattr(one, name), getattr(two, name)
            assert (a is None and b is None) or torch.equal(a, b), name
    assert read_info(old.folder / shard_name(0), whole=True)["format"] == 2
    behind = torch.zeros(REAL, dtype=torch.float64)
    for index in range(len(new)):
        if (after := new[index].after) >= 0:
            behind[after] += 1
    assert behind.any() or side == "heldout"
    assert torch.allclose(new.token_weights(REAL) - old.token_weights(REAL), behind, atol=1e-9), (
        "rankings differ by what stands behind alone"
    )


# --- ids ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("different", [1, 3, 40_000, 65_536, 65_537])
def test_ids_of_large_vocabularies(different: int) -> None:
    generator = torch.Generator().manual_seed(different)
    known = torch.randperm(151_936, generator=generator)[:different]
    ids = known[torch.cat([torch.arange(different), torch.randint(different, (4 * different,), generator=generator)])]
    packed, table = pack_ids(ids)
    assert torch.equal(unpack_ids(packed, None if table is None else read_table(table)), ids)
    assert (table is not None) == (different in (40_000, 65_536))
    if table is not None:
        assert packed.dtype == torch.uint16 and table.numel() <= 151_936 // 8 + 1
        part = slice(7, 93)
        assert torch.equal(unpack_ids(packed[part], read_table(table)), ids[part])


def columns_like_real_ones(positions: int, vocab: int, k: int) -> dict[str, torch.Tensor]:
    """A few ids everywhere, tens of thousands that come up now and then: as often as in English text, and spread over the vocabulary."""
    generator = torch.Generator().manual_seed(0)
    usual = 1 / (torch.arange(60_000) + 30.0) ** 1.1
    places = torch.randperm(vocab, generator=generator)[:60_000]
    ids = places[torch.multinomial(usual, positions * k, replacement=True, generator=generator)].view(positions, k).to(torch.int32)
    logp = -torch.arange(1, k + 1).float().log().expand(positions, k) - 2
    return {"ids": ids, "logp": logp, "tail": 1 - logp.exp().sum(-1), "lse": torch.zeros(positions)}


def test_a_law_of_64_ids_takes_210_bytes_in_a_vocabulary_of_151_936(tmp_path: Path) -> None:
    sequences, length = 64, 256
    columns = columns_like_real_ones(sequences * length, 151_936, 64)
    path = tmp_path / shard_name(0)
    write_shard(path, [[1] * length] * sequences, [0] * sequences, columns, vocab=151_936, logp_bits=8)
    about = {"mode": "topk", "vocab": 151_936, "top_k": 64}
    manifest = write_manifest(tmp_path, about)
    each = manifest["bytes"] / manifest["positions"]
    assert len(columns["ids"].unique()) > 40_000 and each <= 210
    stated: dict[str, Any] = {"mode": "topk", "top_k": 64, "vocab": 151_936, "hidden": 0, "logp_bits": 8, "hidden_bytes": 0}
    assert each == pytest.approx(bytes_per_position(**stated, shard_positions=sequences * length), rel=0.01)
    recording = Recording(tmp_path)
    for index in (0, 31, 63):
        found = recording[index].ids
        assert found is not None and torch.equal(found, columns["ids"][index * length : (index + 1) * length].long())
    assert recording.token_weights(151_936).sum() == pytest.approx(
        sequences * length * (1 + float(columns["logp"][0].exp().sum())), rel=1e-4
    )


@pytest.mark.parametrize("record", [
    {"mode": "topk"}, {"mode": "topk", "top_k": 300, "logp_bits": 16}, {"mode": "hidden"}, {"mode": "hidden", "hidden_bits": 8},
    {"mode": "hidden", "hidden_bits": 16}, {"mode": "text"}, {"mode": "topk", "server": {"url": "http://localhost"}}, {"mode": "live"},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("vocab", [40, 1 << 16, (1 << 16) + 1, 151_936])
@pytest.mark.parametrize("shard_sequences", [1, 8])
def test_what_plan_foretells_is_what_the_pilot_says(record: dict[str, Any], vocab: int, shard_sequences: int) -> None:
    values = {"run_dir": "r", "target": {"source": "t", "dtype": "bfloat16"}, "corpus": {"source": "c", "format": "text"},
              "respond": {"prompts": 20, "heldout_prompts": 6, "prompt_tokens": 8, "max_new_tokens": 24},
              "record": {"shard_sequences": shard_sequences, **record},
              "train": {"loss": {"name": "ce"} if record["mode"] == "text" else {}}}  # fmt: skip
    recipe = Recipe.model_validate_json(json.dumps(values))
    size = estimates.Size(2, 16, vocab, 2, 2, 8, 32, True)
    there = record["mode"] != "text" and "server" not in record
    scorers: Any = SimpleNamespace(settings=recipe.record, target=SimpleNamespace(vocab=vocab), hidden_size=16,
                                   heldout_mode="hidden" if there else record["mode"])  # fmt: skip
    texts = {"train": [Text([1] * 32)] * 20, "heldout": [Text([1] * 32)] * 6}
    foretold = estimates.estimate(recipe, size, [size]).recording_bytes
    assert foretold == _size(texts, scorers, "bfloat16", record["mode"], None) > 0


@pytest.mark.parametrize(
    ("vocab", "k", "kept_mass", "bits"), [(200, 16, 1.0, 8), (70_000, 16, 1.0, 16), (70_000, 16, 0.6, 8), (151_936, 64, 1.0, 8)]
)
def test_a_shard_takes_what_was_foretold(vocab: int, k: int, kept_mass: float, bits: int, tmp_path: Path) -> None:
    """But for its header and what stands once for each sequence."""
    sequences, length = 16, 512
    generator = torch.Generator().manual_seed(0)
    logp = torch.randn(sequences * length, k, generator=generator).sort(-1, descending=True).values.log_softmax(-1) - 0.1
    used = logp.exp().cumsum(-1) < kept_mass
    columns = {"ids": torch.randint(vocab, logp.shape, generator=generator).to(torch.int32), "logp": logp, "count": used.sum(-1).clamp_min(1).int(),
               "tail": torch.full((len(logp),), 0.1), "lse": torch.zeros(len(logp))}  # fmt: skip
    path = tmp_path / shard_name(0)
    write_shard(path, [[1] * length] * sequences, [0] * sequences, columns, vocab=vocab, logp_bits=bits)
    kept = float(columns["count"].double().mean())
    each = bytes_per_position(mode="topk", top_k=k, vocab=vocab, hidden=0, logp_bits=bits, hidden_bytes=0, kept=kept,
                              shard_positions=sequences * length)  # fmt: skip
    if int(columns["ids"].unique().numel()) > 1 << 16:
        each += kept  # too many ids for a table, of which no plan knows
    assert path.stat().st_size / len(logp) == pytest.approx(each, rel=0.02)
