"""The target's token distributions: responses, their recording, and the divergences. Imports torch on use only."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from draftstill.distill.fused import STATS, Confidence, Objective, Teacher, fused_loss, fused_tokens
    from draftstill.distill.inspecting import inspect
    from draftstill.distill.prompts import Prompt, cut_prompts, encode, seed_of
    from draftstill.distill.recorder import record
    from draftstill.distill.recording import Recorded, Recording
    from draftstill.distill.responses import read_responses, respond
    from draftstill.distill.scoring import Hidden, TopK, score_texts
    from draftstill.distill.sources import Text
    from draftstill.distill.weights import largest_gaps, prefix_confidence, runs, within

_HOME = {
    "STATS": "fused", "Objective": "fused", "Teacher": "fused", "fused_loss": "fused", "Prompt": "prompts", "cut_prompts": "prompts",
    "encode": "prompts", "seed_of": "prompts", "Hidden": "scoring", "TopK": "scoring", "record": "recorder", "score_texts": "scoring", "Text": "sources",
    "Confidence": "fused", "fused_tokens": "fused", "largest_gaps": "weights", "prefix_confidence": "weights", "runs": "weights", "within": "weights",
    "Recorded": "recording", "Recording": "recording", "inspect": "inspecting", "read_responses": "responses", "respond": "responses",
}  # fmt: skip
__all__ = [*_HOME]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
