"""Losslessness, checked on the user's own pair: float32 greedy identity, a self-pair at exactly 1, sampling against the exact law."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

from draftstill.decode import Decoder, ModelDrafter, Request, Sampling, probabilities
from draftstill.decode.trace import metrics
from draftstill.distill import Prompt, seed_of
from draftstill.evaluate.arms import PLAIN, Bench, open_bench
from draftstill.recipe import Recipe
from draftstill.sources import load_model, resolve_model
from draftstill.stages import resolved_device, served_target

_TOKENS = 32
"""Tokens per audited prompt."""
_DRAWS = 384
"""Texts sampled for the chi-squared test."""


def audit(recipe: Recipe, draft: Path, prompts: Sequence[Prompt]) -> dict[str, Any] | None:
    """Run the checks in float32 on the given prompts; None where there are no prompts."""
    if not prompts:
        return None
    bench = open_bench(recipe, draft, dtype="float32")
    return {"greedy_fp32": greedy(bench, prompts), "self_pair": self_pair(bench, prompts), "sampling": sampling(bench, prompts[0])}


def greedy(bench: Bench, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Every arm, and transformers' own generate, against plain decoding, token by token."""
    requests = [Request(p.ids, _TOKENS) for p in prompts]
    arms = [PLAIN, *bench.recipe.evaluate.candidates]
    written = {arm: [t.tokens for t in bench.decoder(arm, Sampling(0.0), rows=len(prompts)).run(requests)] for arm in arms}
    written["transformers"] = _transformers(bench, prompts)
    same = [all(texts[i] == written[PLAIN][i] for texts in written.values()) for i in range(len(prompts))]
    return {
        "prompts": len(prompts),
        "identical": sum(same),
        "arm_names": [*bench.recipe.evaluate.candidates, "transformers"],
        "tokens": _TOKENS,
    }


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


def self_pair(bench: Bench, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """The target as its own draft must be accepted always."""
    network, gamma = bench.target.network, bench.recipe.evaluate.gamma
    decoder = Decoder(network, ModelDrafter(network, gamma), gamma=gamma, eos=bench.target.eos)
    traces = decoder.run([Request(p.ids, _TOKENS) for p in prompts[:2]])
    return {"token_acceptance": metrics(traces)["token_acceptance"]}


@torch.inference_mode()
def sampling(bench: Bench, prompt: Prompt, draws: int = _DRAWS) -> dict[str, Any] | None:
    """First tokens sampled speculatively against their exact law, by chi-squared; cells under 5 expected draws are pooled."""
    arm = next((a for a in ("tuned", "untuned", "lookup") if a in bench.recipe.evaluate.candidates), None)
    if arm is None:
        return None
    settings = bench.recipe.respond.sampler
    law = Sampling(settings.temperature or 1.0, settings.top_k, settings.top_p)
    network = bench.target.network
    ids = torch.tensor([prompt.ids], device=network.device)
    hidden = network.forward(ids, network.new_cache(1, len(prompt.ids)), [0])[:, -1]
    p = probabilities(network.logits(hidden), law)[0].double().cpu().numpy()
    requests = [Request(prompt.ids, 2, seed=seed_of(bench.recipe.seed, "audit", i)) for i in range(draws)]
    traces = bench.decoder(arm, law, rows=64).run(requests)
    counts = np.bincount([t.tokens[0] for t in traces], minlength=len(p)).astype(float)
    return {"p_value": chi_squared(counts, p), "draws": draws, "arm": arm, "temperature": law.temperature}


def chi_squared(counts: np.ndarray, law: np.ndarray) -> float:
    """p-value of counts against a law; 0 when something impossible was drawn, 1 when there is one cell only."""
    if counts[law <= 0].sum() > 0:
        return 0.0
    expected = law / law.sum() * counts.sum()
    big = expected >= 5
    observed = np.append(counts[big], counts[~big].sum())
    wanted = np.append(expected[big], expected[~big].sum())
    if wanted[-1] == 0:
        observed, wanted = observed[:-1], wanted[:-1]
    if len(wanted) < 2:
        return 1.0
    return float(stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue)
