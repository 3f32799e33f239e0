"""Cells: an interrupted score goes on, and what else is scored, in which order, changes nobody's numbers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from draftstill.evaluate import cells, scoring
from draftstill.evaluate.scoring import score
from draftstill.runfolder import RunFolder, read_json
from tests.pipeline import SETTINGS, borrowed, finished, make_texts, opened

TRAINED = ("corpus", "responses", "recording", "draft")
PROMPTS = SETTINGS["evaluate"]["prompts"]
SMALL = {"max_steps": 2, "eval_steps": 2}


def timings(folder: Path) -> dict[str, dict[str, Any]]:
    return {str(p.relative_to(folder)): read_json(p) for p in sorted((folder / "cells" / "timing").rglob("*.json"))}


def tokens(folder: Path) -> dict[str, list[int]]:
    return {name: c["trace"]["tokens"] for name, c in timings(folder).items()}


def counted(result: dict[str, Any], candidate: str, kind: str) -> list[Any]:
    """All that must not depend on who else is scored: counts to the last one, and what was timed before."""
    keys = ("domain", "temperature", "swept", "c", "v", "metrics", "speedup", "predicted", "acceptance", "alpha", "counts", "tokens_per_s")
    return [{k: r[k] for k in keys} for r in result["sweep"] if r["candidate"] == candidate and r["kind"] == kind]


@pytest.mark.parametrize("place", ["texts", "laws", "timing", "audit", "report"])
def test_an_interrupted_score_goes_on(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = borrowed(tmp_path, *TRAINED, evaluate={"audit_prompts": 0, "prompts": 2, "candidates": ["tuned", "lookup"]})
    real, written = cells.write_json, []

    def counting(to: Path, value: Any) -> None:
        if f"/{place}/" in str(to) and sum(f"/{place}/" in str(w) for w in written) == (4 if place == "timing" else 1):
            raise KeyboardInterrupt
        written.append(to)
        real(to, value)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(cells, "write_json", counting)
        if place in ("audit", "report"):
            patch.setattr(scoring, {"audit": "audit", "report": "write_reports"}[place], stop)
        score(*opened(path))
    work = tmp_path / "run" / "score.partial" / "cells"
    kept = {p: p.read_bytes() for p in work.rglob("*.json")}
    assert kept
    again: list[Path] = []
    with monkeypatch.context() as patch:
        patch.setattr(cells, "write_json", lambda to, value: again.append(to) or real(to, value))
        result = score(*opened(path))
    done = tmp_path / "run" / "score"
    assert all((done / "cells" / p.relative_to(work)).read_bytes() == found for p, found in kept.items() if not p.name.startswith("costs-"))
    assert not {a for a in again if not a.name.startswith("costs-")} & set(kept), "a whole cell was made twice"
    whole = tokens(finished() / "run" / "score")
    found = tokens(done)
    assert len(found) == 2 * 2 * 3 and all(whole[name] == text for name, text in found.items() if name in whole)
    assert "partial" not in result and score(*opened(path)) == read_json(done / "score.json")


def test_an_unfinished_score_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "_REWRITE_S", 0.0)
    path = borrowed(tmp_path, *TRAINED, evaluate={"audit_prompts": 0, "candidates": ["tuned"]})
    seen = []
    real = scoring.write_reports
    monkeypatch.setattr(scoring, "write_reports", lambda result, folder: seen.append((result.get("partial"), real(result, folder))))
    score(*opened(path))
    assert [p for p, _ in seen] == [{"timed": n, "of": PROMPTS} for n in range(1, PROMPTS)] + [None]


def test_other_candidates_change_nobodys_numbers(tmp_path: Path) -> None:
    """One candidate; then three, in another order, with another control arm: the first one's figures stay to the last digit, from the
    same decodings, although its composite is called otherwise now."""
    home = tmp_path / "home"
    keys = {"candidates": ["tuned", "composite"], "gammas": [1, 3], "audit_prompts": 0, "prompts": 2}
    first = borrowed(home, *TRAINED[:3], train={**SMALL, "candidates": {"one": {}}}, evaluate=keys)
    alone = score(*opened(first))
    before = timings(home / "run" / "score")
    more = {"other": {"train": {"learning_rate": 1e-3}}, "one": {}, "small": {"draft": {"layers": [1]}}}
    second = borrowed(
        home, train={**SMALL, "candidates": more}, evaluate={**keys, "candidates": ["lookup", "untuned", "composite", "tuned"]}
    )
    recipe, _ = opened(second)
    together = score(recipe, RunFolder(recipe.run_dir, set_aside=True))
    assert (home / "run" / "score.old-1").exists()
    assert set(together["drafts"]) == {"other", "one", "small"}
    for kind in ("tuned", "composite"):
        mine = counted(alone, "one", kind)
        assert len(mine) == 4 and counted(together, "one", kind) == mine, kind
    after = timings(home / "run" / "score")
    assert all(after[name] == cell for name, cell in before.items()), "decoded again"
    assert len(after) > len(before)
    names = {r["arm"] for r in together["arms"]}
    assert {"untuned:one", "untuned:small", "composite:one", "lookup"} <= names and "untuned:other" not in names, names
    # In another order again: nothing is decoded, nothing is counted otherwise.
    shuffled = {n: more[n] for n in ("small", "other", "one")}
    recipe, _ = opened(
        borrowed(
            home, train={**SMALL, "candidates": shuffled}, evaluate={**keys, "candidates": ["tuned", "untuned", "lookup", "composite"]}
        )
    )
    third = score(recipe, RunFolder(recipe.run_dir, set_aside=True))
    for name in more:
        for kind in ("tuned", "composite"):
            assert counted(third, name, kind) == counted(together, name, kind)
    assert timings(home / "run" / "score") == after


def test_a_further_domain_is_scored_apart(tmp_path: Path) -> None:
    make_texts(tmp_path / "other", 6, seed=7)
    shutil.copy(next((finished() / "texts").iterdir()), tmp_path / "other")
    keys = {"candidates": ["tuned"], "audit_prompts": 0, "prompts": 2, "domains": {"general": {"source": str(tmp_path / "other")}}}
    result = score(*opened(borrowed(tmp_path, *TRAINED, evaluate=keys)))
    own = score(*opened(borrowed(tmp_path / "without", *TRAINED, evaluate={k: v for k, v in keys.items() if k != "domains"})))
    assert {r["domain"] for r in result["sweep"]} == {"own", "general"} and {r["domain"] for r in result["arms"]} == {"own"}
    there = result["domains"]["general"]
    assert there["prompts"] == 2 and there["timed_prompts"] == 2 and {r["arm"] for r in there["arms"]} == {"plain", "tuned"}
    counts = lambda s: [r["counts"] for r in s["arms"] if r["counts"]]  # noqa: E731
    assert [c["metrics"] for c in counts(result)] == [c["metrics"] for c in counts(own)]
    assert [c["metrics"] for c in counts({"arms": there["arms"]})] != [c["metrics"] for c in counts(result)]
    assert {d["name"] for d in result["diagnosis"]["tuned"]["domain"]} == {"own", "general"}
    for row in there["arms"]:
        assert {p["prompt"].rsplit("@", 1)[0] for p in row["per_prompt"]} <= {f.name for f in (tmp_path / "other").iterdir()}


def test_fewer_prompts_are_timed_than_counted(tmp_path: Path) -> None:
    keys = {"candidates": ["tuned"], "audit_prompts": 0, "timing_prompts": 1, "timing_tokens": 5}
    result = score(*opened(borrowed(tmp_path, *TRAINED, evaluate=keys)))
    for row in result["arms"]:
        assert [p["emitted"] for p in row["per_prompt"]] == [5]
        if row["counts"]:
            assert row["counts"]["prompts"] == PROMPTS and row["counts"]["metrics"]["emitted"] > 5
    c = result["conditions"]
    assert (c["prompts"], c["timed_prompts"], c["timing_tokens"]) == (PROMPTS, 1, 5)
    assert result["winner"]["arm"] is None, "one prompt allows no interval, so nothing is claimed"
