"""A score against an earlier one: what counts as a regression, what is not compared, and the exit codes."""

from __future__ import annotations

import copy
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftstill import cli, running
from draftstill.errors import DraftstillError
from draftstill.evaluate.comparing import _change, _wider, compare
from draftstill.evaluate.comparison_report import as_lines, as_markdown, compare_scores, old_score
from draftstill.recipe_io import load_recipe
from draftstill.runfolder import RunFolder
from tests.pipeline import write_recipe

HERE = Path(__file__).parent
OLD = json.loads((HERE / "sample_score_2.json").read_text())
FIRST = json.loads((HERE / "sample_score.json").read_text())
Edit = Callable[[dict[str, Any]], None]


@pytest.fixture
def new() -> dict[str, Any]:
    return copy.deepcopy(OLD)


def scaled(interval: dict[str, Any], by: float) -> dict[str, Any]:
    return {**interval, **{k: interval[k] * by for k in ("estimate", "low", "high")}}


def change(score: dict[str, Any], figure: str, by: float, arm: str = "tuned") -> None:
    for row in score["sweep"]:
        if row["arm"] == arm:
            if figure == "speedup":
                row["speedup"] = scaled(row["speedup"], by)
            else:
                row["counts"]["acceptance"] = scaled(row["counts"]["acceptance"], by)


def test_a_score_has_not_changed_against_itself() -> None:
    found = compare(OLD, OLD)
    assert found.changes and not found.differences and not found.regressed and not found.missing
    assert {c.reading for c in found.changes} == {"no clear difference"}
    assert {c.figure for c in found.changes} == {"acceptance", "speed-up", "speed-up under load"}
    assert all(c.change["estimate"] in (0.0, 1.0) for c in found.changes)


@pytest.mark.parametrize(("figure", "name"), [("speedup", "speed-up"), ("acceptance", "acceptance")])
def test_what_fell_beyond_the_intervals_is_a_regression_and_what_rose_is_none(new: dict[str, Any], figure: str, name: str) -> None:
    change(new, figure, 0.3)
    found = compare(new, OLD)
    hit = [c for c in found.changes if c.reading == "worse"]
    assert hit and {(c.arm, c.figure) for c in hit} == {("tuned", name)}
    assert len(found.regressed) == len(hit) and "fell from" in found.regressed[0]
    back = compare(OLD, new)
    assert not back.regressed and sum(c.reading == "better" for c in back.changes) == len(hit)


def test_a_difference_within_the_intervals_is_none(new: dict[str, Any]) -> None:
    change(new, "speedup", 0.98)
    assert not compare(new, OLD).regressed


def test_a_gate_that_looks_at_many_figures_does_not_fail_by_chance() -> None:
    rng, figures, alarms, half = random.Random(0), 40, 0, 1.96
    key = ("acceptance", "own", 0.7, "tuned", 2)
    for _ in range(400):

        def drawn() -> dict[str, Any]:
            x = rng.gauss(0.5, 0.01)
            return {"estimate": x, "low": x - half * 0.01, "high": x + half * 0.01, "method": "bootstrap-t"}  # fmt: skip

        alarms += any(_change(key, drawn(), drawn(), 0.95, figures).reading != "no clear difference" for _ in range(figures))
    assert 4 <= alarms <= 36  # 5% of 400 are 20, each figure by itself would give 87%


def test_a_draft_of_which_nothing_is_accepted_any_more_is_worse(new: dict[str, Any]) -> None:
    for row in new["sweep"]:
        if row["arm"] == "tuned":
            row["counts"]["acceptance"] = {"estimate": 0.0, "low": 0.0, "high": 0.0, "method": "none: all prompts have the same ratio"}
    assert {c.arm for c in compare(new, OLD).changes if c.reading == "worse"} == {"tuned"}
    for row in new["sweep"]:
        if row["arm"] == "tuned":
            row["counts"]["acceptance"]["method"] = "none: one prompt"
    assert not compare(new, OLD).regressed, "one prompt says nothing"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("machine.cpu", "another"), ("machine.cores", 64), ("device", "cuda"), ("dtype", "float16"), ("threads", 1), ("backend", "graphs"),
        ("versions.torch", "9.9"), ("timing_tokens", 7), ("other_cores", 0.9), ("seed", 5),
    ],
)  # fmt: skip
def test_other_conditions_are_named_and_speed_is_not_compared(new: dict[str, Any], path: str, value: object) -> None:
    change(new, "speedup", 0.3)
    change(new, "acceptance", 0.3)
    *parents, last = path.split(".")
    place = new["conditions"]
    for p in parents:
        place = place[p]
    place[last] = value
    found = compare(new, OLD)
    assert {c.figure for c in found.changes} == {"acceptance"} and found.barred
    assert found.regressed and all(line.startswith("acceptance") for line in found.regressed)
    told = as_lines(found) + as_markdown(found, new, OLD)
    assert "speed is not compared" in told and "Speed is not compared" in told and last.replace("_", " ").split()[-1] in told


