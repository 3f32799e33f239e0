"""Cells: an interrupted score goes on, and what else is scored, in which order, changes nobody's numbers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftstill.evaluate import cells, costing, scoring
from draftstill.evaluate.arms import arms_of
from draftstill.evaluate.scoring import score
from draftstill.recipe import Recipe
from draftstill.runfolder import RunFolder, read_json
from draftstill.stages import stages
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

    def stop(*_: Any, **__: Any) -> None:
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


def test_another_arm_or_gamma_changes_nobodys_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lookup proposes more tokens than the draft, a larger gamma too: only the new widths are timed, the draft's row stays as it was."""
    keys: dict[str, Any] = {"candidates": ["tuned"], "gammas": [1, 2], "audit_prompts": 0, "prompts": 2, "temperatures": [0.7]}
    first = borrowed(tmp_path, *TRAINED, evaluate=keys)
    alone = score(*opened(first))
    asked: list[tuple[list[int], list[str]]] = []
    real = costing.measure_costs
    monkeypatch.setattr(costing, "measure_costs", lambda t, d, *a, **k: asked.append((list(k["widths"]), list(d))) or real(t, d, *a, **k))
    for more, widths in (({"candidates": ["lookup", "tuned"], "lookup_gamma": 5}, [4, 5, 6]), ({"gammas": [1, 2, 7]}, [7, 8])):
        keys |= more
        recipe, _ = opened(borrowed(tmp_path, evaluate=keys))
        together = score(recipe, RunFolder(recipe.run_dir, set_aside=True))
        assert asked and {(tuple(w), tuple(d)) for w, d in asked} == {(tuple(widths), ())}
        asked.clear()
        mine = counted(alone, "tuned", "tuned")
        assert len(mine) == 2 and [r for r in counted(together, "tuned", "tuned") if r["swept"] < 7] == mine
        assert set(together["costs"]["verify_s"]) == {str(w) for w in range(1, widths[-1] + 1)}


def test_each_temperature_has_the_costs_of_its_own_law(tmp_path: Path) -> None:
    keys = {"candidates": ["tuned"], "audit_prompts": 0, "prompts": 2, "temperatures": [0.0, 0.7, 1.0]}
    result = score(*opened(borrowed(tmp_path, *TRAINED, evaluate=keys)))
    by_temperature = result["costs_by_temperature"]
    assert set(by_temperature) == {"0", "0.7", "1"} and result["costs"] == by_temperature["0.7"] == by_temperature["1"]
    assert by_temperature["0"]["sampling"]["temperature"] == 0 != by_temperature["0.7"]["sampling"]["temperature"]
    for row in result["sweep"]:
        if row["arm"] == "tuned":
            costs = by_temperature[f"{row['temperature']:g}"]
            assert row["c"] == pytest.approx((costs["first_s"]["tuned"] + costs["draft_s"]["tuned"]) / 2 / costs["verify_s"]["1"])


def test_times_of_other_surroundings_are_not_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts and laws are; what is timed is timed again."""
    keys = {"candidates": ["tuned"], "audit_prompts": 0, "prompts": 2, "temperatures": [0.7]}
    score(*opened(borrowed(tmp_path, *TRAINED, evaluate=keys)))
    monkeypatch.setattr(scoring, "versions", lambda: {"torch": "99", "draftstill": "1", "python": "3"})
    asked: list[list[int]] = []
    real = costing.measure_costs
    monkeypatch.setattr(costing, "measure_costs", lambda *a, **k: asked.append(list(k["widths"])) or real(*a, **k))
    recipe, _ = opened(borrowed(tmp_path, evaluate={**keys, "bootstrap": 201}))
    score(recipe, RunFolder(recipe.run_dir, set_aside=True))
    old, new = (tmp_path / "run" / f / "cells" for f in ("score.old-1", "score"))
    names = [{p.name for p in (folder / "timing").rglob("tuned*")} for folder in (old, new)]
    assert all(names) and not names[0] & names[1] and asked == [[1, 2, 3]] * 2, "before and after"
    for kept in [p.relative_to(old) for part in ("texts", "laws") for p in (old / part).rglob("*.json")]:
        assert (old / kept).read_bytes() == (new / kept).read_bytes()


def test_machine_threads_and_versions_are_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = SimpleNamespace(target=SimpleNamespace(network=SimpleNamespace(device=torch.device("cpu"))))
    here = scoring._surroundings(bench)  # type: ignore[arg-type]
    machine = scoring.describe_machine()
    for name, other in (
        ("describe_machine", lambda: {**machine, "cpu": "another"}), ("describe_machine", lambda: {**machine, "cores": 999}),
        ("describe_machine", lambda: {**machine, "omp_wait_policy": "x"}), ("versions", lambda: {"torch": "99"}), ("versions", lambda: {"draftstill": "99"}),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(scoring, name, other)
            assert scoring._surroundings(bench) != here, name  # type: ignore[arg-type]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert scoring._surroundings(bench) != here  # type: ignore[arg-type]


def test_the_gpu_is_named_and_decides_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU of {device}")
    made = {}
    for kind in ("cpu", "cuda"):
        bench = SimpleNamespace(target=SimpleNamespace(network=SimpleNamespace(device=torch.device(kind))))
        made[kind] = scoring._surroundings(bench)["accelerator"]  # type: ignore[arg-type]
    assert made == {"cpu": None, "cuda": "GPU of cuda"}
    told = read_json(finished() / "run" / "score" / "score.json")["conditions"]
    assert told["device"] == "cpu" and "accelerator" in told and told["accelerator"] is None


def test_every_state_of_the_source_that_timed_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted score goes on after a commit: nothing is timed again, and the report says that two states timed."""
    path = borrowed(tmp_path, *TRAINED, evaluate={"audit_prompts": 0, "prompts": 2, "candidates": ["tuned"], "temperatures": [0.7]})
    states = [{"commit": "a" * 40, "dirty": False}, {"commit": "b" * 40, "dirty": True}]
    real, written = cells.write_json, []

    def counting(to: Path, value: Any) -> None:
        if "/timing/" in str(to) and len(written) == 2:
            raise KeyboardInterrupt
        written.extend([to] if "/timing/" in str(to) else [])
        real(to, value)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(cells, "write_json", counting)
        patch.setattr(scoring, "git_state", lambda: states[0])
        score(*opened(path))
    kept = {p: p.read_bytes() for p in (tmp_path / "run" / "score.partial" / "cells" / "timing").rglob("*.json")}
    monkeypatch.setattr(scoring, "git_state", lambda: states[1])
    result = score(*opened(path))
    assert len(kept) == 2 and all((tmp_path / "run" / "score" / p.relative_to(tmp_path / "run" / "score.partial")).read_bytes() == was
                                  for p, was in kept.items())  # fmt: skip
    assert result["conditions"]["commits"] == ["a" * 40, "b" * 40 + " with changes"]
    assert "2 states of Draftstill's source" in (tmp_path / "run" / "score" / "report.md").read_text()


