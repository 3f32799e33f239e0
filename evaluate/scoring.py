"""The score stage: what each arm's guesses are worth on held-out text, counted on all prompts and timed on some.

Acceptance is counted along texts that plain decoding wrote to their natural end, for every draft and gamma without decoding again
(``decode.deriving``). Speed is measured: every arm decodes the timed prompts alone and to a fixed length, in turns with plain
decoding on one engine. docs/metrics.md has the method and the layout of score.json.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from draftstill.decode import Costs
from draftstill.evaluate import about
from draftstill.evaluate.arms import PLAIN, Bench, kept_head, open_bench
from draftstill.evaluate.assembling import Found, gather, row
from draftstill.evaluate.audit import VERSION as AUDIT
from draftstill.evaluate.audit import audit
from draftstill.evaluate.cells import Cells, Timed, plain_runs
from draftstill.evaluate.choosing import best_arm, best_rows, comparisons, to_publish, winner
from draftstill.evaluate.costing import step_costs
from draftstill.evaluate.diagnosing import diagnoses
from draftstill.evaluate.domains import Domain, domains
from draftstill.evaluate.reading import held_out_figure
from draftstill.evaluate.report import write_reports
from draftstill.machine import describe_machine
from draftstill.progress import Progress, say
from draftstill.recipe import OWN, Recipe
from draftstill.recipe_io import fingerprint
from draftstill.runfolder import RunFolder, Stage, git_state, read_json, versions, write_json
from draftstill.stages import candidate_recipes, draft_stage, stages
from draftstill.train import train_all

Score = dict[str, Any]
SCHEMA = 2
_REWRITE_S = 45.0
"""Least time between two reports of an unfinished score: assembling one takes a second or two of a core."""
_DRAFT_RESAMPLES = 200
"""Resamples for the intervals of an unfinished score."""


def score(recipe: Recipe, run: RunFolder) -> Score:
    """Score all candidates; writes score.json, report.md and report.html into the stage's folder and returns the score.

    All three stand in the work folder from early on and are written anew as timings come in.
    """
    folders = train_all(recipe, run)
    found = stages(recipe, run)
    stage = found["score"]
    if stage.done:
        return read_json(stage.folder / "score.json")
    work = stage.begin()
    bench = open_bench(recipe, folders)
    fields = domains(recipe, run, found, bench.target.tokenizer)
    cells = Cells(work, run, bench, _identity(found), _drafts(bench, folders, found), _surroundings(bench), git_state())
    arms = [(arm, gamma) for arm in bench.arms.values() if arm.name != PLAIN for gamma in arm.gammas]
    _count(cells, fields)
    before = step_costs(cells, fields[0], arms, "before")
    _time(cells, fields, arms, before, found)
    after = step_costs(cells, fields[0], arms, "after")
    costs = {t: c.halfway(after[t]) for t, c in before.items()}
    write_json(work / "costs.json", {f"{t:g}": c.to_json() for t, c in costs.items()})
    result = assemble(cells, fields, arms, costs, found, recipe.evaluate.timed_prompts)
    audited = _audit(cells, folders, fields[0], audited_arms(result))
    result["audit"] = {**audited, **result["audit"]} if audited else None
    write_json(work / "score.json", result)
    write_reports(result, work)
    stage.finish(winner=result["winner"])
    return read_json(stage.folder / "score.json")


def _identity(found: Mapping[str, Stage]) -> dict[str, Any]:
    inputs = found["responses"].inputs
    target = inputs["target"]
    if target.get("content"):  # what it is, not where it lies
        target = {k: v for k, v in target.items() if k != "source"}
    return {"target": target, **{k: inputs[k] for k in ("dtype", "device")}}


def _surroundings(bench: Bench) -> dict[str, Any]:
    """What times depend on beside the work: those of another machine or another torch are not taken over."""
    machine, device, made = describe_machine(), bench.target.network.device, versions()
    return {
        **{k: machine[k] for k in ("cpu", "cores", "omp_wait_policy")}, "threads": torch.get_num_threads(),
        "accelerator": about.accelerator(device),
        **{k: made.get(k) for k in ("draftstill", "torch", "python")},
    }  # fmt: skip


def _drafts(bench: Bench, folders: Mapping[str, Path], found: Mapping[str, Stage]) -> dict[str, Any]:
    """What decides each draft's behaviour: not its name, nor what is scored beside it."""
    made: dict[str, Any] = {"bigram": None if bench.table is None else fingerprint(bench.table.tolist()), "lookup": None}
    own = candidate_recipes(bench.recipe)
    for name, arm in bench.arms.items():
        if arm.draft is None or arm.draft in made:
            continue
        if arm.kind == "stock":
            made[arm.draft] = {k: v for k, v in bench.stock[name.partition(":")[2]].items() if k != "name"}
            continue
        candidate = arm.candidate or name.partition(":")[2] or next(iter(folders))
        kept = kept_head(own[candidate], folders[candidate])
        stage = found[draft_stage(candidate)]
        if arm.kind == "untuned":
            # What is kept of a calibrated one was chosen on the recording.
            calibrated = own[candidate].draft.calibrated
            made[arm.draft] = [{k: stage.inputs[k] for k in ("draft", "content", *(("recording",) if calibrated else ()))}, kept]
        else:
            made[arm.draft] = [stage.facts()["weights_sha256"], kept]
    return made


