"""What a draft step and a verify pass cost on this machine, measured apart from any arm, so that a prediction can be wrong."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from draftstill.decode import Network
from draftstill.evaluate.arms import Bench

_REPEATS = 15


@dataclass(frozen=True, slots=True)
class Costs:
    """Median seconds of one forward with logits, batch 1, behind ``context`` cached tokens."""

    context: int
    repeats: int
    verify_s: dict[str, float]
    """By number of tokens; "1" is a plain step."""
    draft_s: dict[str, float]
    """One step of each draft."""

    def c(self, draft: str) -> float:
        """Draft step over plain target step."""
        return self.draft_s[draft] / self.verify_s["1"]

    def v(self, tokens: int) -> float:
        """Verifying so many tokens over a plain target step."""
        return self.verify_s[str(tokens)] / self.verify_s["1"]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@torch.inference_mode()
def measure_costs(bench: Bench, context: int) -> Costs:
    """Time each kind of step in turns, so that a disturbance meets all of them."""
    widths = range(1, 2 + max(bench.gamma(arm) for arm in bench.recipe.evaluate.candidates))
    tasks: dict[tuple[str, str], Callable[[], object]] = {("verify", str(w)): _step(bench.target.network, context, w) for w in widths}
    tasks |= {("draft", name): _step(network, context, 1) for name, network in bench.drafts.items()}
    taken: dict[tuple[str, str], list[float]] = {key: [] for key in tasks}
    sync = torch.cuda.synchronize if bench.target.network.device.type == "cuda" else (lambda: None)
    for repeat in range(_REPEATS + 2):
        for key, task in tasks.items():
            started = time.perf_counter()
            task()
            sync()
            if repeat >= 2:  # the first rounds warm caches up
                taken[key].append(time.perf_counter() - started)
    median = {key: statistics.median(times) for key, times in taken.items()}
    by_kind = lambda kind: {name: s for (k, name), s in median.items() if k == kind}  # noqa: E731
    return Costs(context, _REPEATS, by_kind("verify"), by_kind("draft"))


def _step(network: Network, context: int, tokens: int) -> Callable[[], object]:
    cache = network.new_cache(1, context + tokens)
    ids = torch.arange(context + tokens, device=network.device).remainder(network.vocab)[None]
    if context:
        network.forward(ids[:, :context], cache, [0])
    return lambda: network.logits(network.forward(ids[:, context:], cache, [context]))
