"""The figures that the training benchmarks print: which gamma a row stands for, and a ratio that was measured the other way round."""

from __future__ import annotations

from typing import Any

import pytest

from draftstill.recipe import OWN
from tests.bench.sweeps import fastest, judged, over, table


def interval(estimate: float) -> dict[str, float]:
    return {"estimate": estimate, "low": estimate / 2, "high": estimate * 2}


def row(arm: str, swept: int, predicted: float, measured: float, **other: Any) -> dict[str, Any]:
    counts = {"metrics": {"tau": 1.5}, "predicted": interval(predicted)}
    return {"arm": arm, "kind": arm, "candidate": arm, "temperature": 0.7, "domain": OWN, "swept": swept, "alpha": 0.5, "c": 0.1, "v": 1.0,
            "counts": counts, "speedup": interval(measured), **other}  # fmt: skip


TUNED = [row("tuned", 2, 1.5, 1.1), row("tuned", 4, 1.4, 1.3)]
LOOKUP = row("lookup", 6, 1.2, 1.25)
PLAIN = row("plain", 0, 9.0, 9.0)
ELSEWHERE = row("tuned", 1, 8.0, 8.0, domain="general")
COLD = row("tuned", 1, 7.0, 7.0, temperature=0.0)


def report(*, swap: bool = False) -> dict[str, Any]:
    a, b, ratio = ("lookup", "tuned", {"estimate": 0.8, "low": 0.5, "high": 1.25}) if swap else ("tuned", "lookup", interval(1.6))
    score = {
        "arms": [PLAIN, TUNED[1], LOOKUP, ELSEWHERE, COLD], "sweep": [PLAIN, *TUNED, LOOKUP, ELSEWHERE, COLD],
        "comparisons": [{"temperature": 0.7, "a": a, "b": b, "ratio": ratio}],
    }  # fmt: skip
    return {"score": score, "tokens": {"tuned": 1234}, "train_seconds": {"tuned": 120.0}, "failed": {"own-1": "no such layer"}}


@pytest.mark.parametrize(("by_prediction", "gamma", "predicted"), [(False, "4", "1.40x"), (True, "2", "1.50x")])
def test_a_row_stands_for_the_gamma_that_was_asked_for(by_prediction: bool, gamma: str, predicted: str) -> None:
    lines = table(report(), 0.7, by_prediction=by_prediction).splitlines()
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines[2:4]]
    assert [c[0] for c in cells] == ["tuned", "lookup"], (
        "plain decoding, other domains and temperatures are not among them; the best comes first"
    )
    assert cells[0][1:4] == ["2 min", "1,234", gamma] and cells[0][8].startswith(predicted)
    assert cells[1][1:3] == ["-", "-"]
    assert lines[-1] == "own-1 is not there: no such layer"


def test_a_ratio_measured_the_other_way_round_is_turned_with_its_ends() -> None:
    asked = (0.7, ("tuned",), ("lookup",))
    assert over(report(), *asked) == interval(1.6)
    turned = over(report(swap=True), *asked)
    assert turned is not None and {k: turned[k] for k in ("estimate", "low", "high")} == pytest.approx(
        {"estimate": 1.25, "low": 0.8, "high": 2.0}
    )
    assert over(report(), 0.7, ("tuned",), ("stock",)) is None


def test_a_goal_is_missed_by_what_is_below_it_and_by_what_was_not_measured() -> None:
    lines = judged({"reached": (interval(1.5), 1.5), "below": (interval(1.4), 1.5), "absent": (None, 1.5)})
    assert [line.split()[0] for line in lines] == ["pass", "MISS", "MISS"]
    assert judged({"low": (interval(1.5), 1.5)}, "low")[0].startswith("MISS")


def test_the_fastest_is_sought_on_the_text_that_the_drafts_are_made_for() -> None:
    assert fastest(report(), 0.7, "tuned", "lookup", "plain") == TUNED[1]