def _count(cells: Cells, fields: Sequence[Domain]) -> None:
    """Texts and laws of all domains and temperatures."""
    settings = cells.recipe.evaluate
    most = sum(len(f.prompts[: settings.prompts]) for f in fields) * settings.max_new_tokens * len(settings.temperatures)
    for label in ("texts", "laws"):
        done = 0
        with Progress(label, most, "tokens") as progress:
            for field in fields:
                for t in settings.temperatures:
                    note = f"{field.name} T={t:g}"

                    def tell(tokens: int, note: str = note) -> None:
                        nonlocal done
                        done += tokens
                        progress.update(done, note)

                    prompts = field.prompts[: settings.prompts]
                    if label == "texts":
                        cells.texts(field.name, prompts, t, tell)
                    else:
                        cells.laws(field.name, prompts, t, cells.texts(field.name, prompts, t), tell)


def _time(cells: Cells, fields: Sequence[Domain], arms: Sequence[Timed], costs: Mapping[float, Costs], found: Mapping[str, Stage]) -> None:
    """Prompt by prompt through all temperatures and domains, so that an unfinished score has seen a little of everything."""
    settings = cells.recipe.evaluate
    plan = [(n, field, t) for n in range(settings.timed_prompts) for field in fields if n < len(field.prompts[: settings.prompts])
            for t in settings.temperatures]  # fmt: skip
    per_cell = (len(arms) + plain_runs(len(arms))) * settings.timed_tokens
    missing = sum(not _timed(cells, number, field, t, arms) for number, field, t in plan)
    if not missing:
        return
    done, written = (len(plan) - missing) * per_cell, time.monotonic()
    with Progress("decode", len(plan) * per_cell, "tokens", done=done) as progress:
        for place, (number, field, t) in enumerate(plan):
            if _timed(cells, number, field, t, arms):
                continue

            def tell(tokens: int, note: str) -> None:
                nonlocal done
                done += tokens
                progress.update(done, note)

            cells.timed(field.name, number, field.prompts[number], t, arms, tell)
            last_of_prompt = place + 1 == len(plan) or plan[place + 1][0] != number
            if last_of_prompt and number + 1 < settings.timed_prompts and time.monotonic() - written > _REWRITE_S:
                _write_partial(cells, fields, arms, costs, found, number + 1)
                written = time.monotonic()
    say(f"  warm-up of the engines: {cells.warm_up_s:.1f} s, not counted")


def _timed(cells: Cells, number: int, field: Domain, temperature: float, arms: Sequence[Timed]) -> bool:
    every = [(cells.bench.arms[PLAIN], 0), *arms]
    return all(cells.read(*cells.place(field.name, number, field.prompts[number], temperature, arm, g)) is not None for arm, g in every)


def _write_partial(
    cells: Cells, fields: Sequence[Domain], arms: Sequence[Timed], costs: Mapping[float, Costs], found: Mapping[str, Stage], timed: int
) -> None:
    settings = cells.recipe.evaluate
    fewer = cells.recipe.model_copy(
        update={"evaluate": settings.model_copy(update={"bootstrap": min(_DRAFT_RESAMPLES, settings.bootstrap)})}
    )
    quick = replace(cells, bench=replace(cells.bench, recipe=fewer))
    result = {**assemble(quick, fields, arms, costs, found, timed), "audit": None}
    result["partial"] = {"timed": timed, "of": cells.recipe.evaluate.timed_prompts}
    write_json(cells.work / "score.json", result)
    write_reports(result, cells.work)


def audited_arms(result: Score) -> list[str]:
    """Whose sampling is audited: the arm that won, and the draft that will be published."""
    winner, best = result["winner"], result["best"]
    published = [r["arm"] for r in result["arms"] if r["kind"] == "tuned" and r["candidate"] == result["publish"]]
    return list(dict.fromkeys(arm for arm in (winner["arm"], *published[:1]) if arm)) or ([best["arm"]] if best else [])


