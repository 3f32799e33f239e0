"""The recipe: one typed YAML file that holds a whole run.

Field docstrings are the help text and the JSON-schema descriptions. Training keys keep the spellings of
transformers' ``TrainingArguments``. Reading, overriding and error text live in ``recipe_io``.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from draftstill.recipe.adapt import Adapt
from draftstill.recipe.base import Fraction, PositiveInt, Section
from draftstill.recipe.evaluate import OWN, Arm, Evaluate
from draftstill.recipe.models import Draft, Source, Target
from draftstill.recipe.publish import Publish
from draftstill.recipe.record import Kind, Record
from draftstill.recipe.respond import Respond, Sampler
from draftstill.recipe.server import Server
from draftstill.recipe.text import Corpus
from draftstill.recipe.train import Candidate, Lora, Loss, LossName, Phase, Switch, Tokens, Train

__all__ = [
    "Adapt",
    "Arm",
    "Candidate",
    "Corpus",
    "Draft",
    "Evaluate",
    "Fraction",
    "Kind",
    "Lora",
    "Loss",
    "LossName",
    "OWN",
    "Phase",
    "PositiveInt",
    "Publish",
    "Recipe",
    "Record",
    "Respond",
    "Sampler",
    "Section",
    "Server",
    "Source",
    "Switch",
    "Target",
    "Tokens",
    "Train",
]


class Recipe(Section):
    """A whole run."""

    run_dir: str
    """Folder for everything the run makes."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Decides the split, the prompts, the sampling and the training order."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto``: CUDA when there is one."""
    target: Target
    """The model whose answers count."""
    draft: Draft = Draft()
    """The model that guesses."""
    corpus: Corpus
    """The user's text."""
    adapt: Adapt | None = None
    """Tune the target first (default: take it as it is)."""
    respond: Respond = Respond()
    """Target-written text."""
    record: Record = Record()
    """Target distributions."""
    train: Train = Train()
    """Training."""
    evaluate: Evaluate = Evaluate()
    """Scoring."""
    publish: Publish = Publish()
    """Publishing."""

    @model_validator(mode="after")
    def _temperatures_agree(self) -> Recipe:
        deployed = self.respond.sampler.temperature
        if deployed not in self.evaluate.temperatures:
            raise ValueError(f"evaluate.temperatures must contain the deployment's temperature, respond.sampler.temperature ({deployed:g})")
        if self.record.mode == "text" and {name for loss in self.train.losses for name in loss.names} != {"ce"}:
            raise ValueError("record.mode: text knows no probabilities; the only loss is train.loss.name: ce")
        asked = {loss.temperature for loss in self.train.losses} - {None, self.record.temperature}
        if self.record.mode not in ("hidden", "live") and asked:
            raise ValueError(
                "train.loss.temperature must equal record.temperature in topk and auto mode, or leave it out; use record.mode: hidden for another"
            )
        return self

    @model_validator(mode="after")
    def _shards_a_live_target(self) -> Recipe:
        if self.train.live == "shard" and self.record.mode != "live":
            raise ValueError(f"train.live: shard divides a target that training holds, and record.mode: {self.record.mode} holds none; leave it out, "
                             "or set record.mode: live")  # fmt: skip
        return self

    @model_validator(mode="after")
    def _cuts_are_recorded(self) -> Recipe:
        largest = max(loss.top_k for loss in self.train.losses)
        if self.record.mode in ("topk", "auto") and largest > self.record.top_k:
            raise ValueError(
                f"train.loss.top_k ({largest}) must be at most record.top_k ({self.record.top_k}) in topk and auto mode: what is cut beyond the recorded "
                "ids is not known; lower it, raise record.top_k, or use record.mode: hidden"
            )
        return self
