"""The arms of a score: plain decoding and every candidate, all in one engine on one target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor

from draftstill.decode import (
    BigramDrafter,
    CompositeDrafter,
    Decoder,
    Drafter,
    GammaPolicy,
    Loaded,
    LoadedDraft,
    LookupDrafter,
    ModelDrafter,
    Network,
    Sampling,
    bigram_table,
    load_draft,
    load_target,
    make_network,
)
from draftstill.distill import read_responses
from draftstill.recipe import Recipe, Source
from draftstill.runfolder import hash_file
from draftstill.sources import load_model, resolve_model
from draftstill.stages import TUNED, candidate_recipes, content_of, resolved_device, resolved_dtype
from draftstill.train import build_draft

PLAIN = "plain"
Kind = Literal["plain", "stock", "untuned", "tuned", "lookup", "bigram", "composite"]


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of decoding, at one or several gammas."""

    name: str
    kind: Kind
    gammas: tuple[int, ...]
    """Tokens that its draft proposes in a round; of a composite arm, its model."""
    draft: str | None = None
    """Name of its model in ``Bench.drafts``."""
    candidate: str | None = None
    """The trained candidate that it is made of."""


def arms_of(recipe: Recipe, trained: Mapping[str, Recipe] | None = None) -> dict[str, Arm]:
    """All arms by name, plain decoding first; ``trained``: the candidates there are (default: all of the recipe).

    An arm's name does not depend on the order of the candidates, and of one made from a single draft it is its kind.
    """
    own = dict(trained or candidate_recipes(recipe))
    settings = recipe.evaluate
    found = [Arm(PLAIN, "plain", (0,)), *(Arm(f"stock:{n}", "stock", settings.swept, f"stock:{n}") for n in settings.stock)]
    for kind in settings.candidates:
        if kind == "lookup":
            found.append(Arm(kind, kind, (settings.lookup_gamma,)))
        elif kind == "bigram":
            found.append(Arm(kind, kind, (settings.gamma,)))
        elif kind == "untuned":
            # A gamma that the trained draft is scored at, too: acceptance before and after training is compared at one.
            nearest = min(settings.swept, key=lambda g: (abs(g - settings.gamma), g))
            found += [Arm(name, kind, (nearest,), name) for name in sorted(set(starts_of(own).values()))]
        else:
            found += [
                Arm(_named(kind, name, own), kind, settings.swept, name, name) for name in own
            ]  # fmt: skip
    return {arm.name: arm for arm in found}


def _named(kind: Literal["tuned", "composite"], candidate: str, own: Mapping[str, Recipe]) -> str:
    if kind == "tuned":
        return candidate
    return kind if len(own) == 1 else f"{kind}:{candidate}"


def starts_of(own: Mapping[str, Recipe]) -> dict[str, str]:
    """By candidate, the arm of its draft before training: one for all drafts that start alike."""
    shapes = {name: recipe.draft.model_dump_json() for name, recipe in own.items()}
    if len(set(shapes.values())) == 1:
        return dict.fromkeys(own, "untuned")
    first = {shape: min(n for n, s in shapes.items() if s == shape) for shape in shapes.values()}
    return {name: f"untuned:{first[shape]}" for name, shape in shapes.items()}


