"""Programs: functions over fixed buffers, run as they are, compiled, or captured as CUDA graphs and replayed; and where they cannot be had."""

from __future__ import annotations

import contextlib
import functools
import gc
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from draftstill.decode.drafters import CompositeDrafter, Drafter, ModelDrafter
from draftstill.decode.guesses import GuessDrafter
from draftstill.decode.network import Network

Backend = Literal["auto", "eager", "graphs", "compile"]
COMPILE: dict[str, Any] = {"fullgraph": True, "dynamic": False}
"""Options of torch.compile; fullgraph fails where anything depends on a value."""
_WARM_UPS = 3
"""Runs before a capture, on a side stream: libraries allocate their workspaces then."""


def parts(drafter: Drafter | None) -> tuple[GuessDrafter | None, ModelDrafter | None] | None:
    """(guesser, model) of a drafter; None where it has no static form."""
    if drafter is None:
        return None, None
    if isinstance(drafter, ModelDrafter):
        return None, drafter
    if isinstance(drafter, GuessDrafter):
        return drafter, None
    if isinstance(drafter, CompositeDrafter):
        return drafter.guesser, drafter.model
    return None


def packed(target: Network, drafter: Drafter | None) -> bool:
    """Whether one of the networks has packed weights."""
    _, model = parts(drafter) or (None, None)
    return target.packed or (model is not None and model.network.packed)


def fallback(backend: Backend, target: Network, drafter: Drafter | None) -> str | None:
    """Why rounds run eagerly although more was asked for; None where they do not."""
    if backend == "eager" or (backend == "auto" and target.device.type != "cuda"):
        return None
    if backend == "graphs" and target.device.type != "cuda":
        return f"CUDA graphs need a CUDA device; the target is on {target.device.type}"
    if parts(drafter) is None:
        return f"{type(drafter).__name__} has no static form"
    if backend == "compile" and packed(target, drafter):
        return "packed weights cannot be compiled, and are faster without; make the networks with pack_weights=False"
    return None


@functools.cache
def _side_stream(index: int) -> Any:
    """One a device: libraries keep a workspace for every stream they were ever used on."""
    return torch.cuda.Stream(index)


@contextlib.contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Make the device current: streams, events and captures go by it. And keep attention off cuDNN, which builds a plan of tens of milliseconds
    and more for each new length of the keys: an eager round has a new one every time."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        yield


class Program:
    """A function of no arguments over fixed buffers: run as it is, compiled, or captured and replayed."""

    def __init__(self, body: Callable[[], None], *, compiled: bool, captured: bool, keep: Sequence[Tensor]) -> None:
        self.body = torch.compile(_of_its_own(body), **COMPILE) if compiled else body
        self.compiled, self.captured, self.keep = compiled, captured, keep
        self.graph: Any = None
        self.ready = not (compiled or captured)
        self.runs = 0

    def prepare(self, pool: Any) -> None:
        """Compile and capture now, leaving the state (``keep``) as it was."""
        saved = [t.clone() for t in self.keep]
        if self.captured:
            stream = _side_stream(torch.cuda.current_device())
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):
                    self.body()
                    self._restore(saved)
            torch.cuda.current_stream().wait_stream(stream)
            graph, collecting = torch.cuda.CUDAGraph(), gc.isenabled()
            gc.collect()
            gc.disable()  # an old graph that is collected during a capture breaks it (pytorch#161037)
            try:
                with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    self.body()
            finally:
                if collecting:
                    gc.enable()
            self.graph = graph
        else:
            self.body()
        self._restore(saved)
        self.ready = True

    def _restore(self, saved: Sequence[Tensor]) -> None:
        for t, s in zip(self.keep, saved, strict=True):
            t.copy_(s)

    def __call__(self) -> None:
        self.runs += 1
        if self.graph is not None:
            self.graph.replay()
        else:
            self.body()


def _of_its_own(body: Callable[[], None]) -> Callable[[], None]:
    """The function with a code object of its own: torch.compile counts recompilations by code object, and gives up at a few."""
    assert isinstance(body, types.FunctionType)
    return types.FunctionType(body.__code__.replace(), body.__globals__, body.__name__, body.__defaults__, body.__closure__)
