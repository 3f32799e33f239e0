"""The target's token distributions: responses, their recording, and the divergences. Imports torch on use only."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from draftstill.distill.bounds import agrees_at_top1, alpha_at_least
    from draftstill.distill.chats import chat_turn
    from draftstill.distill.dialects import Answer, Ask
    from draftstill.distill.fused import STATS, Confidence, Objective, Teacher, fused_loss, fused_tokens
    from draftstill.distill.inspecting import inspect
    from draftstill.distill.kernels import LOSS_TERMS
    from draftstill.distill.prompts import LONGER, Prompt, Refusals, context_of, cut_prompts, encode, seed_of
    from draftstill.distill.recorder import record
    from draftstill.distill.recording import Recorded, Recording
    from draftstill.distill.responses import read_responses, respond
    from draftstill.distill.scoring import Hidden, TopK, score_texts
    from draftstill.distill.served import Served, make_served
    from draftstill.distill.servers import About, Client, ServerError, each, parse_counters
    from draftstill.distill.sources import Text
    from draftstill.distill.weights import largest_gaps, prefix_confidence, runs, within

_HOME = {
    "chat_turn": "chats", "LONGER": "prompts", "Refusals": "prompts", "context_of": "prompts",
    "LOSS_TERMS": "kernels", "STATS": "fused", "Objective": "fused", "Teacher": "fused", "fused_loss": "fused", "Prompt": "prompts", "cut_prompts": "prompts",
    "encode": "prompts", "seed_of": "prompts", "Hidden": "scoring", "TopK": "scoring", "record": "recorder", "score_texts": "scoring", "Text": "sources",
    "Confidence": "fused", "fused_tokens": "fused", "largest_gaps": "weights", "prefix_confidence": "weights", "runs": "weights", "within": "weights",
    "Recorded": "recording", "Recording": "recording", "inspect": "inspecting", "read_responses": "responses", "respond": "responses",
    "alpha_at_least": "bounds", "agrees_at_top1": "bounds", "Served": "served", "make_served": "served",
    "About": "servers", "Answer": "dialects", "Ask": "dialects", "Client": "servers", "ServerError": "servers", "each": "servers", "parse_counters": "servers",
}  # fmt: skip
__all__ = [*_HOME]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
