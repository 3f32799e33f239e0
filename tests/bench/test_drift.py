"""The drift benchmark: its arithmetic, and its path through the product's stages on the tiny pair."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftstill.errors import DraftstillError
from tests.bench import drift
from tests.bench.drift_report import WORDS, findings, markdown, summary, won_back

PROMPTS = 12


def cell(accepted: float, alpha: float) -> dict[str, Any]:
    """A cell of prompts that differ a little: ``accepted`` of 40 proposed tokens, ``alpha`` at all temperatures."""
    shift = [(-1) ** n * (n % 3) / 100 for n in range(PROMPTS)]
    return {"prompts": list(range(PROMPTS)), "alpha": {t: [20 * (alpha + s) for s in shift] for t in ("0", "0.7", "1")},
            "positions": {t: [20] * PROMPTS for t in ("0", "0.7", "1")}, "accepted": [accepted + 10 * s for s in shift],
            "proposed": [40] * PROMPTS, "rounds": [10] * PROMPTS, "emitted": [accepted + 10] * PROMPTS}  # fmt: skip


def test_share_won_back() -> None:
    a, b, c = cell(24, 0.6), cell(16, 0.4), cell(22, 0.55)
    found = won_back(a, b, c)
    assert found is not None and found["estimate"] == pytest.approx(0.75) and found["low"] <= 0.75 <= found["high"]
    assert won_back(b, a, c) is None, "nothing was lost"


def test_findings_say_what_the_intervals_say() -> None:
    cells = {"general": cell(24, 0.6), "drifted": cell(16, 0.4), "forward_kl": cell(22, 0.55), "rollouts": cell(20, 0.45), "ce": cell(22, 0.56),
             "synthetic": cell(18, 0.46), "reverse_kl": cell(22, 0.552), "lk": cell(22, 0.6), "tvd": cell(22, 0.5)}  # fmt: skip
    verdicts = {f["claim"]: f["verdict"] for f in findings(cells)}
    assert verdicts == {
        "a general draft falls on a tuned target": "holds", "offline beats student rollouts": "holds", "white-box beats black-box": "does not hold",
        "synthetic prompts reach 80% of real ones": "holds", "forward KL is the best loss": "does not hold",
    }  # fmt: skip
    assert [f["b"] for f in findings(cells) if f["claim"].startswith("forward")] == ["lk"], "the rival is the best of the others"
    assert findings({"general": cells["general"]}) == []


def test_the_table_names_what_is_missing() -> None:
    report = {"domains": {"biology": summary({"general": cell(24, 0.6)})}, "failed": {"biology/ce": "no room"}, "perplexity": {},
              "conditions": {"biology": {"prompts": PROMPTS}}}  # fmt: skip
    text = markdown(report)
    assert "not measured: no room" in text and text.count("not yet") == len(WORDS) - 2 and "60.0%" in text


@pytest.fixture
def bench(tmp_path: Path) -> drift.Bench:
    made = drift.tiny(tmp_path)
    made.domains = {"biology": made.domains["biology"]}
    return made


def test_every_recipe_is_one(bench: drift.Bench) -> None:
    ways = bench.drafts("biology")
    assert set(ways) == set(WORDS) - {"general", "drifted"}
    recipes = {name: recipe for name, (recipe, _, _) in ways.items()}
    assert {name: r.train.loss.name for name, r in recipes.items() if r.train.loss.name != "forward_kl"} == {
        "reverse_kl": "reverse_kl", "tvd": "tvd", "lk": "lk", "ce": "ce"}  # fmt: skip
    assert recipes["served"].record.top_k == 20 and recipes["rollouts"].respond.prompts == 0
    asked = {r.respond.prompts + r.record.rollouts for r in recipes.values()}
    assert len(asked) == 1, "all ways learn from the same number of texts"
    assert len({json.dumps(r.train.model_dump(mode="json", exclude={"loss"})) for r in recipes.values()}) == 1
    assert all(str(bench.model("general")) == r.draft.source for r in recipes.values())


def test_the_path_runs_and_goes_on(bench: drift.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["general/draft", "biology/target", "biology/general", "biology/drifted", "biology/forward_kl", "biology/ce"]
    done = []
    for name, work in bench.pieces():
        if name in wanted:
            work()
            done.append(name)
    assert done == wanted
    assert {name for name, _ in bench.pieces()} == {f"biology/{n}" for n in WORDS} - set(wanted), "what is done is not done again"
    model = bench.model("biology-ce") / "model.safetensors"
    kept = model.read_bytes()
    model.write_bytes(kept + b" ")
    assert "biology/ce" in {name for name, _ in bench.pieces()}, "a draft that was made anew is measured anew"
    model.write_bytes(kept)
    runs = bench.folder / "runs"
    made = [(runs / f"biology-{n}" / "responses" / "provenance.json").read_bytes() for n in ("forward_kl", "ce")]
    assert made[0] == made[1], "both losses learn from one set of responses"
    found = bench.report()
    arms = found["domains"]["biology"]["arms"]
    assert set(arms) == {"general", "drifted", "forward_kl", "ce"} and found["conditions"]["biology"]["prompts"] == 4
    assert arms["drifted"]["alpha"]["0.7"] < arms["general"]["alpha"]["0.7"], "the tuned target has drifted"
    assert arms["forward_kl"]["alpha"]["0.7"] > arms["drifted"]["alpha"]["0.7"], "and distillation follows it"
    assert "| (c) real prompts, top-64, forward KL | " in markdown(found)


def test_a_spent_budget_starts_nothing_and_a_refusal_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert drift.main(["--quick", "--budget-minutes", "0", "--out", str(tmp_path)]) == 0
    assert "23 pieces are left" in capsys.readouterr().out

    def refused() -> None:
        raise DraftstillError("no room")

    monkeypatch.setattr(drift.Bench, "pieces", lambda self: iter([("biology/ce", refused)]))
    assert drift.main(["--quick", "--out", str(tmp_path)]) == 1
    assert "not measured: no room" in capsys.readouterr().out

    def broken() -> None:
        raise RuntimeError("not enough memory")

    done = []
    monkeypatch.setattr(drift.Bench, "pieces", lambda self: iter([("biology/ce", broken), ("biology/lk", lambda: done.append(1))]))
    assert drift.main(["--quick", "--out", str(tmp_path)]) == 1 and done, "one failing piece does not lose the others"
    assert "not measured: RuntimeError: not enough memory" in capsys.readouterr().out
    monkeypatch.setattr(drift.Bench, "pieces", lambda self: iter([("biology/target", refused)]))
    with pytest.raises(DraftstillError):
        drift.main(["--quick", "--out", str(tmp_path)])
