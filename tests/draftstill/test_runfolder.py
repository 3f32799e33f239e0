import errno
import json
import os
import subprocess
import sys

import pytest

from draftstill import machine, progress, runfolder
from draftstill.errors import DraftstillError
from draftstill.runfolder import RunFolder, atomic_write, read_json, write_json


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch, call):
    path = tmp_path / "file.json"
    atomic_write(path, "old")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="No space"):
        atomic_write(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file.json"]


def test_write_json_refuses_nan_and_keeps_the_old_file(tmp_path):
    write_json(tmp_path / "x.json", {"a": "ü"})
    with pytest.raises(ValueError):
        write_json(tmp_path / "x.json", {"a": float("nan")})
    assert read_json(tmp_path / "x.json") == {"a": "ü"}


def test_damaged_json_is_named(tmp_path):
    (tmp_path / "x.json").write_text('{"a": ')
    with pytest.raises(DraftstillError, match="is damaged"):
        read_json(tmp_path / "x.json")


def make(run: RunFolder, inputs: dict, **facts):
    stage = run.stage("corpus", inputs)
    work = stage.begin()
    (work / "data").write_text("made")
    stage.finish(**facts)
    return stage


def test_a_finished_stage_is_reused(tmp_path):
    stage = make(RunFolder(tmp_path), {"seed": 1}, documents=3)
    assert stage.done and not stage.work.exists()
    again = RunFolder(tmp_path).stage("corpus", {"seed": 1})
    assert again.done and again.facts() == {"documents": 3}


def test_fingerprint_ignores_the_order_of_inputs(tmp_path):
    run = RunFolder(tmp_path)
    assert run.stage("a", {"x": 1, "y": [2]}).fingerprint == run.stage("a", {"y": [2], "x": 1}).fingerprint
    assert run.stage("a", {"x": 1}).fingerprint != run.stage("a", {"x": 2}).fingerprint


def test_a_broken_off_stage_goes_on(tmp_path):
    stage = RunFolder(tmp_path).stage("corpus", {"seed": 1})
    assert not stage.begun
    (stage.begin() / "part-0").write_text("kept")
    again = RunFolder(tmp_path).stage("corpus", {"seed": 1})
    assert again.begun and not again.done
    assert (again.begin() / "part-0").read_text() == "kept"


@pytest.mark.parametrize("finished", [True, False])
def test_another_recipe_is_refused_and_nothing_is_overwritten(tmp_path, finished):
    stage = RunFolder(tmp_path).stage("corpus", {"corpus": {"min_chars": 200}})
    (stage.begin() / "data").write_text("made")
    if finished:
        stage.finish()
    other = RunFolder(tmp_path).stage("corpus", {"corpus": {"min_chars": 5}})
    with pytest.raises(DraftstillError, match="corpus.min_chars was 200, is 5") as caught:
        assert not other.done
        other.begin()
    assert "--set-aside" in str(caught.value)
    assert ((stage.folder if finished else stage.work) / "data").read_text() == "made"


@pytest.mark.parametrize("finished", [True, False])
def test_set_aside_keeps_the_old_stage(tmp_path, finished):
    stage = RunFolder(tmp_path).stage("corpus", {"seed": 1})
    (stage.begin() / "data").write_text("first")
    if finished:
        stage.finish()
    for number in (1, 2):
        other = RunFolder(tmp_path, set_aside=True).stage("corpus", {"seed": number + 1})
        assert not other.done
        work = other.begin()
        assert not (work / "data").exists()
        (work / "data").write_text(f"made {number}")
        other.finish()
        assert (tmp_path / f"corpus.old-{number}").is_dir()
    assert (tmp_path / "corpus.old-1" / "data").read_text() == "first"
    assert (tmp_path / "corpus" / "data").read_text() == "made 2"


def test_finished_folder_holds_provenance_only_at_the_end(tmp_path):
    stage = RunFolder(tmp_path).stage("corpus", {"seed": 1})
    work = stage.begin()
    assert not (work / "provenance.json").exists()
    stage.finish(kept=2)
    found = json.loads((stage.folder / "provenance.json").read_text())
    assert found["fingerprint"] == stage.fingerprint and found["inputs"] == {"seed": 1} and found["facts"] == {"kept": 2}
    assert found["versions"]["python"] and found["machine"]["cores"] >= 1 and found["seconds"] >= 0
    assert {"command", "git", "finished", "stage"} <= found.keys()
    assert not (stage.folder / "stage.json").exists()


def test_a_stage_counts_the_seconds_of_every_attempt(tmp_path, monkeypatch):
    """Two killed attempts, each as long as until it last wrote something, and the one that finishes; the hours between them are nobody's."""
    now = 1000.0
    monkeypatch.setattr(runfolder.time, "time", lambda: now)
    for start, wrote in ((1000.0, 1050.0), (9000.0, 9007.0)):
        now = start
        work = RunFolder(tmp_path).stage("draft", {"seed": 1}).begin()
        for path in [work / "stage.json", *([work / "weights"] if (work / "weights").exists() else [])]:
            os.utime(path, (start, start))  # the kernel's clock is not the patched one
        (work / "weights").write_text(str(start))
        os.utime(work / "weights", (wrote, wrote))
    now = 20_000.0
    stage = RunFolder(tmp_path).stage("draft", {"seed": 1})
    stage.begin()
    now = 20_003.0
    stage.finish()
    assert read_json(stage.folder / "provenance.json")["seconds"] == 50 + 7 + 3


def test_an_attempt_that_made_nothing_took_no_time(tmp_path):
    stage = RunFolder(tmp_path).stage("draft", {"seed": 1})
    os.utime(stage.begin() / "stage.json", (4e9, 4e9))
    again = RunFolder(tmp_path).stage("draft", {"seed": 1})
    again.begin()
    again.finish()
    assert read_json(again.folder / "provenance.json")["seconds"] < 100


def test_a_stage_begun_before_time_was_kept_goes_on(tmp_path):
    stage = RunFolder(tmp_path).stage("draft", {"seed": 1})
    work = stage.begin()
    (work / "weights").write_text("made")
    write_json(work / "stage.json", {k: v for k, v in read_json(work / "stage.json").items() if k not in ("started", "spent")})
    again = RunFolder(tmp_path).stage("draft", {"seed": 1})
    again.begin()
    again.finish()
    assert 0 <= read_json(again.folder / "provenance.json")["seconds"] < 100


def test_lock_refuses_a_second_process(tmp_path):
    code = f"from draftstill.runfolder import RunFolder\nwith RunFolder({str(tmp_path)!r}).lock(): print('held')"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ask = lambda: subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)  # noqa: E731
    with RunFolder(tmp_path).lock():
        refused = ask()
        assert refused.returncode != 0 and "another draftstill command" in refused.stderr
    assert ask().stdout.strip() == "held"


