"""A copy elsewhere: tried before there is anything to lose, complete whenever it was asked for, and sent once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from draftstill.distill import Recording, record, recorder
from draftstill.distill.remote import mirror
from draftstill.errors import DraftstillError
from tests.pipeline import borrowed, command, finished, hashes, opened

ALL = ("corpus", "responses", "recording")
SMALL: dict[str, Any] = {"document_tokens": 0}


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[MemoryFileSystem]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    memory = fsspec.filesystem("memory")
    yield memory
    for place in list(memory.store):
        del memory.store[place]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are put."""
    names: list[str] = []
    real = MemoryFileSystem.put_file

    def put_file(self: MemoryFileSystem, source: str, place: str, **more: Any) -> None:
        names.append(place.rsplit("/", 1)[-1])
        real(self, source, place, **more)

    monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
    return names


@pytest.mark.parametrize("method", ["makedirs", "pipe_file", "rm"])
@pytest.mark.parametrize("fault", [PermissionError("no access"), OSError("no route"), RuntimeError("the client is odd"), KeyError("x")])
def test_a_place_that_cannot_be_written_is_refused_before_anything_is_scored(
    method: str, fault: Exception, files: MemoryFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise fault

    given = opened(borrowed(tmp_path, "corpus", record={"mirror": "memory://bucket/one"}))
    monkeypatch.setattr(MemoryFileSystem, method, fails)
    monkeypatch.setattr(recorder, "respond", lambda *_: pytest.fail("something was begun"))
    with pytest.raises(DraftstillError) as caught:
        record(*given)
    assert caught.value.key == "record.mirror" and caught.value.value == "memory://bucket/one" and caught.value.mend
    assert type(fault).__name__ in str(caught.value)


def test_a_scheme_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DraftstillError) as caught:
        record(*opened(borrowed(tmp_path, "corpus", record={"mirror": "nosuch://bucket/one"})))
    assert caught.value.key == "record.mirror"


def test_the_probe_leaves_nothing_behind_and_all_is_sent_once(files: MemoryFileSystem, sent: list[str], tmp_path: Path) -> None:
    path = borrowed(tmp_path, "corpus", "responses", record={**SMALL, "mirror": "memory://bucket/one"})
    folder = record(*opened(path))
    there = {place.split("/one/", 1)[1] for place in files.store if "/one/" in place}
    assert there == {*hashes(folder, "*/shard-*"), "train/manifest.json", "heldout/manifest.json"}
    assert sent.count("manifest.json") == 2 and sent[-1] == "manifest.json"
    count = len(sent)
    record(*opened(path))
    assert len(sent) == count


def test_a_mirror_that_is_set_later_gets_what_is_there(files: MemoryFileSystem, sent: list[str], tmp_path: Path) -> None:
    path = borrowed(tmp_path, *ALL)
    for address in ("memory://bucket/late", "memory://bucket/later/"):
        record(*opened(path, f"record.mirror={address}"))
        for side in ("train", "heldout"):
            far, near = (Recording(f"{place}/{side}") for place in (address.rstrip("/"), tmp_path / "run" / "recording"))
            assert far.manifest == near.manifest and len(far) == len(near) > 0
    count = len(sent)
    record(*opened(path, "record.mirror=memory://bucket/late"))
    assert len(sent) == count, "both are known to be there"


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_the_command_line_reads_a_recording_that_lies_elsewhere(
    scheme: str, files: MemoryFileSystem, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = finished() / "run" / "recording"
    address = "memory://bucket/seen" if scheme == "memory" else f"file://{tmp_path}/seen"
    for side in ("train", "heldout"):
        mirror(folder / side, f"{address}/{side}")
    capsys.readouterr()
    assert command("recording", "inspect", address) == 0
    both = capsys.readouterr().out
    assert command("recording", "inspect", f"{address}/train") == 0
    one = capsys.readouterr().out
    assert both.count("all right, token hashes too") == 2 and one.count("all right, token hashes too") == 1 and "topk, K = 16" in one
    assert command("recording", "inspect", f"{address}/none") == 1
    assert f"{address}/none holds no recording" in capsys.readouterr().err
    if scheme == "memory":
        files.rm("/bucket/seen/heldout/shard-00000.safetensors")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
        assert command("recording", "inspect", f"{address}/heldout") == 1
        assert "the shard shard-00000.safetensors is missing" in capsys.readouterr().err


def test_only_what_is_missing_is_sent(files: MemoryFileSystem, sent: list[str]) -> None:
    """What broke off: some shards, no manifest; one shard of another recording with the same size."""
    folder, address = finished() / "run" / "recording" / "train", "memory://bucket/part"
    names = sorted(p.name for p in folder.glob("shard-*"))
    assert mirror(folder, address) == len(names) + 1 and sent == [*names, "manifest.json"]
    assert mirror(folder, address) == 0
    files.rm("/bucket/part/manifest.json")
    files.rm(f"/bucket/part/{names[1]}")
    content = files.cat_file(f"/bucket/part/{names[3]}")
    at = content.index(b"sha256") + 14  # within the header's checksum
    files.pipe_file(f"/bucket/part/{names[3]}", content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    sent.clear()
    assert mirror(folder, address) == 3 and sent == [names[1], names[3], "manifest.json"]
    assert len(Recording(folder)) == len(Recording(address))


def test_another_recording_is_replaced_and_never_mixed(files: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the sending breaks off, no manifest tells of shards that are no longer those it lists."""
    folder, address = finished() / "run" / "recording" / "heldout", "memory://bucket/mixed"
    mirror(finished() / "run" / "recording" / "train", address)
    with monkeypatch.context() as patch, pytest.raises(DraftstillError, match=r"record\.mirror"):
        patch.setattr(MemoryFileSystem, "put_file", lambda *_, **__: (_ for _ in ()).throw(OSError("gone")))
        mirror(folder, address)
    with pytest.raises(DraftstillError, match=r"no manifest\.json"):
        Recording(address)
    mirror(folder, address)
    assert len(Recording(address)) == len(Recording(folder))
