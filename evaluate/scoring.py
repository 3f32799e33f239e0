"""The score stage: every arm decodes the same held-out prompts in turns, on one engine; the figures follow from the traces.

A cell is one prompt at one temperature, decoded by all arms one after the other in rotating order; it is one file, so an
interrupted score goes on at the next cell.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from draftstill.corpus import prepare_corpus, read_documents
from draftstill.decode import Costs, Request, Sampling, measure_costs
from draftstill.decode.theory import break_even, ceiling
from draftstill.decode.trace import Round, Trace, check, metrics
from draftstill.distill import Prompt, cut_prompts, seed_of
from draftstill.errors import DraftstillError
from draftstill.evaluate.arms import PLAIN, Bench, open_bench, teacher_forced_alpha
from draftstill.evaluate.audit import audit
from draftstill.evaluate.report import write_reports
from draftstill.evaluate.stats import Interval, paired_ratio, pooled_ratio
from draftstill.machine import LoadWatch, cores, describe_machine
from draftstill.progress import Progress, say
from draftstill.recipe import Recipe
from draftstill.runfolder import RunFolder, Stage, git_state, read_json, versions, write_json
from draftstill.stages import resolved_device, resolved_dtype, served_target, stages
from draftstill.train import train

Score = dict[str, Any]


def score(recipe: Recipe, run: RunFolder) -> Score:
    """Score all candidates; writes score.json, report.md and report.html into the stage's folder and returns the score."""
    stage = stages(recipe, run)["score"]
    draft = train(recipe, run)
    if stage.done:
        return read_json(stage.folder / "score.json")
    work = stage.begin()
    bench = open_bench(recipe, draft)
    prompts, audited_prompts = _prompts(recipe, run, bench)
    cells = _decode_all(bench, prompts, work)
    costs = _costs(bench, prompts, work)
    audited = _audit(recipe, draft, audited_prompts, work)
    result = assemble(recipe, run, bench, prompts, cells, costs, audited)
    write_json(work / "score.json", result)
    write_reports(result, work)
    stage.finish(winner=result["winner"])
    return result


def _prompts(recipe: Recipe, run: RunFolder, bench: Bench) -> tuple[list[Prompt], list[Prompt]]:
    """Held-out prompts to score, and those to audit: each the first so many of one list."""
    settings = recipe.evaluate
    documents = read_documents(prepare_corpus(recipe, run), "test")
    prompts = cut_prompts(documents, max(settings.prompts, settings.audit_prompts), recipe.respond, bench.target.tokenizer, recipe.seed)
    if not prompts:
        raise DraftstillError(f"no held-out document is as long as a prompt of {recipe.respond.prompt_tokens} tokens", key="respond.prompt_tokens",
                              value=recipe.respond.prompt_tokens, mend="lower it, or raise corpus.heldout_fraction")  # fmt: skip
    if len(prompts) < settings.prompts:
        say(f"  evaluate.prompts: the held-out documents hold {len(prompts)} prompts, not {settings.prompts}")
    return prompts[: settings.prompts], prompts[: settings.audit_prompts]


def _audit(recipe: Recipe, draft: Path, prompts: Sequence[Prompt], work: Path) -> dict[str, Any] | None:
    path = work / "audit.json"
    if not path.exists():
        if prompts:
            say("  audit: float32 greedy against plain decoding and transformers, self-pair, sampling against the exact law")
        write_json(path, audit(recipe, draft, prompts))
    return read_json(path)


def _costs(bench: Bench, prompts: Sequence[Prompt], work: Path) -> Costs:
    path = work / "costs.json"
    if not path.exists():
        half_way = len(prompts[0].ids) + bench.recipe.evaluate.max_new_tokens // 2
        gamma = max(bench.gamma(arm) for arm in bench.recipe.evaluate.candidates)
        write_json(
            path,
            measure_costs(
                bench.target.network, bench.drafts, half_way, gamma, backend=bench.decoder(PLAIN, Sampling(0.0)).backend
            ).to_json(),
        )
    return Costs(**read_json(path))


def _sampling(recipe: Recipe, temperature: float) -> Sampling:
    sampler = recipe.respond.sampler
    return Sampling(temperature, sampler.top_k, sampler.top_p)


