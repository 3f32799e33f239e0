"""Losslessness, checked on the user's own pair: what decoding with a draft writes is what the target alone would write.

float32, greedy     token by token the same as plain decoding and as transformers' own generate
serving dtype       a greedy text may part from plain decoding's only where the target, in float32, finds the two tokens nearly equal
sampling            first tokens follow the exact law, by chi-squared
self-pair, trace    the counters: a draft equal to its target scores exactly 1, and every trace obeys its identities
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

from draftstill.decode import Decoder, ModelDrafter, Network, Request, Sampling, probabilities
from draftstill.decode.trace import Trace, check, metrics
from draftstill.distill import Prompt, seed_of
from draftstill.evaluate.arms import PLAIN, Bench, open_bench
from draftstill.evaluate.faults import failures as failures
from draftstill.recipe import Recipe
from draftstill.sources import load_model, resolve_model
from draftstill.stages import resolved_device, resolved_dtype, served_target

_TOKENS = 32
"""Tokens per audited prompt."""
_DRAWS, _MANY_DRAWS = 384, 1536
"""Texts sampled for the chi-squared test, in a score and in an audit alone."""
_PLACES = 3
"""First tokens whose law is compared."""
_FEWEST = 5.0
"""Expected draws of a cell; smaller ones are pooled."""
VERSION = 2
"""Raised when the same inputs would be audited otherwise."""
TIE_STEPS = 8
"""A tie is a gap of at most so many steps of the serving dtype at the size of the largest logit; at a logit of 20, in bfloat16: 1.0. Twice what
was found on the demo (134M, bfloat16, 16 prompts of 64 tokens): texts of the four arms parted at gaps of up to 3.6 steps, 0.24 logits."""
_BITS = {"bfloat16": 7, "float16": 10}
"""Explicit bits of the mantissa."""


def audit(recipe: Recipe, draft: Path | Mapping[str, Path], prompts: Sequence[Prompt], *, thorough: bool = False,
          arms: Sequence[str] = ()) -> dict[str, Any] | None:  # fmt: skip
    """Run all checks on the given prompts; None where there are no prompts.

    Args:
        draft: folder of the draft stage, or that of each candidate.
        thorough: sample with every arm and four times as often.
        arms: else sample with these; with the first that drafts, where none is named.
    """
    if not prompts:
        return None
    dtype = resolved_dtype(recipe)
    served = None if dtype == "float32" else greedy_texts(open_bench(recipe, draft, dtype=dtype), prompts)
    bench = open_bench(recipe, draft, dtype="float32")
    watch: list[Trace] = []
    found: dict[str, Any] = {"greedy_fp32": greedy(bench, prompts, watch), "self_pair": self_pair(bench, prompts, watch)}
    if served is not None:
        found["ties"] = ties(bench.target.network, prompts, served, dtype)
    one = _first(bench)
    chosen = [a for a in bench.arms if a != PLAIN] if thorough else arms or ([] if one is None else [one])
    found["sampling"] = _worst([sampling(bench, prompts[0], _MANY_DRAWS if thorough else _DRAWS, arm=a, watch=watch) for a in chosen])
    return {**found, "identities": identities(watch)}


def _first(bench: Bench) -> str | None:
    kinds = {a.kind: a.name for a in reversed(list(bench.arms.values()))}
    return next((kinds[k] for k in ("tuned", "untuned", "lookup", "bigram", "composite") if k in kinds), None)


def _worst(found: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The arm with the smallest p-value, corrected for having looked at several. Of one where nothing could be compared there is none."""
    if not found:
        return None
    tested = [f for f in found if f["p_value"] is not None]
    worst = min(tested or found, key=lambda f: f["p_value"] or 0.0)
    p_value = min(1.0, worst["p_value"] * len(tested)) if tested else None
    return {**worst, "p_value": p_value, "by_arm": {f["arm"]: f["p_value"] for f in found}}


# -- greedy --------------------------------------------------------------------------------------------------------------------


def greedy_texts(bench: Bench, prompts: Sequence[Prompt], watch: list[Trace] | None = None) -> dict[str, list[list[int]]]:
    """By arm, plain decoding's among them: the greedy continuation of each prompt."""
    requests = [Request(p.ids, _TOKENS) for p in prompts]
    written = {}
    for arm in bench.arms:
        traces = bench.decoder(arm, Sampling(0.0), rows=len(prompts)).run(requests)
        written[arm] = [t.tokens for t in traces]
        if watch is not None:
            watch += traces
    return written


