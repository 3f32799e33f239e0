"""The speculative decoder: exact, fast, and the only thing that ever generates.

``draftstill.decode.trace`` and ``draftstill.decode.theory`` import without torch; everything here imports it on use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from draftstill.decode.drafters import CompositeDrafter, LookupDrafter, ModelDrafter
    from draftstill.decode.engine import Decoder, Request
    from draftstill.decode.loading import Loaded, eos_ids, load_target, revision_of, set_threads
    from draftstill.decode.network import Network, refuse_unsupported
    from draftstill.decode.sampling import Sampling, probabilities
    from draftstill.decode.viewer import show

_HOME = {
    "CompositeDrafter": "drafters", "LookupDrafter": "drafters", "ModelDrafter": "drafters", "Decoder": "engine", "Request": "engine",
    "Network": "network", "refuse_unsupported": "network", "Loaded": "loading", "load_target": "loading", "eos_ids": "loading", "revision_of": "loading",
    "set_threads": "loading", "Sampling": "sampling", "probabilities": "sampling", "show": "viewer",
}  # fmt: skip
__all__ = [*_HOME]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
