"""What the steps of a score's arms cost, timed apart from them; in files like everything that a score measures (``cells``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from draftstill.decode import Costs, Sampling, measure_costs
from draftstill.evaluate.arms import PLAIN
from draftstill.evaluate.cells import Cells, Timed
from draftstill.evaluate.domains import Domain
from draftstill.recipe_io import fingerprint

_STEPS = ("first_s", "draft_s")


def step_costs(cells: Cells, field: Domain, arms: Sequence[Timed], when: Literal["before", "after"]) -> dict[float, Costs]:
    """By temperature: all that sample cost alike, and a greedy step has no softmax and no draw."""
    found: dict[bool, Costs] = {}
    for t in cells.recipe.evaluate.temperatures:
        law = cells.sampling(t)
        if law.greedy not in found:
            found[law.greedy] = _of_law(cells, field, arms, when, law)
    return {t: found[cells.sampling(t).greedy] for t in cells.recipe.evaluate.temperatures}


def _of_law(cells: Cells, field: Domain, arms: Sequence[Timed], when: str, law: Sampling) -> Costs:
    """Of a score that gained a draft or an arm with longer blocks only what is new is timed, against a plain step of its own: what is known of the
    others stays."""
    bench = cells.bench
    context = len(field.prompts[0].ids) + cells.recipe.evaluate.timed_tokens // 2
    backend = bench.decoder(PLAIN, law).backend
    widths = [*range(1, 2 + max((bench.gamma(arm.name, g) for arm, g in arms), default=0))]
    kind = "greedy" if law.greedy else "sampled"
    place, key = f"costs-{when}-{kind}.json", fingerprint(cells.identity, cells.surroundings, context, backend, kind, law.top_k, law.top_p)
    made = {name: fingerprint(cells.drafts[name]) for name in bench.drafts}
    cell = cells.read(place, key) or {"verify_s": {}, **{k: {} for k in _STEPS}}
    lacking = [w for w in widths if str(w) not in cell["verify_s"]]
    drafts = {name: d for name, d in bench.drafts.items() if made[name] not in cell["draft_s"]}
    if lacking or drafts:
        new = measure_costs(bench.target.network, drafts, context, 0, backend=backend, sampling=law, widths=lacking)
        scale = cell["verify_s"].get("1", new.verify_s["1"]) / new.verify_s["1"]
        named: dict[str, dict[str, float]] = {"verify_s": new.verify_s}
        named |= {k: {made[name]: s for name, s in getattr(new, k).items()} for k in _STEPS}
        cell = {"repeats": new.repeats, "sampling": new.sampling, **{k: {**{n: scale * s for n, s in values.items()}, **cell[k]}
                for k, values in named.items()}}  # fmt: skip
    cells.write(place, key, {k: v for k, v in cell.items() if k != "key"})
    steps: dict[str, Any] = {k: {name: cell[k][m] for name, m in made.items()} for k in _STEPS}
    return Costs(
        context, cell["repeats"], {str(w): cell["verify_s"][str(w)] for w in widths}, **steps, backend=backend, sampling=cell["sampling"]
    )