def _decode_all(bench: Bench, prompts: Sequence[Prompt], work: Path) -> dict[float, list[dict[str, Any]]]:
    """Cells by temperature, in the order of the prompts."""
    settings = bench.recipe.evaluate
    arms = [PLAIN, *settings.candidates]
    places = {(t, i): work / "cells" / f"t{t:g}-{i:04d}.json" for t in settings.temperatures for i in range(len(prompts))}
    missing = [key for key, path in places.items() if not path.exists()]
    if missing:
        _decode_missing(bench, prompts, arms, missing, places)
    return {t: [read_json(places[t, i]) for i in range(len(prompts))] for t in settings.temperatures}


def _decode_missing(bench: Bench, prompts: Sequence[Prompt], arms: list[str], missing: list[tuple[float, int]],
                    places: dict[tuple[float, int], Path]) -> None:  # fmt: skip
    settings = bench.recipe.evaluate
    decoders = {(t, arm): bench.decoder(arm, _sampling(bench.recipe, t)) for t in settings.temperatures for arm in arms}
    started = time.monotonic()
    for decoder in decoders.values():
        decoder.run([Request(prompts[0].ids, min(8, settings.max_new_tokens), ignore_eos=True)])
    say(f"  warm-up of {len(decoders)} arms: {time.monotonic() - started:.1f} s, not counted")
    per_cell = len(arms) * settings.max_new_tokens
    total = len(places) * per_cell
    with Progress("decode", total, "tokens", done=total - len(missing) * per_cell) as progress:
        for done, (t, i) in enumerate(missing, len(places) - len(missing)):
            watch, found = LoadWatch(), {}
            turn = i % len(arms)
            for arm in arms[turn:] + arms[:turn]:
                request = Request(
                    prompts[i].ids, settings.max_new_tokens, seed=seed_of(bench.recipe.seed, "score", prompts[i].id), ignore_eos=True
                )
                (trace,) = decoders[t, arm].run([request])
                check([trace])
                found[arm] = trace.to_json()
                progress.update(done * per_cell + len(found) * settings.max_new_tokens, f"T={t:g} {arm}")
            alphas = _alphas(bench, prompts[i], found[PLAIN]["tokens"], t)
            write_json(places[t, i], {"prompt": prompts[i].id, "arms": found, "alpha": alphas, "other_cores": watch.other_cores()})


def _alphas(bench: Bench, prompt: Prompt, written: list[int], temperature: float) -> dict[str, list[float]]:
    sampling = _sampling(bench.recipe, temperature)
    return {name: teacher_forced_alpha(bench.target.network, draft, prompt.ids, written, sampling) for name, draft in bench.drafts.items()}


def _trace(stored: dict[str, Any]) -> Trace:
    return Trace(**{**stored, "rounds": [Round(**r) for r in stored["rounds"]]})


def assemble(recipe: Recipe, run: RunFolder, bench: Bench, prompts: Sequence[Prompt], cells: dict[float, list[dict[str, Any]]],
             costs: Costs, audited: dict[str, Any] | None) -> Score:  # fmt: skip
    """Everything the report says, from the cells."""
    arms, comparisons = [], []
    for t, rows in cells.items():
        traces = {arm: [_trace(c["arms"][arm]) for c in rows] for arm in (PLAIN, *recipe.evaluate.candidates)}
        arms += [_arm(recipe, bench, costs, arm, t, traces, rows) for arm in traces]
        comparisons += _comparisons(recipe, t, traces)
    deploy = recipe.respond.sampler.temperature
    at = deploy if deploy in cells else next(iter(cells))
    found = stages(recipe, run)
    return {
        "schema": 1,
        "target": _about_target(bench),
        "draft": _about_draft(recipe, found["draft"], bench),
        "corpus": _about_corpus(recipe, found),
        "costs": costs.to_json(),
        "training": {"curve": found["draft"].facts()["curve"]},
        "conditions": {**_conditions(recipe, prompts, cells), "past_eos": round(_past_eos(bench, cells), 4)},
        "arms": arms,
        "comparisons": comparisons,
        "winner": winner(arms, comparisons, at),
        "audit": {**audited, "greedy_timed": _greedy_timed(recipe, cells)} if audited else None,
        "examples": _examples(recipe, bench, prompts, cells[at], at),
    }


