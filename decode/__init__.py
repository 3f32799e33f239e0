"""The speculative decoder: exact, fast, and the only thing that ever generates.

``draftstill.decode.trace`` and ``draftstill.decode.theory`` import without torch; everything here imports it on use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from draftstill.decode.adaptive import AdaptiveGamma, FixedGamma, GammaPolicy, GoodputGamma
    from draftstill.decode.costs import Costs, measure_costs
    from draftstill.decode.deriving import derive
    from draftstill.decode.drafters import CompositeDrafter, Drafter, ModelDrafter
    from draftstill.decode.encdec import make_network
    from draftstill.decode.engine import Decoder
    from draftstill.decode.families import refuse_unsupported
    from draftstill.decode.guesses import BigramDrafter, LookupDrafter, bigram_table
    from draftstill.decode.loading import Loaded, LoadedDraft, eos_ids, load_draft, load_target, revision_of, set_threads
    from draftstill.decode.network import Network
    from draftstill.decode.requests import Request
    from draftstill.decode.sampling import Law, Sampling, probabilities
    from draftstill.decode.shapes import random_model
    from draftstill.decode.simulation import simulate
    from draftstill.decode.viewer import show

_FACE = {
    "adaptive": ("AdaptiveGamma", "FixedGamma", "GammaPolicy", "GoodputGamma"),
    "costs": ("Costs", "measure_costs"),
    "deriving": ("derive",),
    "drafters": ("CompositeDrafter", "Drafter", "ModelDrafter"),
    "encdec": ("make_network",),
    "engine": ("Decoder",),
    "families": ("refuse_unsupported",),
    "guesses": ("BigramDrafter", "LookupDrafter", "bigram_table"),
    "loading": ("Loaded", "LoadedDraft", "eos_ids", "load_draft", "load_target", "revision_of", "set_threads"),
    "network": ("Network",),
    "requests": ("Request",),
    "sampling": ("Law", "Sampling", "probabilities"),
    "shapes": ("random_model",),
    "simulation": ("simulate",),
    "viewer": ("show",),
}
_HOME = {name: module for module, names in _FACE.items() for name in names}
__all__ = [*_HOME]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
