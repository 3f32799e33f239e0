"""The score's summary for the trackers of ``train.report_to``: wandb, tensorboard, trackio."""

from __future__ import annotations

from typing import Any

from draftstill.evaluate.reading import Score, acceptance, arms_at, as_read, shown_candidate
from draftstill.evaluate.sentences import verdict
from draftstill.evaluate.wording import leader, losslessness, outcome
from draftstill.recipe import Recipe
from draftstill.runfolder import RunFolder, read_json
from draftstill.stages import stages
from draftstill.train import log_summary


def track_score(recipe: Recipe, run: RunFolder) -> None:
    """Log the finished score. A tracker that fails is said and left out."""
    stage = stages(recipe, run)["score"]
    log_summary(recipe, stage, summary_of(read_json(stage.folder / "score.json")))


def summary_of(score: Score) -> dict[str, Any]:
    """Flat figures at the deployment's temperature: who wins, its speed-up with its bounds, and of each arm alpha, acceptance, speed-up,
    tokens per second. What was not measured is left out, so that no tracker shows a 0 for it."""
    score = as_read(score)
    winner, led, passed = score["winner"], leader(score), losslessness(score)[0]
    found: dict[str, Any] = {
        "score/verdict": verdict(score), "score/outcome": outcome(score), "score/winner": winner["arm"], "score/temperature": winner["temperature"],
        "score/gamma": winner["gamma"], "score/lossless": None if passed is None else int(passed), "score/publish": shown_candidate(score),
    }  # fmt: skip
    if led:
        found |= {
            "score/fastest": led[0],
            **{f"score/speedup{end}": led[1][k] for end, k in (("", "estimate"), ("_low", "low"), ("_high", "high"))},
        }
    for name, a in arms_at(score, winner["temperature"]).items():
        figures = {"alpha": a["alpha"], "acceptance": acceptance(a)[1], "speedup": (a["speedup"] or {}).get("estimate"),
                   "tokens_per_s": a["tokens_per_s"], "gamma": a["swept"] or None}  # fmt: skip
        found |= {f"score/{name.replace(':', '/')}/{k}": v for k, v in figures.items()}
    if score.get("load"):
        found["score/stops_paying_at"] = score["load"]["stops_paying_at"]
    return {k: v for k, v in found.items() if v is not None}
