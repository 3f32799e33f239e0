"""Texts that a server will not score: one costs itself, many end the recording, and what stops the server itself stops the stage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftstill.distill import Recording, inspect, record, seed_of
from draftstill.distill.refusing import Refused, Unscored
from draftstill.errors import DraftstillError
from draftstill.runfolder import RunFolder
from draftstill.stages import stages
from tests.distill.fake_server import Reply, fake
from tests.distill.test_served_recording import KINDS, SERVED, served
from tests.pipeline import command, hashes, make_home, opened

WORDS = "This model's maximum context length is 16 tokens"
LOSS = {"max_steps": 4, "eval_steps": 2, "bf16": False}


def ids_of(body: Any) -> list[int]:
    """What a request for laws scores, but for vLLM's and SGLang's one id more."""
    return body["input_ids"] if "input_ids" in body else body["prompt"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recording of one that refuses some and is never out of order."""
    with fake(picky("vllm", unlucky), "vllm") as server:
        folder = record(*opened(home(tmp_path_factory.mktemp("undisturbed"), server.url)))
    assert len(lost(folder, "train")) > 2
    return folder


def picky(kind: str, refuses: Callable[[list[int]], bool], status: int = 400) -> Any:
    inner = served(kind)

    def answer(path: str, body: Any) -> Reply:
        if body is not None and refuses(ids_of(body)):
            return status, {"error": {"message": WORDS}}
        return inner(path, body)

    return answer


def unlucky(ids: list[int], of: int = 2) -> bool:
    """Whether a text is refused once it is longer than what the probe asks for; by its beginning, so that prefixes agree with the whole."""
    return len(ids) > 13 and seed_of(*ids[:8]) % of == 0


def home(path: Path, url: str, limit: float = 0.9, **server: Any) -> Path:
    sections = {**SERVED, "respond": {**SERVED["respond"], "prompts": 12, "heldout_prompts": 4, "truncated": "keep"}, "train": LOSS}
    return make_home(
        path, **{**sections, "record": {**SERVED["record"], "max_refused": limit, "server": {"url": url, "retries": 0, **server}}}
    )


def listed(folder: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / "rejected.jsonl").read_text().splitlines()]


