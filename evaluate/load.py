"""Throughput under load: as many requests in flight as a batch has rows, the next one entering when one ends.

Beside plain decoding run the score's best arm at its gamma, and a draft whose gamma follows goodput and may be 0. The larger the
batch, the less a verify pass gets for nothing: the sweep finds the batch at which speculation stops paying.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from draftstill.decode import Costs, Decoder, GoodputGamma, Request, Sampling, measure_costs
from draftstill.decode.theory import best_gamma, expected_tokens, predicted_speedup
from draftstill.decode.trace import check, metrics
from draftstill.distill import Prompt, seed_of
from draftstill.errors import DraftstillError
from draftstill.evaluate.arms import PLAIN, Bench, open_bench
from draftstill.evaluate.assembling import bootstrap
from draftstill.evaluate.domains import domains
from draftstill.evaluate.reading import has_interval
from draftstill.evaluate.report import write_reports
from draftstill.evaluate.stats import paired_ratio
from draftstill.machine import LoadWatch
from draftstill.progress import Progress, say
from draftstill.recipe import Recipe
from draftstill.recipe_io import fingerprint
from draftstill.runfolder import RunFolder, Stage, read_json, write_json
from draftstill.stages import candidate_recipes, draft_stage, failure, stages

_BLOCKS = 8
"""Repetitions, each with requests of its own; the arms take turns within one, and the intervals are over them: with fewer they are wide enough
to hide a loss of a few percent."""
_MOST_GAMMA = 8
"""Largest gamma whose verify cost is measured at every batch size."""
FIXED, ADAPTIVE = "fixed", "adaptive"

Load = dict[str, Any]


def measure_load(recipe: Recipe, run: RunFolder) -> Load:
    """Measure at every size of ``evaluate.batches``; the result joins score.json as ``load``, and the reports are written anew.

    An interrupted measurement goes on at the next batch size.

    Raises:
        DraftstillError: nothing is scored yet, or the score has no arm to run.
    """
    found = stages(recipe, run)
    if not found["score"].done:
        raise DraftstillError("there is no score whose best arm could be put under load", key="run_dir", value=recipe.run_dir,
                              mend="run `draftstill evaluate RECIPE` first")  # fmt: skip
    score = read_json(found["score"].folder / "score.json")
    stage = _stage(recipe, run, found["score"].fingerprint, score)
    if stage.done:
        load: Load = read_json(stage.folder / "load.json")
    else:
        work = stage.begin()
        load = _measure(recipe, run, score, work)
        write_json(work / "load.json", load)
        stage.finish(stops_paying_at=load["stops_paying_at"], adaptive_never_slower=load["adaptive_never_slower"])
    _join(found["score"].folder, load)
    return load


def _stage(recipe: Recipe, run: RunFolder, fingerprint_: str, score: Mapping[str, Any]) -> Stage:
    """The stage of this very score. What was measured for another one of the same recipe, which lies there no more, is kept as load.old-N."""
    asked = {"score": fingerprint_, "batches": recipe.evaluate.batches, "load_prompts": recipe.evaluate.load_prompts}
    older = run.stage("load", asked)  # made before a load named its score; if it was joined to this one, it is of this one
    if _made_for(older.folder / "provenance.json") == older.inputs and score.get("load") == read_json(older.folder / "load.json"):
        return older
    chosen = {name: [r["arm"], r["swept"]] for name, r in _chosen(score, recipe).items()}
    stage = run.stage("load", {**asked, "arms": chosen, "content": fingerprint({k: v for k, v in score.items() if k != "load"})})
    for record in (stage.folder / "provenance.json", stage.work / "stage.json"):
        made = _made_for(record)
        if made is not None and made != stage.inputs and {k: made.get(k) for k in asked} == older.inputs:
            say("  load: what is there was measured for another score; it is kept beside the new one")
            return RunFolder(run.path, set_aside=True).stage("load", stage.inputs)
    return stage


def _made_for(record: Path) -> Any:
    return read_json(record)["inputs"] if record.exists() else None


def _join(folder: Path, load: Load) -> None:
    score = read_json(folder / "score.json")
    if score.get("load") != load:
        score["load"] = load
        write_json(folder / "score.json", score)
        write_reports(score, folder)


def _measure(recipe: Recipe, run: RunFolder, score: Mapping[str, Any], work: Path) -> Load:
    chosen = _chosen(score, recipe)
    found = stages(recipe, run)
    own = {n: r for n, r in candidate_recipes(recipe).items() if failure(found[draft_stage(n)]) is None}
    kinds = tuple(dict.fromkeys(r["kind"] for r in chosen.values()))
    arms = {r["arm"] for r in chosen.values()}
    wanted = {
        "candidates": tuple(k for k in kinds if k != "stock"),
        "stock": {n: s for n, s in recipe.evaluate.stock.items() if f"stock:{n}" in arms},
    }
    names = [r["candidate"] for r in chosen.values() if r["candidate"]] or [score.get("publish") or next(iter(own))]
    folders = {n: found[draft_stage(n)].folder for n in own if n in names or "untuned" in kinds}
    # Names stay those of the score: only what is not run is left out.
    bench = replace(
        open_bench(recipe.model_copy(update={"evaluate": recipe.evaluate.model_copy(update=wanted)}), folders),
        names=tuple(own),
    )
    prompts = domains(recipe, run, found, bench.target.tokenizer)[0].prompts
    done: list[dict[str, Any]] = []
    for rows in recipe.evaluate.batches:
        path = work / f"rows-{rows:04d}.json"
        if not path.exists():
            write_json(path, _batch(bench, prompts, rows, chosen))
        done.append(read_json(path))
    return {
        "temperature": recipe.respond.sampler.temperature, "new_tokens": recipe.evaluate.timed_tokens, "blocks": _BLOCKS, "batches": done,
        FIXED: {k: chosen[FIXED][k] for k in ("arm", "swept")}, ADAPTIVE: {"arm": chosen[ADAPTIVE]["arm"]} if ADAPTIVE in chosen else None,
        **verdict(done),
    }  # fmt: skip


def verdict(batches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Where speculation stops paying, and whether the adaptive gamma ever loses: by the intervals.

    Returns:
        stops_paying_at: the smallest batch from which on the fixed arm at no batch is proven to gain (None: at the largest it is);
        adaptive_never_slower: whether no interval lies below 1 (None: it did not run), adaptive_slower_at: where one does.
    """
    stops = None
    for b in sorted(batches, key=lambda b: -b["rows"]):
        if b["arms"][FIXED]["ratio"]["low"] > 1.0 and has_interval(b["arms"][FIXED]["ratio"]):
            break
        stops = b["rows"]
    ran = [b for b in batches if ADAPTIVE in b["arms"]]
    slower = [b["rows"] for b in ran if b["arms"][ADAPTIVE]["ratio"]["high"] < 1.0]
    return {"stops_paying_at": stops, "adaptive_never_slower": not slower if ran else None, "adaptive_slower_at": slower}