def test_another_gpu_bars_speed_where_both_scores_name_theirs(new: dict[str, Any]) -> None:
    old = copy.deepcopy(OLD)
    for score in (old, new):
        score["conditions"].update(device="cuda", accelerator="NVIDIA A10")
    assert not compare(new, old).barred
    new["conditions"]["accelerator"] = "NVIDIA H200"
    assert compare(new, old).barred == ["accelerator"] and {c.figure for c in compare(new, old).changes} == {"acceptance"}
    assert "NVIDIA A10" in as_markdown(compare(new, old), new, old)
    for score in (old, new):
        del score["conditions"]["accelerator"]
        assert not compare(new, old).barred, "an older score does not name it"
    assert {c.figure for c in compare(new, old).changes} > {"acceptance"}


def test_other_prompts_bar_speed_and_another_sampler_bars_everything(new: dict[str, Any]) -> None:
    for a in new["arms"]:
        for row in a["per_prompt"]:
            row["prompt"] += "x"
    assert "timed prompts" in compare(new, OLD).barred
    new["conditions"]["top_p"] = 0.5
    assert compare(new, OLD).changes == () and "nothing is compared" in as_lines(compare(new, OLD))


def test_other_lengths_bar_the_acceptance_that_was_counted_on_them(new: dict[str, Any]) -> None:
    new["conditions"]["timing_tokens"] += 1
    assert {c.figure for c in compare(new, OLD).changes} == {"acceptance"}, "counted on whole texts, timed on others"
    new["conditions"]["max_new_tokens"] += 1
    assert compare(new, OLD).changes == ()
    older = copy.deepcopy(FIRST)
    older["conditions"]["max_new_tokens"] += 1
    assert compare(older, FIRST).changes == (), "an older score counts acceptance on the timed texts"


def test_our_own_version_and_commit_are_named_but_bar_nothing(new: dict[str, Any]) -> None:
    new["conditions"]["versions"]["draftstill"] = "99"
    found = compare(new, OLD)
    assert [d.what for d in found.differences] == ["version of draftstill"] and not found.barred


def test_another_target_is_refused(new: dict[str, Any]) -> None:
    new["target"]["parameters"] += 1
    with pytest.raises(DraftstillError, match="of another target"):
        compare(new, OLD)


def test_an_audit_that_fails_now_is_a_regression(new: dict[str, Any]) -> None:
    new["audit"]["greedy_fp32"]["identical"] = 0
    found = compare(new, OLD)
    assert found.broken and "not any more" in found.regressed[0] and "regressed" in as_lines(found)


def test_what_is_not_scored_any_more_is_said(new: dict[str, Any]) -> None:
    new["sweep"] = [r for r in new["sweep"] if r["arm"] != "lookup"]
    found = compare(new, OLD)
    assert found.missing and all("prompt lookup" in m for m in found.missing) and not found.regressed
    assert "not scored any more: prompt lookup" in as_markdown(found, new, OLD)


def test_an_older_schema_is_compared_by_what_both_measured() -> None:
    newer = copy.deepcopy(OLD)
    newer["target"], newer["conditions"] = FIRST["target"], {**newer["conditions"], "top_k": 0, "top_p": 1.0, "timing_tokens": 64}
    for row in newer["sweep"]:
        if row["counts"]:
            row["counts"]["acceptance"] = None  # were it read, nothing would be compared
    found = compare(newer, FIRST)
    assert found.changes and {c.figure for c in found.changes} == {"acceptance"}


def test_the_page_for_a_pull_request_is_whole_and_inert(new: dict[str, Any]) -> None:
    hostile = "<img src=x onerror=alert(1)> | `x` [a](b)"
    for score in (new, before := copy.deepcopy(OLD)):
        for row in score["sweep"]:
            if row["arm"] == "tuned":
                row["arm"] = hostile
    change(new, "speedup", 0.3, hostile)
    new["conditions"]["versions"]["torch2"] = hostile
    text = as_markdown(compare(new, before), new, before)
    assert "<img" not in text and hostile not in text
    rows = [line.replace("\\|", "") for line in text.splitlines() if line.startswith("| ")]
    assert {r.count("|") for r in rows} <= {7, 5}
    json.dumps(compare(new, before).to_json())


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read"),
        ("{", "is not JSON"),
        ("[]", "schema None"),
        ('{"schema": 3}', "schema 3"),
        ('{"schema": 2}', "has no target"),
    ],
)
def test_what_is_no_score_is_refused(tmp_path: Path, content: str | None, says: str) -> None:
    path = tmp_path / "old.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DraftstillError, match=says) as caught:
        old_score(path)
    assert caught.value.key == "--compare" and caught.value.mend