def _arm(
    recipe: Recipe,
    bench: Bench,
    costs: Costs,
    arm: str,
    temperature: float,
    traces: dict[str, list[Trace]],
    rows: list[dict[str, Any]],
) -> dict[str, Any]:
    own = traces[arm]
    m = metrics(own)
    alphas = [a for cell in rows for a in cell["alpha"].get(arm, ())]
    gamma = bench.gamma(arm)
    figures: dict[str, Any] = dict.fromkeys(("c", "v", "predicted", "break_even", "ceiling", "speedup", "acceptance"))
    if arm != PLAIN:
        draft = "tuned" if arm == "composite" else arm
        c = costs.c(draft) if draft in bench.drafts else 0.0
        # Each round at its own width: lookup and the composite do not always propose.
        v = statistics.fmean(costs.v(1 + r.proposed) for t in own for r in t.rounds)
        figures |= {"c": c, "v": v, "predicted": m["tau"] / (m["draft_steps"] / m["rounds"] * c + v)}
        figures["speedup"] = speed_ratio(recipe, traces[PLAIN], own).to_json()
        if arm in bench.drafts:  # the formulas speak of one drafter that always proposes gamma tokens
            figures |= {"break_even": break_even(gamma, c, v), "ceiling": ceiling(gamma, c, v)}
    accepted = pooled_ratio(*_sums(own, "accepted", "proposed"), **_bootstrap(recipe))
    if accepted is not None:
        figures["acceptance"] = accepted.to_json()
    return {
        "arm": arm, "temperature": temperature, "gamma": gamma, "metrics": m, "alpha": statistics.fmean(alphas) if alphas else None, **figures,
        "tokens_per_s": m["tokens_per_s"],
        "per_prompt": [{"prompt": cell["prompt"], "seconds": t.decode_s, "emitted": len(t.tokens), "rounds": len(t.rounds),
                        "proposed": sum(r.proposed for r in t.rounds), "accepted": sum(r.accepted for r in t.rounds)}
                       for cell, t in zip(rows, own, strict=True)],
    }  # fmt: skip


def _greedy_timed(recipe: Recipe, cells: dict[float, list[dict[str, Any]]]) -> dict[str, Any] | None:
    """How many temperature-0 texts of the timing itself, in its dtype, equal plain decoding's. In bfloat16 near-ties may fall either way."""
    rows = cells.get(0.0)
    if not rows:
        return None
    same = {arm: sum(c["arms"][arm]["tokens"] == c["arms"][PLAIN]["tokens"] for c in rows) for arm in recipe.evaluate.candidates}
    return {"dtype": resolved_dtype(recipe), "prompts": len(rows), "identical": same}


def _past_eos(bench: Bench, cells: dict[float, list[dict[str, Any]]]) -> float:
    """Share of plain decoding's timed tokens that stand behind an end of text: timing runs on to a fixed length."""
    total = behind = 0
    for tokens in (c["arms"][PLAIN]["tokens"] for rows in cells.values() for c in rows):
        end = next((i for i, t in enumerate(tokens) if t in bench.target.eos), len(tokens))
        total, behind = total + len(tokens), behind + max(0, len(tokens) - end - 1)
    return behind / total


def _sums(traces: Sequence[Trace], *names: str) -> list[list[int]]:
    return [[sum(getattr(r, name) for r in t.rounds) for t in traces] for name in names]


def _bootstrap(recipe: Recipe) -> dict[str, Any]:
    return {"confidence": recipe.evaluate.confidence, "resamples": recipe.evaluate.bootstrap, "seed": recipe.seed}


def speed_ratio(recipe: Recipe, slow: Sequence[Trace], fast: Sequence[Trace]) -> Interval:
    """Speed of the second over speed of the first, paired by prompt."""
    return paired_ratio([t.decode_s for t in slow], [t.decode_s for t in fast], [len(t.tokens) for t in slow], [len(t.tokens) for t in fast],
                        **_bootstrap(recipe))  # fmt: skip


def _comparisons(recipe: Recipe, temperature: float, traces: dict[str, list[Trace]]) -> list[dict[str, Any]]:
    names = recipe.evaluate.candidates
    return [{"temperature": temperature, "a": a, "b": b, "ratio": speed_ratio(recipe, traces[b], traces[a]).to_json()}
            for n, b in enumerate(names) for a in names[n + 1 :]]  # fmt: skip


def winner(arms: list[dict[str, Any]], comparisons: list[dict[str, Any]], temperature: float) -> dict[str, Any]:
    """The fastest arm whose interval lies above 1; ``clear`` when it beats every other such arm beyond their paired intervals."""
    able = [a for a in arms if a["temperature"] == temperature and a["speedup"] and a["speedup"]["low"] > 1.0]
    if not able:
        return {"temperature": temperature, "arm": None, "speedup": None, "clear": True}
    best = max(able, key=lambda a: a["speedup"]["estimate"])
    clear = True
    for other in able:
        for c in comparisons:
            if c["temperature"] == temperature and {c["a"], c["b"]} == {best["arm"], other["arm"]}:
                r = c["ratio"]
                clear &= r["low"] > 1.0 if c["a"] == best["arm"] else r["high"] < 1.0
    return {"temperature": temperature, "arm": best["arm"], "speedup": best["speedup"], "clear": clear}