def greedy(bench: Bench, prompts: Sequence[Prompt], watch: list[Trace] | None = None) -> dict[str, Any]:
    """Every arm, and transformers' own generate, against plain decoding, token by token."""
    written = greedy_texts(bench, prompts, watch)
    written["transformers"] = _transformers(bench, prompts)
    same = [all(texts[i] == written[PLAIN][i] for texts in written.values()) for i in range(len(prompts))]
    return {"prompts": len(prompts), "identical": sum(same), "arm_names": [a for a in written if a != PLAIN], "tokens": _TOKENS}


@torch.inference_mode()
def _transformers(bench: Bench, prompts: Sequence[Prompt]) -> list[list[int]]:
    recipe = bench.recipe
    device = resolved_device(recipe)
    model = load_model(resolve_model(served_target(recipe), "target.source"), "float32", device)
    eos = list(bench.target.eos)
    padding = list(range(bench.target.vocab, model.config.vocab_size))  # no real tokens: the decoder never scores them
    texts = []
    for p in prompts:
        ids = torch.tensor([p.ids], device=device)
        # Settings that a model's generation_config may carry and that are no part of greedy decoding are put out of action.
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=_TOKENS, do_sample=False, num_beams=1, repetition_penalty=1.0,
                             no_repeat_ngram_size=0, suppress_tokens=padding or None, eos_token_id=eos or None, pad_token_id=eos[0] if eos else 0)  # fmt: skip
        texts.append(out[0, len(p.ids) :].tolist())
    return texts


def ties(target: Network, prompts: Sequence[Prompt], written: Mapping[str, Sequence[Sequence[int]]], dtype: str) -> dict[str, Any]:
    """Greedy texts in a serving dtype that part from plain decoding's: each a tie or a failure.

    Args:
        target: in float32. It reads both texts up to where they part; the distance of the lower of the two tokens' logits from its
            largest one is the gap. Nothing behind the first difference is compared: from there on the texts have different pasts.
        written: see ``greedy_texts``.

    Returns:
        dtype, steps, texts, identical, tied, failed, largest_gap (logits), largest_steps, cases (first 20, widest gap first).
    """
    cases: list[dict[str, Any]] = []
    for arm, texts in written.items():
        for prompt, plain, text in zip(prompts, written[PLAIN], texts, strict=True):
            if list(plain) == list(text):
                continue
            at = next((i for i, (a, b) in enumerate(zip(plain, text, strict=False)) if a != b), None)
            gap = steps = None
            if at is not None:  # else one is the beginning of the other: an end was missed or made up
                logits = _next_logits(target, [[*prompt.ids, *plain[:at]]])[0]
                top = float(logits.max())
                gap = top - float(torch.minimum(logits[plain[at]], logits[text[at]]))
                steps = gap / step_at(top, dtype)
            tied = steps is not None and steps <= TIE_STEPS
            cases.append({"arm": arm, "prompt": prompt.id, "at": at, "gap": gap, "steps": steps, "tie": tied})
    compared = (len(written) - 1) * len(prompts)
    cases.sort(key=lambda c: (c["tie"], -(c["gap"] or 0.0)))
    return {
        "dtype": dtype, "steps": TIE_STEPS, "texts": compared, "identical": compared - len(cases), "tied": sum(c["tie"] for c in cases),
        "failed": sum(not c["tie"] for c in cases), "largest_gap": max((c["gap"] or 0.0 for c in cases), default=None),
        "largest_steps": max((c["steps"] or 0.0 for c in cases), default=None), "cases": cases[:20],
    }  # fmt: skip


def step_at(value: float, dtype: str) -> float:
    """The distance of neighbouring numbers of a dtype, at a value."""
    return math.ldexp(1.0, math.frexp(max(abs(value), 1.0))[1] - 1 - _BITS[dtype])


@torch.inference_mode()
def _next_logits(network: Network, texts: Sequence[Sequence[int]]) -> torch.Tensor:
    """[B, V] behind texts of one length."""
    ids = torch.tensor([list(t) for t in texts], device=network.device)
    hidden = network.forward(ids, network.new_cache(len(ids), ids.shape[1]), [0] * len(ids))[:, -1]
    return network.logits(hidden).float()


# -- counters ------------------------------------------------------------------------------------------------------------------


