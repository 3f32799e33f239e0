"""The target's token distributions: responses, their recording, and the divergences. Imports torch on use only."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from draftstill.distill.fused import STATS, Objective, Teacher, fused_loss
    from draftstill.distill.prompts import Prompt, cut_prompts, encode, seed_of
    from draftstill.distill.recorder import Hidden, TopK, record, score_texts
    from draftstill.distill.recording import Recorded, Recording, inspect
    from draftstill.distill.responses import read_responses, respond

_HOME = {
    "STATS": "fused", "Objective": "fused", "Teacher": "fused", "fused_loss": "fused", "Prompt": "prompts", "cut_prompts": "prompts",
    "encode": "prompts", "seed_of": "prompts", "Hidden": "recorder", "TopK": "recorder", "record": "recorder", "score_texts": "recorder",
    "Recorded": "recording", "Recording": "recording", "inspect": "recording", "read_responses": "responses", "respond": "responses",
}  # fmt: skip
__all__ = [*_HOME]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
