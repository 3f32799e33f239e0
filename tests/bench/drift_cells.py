"""One cell of ``make bench-drift``: what a draft is worth on a target, over held-out prompts of a domain. A file each."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from draftstill.corpus import prepare_corpus, read_documents
from draftstill.decode import Decoder, Loaded, ModelDrafter, Network, Request, Sampling, load_target, make_network, probabilities
from draftstill.decode.trace import check, metrics
from draftstill.distill import Prompt, cut_prompts, seed_of
from draftstill.recipe import Recipe
from draftstill.recipe_io import fingerprint
from draftstill.runfolder import RunFolder, git_state, hash_file, read_json, write_json
from draftstill.sources import load_model, quiet_transformers, resolve_model
from draftstill.stages import resolved_device, resolved_dtype

GAMMA = 4
DEPLOYED = 0.7
TEMPERATURES = (0.0, DEPLOYED, 1.0)
_ROWS = 16


def texts(recipe: Recipe, run: RunFolder, path: Path, count: int, tokens: int) -> None:
    """What a recipe's target writes to held-out prompts, plainly decoded, at each temperature; written once."""
    made = {"target": fingerprint(recipe.target, recipe.adapt, recipe.corpus), "prompts": count, "tokens": tokens}
    if holds(path, made):
        return
    with quiet_transformers():
        target = load_target(recipe)
    prompts = held_out(recipe, run, target, count)
    found = {f"{t:g}": [x.tokens for x in decode(target, None, prompts, Sampling(t), tokens)] for t in TEMPERATURES}
    write_json(path, {"made": made, "prompts": [{"id": p.id, "ids": p.ids} for p in prompts], "texts": found})


def holds(path: Path, made: dict[str, Any]) -> bool:
    """Whether a file is there and was made of these things: reused by its name alone, an old figure would stand among new ones."""
    return path.exists() and read_json(path).get("made") == made


def made_of(draft: Path, written: Path, tokens: int) -> dict[str, Any]:
    """What decides a cell: the draft's weights, the target's texts, and how it decodes."""
    return {"draft": hash_file(draft / "model.safetensors"), "texts": hash_file(written), "tokens": tokens, "gamma": GAMMA}


def held_out(recipe: Recipe, run: RunFolder, target: Loaded, count: int) -> list[Prompt]:
    return cut_prompts(read_documents(prepare_corpus(recipe, run), "test"), count, recipe.respond, target.tokenizer, recipe.seed)


def decode(target: Loaded, draft: Network | None, prompts: Sequence[Any], sampling: Sampling, tokens: int) -> list[Any]:
    """Traces of all prompts, with a draft or plainly."""
    drafter = None if draft is None else ModelDrafter(draft, GAMMA)
    decoder = Decoder(target.network, drafter, sampling=sampling, eos=target.eos, rows=min(_ROWS, len(prompts)))
    found = decoder.run([Request(p.ids, tokens, seed=seed_of("drift", p.id)) for p in prompts])
    check(found)
    return found


def measure(recipe: Recipe, draft: Path, written: Path, path: Path, tokens: int) -> None:
    """Write a cell: alpha per prompt at each temperature on the target's own texts, and proposed, accepted, rounds and emitted of speculative
    decoding at the deployment's temperature.

    Args:
        recipe: names the target.
        draft: the model's folder.
        written: what ``texts`` wrote for this target.
    """
    made = made_of(draft, written, tokens)
    if holds(path, made):
        return
    stored = read_json(written)
    prompts = [Prompt(p["id"], p["ids"], 0) for p in stored["prompts"]]
    with quiet_transformers():
        target = load_target(recipe)
        source = resolve_model(recipe.draft.model_copy(update={"source": str(draft), "sha256": None, "file": None}), "draft.source")
        model = load_model(source, resolved_dtype(recipe), resolved_device(recipe))
    network = make_network(model, vocab=target.vocab, key="draft.source")
    alphas = {t: [alpha(target.network, network, p.ids, text, Sampling(float(t))) for p, text in zip(prompts, found, strict=True)]
              for t, found in stored["texts"].items()}  # fmt: skip
    traces = decode(target, network, prompts, Sampling(DEPLOYED), tokens)
    counts = [metrics([trace]) for trace in traces]
    write_json(path, {
        "made": made, "commit": git_state(), "prompts": [p.id for p in prompts],
        "alpha": {t: [sum(a) for a in rows] for t, rows in alphas.items()}, "positions": {t: [len(a) for a in rows] for t, rows in alphas.items()},
        **{name: [c[name] for c in counts] for name in ("proposed", "accepted", "rounds", "emitted")},
    })  # fmt: skip
    del target, network, model
    gc.collect()


@torch.inference_mode()
def alpha(target: Network, draft: Network, prompt: Sequence[int], written: Sequence[int], sampling: Sampling) -> list[float]:
    """sum min(p, q) at each written token, both laws as processed; at temperature 0 whether the argmaxes agree."""
    ids = torch.tensor([[*prompt, *written]], device=target.device)
    rows = slice(len(prompt) - 1, ids.shape[1] - 1)
    p, q = (probabilities(n.logits(n.forward(ids, n.new_cache(1, ids.shape[1]), [0])[0, rows]), sampling) for n in (target, draft))
    return [round(x, 6) for x in torch.minimum(p, q).sum(-1).tolist()]