def test_a_calibrated_shape_depends_on_the_recording() -> None:
    """The untuned arm of a draft whose layers or widths were chosen on the recording is another one after another recording."""
    recipe, run = opened(finished() / "recipe.yaml")
    folders = {"tuned": finished() / "run" / "draft"}
    bench = SimpleNamespace(recipe=recipe, table=None, arms=arms_of(recipe))
    made = {}
    for name, draft in (
        ("fixed", {}),
        ("layers", {"layers": "auto", "depth": 2}),
        ("heads", {"keep_heads": 0.5}),
        ("mlp", {"keep_mlp": 0.5}),
    ):
        values = recipe.model_dump(mode="json")
        other = Recipe.model_validate_json(json.dumps({**values, "draft": {**values["draft"], **draft}}))
        bench.recipe = other
        found = stages(recipe, run)
        for recording in ("a", "b"):
            found["draft"].inputs["recording"] = recording
            made[name, recording] = scoring._drafts(bench, folders, found)["untuned"]  # type: ignore[arg-type]
    assert made["fixed", "a"] == made["fixed", "b"]
    assert all(made[name, "a"] != made[name, "b"] for name in ("layers", "heads", "mlp"))


def test_warm_up_is_that_of_all_attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = borrowed(tmp_path, *TRAINED, evaluate={"audit_prompts": 0, "prompts": 2, "candidates": ["tuned"]})

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(scoring, "write_reports", stop)
        score(*opened(path))
    before = read_json(tmp_path / "run" / "score.partial" / "warm_up.json")["seconds"]
    result = score(*opened(path))
    assert before > 0 and result["conditions"]["warm_up_s"] == round(before, 2), "nothing was decoded any more"


def test_what_the_audit_samples_with_and_what_decides_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The winner and the published draft, whatever the order of the recipe; another sampler or seed is another audit."""
    asked: list[Any] = []
    monkeypatch.setattr(scoring, "audit", lambda *a, arms: asked.append(list(arms)))
    keys = {"candidates": ["lookup", "tuned"], "audit_prompts": 1, "prompts": 2, "temperatures": [0.7]}
    path = borrowed(tmp_path, *TRAINED, evaluate=keys)
    result = score(*opened(path))
    assert asked == [scoring.audited_arms(result)] and "tuned" in asked[0]
    row = {"arm": "b", "kind": "tuned", "candidate": "b"}
    told = {"winner": {"arm": None}, "best": None, "publish": "b", "arms": [{**row, "arm": "a", "candidate": "a"}, row]}
    assert scoring.audited_arms(told) == ["b"]
    assert scoring.audited_arms({**told, "winner": {"arm": "lookup"}}) == ["lookup", "b"]
    assert scoring.audited_arms({**told, "winner": {"arm": "b"}}) == ["b"]
    assert scoring.audited_arms({**told, "arms": [], "best": {"arm": "lookup"}}) == ["lookup"]
    assert scoring.audited_arms({**told, "arms": []}) == []


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
    mine, alone = (s["diagnosis"]["tuned"] for s in (result, own))
    assert all(mine[k] == alone[k] for k in ("tokens", "alpha", "kl", "output", "worst", "sure"))
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