def _audit(cells: Cells, folders: Mapping[str, Path], field: Domain, arms: Sequence[str]) -> dict[str, Any] | None:
    prompts, recipe = field.prompts[: cells.recipe.evaluate.audit_prompts], cells.recipe
    key = fingerprint(cells.identity, dict(cells.drafts), [p.ids for p in prompts], recipe.evaluate.decisive(),
                      recipe.respond.sampler, recipe.seed, AUDIT, list(arms))  # fmt: skip
    cell = cells.read("audit.json", key)
    if cell is None:
        if prompts:
            say("  audit: float32 greedy against plain decoding and transformers, self-pair, sampling against the exact law")
        cell = {"audit": audit(recipe, folders, prompts, arms=arms)}
        cells.write("audit.json", key, cell)
    write_json(cells.work / "audit.json", cell["audit"])
    return cell["audit"]  # type: ignore[no-any-return]


def assemble(cells: Cells, fields: Sequence[Domain], arms: Sequence[Timed], costs: Mapping[float, Costs], stages_: Mapping[str, Stage],
             timed: int) -> Score:  # fmt: skip
    """Everything the report says but the audit, from the cells. ``timed``: so many prompts have all their timings."""
    recipe, bench = cells.recipe, cells.bench
    settings, own = recipe.evaluate, bench.candidates
    hashed = lambda f: fingerprint([p.ids for p in f.prompts[: settings.prompts]])  # noqa: E731
    everything = [(bench.arms[PLAIN], 0), *arms]
    found: dict[tuple[str, float], Found] = {}
    sweep: list[dict[str, Any]] = []
    best: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for field in fields:
        prompts = field.prompts[: settings.prompts]
        for t in settings.temperatures:
            here = found[field.name, t] = gather(cells, field.name, prompts, t, arms, min(timed, len(prompts)))
            rows = [row(cells, costs[t], here, arm, gamma) for arm, gamma in everything]
            best[field.name, t] = best_rows(recipe, here, bench.arms, rows)
            sweep += rows
    deploy = recipe.respond.sampler.temperature
    at = deploy if deploy in settings.temperatures else settings.temperatures[0]
    mine = best[OWN, at]
    published = to_publish(mine, list(own))
    shown = published or next(iter(own))
    chosen = next((r for r in mine if r["candidate"] == shown and r["kind"] == "tuned"), None) or next(
        (r for r in mine if r["candidate"] == shown), None
    )
    gamma = settings.gamma if chosen is None else chosen["swept"]
    every = list(found.values())
    viewed = chosen or next((r for r in mine if r["arm"] != PLAIN), None)
    corpus = about.about_corpus(recipe, stages_)
    curves = {name: stages_[draft_stage(name)].facts()["curve"] for name in own}
    return {
        "schema": SCHEMA,
        "target": about.about_target(bench),
        "draft": about.about_draft(own[shown], stages_[draft_stage(shown)]),
        "drafts": {name: about.about_draft(r, stages_[draft_stage(name)]) for name, r in own.items()},
        **({"stock": bench.stock} if bench.stock else {}),
        "corpus": corpus,
        "costs": costs[at].to_json(),
        "costs_by_temperature": {f"{t:g}": c.to_json() for t, c in costs.items()},
        "training": {"curve": curves[shown], "curves": curves},
        "conditions": {**about.conditions(recipe, every, cells.warm_up_s, gamma), "past_eos": about.past_eos(bench, every),
                       "accelerator": about.accelerator(bench.target.network.device),
                       "test_sha256": stages_["corpus"].facts().get("test_sha256"), "prompts_sha256": hashed(fields[0])},
        "arms": [r for t in settings.temperatures for r in best[OWN, t]],
        "sweep": [{k: v for k, v in r.items() if k != "per_prompt"} for r in sweep],
        "domains": {
            field.name: {**field.facts, "prompts_sha256": hashed(field), "prompts": len(field.prompts[: settings.prompts]),
                         "timed_prompts": min(timed, len(field.prompts[: settings.prompts])),
                         "arms": [] if field.name == OWN else [r for t in settings.temperatures for r in best[field.name, t]]}
            for field in fields
        },
        "comparisons": [c for t in settings.temperatures for c in comparisons(recipe, found[OWN, t], best[OWN, t])],
        "winner": winner(recipe, found[OWN, at], [r for r in sweep if r["domain"] == OWN and r["temperature"] == at]),
        "best": best_arm(mine),
        "publish": published,
        "diagnosis": diagnoses(cells, costs[at], [found[f.name, at] for f in fields], [r for r in sweep if r["domain"] == OWN and r["temperature"] == at],
                               mine, curves, held_out_figure({"corpus": corpus})),
        "audit": {"greedy_timed": about.greedy_timed(recipe, [f for f in every if f.domain == OWN])},
        "examples": about.examples(bench, found[OWN, at], viewed["arm"], viewed["swept"]) if viewed else [],
    }  # fmt: skip
