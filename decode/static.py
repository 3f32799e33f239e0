"""Rounds whose texts, lengths and laws live on the device, so that a round can be captured as CUDA graphs or compiled whole.

Two programs make a round: the draft block, and verify + accept + commit. All rows of the cache take part in each; a free slot
computes garbage that nobody reads. The host uploads noise (and guesses, if there is a guesser), launches, and reads one report
a round. Where nothing that the host decides depends on the last report, it reads a round behind the device (`lag`): what a
finished row did meanwhile is dropped.
Shape suffixes: R slots, G most proposed tokens, g proposed tokens of one program, N uniforms per row, K ids that the draft can propose.
"""

from __future__ import annotations

import copy
import time
import types
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from draftstill.decode.acceptance import Proposal
from draftstill.decode.adaptive import FixedGamma
from draftstill.decode.drafters import Asked, CompositeDrafter, Drafter, ModelDrafter, share_time
from draftstill.decode.guesses import GuessDrafter
from draftstill.decode.network import Network, StaticCache
from draftstill.decode.round import accept, draft_block, verify
from draftstill.decode.sampling import Law, Sampling, Text

if TYPE_CHECKING:
    from draftstill.decode.engine import Active, Decoder

Backend = Literal["auto", "eager", "graphs", "compile"]
COMPILE: dict[str, Any] = {"fullgraph": True, "dynamic": False}
"""Options of torch.compile; fullgraph fails where anything depends on a value."""
_WINDOWS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Cache lengths that programs are made for: a program reads the whole of its window behind a mask."""
_MOST_LAWS = 8
"""Kinds of law that programs are kept for."""
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


def lag_of(device: torch.device) -> int:
    """Rounds that the host reads behind the device."""
    return 1 if device.type == "cuda" else 0


@dataclass(slots=True)
class _Flight:
    """A round that was launched and not yet read."""

    items: list[Active | None]
    steps: int
    report: Tensor
    marks: list[Any]
    """Before the draft, before verify, after it: CUDA events, or seconds."""
    warm_s: float
    """Seconds of compiling and capturing that went before it."""


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
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):
                    self.body()
                    self._restore(saved)
            torch.cuda.current_stream().wait_stream(stream)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, pool=pool):
                self.body()
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


class StaticRounds:
    """Device state, programs and the loop over them, for one decoder and one target cache."""

    def __init__(self, decoder: Decoder, cache: StaticCache) -> None:
        found = parts(decoder.drafter)
        assert found is not None
        self.decoder, self.cache = decoder, cache
        self.guesser, self.model = found
        # Weak: an outgrown cache is freed before its successor is made.
        self._draft_cache = None if self.model is None or self.model.cache is None else weakref.ref(self.model.cache)
        device = self.device = decoder.target.device
        R, G = cache.rows, decoder.gamma
        kept = None if self.model is None else self.model.network.head_ids
        whole = lambda *shape: torch.zeros(shape, dtype=torch.int64, device=device)  # noqa: E731
        self.text = Text(whole(R, cache.slots + G + 1), whole(R) + 1, whole(R))
        self.gamma = 0 if self.model is None else min(G, self.model.gamma)
        """Most tokens drafted by the model; guesses may be longer."""
        self.limit_R, self.cap_R = whole(R), whole(R) + self.gamma
        self.u_RN = torch.zeros(R, 2 * G + 1, dtype=torch.float64, device=device)
        self.guess_RG, self.guesses_R = whole(R, G), whole(R)
        self.proposal = Proposal(whole(R, G), whole(R), ids_K=kept)
        self.report_R = whole(R, 3 + G)
        # Nothing that the host decides depends on the last report.
        self.blind = self.guesser is None and (self.model is None or isinstance(self.model.policy, FixedGamma))
        self.lag = lag_of(device) if self.blind else 0
        self.programs: dict[Any, Program] = {}
        self.laws: dict[Any, tuple[Law, Law]] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._staged = [self._pinned(R, 3 + G) for _ in range(2)], [self._pinned(R, 2 * G + 1, dtype=torch.float64) for _ in range(2)]
        self._turn = 0
        self.warm_s = self._warm_before = 0.0
        """Seconds of compiling and capturing, in no round's time."""

    def fits(self, cache: StaticCache) -> bool:
        """Whether the buffers of the programs are still those of the caches."""
        return cache is self.cache and (self._draft_cache is None or (self.model is not None and self.model.cache is self._draft_cache()))

    def close(self) -> None:
        """Let programs go: they hold the caches."""
        self.programs.clear()

    def counts(self) -> dict[str, Any]:
        """Programs there are, and what the last call ran and spent on making them; for the trace."""
        every = self.programs.values()
        return {
            "programs": len(self.programs), "compiled": sum(p.compiled for p in every), "graphs_captured": sum(p.graph is not None for p in every),
            "runs": sum(p.runs for p in every), "graphs_replayed": sum(p.runs for p in every if p.graph is not None),
            "warm_s": self.warm_s - self._warm_before, "lag": self.lag,
        }  # fmt: skip

    def _pinned(self, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, pin_memory=self.device.type == "cuda")

    # -- the programs -------------------------------------------------------------------------------------------------------

    def _draft(self, g: int, window: int, law: Law) -> None:
        """The draft block of every row, into the proposal's buffers. The first step reads the last two tokens: after a wholly accepted
        block the draft has not read the last but one, and otherwise reading it again changes nothing."""
        assert self.model is not None and self.model.cache is not None
        network, text = self.model.network, self.text
        cache = _narrow(self.model.cache, window)
        # Rows past the draft's context propose nothing; they compute inside it.
        ends_R = text.length_B.clamp_max(cache.slots - g)
        start_R = (ends_R - 2).clamp_min(0)
        ids_R2 = text.ids_BS.gather(1, start_R[:, None] + torch.arange(2, device=self.device))
        room_R = torch.minimum(self.limit_R - text.length_B - 1, network.max_positions + 1 - text.length_B)
        counts_R = torch.minimum(self.cap_R, room_R).clamp(0, g)
        made, _ = draft_block(
            network, cache, ids_R2, start_R, ends_R - 1 - start_R, ends_R, counts_R, g, law, self.u_RN, text if law.needs_text else None,
            min_confidence=self.model.min_confidence,
        )  # fmt: skip
        kept = self.proposal
        kept.tokens_BG[:, :g] = made.tokens_BG
        kept.counts_B.copy_(made.counts_B)
        if made.q_BGK is not None and made.q_drawn_BG is not None:
            assert kept.q_BGK is not None and kept.q_drawn_BG is not None
            kept.q_BGK[:, :g] = made.q_BGK
            kept.q_drawn_BG[:, :g] = made.q_drawn_BG

    def _verify(self, g: int, window: int, law: Law) -> None:
        """Verify, accept, and move every row on; what happened goes into the report."""
        text, G = self.text, self.decoder.gamma
        length_R = text.length_B
        ids_RG1 = text.ids_BS.gather(1, (length_R - 1)[:, None])
        proposal = self._offered(g, law) if g else None
        if proposal is not None:
            ids_RG1 = torch.cat([ids_RG1, proposal.tokens_BG], 1)
            text.ids_BS.scatter_(1, length_R[:, None] + torch.arange(g, device=self.device), proposal.tokens_BG)
        cache = _narrow(self.cache, window)
        # Slots whose text has ended may stand anywhere; they compute inside the window, too.
        start_R = (length_R - 1).clamp_max(cache.slots - g - 1)
        scores = verify(self.decoder.target, cache, ids_RG1, start_R, law, text if law.needs_text else None)
        accepted_R, next_R = accept(scores, proposal, law, self.u_RN[:, G:], simulate=self.decoder.simulate)
        text.ids_BS.scatter_(1, (length_R + accepted_R)[:, None], next_R[:, None])
        self.report_R[:, 0], self.report_R[:, 1] = accepted_R, next_R
        self.report_R[:, 2] = 0 if proposal is None else proposal.counts_B
        if proposal is not None:
            self.report_R[:, 3 : 3 + g] = proposal.tokens_BG
        length_R.add_(torch.where(length_R < self.limit_R, accepted_R + 1, 0))

    def _offered(self, g: int, law: Law) -> Proposal:
        """What the model drafted and the guesser guessed, merged row by row."""
        made = self.proposal
        tokens, counts = made.tokens_BG[:, :g], made.counts_B
        drawn, q = (
            (None, None) if law.greedy or made.q_BGK is None or made.q_drawn_BG is None else (made.q_drawn_BG[:, :g], made.q_BGK[:, :g])
        )
        certain = None
        if self.guesser is not None:
            certain = self.guesses_R > 0
            tokens = torch.where(certain[:, None], self.guess_RG[:, :g], tokens)
            counts = torch.where(certain, self.guesses_R, counts)
            drawn = None if drawn is None else torch.where(certain[:, None], 1.0, drawn)
        return Proposal(tokens, counts, drawn, q, made.ids_K, certain)

    def _program(self, kind: Literal["draft", "verify"], g: int, window: int, key: Any) -> Program:
        name = (kind, g, window, key)
        if name not in self.programs:
            p_law, q_law = self.laws[key]
            body, law = (self._draft, q_law) if kind == "draft" else (self._verify, p_law)
            self.programs[name] = Program(
                lambda: body(g, window, law), compiled=self.decoder.asked_backend == "compile", captured=self.device.type == "cuda",
                keep=[self.text.ids_BS, self.text.length_B],
            )  # fmt: skip
        program = self.programs[name]
        if not program.ready:
            started = time.perf_counter()
            program.prepare(self._pool)
            self.decoder._sync()
            self.warm_s += time.perf_counter() - started
        return program

    # -- the loop -----------------------------------------------------------------------------------------------------------

    def run(self, waiting: deque[Active], commit: Callable[..., list[int]], tell: Callable[[Active, list[int]], None]) -> None:
        """Answer all; ``commit`` and ``tell`` are the decoder's."""
        self._warm_before = self.warm_s
        for program in self.programs.values():
            program.runs = 0
        key = self._laws_for([i.row.sampling for i in waiting])
        slots: list[Active | None] = [None] * self.cache.rows
        self.limit_R.zero_()
        flying: deque[_Flight] = deque()
        clock = time.perf_counter()
        while waiting or any(i is not None and i.trace.finish is None for i in slots):
            if waiting and any(i is None or i.trace.finish for i in slots):
                while flying:
                    clock = self._land(flying.popleft(), clock, commit, tell)
                self._enter(slots, waiting, key)
                clock = time.perf_counter()
            flying.append(self._launch(slots, key, len(flying)))
            while len(flying) > self.lag:
                clock = self._land(flying.popleft(), clock, commit, tell)

    def _laws_for(self, samplings: Sequence[Sampling]) -> Any:
        """Laws of the run: one for all where its requests agree, else one law per slot whose settings change in place."""
        target, kept = self.decoder.target, self.proposal.ids_K
        distinct = list(dict.fromkeys(samplings))
        options: dict[str, Any] = {"vocab": target.vocab, "device": self.device, "eos": self.decoder.eos}
        key: Any = distinct[0]
        if distinct != [self.decoder.sampling]:
            # What the operations depend on, rounded up; all else is a number per slot, so that other numbers need no other programs.
            features, longest, largest = (frozenset().union(*(s.features for s in distinct)), max(s.no_repeat_ngram for s in distinct),
                                          max(s.top_k for s in distinct))  # fmt: skip
            longest, largest = (1 << (n - 1).bit_length() if n else 0 for n in (longest, largest))
            key = ("packed", features, longest, min(largest, target.vocab))
            options |= {"packed": True, "features": features, "longest_ngram": longest, "largest_top_k": key[3]}
            while key not in self.laws and len(self.laws) >= _MOST_LAWS:
                oldest = next(iter(self.laws))
                del self.laws[oldest]
                self.programs = {name: p for name, p in self.programs.items() if name[3] != oldest}
        if key not in self.laws:
            rows = [distinct[0]] * self.cache.rows
            self.laws[key] = Law.of(rows, **options), Law.of(rows, ids_K=kept, **options)
        made_proposal = self.proposal
        if self.model is not None and not self.laws[key][0].greedy and made_proposal.q_BGK is None:
            R, G = made_proposal.tokens_BG.shape
            K = self.model.network.columns
            made_proposal.q_BGK = torch.zeros(R, G, K, device=self.device)
            made_proposal.q_drawn_BG = torch.ones(R, G, device=self.device)
        return key

    def _enter(self, slots: list[Active | None], waiting: deque[Active], key: Any) -> None:
        free = [s for s, i in enumerate(slots) if i is None or i.trace.finish]
        taken = free[: len(waiting)]
        for s in taken:
            slots[s] = waiting.popleft()
        for run in _runs(taken):
            self.decoder.enter(run[0], [item for s in run if (item := slots[s]) is not None])
        for s in taken:
            item = slots[s]
            assert item is not None
            row, text = item.row, self.text
            text.ids_BS[s, : len(row.tokens)] = torch.tensor(row.tokens, device=self.device)
            text.length_B[s], text.prompt_B[s] = len(row.tokens), row.prompt_length
            self.limit_R[s] = min(len(row.tokens) + item.remaining, self.decoder.target.max_positions)
            if isinstance(key, tuple):
                for law in self.laws[key]:
                    law.set(s, row.sampling)
        for s in free[len(taken) :]:
            self.limit_R[s] = 0

    def _launch(self, slots: list[Active | None], key: Any, ahead: int) -> _Flight:
        decoder = self.decoder
        items = [i if i is not None and i.trace.finish is None else None for i in slots]
        self._turn ^= 1
        p_law = self.laws[key][0]
        if not p_law.greedy or decoder.simulate is not None:
            staged = self._staged[1][self._turn]
            for s, item in enumerate(items):
                if item is not None:
                    staged[s] = decoder.noise([item.row])[0]
            self.u_RN.copy_(staged, non_blocking=True)
        g_guess, g_model = self._needed(items)
        steps = self._size(g_model, self.gamma)
        g = max(steps, self._size(g_guess, decoder.gamma))
        # The host may be behind the device by rounds that all accept everything.
        reach = max((len(i.row.tokens) for i in items if i is not None), default=1) + (ahead + 1) * (decoder.gamma + 1)
        window = next((w for w in _WINDOWS if w >= reach), reach)
        warm_s = self.warm_s
        draft = self._program("draft", steps, window, key) if steps else None
        check = self._program("verify", g, window, key)
        marks = [self._mark()]
        if draft is not None:
            draft()
        elif g:
            self.proposal.counts_B.zero_()
        marks.append(self._mark())
        check()
        marks.append(self._mark())
        report = self._staged[0][self._turn]
        report.copy_(self.report_R, non_blocking=True)
        marks.append(self._mark())
        return _Flight(items, steps, report, marks, self.warm_s - warm_s)

    def _needed(self, items: Sequence[Active | None]) -> tuple[int, int]:
        """Most tokens guessed, and most to draft, in any row; what the host decides is uploaded."""
        if self.blind:
            return 0, self.gamma
        rows = [i.row for i in items if i is not None]
        limits = [max(0, self.decoder.limit(i)) for i in items if i is not None]
        at = [s for s, i in enumerate(items) if i is not None]
        guessed = 0
        if self.guesser is not None:
            found = self.guesser.guesses(rows, limits)
            guessed = max(map(len, found), default=0)
            G = self.decoder.gamma
            whole = [[0] * G for _ in items]
            for s, tokens in zip(at, found, strict=True):
                whole[s][: len(tokens)] = tokens
            counts = [0] * len(items)
            for s, tokens in zip(at, found, strict=True):
                counts[s] = len(tokens)
            self.guess_RG.copy_(torch.tensor(whole, dtype=torch.int64).view(len(items), G))
            self.guesses_R.copy_(torch.tensor(counts))
            limits = [0 if tokens else n for tokens, n in zip(found, limits, strict=True)]
        if self.model is None:
            return guessed, 0
        drafted, _ = self.model.caps(rows, limits)
        caps = [0] * len(items)
        for s, row, n in zip(at, rows, drafted, strict=True):
            caps[s] = n
            if n:
                # The program reads the last two tokens. What it missed while others proposed for the row goes in before.
                self.model.catch_up(s, row, 2)
                row.draft_length = len(row.tokens)
        self.cap_R.copy_(torch.tensor(caps))
        return guessed, max(drafted, default=0)

    @staticmethod
    def _size(needed: int, most: int) -> int:
        """Programs are made for few sizes: 0, 1, 2, 3, 4, 6, 8, 12, 16, ... and the most there can be."""
        sizes = [0, 1, 2, 3, 4, *(n for power in range(3, 8) for n in (2**power * 3 // 4, 2**power))]
        return min([s for s in sizes if s >= needed] + [most])

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _land(self, flight: _Flight, clock: float, commit: Callable[..., list[int]], tell: Callable[[Active, list[int]], None]) -> float:
        """Read a round's report and commit it; returns the time."""
        if self.device.type == "cuda":
            flight.marks[-1].synchronize()
            draft_s, verify_s = (a.elapsed_time(b) / 1000 for a, b in zip(flight.marks[:2], flight.marks[1:3], strict=True))
        else:
            draft_s, verify_s = flight.marks[1] - flight.marks[0], flight.marks[2] - flight.marks[1]
        if self.model is not None:
            self.model.steps = flight.steps
        found = flight.report.tolist()
        live = [(s, i) for s, i in enumerate(flight.items) if i is not None and i.trace.finish is None]
        asked = [self._asked(item) for _, item in live]
        news = []
        for (s, item), who in zip(live, asked, strict=True):
            accepted, following, count, *tokens = found[s]
            news.append(commit(item, who, tokens, count, accepted, following))
        now = time.perf_counter()
        host_s = max(0.0, now - clock - draft_s - verify_s - flight.warm_s)
        share_time([i.trace.rounds[-1] for _, i in live], asked, flight.steps, (draft_s, verify_s, 0.0, host_s))
        for (_, item), new in zip(live, news, strict=True):
            tell(item, new)
        return now

    def _asked(self, item: Active) -> Asked:
        """Who proposed for the row: known from its text as it was at the launch."""
        limit = max(0, self.decoder.limit(item))
        if self.guesser is not None and self.guesser.guesses([item.row], [limit])[0]:
            return self.guesser.name
        return "none" if self.model is None else self.model.caps([item.row], [limit])[1][0]


def _of_its_own(body: Callable[[], None]) -> Callable[[], None]:
    """The function with a code object of its own: torch.compile counts recompilations by code object, and gives up at a few."""
    assert isinstance(body, types.FunctionType)
    return types.FunctionType(body.__code__.replace(), body.__globals__, body.__name__, body.__defaults__, body.__closure__)


def _narrow(cache: StaticCache, slots: int) -> StaticCache:
    """The first ``slots`` slots of a cache, sharing memory."""
    part = copy.copy(cache)
    part.slots = min(slots, cache.slots)
    part.keys = [k[:, :, : part.slots] for k in cache.keys]
    part.values = [v[:, :, : part.slots] for v in cache.values]
    return part


def _runs(numbers: Sequence[int]) -> list[list[int]]:
    """Ascending numbers, split where one is skipped."""
    found: list[list[int]] = []
    for n in numbers:
        if found and n == found[-1][-1] + 1:
            found[-1].append(n)
        else:
            found.append([n])
    return found