def lost(folder: Path, side: str) -> list[int]:
    """Sequences that nothing is learnt from."""
    recording = Recording(folder / side)
    return [n for n in range(len(recording)) if not recording.supervised(n)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recording of a server that takes everything."""
    with fake(served("vllm"), "vllm") as server:
        return record(*opened(home(tmp_path_factory.mktemp("whole"), server.url)))


@pytest.mark.parametrize(("kind", "status"), list(zip(KINDS, (400, 413, 422), strict=True)))
def test_a_refused_text_keeps_its_place_and_teaches_nothing(kind: str, status: int, whole: Path, tmp_path: Path,
                                                            capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    with fake(picky(kind, unlucky, status), kind) as server:
        folder = record(*opened(path := home(tmp_path / "a", server.url)))
    said = " ".join(capsys.readouterr().out.split())
    found = 0
    for side in ("train", "heldout"):
        recording, before = Recording(folder / side), Recording(whole / side)
        wanted = [n for n in range(len(before)) if unlucky(before[n].tokens.tolist())]
        assert lost(folder, side) == wanted and len(recording) == len(before) and not lost(whole, side)
        assert recording.manifest.get("refused", 0) == len(wanted)
        supervised = sum(recording.supervised(n) for n in range(len(recording)))
        assert supervised == sum(v["supervised"] for v in recording.manifest["kinds"].values())
        for n in range(len(recording)):
            a, b = recording[n], before[n]
            assert torch.equal(a.tokens, b.tokens)
            if n in wanted:
                assert a.p is not None and a.tail is not None and not a.p.any() and (a.tail == 1).all()
            else:
                assert a.p is not None and b.p is not None and torch.allclose(a.p[a.rows], b.p[b.rows], atol=1e-3)
        found += len(wanted)
        assert ("refused" in inspect(folder / side)) == bool(wanted)
    told = stages(*opened(path))["recording"].facts()["refused"]
    reason = f"refused by the server ({status})"
    assert found and sum(told[side].get(reason, 0) for side in told) == found
    assert [row["reason"] for row in listed(folder)] == [reason] * found and all(WORDS in row["detail"] for row in listed(folder))
    assert {row["id"].partition("/")[0] for row in listed(folder)} == {side for side in told if told[side]}
    assert f"{found} texts were refused by the server" in said and WORDS in said
    assert not list(folder.glob("refused-*"))
    if kind == "vllm":
        assert command("train", path) == 0
        assert "nothing supervised" in capsys.readouterr().out


def test_a_server_that_takes_everything_is_told_of_nothing(whole: Path) -> None:
    assert not (whole / "rejected.jsonl").exists()
    facts = json.loads((whole / "provenance.json").read_text())["facts"]
    assert facts["refused"] == {"train": {}, "heldout": {}} and "refused" not in Recording(whole / "train").manifest


@pytest.mark.parametrize("status", [401, 500, None])
def test_what_no_text_is_to_blame_for_stops_the_stage_and_keeps_whole_shards(status: int | None, undisturbed: Path, tmp_path: Path) -> None:
    """After some answers the server is out of order; once it is mended the same command goes on, with refusals counted over both attempts."""
    left = [10_000]
    inner = picky("vllm", unlucky)

    def answer(path: str, body: Any) -> Reply:
        left[0] -= body is not None
        if body is not None and left[0] <= 0:
            return None if status is None else (status, {"error": {"message": "out of order"}})
        return inner(path, body)

    with fake(answer, "vllm") as server:
        path = home(tmp_path / "b", server.url, concurrency=1)
        left[0] = 2 * 2 + 2 * SERVED["record"]["shard_sequences"] + 2  # two probes, two shards and a little
        with pytest.raises(DraftstillError) as caught:
            record(*opened(path))
        assert caught.value.key == "record.server.url"
        work = tmp_path / "b" / "run" / "recording.partial"
        kept = {p: p.stat().st_mtime_ns for p in (work / "train").glob("shard-*")}
        assert len(kept) == 2 and list(work.glob("refused-train-*"))
        left[0] = 10_000
        again = record(*opened(path))
    assert all((again / "train" / p.name).stat().st_mtime_ns == time for p, time in kept.items())
    assert hashes(again, "*/shard-*") == hashes(undisturbed, "*/shard-*")
    assert (again / "rejected.jsonl").read_bytes() == (undisturbed / "rejected.jsonl").read_bytes()


def test_too_many_refusals_end_the_recording_and_what_was_scored_stays(undisturbed: Path, tmp_path: Path) -> None:
    texts = len(Recording(undisturbed / "train"))
    limit = (len(lost(undisturbed, "train")) - 0.5) / texts  # the last of them is one too many
    with fake(picky("vllm", unlucky), "vllm") as server:
        path = home(tmp_path / "a", server.url, limit=limit)
        with pytest.raises(DraftstillError, match=rf"of the {texts} train texts are refused by the server \(400\).*{WORDS}") as caught:
            record(*opened(path))
        assert caught.value.key == "record.max_refused" and caught.value.value == limit and "--set-aside" in str(caught.value)
        asked = len(server.asked("/v1/completions"))
        shards = {p: p.stat().st_mtime_ns for p in (tmp_path / "a/run/recording.partial/train").glob("shard-*")}
        with pytest.raises(DraftstillError, match="train texts are refused"):  # the same again, without asking for what is there
            record(*opened(path))
        assert shards and len(server.asked("/v1/completions")) - asked < asked
        recipe, _ = opened(path, "record.max_refused=0.9")
        folder = record(recipe, RunFolder(recipe.run_dir))  # the limit decides what is accepted, not what is made
        assert all((folder / "train" / p.name).stat().st_mtime_ns == time for p, time in shards.items()) and lost(folder, "train")
    with fake(picky("vllm", unlucky), "vllm") as server:
        path = home(tmp_path / "b", server.url, limit=limit)
        with pytest.raises(DraftstillError):
            record(*opened(path))
    with fake(served("vllm"), "vllm") as server:  # mended by the server: what it takes now is asked for anew
        folder = record(*opened(path, f"record.server.url={server.url}"))
    assert len(lost(folder, "train")) <= limit * texts


def test_a_heldout_side_without_any_law_is_refused(whole: Path, tmp_path: Path) -> None:
    heldout = {tuple(Recording(whole / "heldout")[n].tokens.tolist()) for n in range(len(Recording(whole / "heldout")))}
    with fake(picky("vllm", lambda ids: tuple(ids[:-1]) in heldout), "vllm") as server:
        with pytest.raises(DraftstillError, match="heldout texts are refused") as caught:
            record(*opened(home(tmp_path / "a", server.url)))
        assert caught.value.key == "record.max_refused"


def test_processes_that_refuse_at_the_same_moment_are_added_up(tmp_path: Path) -> None:
    """Each sees only shards that are there already: alone each is within the limit, together they are not."""
    refused = Refused(tmp_path, "train", texts=20, limit=0.1)
    for shard in (0, 1):
        refused.settle(shard, {0: Unscored({}, "too long", "no room"), 3: Unscored({}, "too long", "no room")})
    with pytest.raises(DraftstillError, match="4 of the 20 train texts") as caught:
        refused.check()
    assert caught.value.key == "record.max_refused"
    Refused(tmp_path, "train", texts=40, limit=0.1).check()
    Refused(tmp_path, "heldout", texts=1, limit=0.0).check()