@dataclass(slots=True)
class Bench:
    """Target and drafts in memory, in one dtype."""

    recipe: Recipe
    target: Loaded
    drafts: dict[str, Network]
    """By arm (stock, untuned) or candidate: with the head that the decoder drafts from."""
    table: Tensor | None = None
    """The bigram table."""
    names: tuple[str, ...] = ()
    """The trained candidates that there are (none named: all of the recipe)."""
    stock: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What each stock draft is: name, source, parameters, revision, content, sha256."""

    @property
    def candidates(self) -> dict[str, Recipe]:
        """Those candidates with the recipe of each, in the recipe's order."""
        return {n: r for n, r in candidate_recipes(self.recipe).items() if n in self.names or not self.names}

    @property
    def arms(self) -> dict[str, Arm]:
        return arms_of(self.recipe, self.candidates)

    def arm(self, name: str) -> Arm:
        """An arm by name, or the first of a kind."""
        found = self.arms
        return found[name] if name in found else next(a for a in found.values() if a.kind == name)

    def decoder(
        self, arm: str, sampling: Sampling, *, rows: int = 1, gamma: int | None = None, policy: GammaPolicy | None = None
    ) -> Decoder:
        """The engine of one arm.

        Args:
            gamma: default: the recipe's own, ``evaluate.gamma`` or ``evaluate.lookup_gamma``.
            policy: chooses the draft's gamma in each round instead.
        """
        return Decoder(
            self.target.network, self.drafter(arm, gamma, policy), sampling=sampling, eos=self.target.eos, rows=rows,
            backend=self.recipe.evaluate.backend,
        )  # fmt: skip

    def drafter(self, name: str, gamma: int | None = None, policy: GammaPolicy | None = None) -> Drafter | None:
        """Who proposes for an arm; None for plain decoding."""
        if name == PLAIN:
            return None
        arm = self.arm(name)
        settings, network = self.recipe.evaluate, self.target.network
        if arm.kind == "lookup":
            return LookupDrafter(gamma or settings.lookup_gamma, network.vocab, network.device)
        if arm.kind == "bigram":
            assert self.table is not None
            return BigramDrafter(self.table, gamma or settings.gamma, network.device)
        assert arm.draft is not None
        model = ModelDrafter(self.drafts[arm.draft], gamma or settings.gamma, policy=policy)
        if arm.kind != "composite":
            return model
        return CompositeDrafter(LookupDrafter(settings.lookup_gamma, network.vocab, network.device), model)

    def gamma(self, arm: str, gamma: int | None = None) -> int:
        """Most tokens that the arm proposes in a round."""
        drafter = self.drafter(arm, gamma)
        return 0 if drafter is None else drafter.gamma


def open_bench(recipe: Recipe, draft: Path | Mapping[str, Path], *, dtype: str | None = None) -> Bench:
    """Load the target and what the arms need.

    Args:
        draft: the folder of the draft stage, or that of each trained candidate by name.
    """
    folders = dict(draft) if isinstance(draft, Mapping) else {TUNED: Path(draft)}
    dtype = dtype or resolved_dtype(recipe)
    target = load_target(recipe, dtype=dtype)
    device = resolved_device(recipe)
    own = {name: r for name, r in candidate_recipes(recipe).items() if name in folders}
    wanted = set(recipe.evaluate.candidates)
    stock = {
        name: load_draft(named, f"evaluate.stock.{name}.source", target, recipe, dtype=dtype)
        for name, named in recipe.evaluate.stock.items()
    }
    drafts = {f"stock:{name}": loaded.network for name, loaded in stock.items()}
    if "untuned" in wanted:
        for candidate, arm in starts_of(own).items():
            if arm not in drafts:
                model = build_draft(own[candidate]).model.to(device=device, dtype=getattr(torch, dtype))
                drafts[arm] = make_network(
                    model, vocab=target.vocab, head_ids=head_ids(own[candidate], folders[candidate]), key="draft.source"
                )
    if wanted & {"tuned", "composite"}:
        for name, mine in own.items():
            source = resolve_model(
                mine.draft.model_copy(update={"source": str(folders[name] / "model"), "sha256": None, "file": None}), "draft.source"
            )
            drafts[name] = make_network(
                load_model(source, dtype, device), vocab=target.vocab, head_ids=head_ids(mine, folders[name]), key="draft.source"
            )
    table = _table(recipe, target.vocab) if "bigram" in wanted else None
    return Bench(
        recipe, target, drafts, table, tuple(own), {name: _about(recipe.evaluate.stock[name], loaded) for name, loaded in stock.items()}
    )


def _about(named: Source, loaded: LoadedDraft) -> dict[str, Any]:
    return {"name": loaded.name, "source": named.source, "parameters": loaded.network.parameters, "revision": loaded.revision,
            "content": content_of(named.source), "sha256": named.sha256}  # fmt: skip


def _table(recipe: Recipe, vocab: int) -> Tensor:
    """The most frequent successors in what the target wrote for training, prompts included."""
    rows = read_responses(Path(recipe.run_dir) / "responses", "train")
    return bigram_table(([*row["prompt"], *row["response"]] for row in rows), vocab)


def kept_head(recipe: Recipe, draft: Path) -> list[Any] | None:
    """What decides the head that the decoder drafts from, as a cell's key holds it (None: the whole one)."""
    return [recipe.draft.head_tokens, hash_file(draft / "token_ranking.safetensors")] if recipe.draft.head_tokens else None


def head_ids(recipe: Recipe, draft: Any) -> Tensor | None:
    """Ids the decoder drafts from: the most frequent of the recorded text (None: all)."""
    if not recipe.draft.head_tokens:
        return None
    ranking = load_file(draft / "token_ranking.safetensors")["ids"].long()
    return ranking[: recipe.draft.head_tokens].sort().values