def test_inputs_take_models_and_paths_only(tmp_path):
    from draftstill.recipe import Sampler

    stage = RunFolder(tmp_path).stage("a", {"sampler": Sampler(), "path": tmp_path})
    assert stage.inputs["sampler"]["temperature"] == 0.7 and stage.inputs["path"] == str(tmp_path)
    with pytest.raises(TypeError, match="cannot stand in a fingerprint"):
        RunFolder(tmp_path).stage("a", {"x": object()})


def test_weights_in_one_file_or_in_several_have_one_hash(tmp_path):
    with pytest.raises(DraftstillError, match="no weights"):
        runfolder.hash_weights(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"abc")
    assert runfolder.hash_weights(tmp_path) == runfolder.hash_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    for number in (1, 2):
        (tmp_path / f"model-0000{number}-of-00002.safetensors").write_bytes(b"a")
    both = runfolder.hash_weights(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(b"b")
    assert runfolder.hash_weights(tmp_path) not in (both, runfolder.hash_file(tmp_path / "model-00001-of-00002.safetensors"))


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644])
def test_weights_are_as_private_as_their_config(tmp_path, mode):
    for name, own in (("config.json", mode), ("model.safetensors", 0o600)):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(own)
    runfolder.share_weights(tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == mode


def test_hash_file(tmp_path):
    (tmp_path / "x").write_bytes(b"abc")
    assert runfolder.hash_file(tmp_path / "x") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (43.4, "43 s"), (125, "2:05 min"), (3725, "1:02 h"), (-3, "0 s"), (59.7, "1:00 min")]
)
def test_duration(seconds, text):
    assert progress.duration(seconds) == text


def test_progress_rate_counts_this_attempt_only(capsys):
    now = [0.0]
    with progress.Progress("recording", 100, "tokens", done=50, clock=lambda: now[0]) as p:
        now[0] = 20.0
        p.update(60)
        assert p.line(now[0]) == "  recording  60%  0 tokens/s  1:20 min left"
        now[0] = 21.0
        p.update(61)  # within 15 s of the last line: silent
    lines = capsys.readouterr().out.splitlines()
    assert "going on at 50 of 100" in lines[0] and "60%" in lines[1] and "61 tokens in 21 s" in lines[2] and len(lines) == 3


def test_quiet_progress_prints_nothing(capsys):
    with progress.Progress("x", 0, quiet=True, done=1) as p:
        p.update(1)
        assert "100%" in p.line(1.0)
    assert capsys.readouterr().out == ""


def test_machine_is_described_without_torch():
    code = "import sys; from draftstill.machine import *; describe_machine(); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert done.stdout.strip() == "False", done.stderr


def test_bf16_goes_by_the_cpu_flags(monkeypatch):
    for flags, expected in (({"avx512_bf16"}, True), ({"amx_bf16", "avx2"}, True), ({"avx512f"}, False), (set(), False)):
        monkeypatch.setattr(machine, "cpu_flags", lambda flags=flags: frozenset(flags))
        assert machine.cpu_has_bf16() is expected


def test_load_watch_sees_others_but_not_us(monkeypatch):
    readings = iter([(100.0, 50.0, 10.0), (110.0, 75.0, 15.0)])  # 10 s: 25 CPU seconds busy, of which 5 ours
    monkeypatch.setattr(machine.LoadWatch, "_now", staticmethod(lambda: next(readings)))
    assert machine.LoadWatch().other_cores() == pytest.approx(2.0)
