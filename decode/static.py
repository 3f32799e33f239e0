"""Rounds as programs over device state (``device``), compiled or captured as CUDA graphs.

The host uploads noise (and guesses, if there is a guesser), launches, and reads one report a round. Where nothing that it decides
depends on the last report, it reads a round behind the device (``lag``): what a finished row did meanwhile is dropped.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from draftstill.decode.adaptive import FixedGamma
from draftstill.decode.device import DeviceRound
from draftstill.decode.drafters import Asked, share_time
from draftstill.decode.network import StaticCache
from draftstill.decode.programs import Program
from draftstill.decode.sampling import Law, Sampling

if TYPE_CHECKING:
    from draftstill.decode.engine import Decoder
    from draftstill.decode.requests import Active

_WINDOWS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Cache lengths that programs are made for: a program reads the whole of its window behind a mask."""
_MOST_LAWS = 8
"""Kinds of law that programs are kept for."""


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


class StaticRounds(DeviceRound):
    """The programs made of the bodies, and the loop over them, for one decoder and one target cache."""

    def __init__(self, decoder: Decoder, cache: StaticCache) -> None:
        super().__init__(decoder, cache)
        device, R, G = self.device, cache.rows, decoder.gamma
        # Nothing that the host decides depends on the last report.
        self.blind = self.guesser is None and (self.model is None or isinstance(self.model.policy, FixedGamma))
        self.lag = lag_of(device) if self.blind else 0
        self.programs: dict[Any, Program] = {}
        self.laws: dict[Any, tuple[Law, Law]] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._staged = [self._pinned(R, 3 + G) for _ in range(2)], [self._pinned(R, 2 * G + 1, dtype=torch.float64) for _ in range(2)]
        self._turn = 0
        self.warm_s = self._warm_before = self._warm_told = 0.0
        """Seconds of compiling and capturing, in no round's time."""

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

    def _program(self, kind: Literal["draft", "verify"], g: int, window: int, key: Any) -> Program:
        name = (kind, g, window, key)
        if name not in self.programs:
            p_law, q_law = self.laws[key]
            body, law = (self.draft, q_law) if kind == "draft" else (self.verify, p_law)
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
        self._warm_before = self._warm_told = self.warm_s
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
        options: dict[str, Any] = {"vocab": target.vocab, "device": self.device, "eos": self.decoder.eos, "steady": self.decoder.steady}
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
        window = min(next((w for w in _WINDOWS if w >= reach), reach), self.cache.slots)
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
        return _Flight(items, steps, report, marks)

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
        # What was spent on making programs since the last report was spent in no round.
        warm_s, self._warm_told = self.warm_s - self._warm_told, self.warm_s
        host_s = max(0.0, now - clock - draft_s - verify_s - warm_s)
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


def _runs(numbers: Sequence[int]) -> list[list[int]]:
    """Ascending numbers, split where one is skipped."""
    found: list[list[int]] = []
    for n in numbers:
        if found and n == found[-1][-1] + 1:
            found[-1].append(n)
        else:
            found.append([n])
    return found
