"""What a draft step and a verify pass cost on this machine, measured apart from any decoding, so that a prediction can be wrong."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from draftstill.decode.network import Network
from draftstill.decode.programs import Program, on_device

_REPEATS = 15
_FURTHER = 3
"""Steps timed behind the first one of a block."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Median seconds of one forward with logits behind ``context`` cached tokens, ``rows`` rows at once."""

    context: int
    repeats: int
    verify_s: dict[str, float]
    """By number of tokens; "1" is a plain step."""
    first_s: dict[str, float]
    """The first step of a block of each draft: behind a verify pass, which has taken the draft's weights out of the caches."""
    draft_s: dict[str, float]
    """Each further step."""
    rows: int = 1
    backend: str = "eager"
    """How the steps ran, as in ``Decoder``."""

    def drafting(self, draft: str, steps: int) -> float:
        """A block of so many draft steps over a plain target step."""
        return (self.first_s[draft] + (steps - 1) * self.draft_s[draft]) / self.verify_s["1"] if steps else 0.0

    def c(self, draft: str, gamma: int) -> float:
        """Draft step over plain target step, as the mean over a block of ``gamma`` steps."""
        return self.drafting(draft, gamma) / gamma

    def c_by_gamma(self, draft: str, most: int) -> dict[int, float]:
        """c by gamma, 1 .. most; what ``AdaptiveGamma`` and ``theory.best_gamma`` take."""
        return {g: self.c(draft, g) for g in range(1, most + 1)}

    def v(self, tokens: int) -> float:
        """Verifying so many tokens over a plain target step."""
        return self.verify_s[str(tokens)] / self.verify_s["1"]

    def v_by_gamma(self) -> dict[int, float]:
        """v by gamma, one token more being verified; what ``AdaptiveGamma`` and ``theory.best_gamma`` take."""
        return {int(tokens) - 1: self.v(int(tokens)) for tokens in self.verify_s}

    def halfway(self, other: Costs) -> Costs:
        """The mean of two measurements of the same steps, one before and one after what they are to explain."""
        mean = lambda a, b: {k: (a[k] + b[k]) / 2 for k in a}  # noqa: E731
        return replace(self, repeats=self.repeats + other.repeats, verify_s=mean(self.verify_s, other.verify_s),
                       first_s=mean(self.first_s, other.first_s), draft_s=mean(self.draft_s, other.draft_s))  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@torch.inference_mode()
def measure_costs(target: Network, drafts: Mapping[str, Network], context: int, gamma: int, *, rows: int = 1, repeats: int = _REPEATS,
                  backend: str = "eager") -> Costs:  # fmt: skip
    """Time plain steps, verify passes of up to ``gamma`` + 1 tokens and blocks of draft steps in turns, so that a disturbance meets all
    of them. Each block stands behind a verify pass, as in decoding.

    ``backend``: that of the decoder they are meant for; an eager step of a small model on CUDA is mostly launches.
    """
    with on_device(target.device):
        return _measure(target, drafts, context, gamma, rows, repeats, backend)


def _measure(target: Network, drafts: Mapping[str, Network], context: int, gamma: int, rows: int, repeats: int, backend: str) -> Costs:
    tasks: dict[tuple[str, str], Callable[[], object]] = {
        ("verify", str(w)): _step(target, context, w, rows, backend) for w in range(1, gamma + 2)
    }
    widest = tasks["verify", str(gamma + 1)]
    for name, network in drafts.items():
        # A program's first step always reads two tokens: after a whole block has passed, the last one of it is unread, too.
        tasks["before", name] = widest
        tasks["first", name] = _step(network, context, 1 if backend == "eager" else 2, rows, backend)
        further = _step(network, context, 1, rows, backend)
        tasks |= {(f"further {n}", name): further for n in range(_FURTHER)}
    taken: dict[tuple[str, str], list[float]] = {key: [] for key in tasks}
    sync = torch.cuda.synchronize if target.device.type == "cuda" else (lambda: None)
    for repeat in range(repeats + 2):
        for key, task in tasks.items():
            started = time.perf_counter()
            task()
            sync()
            if repeat >= 2:  # the first rounds warm caches up
                taken[key].append(time.perf_counter() - started)
    verify = {name: statistics.median(times) for (kind, name), times in taken.items() if kind == "verify"}
    first = {name: statistics.median(taken["first", name]) for name in drafts}
    steps = {name: statistics.median(s for n in range(_FURTHER) for s in taken[f"further {n}", name]) for name in drafts}
    return Costs(context, repeats, verify, first, steps, rows, backend)


def _step(network: Network, context: int, tokens: int, rows: int, backend: str) -> Callable[[], object]:
    # As the decoder's caches: a program reads all of it.
    cache = network.new_cache(rows, context + tokens if backend == "eager" else -(-(context + tokens) // 256) * 256)
    ids = torch.arange(context + tokens, device=network.device).remainder(network.vocab).expand(rows, -1)
    if context:
        network.forward(ids[:, :context], cache, [0] * rows)
    new = ids[:, context:].contiguous()
    if backend == "eager":
        return lambda: network.logits(network.forward(new, cache, [context] * rows))
    starts = torch.full((rows,), context, device=network.device)
    kept = torch.empty(rows, tokens, network.columns, device=network.device)  # what is not kept, a compiler leaves out

    def body() -> None:
        kept.copy_(network.logits(network.forward(new, cache, starts)))

    program = Program(body, compiled=backend == "compile", captured=network.device.type == "cuda", keep=[])
    program.prepare(None)
    return program