def test_the_command_exits_2_on_a_regression_and_reads_the_old_score_first(
    new: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe_path = write_recipe(tmp_path)
    recipe = load_recipe(recipe_path)
    folder = Path(recipe.run_dir) / "score"
    ran = []

    def verb(*_: object) -> tuple[Any, RunFolder]:
        ran.append(True)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "score.json").write_text(json.dumps(new))
        return recipe, RunFolder(recipe.run_dir)

    def code(*options: str) -> int:
        monkeypatch.setattr(sys, "argv", ["draftstill", "evaluate", str(recipe_path), *options])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return int(str(stop.value.code))

    monkeypatch.setattr(running, "make", verb)
    old = tmp_path / "old.json"
    assert code("--compare", str(old)) == 1 and not ran, "refused before anything starts"
    old.write_text(json.dumps(OLD))
    assert code("--compare", str(old), "--audit") == 1 and not ran
    capsys.readouterr()
    assert code("--compare", str(old)) == 0 and "nothing regressed" in capsys.readouterr().out
    assert (folder / "compare.md").read_text().startswith("## Compared with the score of")
    change(new, "speedup", 0.3)
    assert code("--compare", str(old)) == 2
    shown = capsys.readouterr()
    assert "regressed beyond" in shown.out and "gate missed" in shown.err and "speed-up of draft after training" in shown.err


def test_the_terminal_names_what_changed(new: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(new, "speedup", 0.3)
    assert compare_scores(new, OLD, tmp_path)
    out = capsys.readouterr().out
    assert "worse" in out and "speed-up of draft after training at gamma" in out


@pytest.mark.parametrize("key", ["prompts_sha256", "test_sha256"])
def test_other_prompts_or_test_documents_bar_everything(new: dict[str, Any], key: str) -> None:
    old = copy.deepcopy(OLD)
    old["conditions"][key] = new["conditions"][key] = "a"
    assert compare(new, old).changes and not compare(new, old).barred
    new["conditions"][key] = "b"
    found = compare(new, old)
    assert found.changes == () and found.barred and "nothing is compared" in as_lines(found)
    del new["conditions"][key]
    assert compare(new, old).changes, "an older score does not know it"


def test_other_prompts_of_a_further_domain_bar_everything(new: dict[str, Any]) -> None:
    old = copy.deepcopy(OLD)
    other = next(name for name in old["domains"] if name != "own")
    old["domains"][other]["prompts_sha256"], new["domains"][other]["prompts_sha256"] = "a", "b"
    assert compare(new, old).changes == () and compare(new, old).barred == [f"prompts of {other}"]
    del new["domains"][other]
    assert compare(new, old).changes, "what is not scored any more is missing, no difference"


def test_few_prompts_widen_by_t() -> None:
    """Two scores of the same truth, 5 prompts each, 20 figures: by normal quantiles more than the nominal share would alarm."""
    from scipy import stats

    rng, alarms, half, figures = random.Random(3), 0, float(stats.t.ppf(0.975, 4)), 20
    key = ("acceptance", "own", 0.7, "tuned", 2)

    def drawn(named: bool) -> dict[str, Any]:
        values = [rng.gauss(0.5, 0.02) for _ in range(5)]
        mean = sum(values) / 5
        error = (sum((v - mean) ** 2 for v in values) / 20) ** 0.5
        method = {"method": "bootstrap-t", "prompts": 5} if named else {"method": "t: 5 prompts"}
        return {"estimate": mean, "low": mean - half * error, "high": mean + half * error, **method}

    for n in range(400):
        alarms += any(
            _change(key, drawn(n % 2 == 0), drawn(n % 2 == 1), 0.95, figures).reading != "no clear difference" for _ in range(figures)
        )
    assert alarms <= 0.05 * 400


def test_the_widening_is_the_ratio_of_t_quantiles() -> None:
    from scipy import stats

    wide = lambda interval: _wider({"method": "bootstrap-t", **interval}, 0.95, 20)  # noqa: E731
    assert wide({"prompts": 5}) == pytest.approx(stats.t.ppf(1 - 0.05 / 40, 4) / stats.t.ppf(0.975, 4))
    assert wide({"method": "t: 5 prompts"}) == wide({"prompts": 5}) > wide({"prompts": 40}) > wide({})
    assert wide({}) == pytest.approx(stats.norm.ppf(1 - 0.05 / 40) / stats.norm.ppf(0.975)) == wide({"prompts": None})
