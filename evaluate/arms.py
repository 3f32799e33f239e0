"""The arms of a score: plain decoding and every candidate, all in one engine on one target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from draftstill.decode import (
    CompositeDrafter,
    Decoder,
    Drafter,
    Loaded,
    LookupDrafter,
    ModelDrafter,
    Network,
    Sampling,
    load_target,
    make_network,
)
from draftstill.recipe import Recipe
from draftstill.sources import load_model, resolve_model
from draftstill.stages import resolved_device, resolved_dtype
from draftstill.train import build_draft

PLAIN = "plain"


@dataclass(slots=True)
class Bench:
    """Target and drafts in memory, in one dtype."""

    recipe: Recipe
    target: Loaded
    drafts: dict[str, Network]
    """untuned, tuned: with the head that the decoder drafts from."""

    def decoder(self, arm: str, sampling: Sampling, *, rows: int = 1) -> Decoder:
        """The engine of one arm."""
        return Decoder(
            self.target.network, self._drafter(arm), sampling=sampling, eos=self.target.eos, rows=rows, backend=self.recipe.evaluate.backend
        )

    def _drafter(self, arm: str) -> Drafter | None:
        if arm == PLAIN:
            return None
        settings, network = self.recipe.evaluate, self.target.network
        lookup = LookupDrafter(settings.lookup_gamma, network.vocab, network.device)
        if arm == "lookup":
            return lookup
        model = ModelDrafter(self.drafts["tuned" if arm == "composite" else arm], settings.gamma)
        return CompositeDrafter(lookup, model) if arm == "composite" else model

    def gamma(self, arm: str) -> int:
        """Most tokens the arm proposes in a round."""
        settings = self.recipe.evaluate
        return {PLAIN: 0, "lookup": settings.lookup_gamma, "composite": max(settings.gamma, settings.lookup_gamma)}.get(arm, settings.gamma)


def open_bench(recipe: Recipe, draft: Any, *, dtype: str | None = None) -> Bench:
    """Load the target and what the candidates need; ``draft`` is the folder of the draft stage."""
    dtype = dtype or resolved_dtype(recipe)
    target = load_target(recipe, dtype=dtype)
    kept = head_ids(recipe, draft)
    device = resolved_device(recipe)
    drafts = {}
    if "untuned" in recipe.evaluate.candidates:
        model = build_draft(recipe).model.to(device=device, dtype=getattr(torch, dtype))
        drafts["untuned"] = make_network(model, vocab=target.vocab, head_ids=kept, key="draft.source")
    if {"tuned", "composite"} & set(recipe.evaluate.candidates):
        source = resolve_model(
            recipe.draft.model_copy(update={"source": str(draft / "model"), "sha256": None, "file": None}), "draft.source"
        )
        drafts["tuned"] = make_network(load_model(source, dtype, device), vocab=target.vocab, head_ids=kept, key="draft.source")
    return Bench(recipe, target, drafts)


def head_ids(recipe: Recipe, draft: Any) -> Tensor | None:
    """Ids the decoder drafts from: the most frequent of the recorded text (None: all)."""
    if not recipe.draft.head_tokens:
        return None
    ranking = load_file(draft / "token_ranking.safetensors")["ids"].long()
    return ranking[: recipe.draft.head_tokens].sort().values


@torch.inference_mode()
def teacher_forced_alpha(target: Network, draft: Network, prompt: list[int], written: list[int], sampling: Sampling) -> list[float]:
    """sum min(p, q) at each position of target-written text, both laws processed; at temperature 0 argmax agreement.

    Args:
        prompt, written: ids; one value per written token.
    """
    from draftstill.decode import probabilities

    ids = torch.tensor([[*prompt, *written]], device=target.device)
    rows = slice(len(prompt) - 1, ids.shape[1] - 1)
    laws = []
    for network in (target, draft):
        hidden = network.forward(ids, network.new_cache(1, ids.shape[1]), [0])[0, rows]
        law = probabilities(network.logits(hidden), sampling)
        if network.head_ids is not None:
            whole = torch.zeros(len(law), network.vocab, device=law.device)
            law = whole.index_copy_(1, network.head_ids, law)
        laws.append(law)
    return torch.minimum(*laws).sum(-1).tolist()