def self_pair(bench: Bench, prompts: Sequence[Prompt], watch: list[Trace] | None = None) -> dict[str, Any]:
    """The target as its own draft must be accepted always."""
    network, gamma = bench.target.network, bench.recipe.evaluate.gamma
    decoder = Decoder(network, ModelDrafter(network, gamma), gamma=gamma, eos=bench.target.eos)
    traces = decoder.run([Request(p.ids, _TOKENS) for p in prompts[:2]])
    if watch is not None:
        watch += traces
    return {"token_acceptance": metrics(traces)["token_acceptance"]}


def identities(traces: Sequence[Trace]) -> dict[str, Any]:
    """Whether each trace's counts agree with each other and with its tokens."""
    broken = []
    for trace in traces:
        try:
            check([trace])
        except AssertionError as error:
            broken.append(str(error))
    return {"traces": len(traces), "broken": len(broken), "first": broken[0] if broken else None}


# -- sampling ------------------------------------------------------------------------------------------------------------------


def sampling(
    bench: Bench, prompt: Prompt, draws: int = _DRAWS, *, arm: str | None = None, watch: list[Trace] | None = None
) -> dict[str, Any]:
    """The first three tokens of texts sampled speculatively against their exact law, by chi-squared.

    The first token's law is enumerated, and the law of each further one behind every beginning that was drawn often enough.

    Returns:
        p_value: the smallest of the places', times their number (None: no token came often enough at any place, so nothing was tested);
        draws, arm, temperature; places: p_value and cells of each.

    Raises:
        ValueError: there is no arm to sample with.
    """
    arm = arm or _first(bench)
    if arm is None:
        raise ValueError("no arm proposes anything")
    settings = bench.recipe.respond.sampler
    law = Sampling(settings.temperature or 1.0, settings.top_k, settings.top_p)
    # One token more than is looked at: the last of a text is never proposed.
    requests = [Request(prompt.ids, _PLACES + 1, seed=seed_of(bench.recipe.seed, "audit", i), ignore_eos=True) for i in range(draws)]
    traces = bench.decoder(arm, law, rows=64).run(requests)
    if watch is not None:
        watch += traces
    places = [_place(bench.target.network, law, prompt, [t.tokens[:n] for t in traces]) for n in range(1, _PLACES + 1)]
    tested = [p["p_value"] for p in places if p["p_value"] is not None]
    p_value = min(1.0, min(tested) * len(tested)) if tested else None
    return {"p_value": p_value, "draws": draws, "arm": arm, "temperature": law.temperature, "places": places}


def _place(network: Network, law: Sampling, prompt: Prompt, starts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The law of the last of so many first tokens, behind each beginning."""
    behind: dict[tuple[int, ...], Counter[int]] = {}
    for start in starts:
        behind.setdefault(tuple(start[:-1]), Counter())[start[-1]] += 1
    statistic, freedom = 0.0, 0
    for beginning, drawn in behind.items():
        if drawn.total() < 2 * _FEWEST:
            continue
        p = probabilities(_next_logits(network, [[*prompt.ids, *beginning]]), law)[0].double().cpu().numpy()
        counts = np.bincount(list(drawn.elements()), minlength=len(p)).astype(float)
        own, cells = _cells(counts, p)
        statistic, freedom = statistic + own, freedom + cells - 1
    return {
        "p_value": None if not freedom and math.isfinite(statistic) else float(stats.chi2.sf(statistic, max(freedom, 1))),
        "cells": freedom,
    }


def chi_squared(counts: np.ndarray, law: np.ndarray) -> float:
    """p-value of counts against a law; 0 when something impossible was drawn, 1 when there is one cell only."""
    statistic, cells = _cells(counts, law)
    return 1.0 if cells < 2 and not statistic else float(stats.chi2.sf(statistic, max(cells - 1, 1)))


def _cells(counts: np.ndarray, law: np.ndarray) -> tuple[float, int]:
    """Statistic and number of cells; those of fewer than 5 expected draws are one, and join the next one if that is too few, too."""
    if counts[law <= 0].sum() > 0:
        return math.inf, 1
    expected = law / law.sum() * counts.sum()
    order = np.argsort(expected)[::-1]
    big = int((expected >= _FEWEST).sum())
    observed, wanted = counts[order[:big]], expected[order[:big]]
    rest_seen, rest_wanted = counts[order[big:]].sum(), expected[order[big:]].sum()
    if rest_wanted >= _FEWEST or not big:
        observed, wanted = np.append(observed, rest_seen), np.append(wanted, rest_wanted)
    else:
        observed[-1] += rest_seen
        wanted[-1] += rest_wanted
    return float(((observed - wanted) ** 2 / wanted).sum()), len(wanted)
