"""From cells to figures: one row for every arm, gamma and temperature of a domain. No decoding here."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftstill.decode import BigramDrafter, Costs, LookupDrafter, derive
from draftstill.decode.theory import break_even, ceiling, expected_tokens, predicted_speedup
from draftstill.decode.trace import Round, Trace, check, metrics
from draftstill.distill import Prompt
from draftstill.evaluate.arms import PLAIN, Arm, Bench
from draftstill.evaluate.cells import Cells, Timed
from draftstill.evaluate.stats import paired_ratio, pooled_ratio
from draftstill.recipe import Recipe

Row = dict[str, Any]
_COUNTED = ("rows", "rounds", "proposed", "accepted", "emitted", "bonus", "corrected", "extra", "plain", "draft_steps", "token_acceptance",
            "tau", "tau_without_bonus", "block_efficiency", "acceptance_at", "acceptance_at_unconditional", "drafting_stopped")  # fmt: skip
"""Metrics that hold no time."""


@dataclass(slots=True)
class Found:
    """What the cells of one domain and temperature hold."""

    domain: str
    temperature: float
    prompts: Sequence[Prompt]
    texts: list[dict[str, Any]]
    """One for each prompt; see ``Cells.texts``."""
    laws: dict[str, list[dict[str, Any]]]
    """By draft, one for each prompt; see ``Cells.laws``."""
    timed: list[dict[tuple[str, int], dict[str, Any]]]
    """For each timed prompt, the first ones of ``prompts``: the cell of every arm and gamma."""


def gather(cells: Cells, domain: str, prompts: Sequence[Prompt], temperature: float, arms: Sequence[Timed], timed: int) -> Found:
    """Read what is there. Texts and laws must be; ``timed``: so many prompts have all their timings."""
    texts = cells.texts(domain, prompts, temperature)
    laws = cells.laws(domain, prompts, temperature, texts)
    rows = []
    for number, prompt in enumerate(prompts[:timed]):
        here = {}
        for arm, gamma in [(cells.bench.arms[PLAIN], 0), *arms]:
            cell = cells.read(*cells.place(domain, number, prompt, temperature, arm, gamma))
            assert cell is not None
            here[arm.name, gamma] = cell
        rows.append(here)
    return Found(domain, temperature, prompts, texts, laws, rows)


def trace_of(cell: Mapping[str, Any]) -> Trace:
    """The stored trace of a timing."""
    stored = cell["trace"]
    return Trace(**{**stored, "rounds": [Round(**r) for r in stored["rounds"]]})


def bootstrap(recipe: Recipe) -> dict[str, Any]:
    """The keywords of every interval."""
    return {"confidence": recipe.evaluate.confidence, "resamples": recipe.evaluate.bootstrap, "seed": recipe.seed}


def seconds(found: Found, arm: str, gamma: int) -> tuple[list[float], list[float], list[int], list[int]]:
    """(plain seconds, the arm's, plain tokens, the arm's) of each timed prompt; plain decoding's are of the same minutes."""
    mine = [row[arm, gamma] for row in found.timed]
    traces = [trace_of(c) for c in mine]
    return ([c["plain_s"] for c in mine], [t.decode_s for t in traces], [c["plain_tokens"] for c in mine], [len(t.tokens) for t in traces])


def derived(bench: Bench, found: Found, arm: Arm, gamma: int, seeds: Sequence[int]) -> list[Trace]:
    """The rounds that the arm takes along each text: see ``decode.deriving``."""
    settings, network = bench.recipe.evaluate, bench.target.network
    draft = bench.drafts.get(arm.draft or "")
    traces = []
    for n, (prompt, text) in enumerate(zip(found.prompts, found.texts, strict=True)):
        guesser: LookupDrafter | BigramDrafter | None = None
        if arm.kind in ("lookup", "composite"):
            guesser = LookupDrafter(settings.lookup_gamma if arm.kind == "composite" else gamma, network.vocab, network.device)
        elif arm.kind == "bigram":
            assert bench.table is not None
            guesser = BigramDrafter(bench.table, gamma, network.device)
        keep = None if arm.draft is None else found.laws[arm.draft][n]["keep"]
        traces.append(
            derive(prompt.ids, text["tokens"], keep, gamma, most=settings.max_new_tokens, ended=text["finish"] == "eos", seed=seeds[n],
                   guesser=guesser, context=None if draft is None else draft.max_positions)
        )  # fmt: skip
    check(traces)
    return traces