def _chosen(score: Mapping[str, Any], recipe: Recipe) -> dict[str, dict[str, Any]]:
    """The row of the best arm, and of the best draft that proposes alone: of lookup behind which a draft stands, the policy would choose the draft's
    gamma only, and lookup go on guessing where every guess loses."""
    at = score["winner"]["temperature"]
    rows = [
        {"kind": r["arm"], "candidate": None, "swept": r["gamma"], **r}
        for r in score["arms"]
        if r["arm"] != PLAIN and r["temperature"] == at
    ]
    speed = lambda r: (r["speedup"] or (r.get("counts") or {}).get("predicted") or {"estimate": 0.0})["estimate"]  # noqa: E731
    if not rows:
        raise DraftstillError("the score has plain decoding alone", key="evaluate.candidates", value=list(recipe.evaluate.candidates),
                              mend="name an arm to put under load, for example [tuned]")  # fmt: skip
    alone = [r for r in rows if r["kind"] == "tuned"]
    return {FIXED: max(rows, key=speed), **({ADAPTIVE: max(alone, key=speed)} if alone else {})}


def _batch(bench: Bench, prompts: Sequence[Prompt], rows: int, chosen: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """All arms at one batch size."""
    recipe = bench.recipe
    settings, sampler = recipe.evaluate, recipe.respond.sampler
    law = Sampling(sampler.temperature, sampler.top_k, sampler.top_p)
    costs = _costs(bench, prompts, rows, chosen, law)
    decoders = {PLAIN: bench.decoder(PLAIN, law, rows=rows)}
    fixed, varied = chosen[FIXED], chosen.get(ADAPTIVE)
    decoders[FIXED] = bench.decoder(fixed["arm"], law, rows=rows, gamma=fixed["swept"])
    out: dict[str, Any] = {"rows": rows, "costs": costs.to_json()}
    if varied is not None:
        v = costs.v_by_gamma()
        most = min(_MOST_GAMMA, max(v))
        c = costs.c_by_gamma(varied["candidate"], most)
        alpha = varied["alpha"]
        policy = GoodputGamma(c, v, most, rows, prior_alpha=alpha)
        decoders[ADAPTIVE] = bench.decoder(varied["arm"], law, rows=rows, policy=policy)
        predicted = {g: predicted_speedup(expected_tokens(alpha, g), g, c[g], v[g]) for g in range(1, most + 1)}
        out["goodput"] = {
            "alpha": alpha,
            "c_by_gamma": {str(g): x for g, x in c.items()},
            "best_gamma": best_gamma(alpha, c, v, most)[0],
            "speedup_by_gamma": {"0": 1.0, **{str(g): s for g, s in predicted.items()}},
        }
    size = max(2 * rows, -(-settings.load_prompts // _BLOCKS))
    blocks = [[_request(recipe, prompts, b * size + i) for i in range(size)] for b in range(_BLOCKS)]
    # Caches grow and graphs are captured on the way: the block that reaches furthest goes through every engine before anything is timed.
    longest = max(blocks, key=lambda block: max(len(r.prompt) for r in block))
    for decoder in decoders.values():
        decoder.run(longest)
    watch = LoadWatch()
    found = _run(decoders, blocks, settings.timed_tokens, rows)
    out["other_cores"] = round(watch.other_cores(), 3)
    wall = {name: [b["wall_s"] for b in mine] for name, mine in found.items()}
    tokens = {name: [b["emitted"] for b in mine] for name, mine in found.items()}
    out["arms"] = {}
    for name, mine in found.items():
        total = {k: sum(b[k] for b in mine) for k in ("wall_s", "decode_s", "emitted", "rounds", "proposed", "accepted")}
        out["arms"][name] = {
            "tokens_per_s": total["emitted"] / total["wall_s"], "decode_tokens_per_s": total["emitted"] / total["decode_s"],
            "tau": total["emitted"] / total["rounds"], "mean_gamma": total["proposed"] / total["rounds"],
            "token_acceptance": total["accepted"] / total["proposed"] if total["proposed"] else None,
            "ratio": None if name == PLAIN else paired_ratio(wall[PLAIN], wall[name], tokens[PLAIN], tokens[name], **bootstrap(recipe)).to_json(),
            "blocks": mine,
        }  # fmt: skip
    out["fastest"] = max(out["arms"], key=lambda name: out["arms"][name]["tokens_per_s"])
    return out


def _costs(bench: Bench, prompts: Sequence[Prompt], rows: int, chosen: Mapping[str, dict[str, Any]], law: Sampling) -> Costs:
    """Steps of this many rows."""
    drafts = {n: d for n, d in bench.drafts.items() if n in {r["candidate"] for r in chosen.values()}}
    context = len(prompts[0].ids) + bench.recipe.evaluate.timed_tokens // 2
    most = min(
        _MOST_GAMMA, max([bench.recipe.evaluate.gamma, *(r["swept"] for r in chosen.values() if r["kind"] in ("tuned", "composite"))])
    )
    return measure_costs(
        bench.target.network, drafts, context, most, rows=rows, repeats=5, backend=bench.decoder(PLAIN, law).backend, sampling=law
    )


def _request(recipe: Recipe, prompts: Sequence[Prompt], number: int) -> Request:
    """Where the prompts run out they come again, each time with another seed."""
    prompt = prompts[number % len(prompts)]
    return Request(prompt.ids, recipe.evaluate.timed_tokens, seed=seed_of(recipe.seed, "load", prompt.id, number), ignore_eos=True)


def _run(decoders: Mapping[str, Decoder], blocks: Sequence[Sequence[Request]], length: int, rows: int) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in decoders}
    names, done = list(decoders), 0
    with Progress(f"load, {rows} at once", sum(map(len, blocks)) * length * len(names), "tokens") as progress:
        for number, block in enumerate(blocks):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                started = time.perf_counter()
                traces = decoders[name].run(block)
                # What the warm-up did not meet is captured meanwhile: a gamma that the policy had not chosen yet.
                made_s = max(float(t.engine.get("warm_s", 0.0)) for t in traces)
                wall_s = time.perf_counter() - started - made_s
                check(traces)
                m = metrics(traces)
                found[name].append(
                    {
                        "wall_s": wall_s,
                        "made_s": made_s,
                        **{k: m[k] for k in ("decode_s", "prefill_s", "emitted", "rounds", "proposed", "accepted")},
                    }
                )
                done += m["emitted"]
                progress.update(done, name)
    return found
