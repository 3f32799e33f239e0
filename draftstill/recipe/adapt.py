"""Tuning the target on the user's text before anything is distilled from it."""

from __future__ import annotations

from draftstill.recipe.base import Section


class Adapt(Section):
    """Tune the target on the corpus by LoRA and merge it; the merged model takes the target's place in all later stages."""
