"""The diagnosis of each trained draft, from the texts and laws of a score: see ``diagnosis``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from draftstill.decode import Costs
from draftstill.evaluate.advice import Conditions
from draftstill.evaluate.assembling import Found, Row, derived
from draftstill.evaluate.cells import Cells
from draftstill.evaluate.diagnosis import diagnose, text_of
from draftstill.evaluate.token_kinds import pieces_of


def diagnoses(cells: Cells, costs: Costs, found: Sequence[Found], sweep: Sequence[Row], best: Sequence[Row],
              curves: Mapping[str, Sequence[Mapping[str, Any]]], curve_of: str = "alpha") -> dict[str, dict[str, Any]]:  # fmt: skip
    """By candidate, at the best gamma of its draft alone: on the run's own text, the others in the table of domains.

    Args:
        found: all domains at one temperature, the run's own first.
        sweep, best: the rows of the run's own domain at that temperature.
        curves: of the training, by candidate; ``curve_of``: what they show.
    """
    rows = [r for r in best if r["kind"] == "tuned"]
    if not rows:
        return {}
    pieces = {f.domain: [pieces_of(cells.bench.target.tokenizer, t["tokens"]) for t in f.texts] for f in found}
    made, v = {}, costs.v_by_gamma()
    for r in rows:
        arm = cells.bench.arms[r["arm"]]
        own, others = (
            [
                text_of(prompt.id, f.domain, pieces[f.domain][n], trace, f.laws[r["draft"]][n])
                for f in some
                for n, (prompt, trace) in enumerate(
                    zip(f.prompts, derived(cells.bench, f, arm, r["swept"], [cells.seed(p) for p in f.prompts]), strict=True)
                )
            ]
            for some in (found[:1], found[1:])
        )
        speeds = {s["swept"]: (s["speedup"] or s["counts"]["predicted"])["estimate"] for s in sweep if s["arm"] == r["arm"]}
        curve = [p["alpha_deploy"] for p in curves.get(r["candidate"], ()) if p.get("alpha_deploy") is not None]
        conditions = Conditions(costs.c_by_gamma(r["draft"], max(v)), v, speeds, curve, cells.recipe.evaluate.gamma, curve_of)
        made[r["candidate"]] = diagnose(own, r["swept"], conditions, others)
    return made
