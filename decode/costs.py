"""What a draft step and a verify pass cost on this machine, measured apart from any decoding, so that a prediction can be wrong."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from draftstill.decode.acceptance import Proposal
from draftstill.decode.network import Network, StaticCache
from draftstill.decode.programs import Program, on_device
from draftstill.decode.round import Starts, accept, draft_block, verify
from draftstill.decode.sampling import Law, Sampling

_REPEATS = 15
_FURTHER = 3
"""Steps timed behind the first one of a block."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Median seconds of one step behind ``context`` cached tokens, ``rows`` rows at once: forward, logits, and what ``sampling`` asks for."""

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
    sampling: dict[str, Any] | None = None
    """The law that draft steps draw from, and by which a verify pass accepts and draws its own token, the time of both included; None: forward
    and logits alone."""

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
                  backend: str = "eager", sampling: Sampling | None = None, widths: Sequence[int] | None = None) -> Costs:  # fmt: skip
    """Time plain steps, verify passes of up to ``gamma`` + 1 tokens and blocks of draft steps in turns, so that a disturbance meets all
    of them. Each block stands behind a verify pass, as in decoding.

    Args:
        backend: that of the decoder they are meant for; an eager step of a small model on CUDA is mostly launches.
        sampling: time this law, too: a draft step's softmax and draw, a verify pass's acceptance and its own token. Settings that look at
            the text (penalties, banned n-grams) are left out. None: forward and logits alone.
        widths: time verify passes of these numbers of tokens only, beside the plain step.
    """
    if sampling is not None:
        sampling = replace(sampling, repetition_penalty=1.0, no_repeat_ngram=0, min_new_tokens=0)
    wanted = range(1, gamma + 2) if widths is None else sorted({1, *widths})
    with on_device(target.device):
        return _measure(target, drafts, context, wanted, rows, repeats, backend, sampling)


def _measure(target: Network, drafts: Mapping[str, Network], context: int, widths: Sequence[int], rows: int, repeats: int, backend: str,
             sampling: Sampling | None) -> Costs:  # fmt: skip
    def step(network: Network, tokens: int, drafts: bool = False) -> Callable[[], object]:
        return _step(network, context, tokens, rows, backend, sampling, drafts)

    tasks: dict[tuple[str, str], Callable[[], object]] = {("verify", str(w)): step(target, w) for w in widths}
    widest = tasks["verify", str(widths[-1])]
    for name, network in drafts.items():
        # A program's first step always reads two tokens: after a whole block has passed, the last one of it is unread, too.
        tasks["before", name] = widest
        tasks["first", name] = step(network, 1 if backend == "eager" else 2, True)
        further = step(network, 1, True)
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
    verified = {name: statistics.median(times) for (kind, name), times in taken.items() if kind == "verify"}
    first = {name: statistics.median(taken["first", name]) for name in drafts}
    steps = {name: statistics.median(s for n in range(_FURTHER) for s in taken[f"further {n}", name]) for name in drafts}
    return Costs(context, repeats, verified, first, steps, rows, backend, None if sampling is None else asdict(sampling))


def _step(
    network: Network, context: int, tokens: int, rows: int, backend: str, sampling: Sampling | None, drafts: bool
) -> Callable[[], object]:
    """A verify pass of so many tokens, or a draft step that reads so many."""
    # As the decoder's caches: a program reads all of it.
    cache = network.new_cache(rows, context + tokens if backend == "eager" else -(-(context + tokens) // 256) * 256)
    ids = torch.arange(context + tokens, device=network.device).remainder(network.vocab).expand(rows, -1)
    if context:
        network.forward(ids[:, :context], cache, [0] * rows)
    new = ids[:, context:].contiguous()
    eager = backend == "eager"
    starts: Starts = [context] * rows if eager else torch.full((rows,), context, device=network.device)
    if sampling is None:
        work: Callable[[], Tensor] = lambda: network.logits(network.forward(new, cache, starts))  # noqa: E731
    else:
        law = Law.of([sampling] * rows, vocab=network.vocab, device=network.device, ids_K=network.head_ids)
        work = _drafted(network, cache, new, starts, law) if drafts else _verified(network, cache, new, starts, law)
    if eager:
        return work
    kept = torch.empty_like(work())  # what is not kept, a compiler leaves out

    def body() -> None:
        kept.copy_(work())

    program = Program(body, compiled=backend == "compile", captured=network.device.type == "cuda", keep=[])
    program.prepare(None)
    return program


def _drafted(network: Network, cache: StaticCache, new: Tensor, starts: Starts, law: Law) -> Callable[[], Tensor]:
    """One step of a block: the token that is drawn."""
    rows, tokens = new.shape
    whole = lambda n: torch.full((rows,), n, device=new.device)  # noqa: E731
    last = whole(tokens - 1) if tokens > 1 else None
    ends: Starts = starts + tokens if isinstance(starts, Tensor) else [s + tokens for s in starts]
    counts, u = whole(1), _uniforms(rows, 1, new.device)
    return lambda: draft_block(network, cache, new, starts, last, ends, counts, 1, law, u)[0].tokens_BG


def _verified(network: Network, cache: StaticCache, new: Tensor, starts: Starts, law: Law) -> Callable[[], Tensor]:
    """A verify pass of a block that was drawn from an even law: the target's own token behind it."""
    rows, tokens = new.shape
    gamma, u = tokens - 1, _uniforms(rows, tokens, new.device)
    offered = None
    if gamma:
        counts, even = torch.full((rows,), gamma, device=new.device), 1 / network.vocab
        offered = Proposal(new[:, 1:].contiguous(), counts)
        if not law.greedy:
            offered.q_drawn_BG = torch.full((rows, gamma), even, device=new.device)
            offered.q_BGK = torch.full((1, 1, 1), even, device=new.device).expand(rows, gamma, network.vocab)
    return lambda: accept(verify(network, cache, new, starts, law), offered, law, u)[1]


def _uniforms(rows: int, count: int, device: torch.device) -> Tensor:
    return torch.rand(rows, count, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(device)