def _about_target(bench: Bench) -> dict[str, Any]:
    loaded, config = bench.target, bench.target.config
    return {"name": loaded.source.name, "source": served_target(bench.recipe).source, "licence": loaded.source.licence, "parameters": loaded.network.parameters,
            "layers": config.num_hidden_layers, "hidden_size": config.hidden_size, "vocab_size": config.vocab_size,
            "dtype": resolved_dtype(bench.recipe)}  # fmt: skip


def _about_draft(recipe: Recipe, stage: Stage, bench: Bench) -> dict[str, Any]:
    facts = stage.facts()
    layers = list(recipe.draft.layers) if recipe.draft.source == "prune" else []
    return {"name": facts["name"], "parameters": facts["parameters"], "layers": layers, "head_tokens": recipe.draft.head_tokens,
            "trained_tokens": facts["tokens"], "train_seconds": facts["train_seconds"], "loss": recipe.train.loss.label,
            "weights_sha256": facts["weights_sha256"]}  # fmt: skip


def _about_corpus(recipe: Recipe, found: dict[str, Stage]) -> dict[str, Any]:
    corpus, responses, recording = (found[n].facts() for n in ("corpus", "responses", "recording"))
    return {"source": recipe.corpus.source, "documents": {k: v["documents"] for k, v in corpus["splits"].items()},
            "recorded_tokens": recording["sizes"]["train"]["positions"], "response_tokens": responses["tokens"],
            "response_finish": responses["finish"]}  # fmt: skip


def _conditions(recipe: Recipe, prompts: Sequence[Prompt], cells: dict[float, list[dict[str, Any]]]) -> dict[str, Any]:
    settings, sampler = recipe.evaluate, recipe.respond.sampler
    every = [c for rows in cells.values() for c in rows]
    engine = every[0]["arms"][PLAIN]["engine"]
    return {
        "rows": 1, "backend": engine["backend"], **({"packed": engine["packed"]} if "packed" in engine else {}),
        **({"fallback": engine["fallback"]} if "fallback" in engine else {}),
        "date": time.strftime("%Y-%m-%d", time.gmtime()), "machine": describe_machine(), "threads": torch.get_num_threads() or cores(),
        "device": resolved_device(recipe), "dtype": resolved_dtype(recipe), "versions": versions(), "git": git_state(), "gamma": settings.gamma,
        "lookup_gamma": settings.lookup_gamma, "max_new_tokens": settings.max_new_tokens, "prompts": len(prompts), "seed": recipe.seed,
        "temperatures": list(settings.temperatures), "top_k": sampler.top_k, "top_p": sampler.top_p,
        "other_cores": round(statistics.fmean(c["other_cores"] for c in every), 3), "confidence": settings.confidence,
        "command": " ".join(["draftstill", *sys.argv[1:]]),
    }  # fmt: skip


def _examples(
    recipe: Recipe, bench: Bench, prompts: Sequence[Prompt], rows: list[dict[str, Any]], temperature: float, most: int = 3
) -> list[dict[str, Any]]:
    """The per-token view of a few texts; neighbours of one kind are decoded together, so that split characters stay whole."""
    arm = next((a for a in ("tuned", "composite", "untuned", "lookup") if a in recipe.evaluate.candidates), None)
    if arm is None:
        return []
    tokenizer, examples = bench.target.tokenizer, []
    for prompt, cell in list(zip(prompts, rows, strict=True))[:most]:
        trace = _trace(cell["arms"][arm])
        runs: list[tuple[str, list[int]]] = []
        for token, mark in zip(trace.tokens, trace.marks(), strict=True):
            if runs and runs[-1][0] == mark == "accepted":
                runs[-1][1].append(token)
            else:
                runs.append((mark, [token]))
        pieces = [{"text": tokenizer.decode(ids), "kind": kind} for kind, ids in runs]
        examples.append(
            {"prompt_id": prompt.id, "prompt": tokenizer.decode(prompt.ids), "arm": arm, "temperature": temperature, "pieces": pieces}
        )
    return examples
