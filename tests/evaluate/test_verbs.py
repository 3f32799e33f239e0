"""The verbs ``evaluate`` and ``publish``: no option is left out without a word, and a dry run keeps nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftstill import running
from draftstill.runfolder import read_json
from tests.pipeline import ORDER, borrowed, command, hashes, write_recipe

SCORE_ONLY = (("--min-speedup", "1.1"), ("--min-alpha", ".5"), ("--load",), ("--compare", "old.json"))
SERVER = ("--server", "http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("alone", "beside"),
    [
        *(((*mode,), option) for mode in (("--audit",), SERVER) for option in SCORE_ONLY),
        (("--audit",), SERVER),
        (("--audit",), ("--baseline-server", "http://127.0.0.1:9")),
    ],
)
def test_what_would_be_left_out_is_refused_before_anything_runs(
    alone: tuple[str, ...], beside: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("something ran")

    for name in ("make", "through", "open_run", "face"):
        monkeypatch.setattr(running, name, never)
    assert command("evaluate", write_recipe(tmp_path), *alone, *beside) == 1
    shown = capsys.readouterr().err
    assert f"{beside[0]}: would be left out beside {alone[0]}" in shown and "mend:" in shown


@pytest.mark.parametrize("state", ["scored", "published", "published by another recipe"])
def test_a_dry_run_keeps_nothing(state: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = borrowed(tmp_path, *ORDER[: 5 if state == "scored" else 6], publish={"repo_id": "me/draft"})
    options = ["publish.vocabulary=real", "--set-aside"] if state == "published by another recipe" else []
    before = hashes(tmp_path / "run")
    assert command("publish", path, "--dry-run", *options) == 0
    told = capsys.readouterr().out
    assert "model.safetensors" in told and "dry run: nothing was" in told and "would send these files to me/draft (private)" in told
    after = hashes(tmp_path / "run")
    after.pop(".lock", None)
    assert after == before and not list((tmp_path / "run").glob("published.*"))


def test_a_dry_run_makes_what_it_needs(tmp_path: Path) -> None:
    path = borrowed(tmp_path, *ORDER[:4], evaluate={"candidates": ["tuned"], "prompts": 1, "audit_prompts": 0, "temperatures": [0.7]})
    assert command("publish", path, "--dry-run") == 0
    assert read_json(tmp_path / "run" / "score" / "score.json")["publish"] == "tuned" and not (tmp_path / "run" / "published").exists()
    assert command("publish", path) == 0 and (tmp_path / "run" / "published" / "model").is_dir()