def row(cells: Cells, costs: Costs, found: Found, arm: Arm, gamma: int) -> Row:
    """All figures of one arm at one gamma."""
    bench, recipe = cells.bench, cells.recipe
    out: Row = {
        "domain": found.domain, "arm": arm.name, "kind": arm.kind, "candidate": arm.candidate, "draft": arm.draft, "temperature": found.temperature,
        "swept": gamma, "gamma": bench.gamma(arm.name, gamma or None),
        **dict.fromkeys(("c", "v", "predicted", "break_even", "ceiling", "speedup", "acceptance", "counts")),
    }  # fmt: skip
    traces = [trace_of(cell[arm.name, gamma]) for cell in found.timed]
    m = metrics(traces)
    alphas = [a for text in found.laws.get(arm.draft or "", []) for a in text["alpha"]]
    alpha = statistics.fmean(alphas) if alphas else None
    out |= {"metrics": m, "alpha": alpha, "tokens_per_s": m["tokens_per_s"]}
    if arm.name != PLAIN:
        counted = derived(bench, found, arm, gamma, [cells.seed(p) for p in found.prompts])
        out["c"] = costs.c(arm.draft, gamma) if arm.draft else 0.0
        # Each round at its own width: lookup and the composite do not always propose.
        out["v"] = statistics.fmean(costs.v(1 + r.proposed) for t in (traces or counted) for r in t.rounds)
        if traces:
            out["predicted"] = m["emitted"] / sum(cost(costs, arm, t) for t in traces)
            out["speedup"] = paired_ratio(*seconds(found, arm.name, gamma), **bootstrap(recipe)).to_json()
            accepted = pooled_ratio(*_sums(traces, "accepted", "proposed"), **bootstrap(recipe))
            out["acceptance"] = None if accepted is None else accepted.to_json()
        alone = arm.kind in ("stock", "tuned", "untuned")
        if alone:  # the formulas speak of one drafter that always proposes gamma tokens
            out |= {"break_even": break_even(gamma, out["c"], out["v"]), "ceiling": ceiling(gamma, out["c"], out["v"])}
        out["counts"] = counts(recipe, costs, arm, counted, alpha if alone else None, gamma)
    out["per_prompt"] = [
        {"prompt": cell[arm.name, gamma]["prompt"], "seconds": t.decode_s, "plain_seconds": cell[arm.name, gamma]["plain_s"], "prefill_s": t.prefill_s,
         "emitted": len(t.tokens), "rounds": len(t.rounds), "proposed": sum(r.proposed for r in t.rounds), "accepted": sum(r.accepted for r in t.rounds)}
        for cell, t in zip(found.timed, traces, strict=True)
    ]  # fmt: skip
    return out


def cost(costs: Costs, arm: Arm, trace: Trace) -> float:
    """What the rounds of a text cost by measured steps, in plain target steps; each round at its own numbers of steps and tokens."""
    drafting = [costs.drafting(arm.draft, r.draft_steps) if arm.draft else 0.0 for r in trace.rounds]
    return sum(drafting) + sum(costs.v(1 + r.proposed) for r in trace.rounds)


def counts(recipe: Recipe, costs: Costs, arm: Arm, traces: Sequence[Trace], alpha: float | None, gamma: int) -> dict[str, Any]:
    """Acceptance on all prompts, to their natural ends, and the speed-up that follows from these counts and the measured costs."""
    keys = bootstrap(recipe)
    m = metrics(traces)
    accepted = pooled_ratio(*_sums(traces, "accepted", "proposed"), **keys)
    tau = pooled_ratio([len(t.tokens) for t in traces], [len(t.rounds) for t in traces], **keys)
    predicted = pooled_ratio([len(t.tokens) for t in traces], [cost(costs, arm, t) for t in traces], **keys)
    histogram = [0] * (1 + max((r.accepted for t in traces for r in t.rounds), default=0))
    for t in traces:
        for r in t.rounds:
            histogram[r.accepted] += 1
    found: dict[str, Any] = {
        "prompts": len(traces), "ended": sum(t.finish == "eos" for t in traces), "metrics": {k: m[k] for k in _COUNTED}, "histogram": histogram,
        "acceptance": None if accepted is None else accepted.to_json(), "tau": None if tau is None else tau.to_json(),
        "predicted": None if predicted is None else predicted.to_json(), "iid": None,
    }  # fmt: skip
    if alpha is not None and arm.draft:
        even = expected_tokens(alpha, gamma)
        found["iid"] = {
            "alpha": alpha,
            "tau": even,
            "predicted": predicted_speedup(even, gamma, costs.c(arm.draft, gamma), costs.v(1 + gamma)),
        }
    return found


def _sums(traces: Sequence[Trace], *names: str) -> list[list[int]]:
    return [[sum(getattr(r, name) for r in t.rounds) for t in traces] for name in names]
