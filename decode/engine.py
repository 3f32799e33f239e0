"""The decoder: rounds of propose, verify, accept, commit. Plain decoding is the same engine without a drafter.

Rows differ in prompt, length, sampling, seed and acceptance; each equals its own batch-1 run. Finished rows leave, waiting
ones enter. The prompt's last token is fed by the first round, so the first new token is an ordinary one.
Shape suffixes: B active rows, G proposed tokens, G1 = G + 1, V vocabulary.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from draftstill.decode.acceptance import Proposal
from draftstill.decode.drafters import PROPOSERS, Asked, Batch, Drafter, Offer, Row, has_room, share_time
from draftstill.decode.network import Network, StaticCache, prefill
from draftstill.decode.programs import Backend, fallback, on_device
from draftstill.decode.requests import Active, Request, check_request, check_vocabulary
from draftstill.decode.round import accept, verify
from draftstill.decode.sampling import Law, Sampling, Text, uniforms
from draftstill.decode.static import StaticRounds
from draftstill.decode.stops import StopText
from draftstill.decode.trace import Kind, Round, Trace, ratio
from draftstill.errors import DraftstillError

_SLOT_STEP = 256
"""Caches grow in steps of this many positions, so that texts of changing lengths do not reallocate each time."""


class Decoder:
    """Writes texts with a target and, if there is one, a drafter.

    Args:
        target: the model whose answer counts.
        drafter: None is plain decoding (gamma = 0).
        gamma: most tokens proposed in a round; None: as many as the drafter does.
        sampling: the law of both p and q, where a request has none of its own.
        eos: ids that end a text; they are emitted.
        rows: texts decoded side by side.
        backend: ``eager``; ``graphs``: rounds captured as CUDA graphs; ``compile``: rounds through torch.compile (and captured, on
            CUDA); ``auto``: graphs on CUDA, eager elsewhere. What cannot be had runs eagerly, and the trace says why.
        simulate: accept each proposed token with this probability, whatever it is: what a draft of that acceptance would cost
            and gain here. The text then means nothing.
        detokenize: ids to text, needed by requests with stop strings.
        steady: draw so that a row's sampled text hardly ever depends, by rounding, on how many rows it is decoded with; 1% slower.
    """

    def __init__(self, target: Network, drafter: Drafter | None = None, *, gamma: int | None = None, sampling: Sampling | None = None,
                 eos: Iterable[int] = (), rows: int = 1, backend: Backend = "auto", simulate: float | None = None,
                 detokenize: Callable[[list[int]], str] | None = None, steady: bool = False) -> None:  # fmt: skip
        if simulate is not None and not 0.0 <= simulate <= 1.0:
            raise DraftstillError("a simulated acceptance lies between 0 and 1", value=simulate)
        check_vocabulary(target, drafter)
        self.target, self.drafter = target, drafter
        self.gamma = 0 if drafter is None else drafter.gamma if gamma is None else gamma
        self.sampling = sampling or Sampling(0.0)
        self.eos, self.rows, self.simulate, self.detokenize = frozenset(eos), rows, simulate, detokenize
        self.steady = steady
        self.asked_backend, self._fallback = backend, fallback(backend, target, drafter)
        self.accounted: float | None = None
        """Share of the last run's wall time that its traces account for."""
        self._cache: StaticCache | None = None
        self._static: StaticRounds | None = None
        self._laws: tuple[tuple[Sampling, ...], dict[int | None, Law]] = ((), {})
        self._sync = torch.cuda.synchronize if target.device.type == "cuda" else (lambda: None)

    @property
    def eager(self) -> bool:
        """Whether rounds run eagerly."""
        return (
            self._fallback is not None
            or self.asked_backend == "eager"
            or (self.asked_backend == "auto" and self.target.device.type != "cuda")
        )

    @property
    def backend(self) -> str:
        """How rounds run, whatever was asked for."""
        return "eager" if self.eager else "graphs" if self.asked_backend == "auto" else self.asked_backend

    def describe(self) -> dict[str, Any]:
        """How it runs, for the trace."""
        found: dict[str, Any] = {"backend": self.backend, "packed": self.target.packed}
        if self._fallback:
            found |= {"asked": self.asked_backend, "fallback": self._fallback}
        if self.drafter is not None:
            found |= {"gamma": self.gamma, "drafter": self.drafter.describe()}
        if self.simulate is not None:
            found["simulated_acceptance"] = self.simulate
        if self._static is not None:
            found |= self._static.counts()
        return found

    @torch.inference_mode()
    def run(self, requests: Sequence[Request], on_tokens: Callable[[int, Trace, list[int]], None] | None = None,
            on_finish: Callable[[int, Trace], None] | None = None) -> list[Trace]:  # fmt: skip
        """Write all texts; returns their traces in the order of the requests.

        ``on_tokens(index, trace, new)`` is called after each round of a row, ``on_finish(index, trace)`` at its end.
        """
        with on_device(self.target.device):
            return self._run(requests, on_tokens, on_finish)

    def _run(self, requests: Sequence[Request], on_tokens: Callable[[int, Trace, list[int]], None] | None,
             on_finish: Callable[[int, Trace], None] | None) -> list[Trace]:  # fmt: skip
        for n, request in enumerate(requests):
            check_request(n, request, self.target, self.detokenize is not None)
        done: list[Trace | None] = [None] * len(requests)
        waiting: deque[Active] = deque()
        for index, request in enumerate(requests):
            item = self._item(index, request)
            if item.trace.finish:
                done[index] = item.trace
            else:
                waiting.append(item)
        if not waiting:
            return [t for t in done if t is not None]
        self._reserve(waiting)
        started = time.perf_counter()
        warm_s = 0.0 if self._static is None else self._static.warm_s

        def tell(item: Active, new: list[int]) -> None:
            if on_tokens:
                on_tokens(item.index, item.trace, new)
            if item.trace.finish:
                item.trace.engine = self.describe()
                done[item.index] = item.trace
                if on_finish:
                    on_finish(item.index, item.trace)

        if self.eager:
            self._run_eagerly(waiting, tell)
        else:
            assert self._static is not None
            self._static.run(waiting, self.commit, tell)
        traces = [t for t in done if t is not None]
        warm_s = 0.0 if self._static is None else self._static.warm_s - warm_s
        self.accounted = ratio(sum(t.prefill_s + t.decode_s for t in traces), time.perf_counter() - started - warm_s)
        return traces

    def _item(self, index: int, request: Request) -> Active:
        prompt = list(request.prompt)
        tokens = list(self.target.start_ids) if self.target.encoder else prompt
        row = Row(tokens, torch.Generator().manual_seed(request.seed), request.sampling or self.sampling, prompt, len(tokens))
        trace = Trace(len(prompt), finish="length" if request.max_new_tokens == 0 else None)
        stops = StopText(request.stop, self.detokenize) if request.stop and self.detokenize else None
        return Active(index, request, row, trace, stops)

    def _reserve(self, items: Iterable[Active]) -> None:
        items = list(items)
        rows = min(self.rows, len(items))
        positions = min(max(len(i.row.tokens) + i.request.max_new_tokens for i in items), self.target.max_positions)
        source = max(len(i.row.source) for i in items)
        slots, source = (-(-n // _SLOT_STEP) * _SLOT_STEP for n in (positions + self.gamma + 1, source))
        if not has_room(self._cache, rows, slots, source):
            if self._static is not None:
                self._static.close()
            self._cache = self._static = None  # free the old one first
            self._cache = self.target.new_cache(rows, slots, source)
        if self.drafter is not None:
            self.drafter.reserve(rows, slots, source)
        if not self.eager:
            assert self._cache is not None
            if self._static is None or not self._static.fits(self._cache):
                if self._static is not None:
                    self._static.close()
                self._static = StaticRounds(self, self._cache)

    # -- eager rounds -------------------------------------------------------------------------------------------------------

    def _run_eagerly(self, waiting: deque[Active], tell: Callable[[Active, list[int]], None]) -> None:
        active: list[Active] = []
        while waiting or active:
            entering = [waiting.popleft() for _ in range(min(len(waiting), self.rows - len(active)))]
            self.enter(len(active), entering)
            active += entering
            news = self._round(active)
            for slot in range(len(active) - 1, -1, -1):
                item = active[slot]
                tell(item, news[slot])
                if item.trace.finish:
                    self._leave(active, slot)

    def enter(self, first: int, items: Sequence[Active]) -> None:
        """Prefill rows side by side from slot ``first`` on: everything but each prompt's last token."""
        assert self._cache is not None
        if not items:
            return
        started = time.perf_counter()
        rows = [item.row for item in items]
        if self.target.encoder:
            self.target.read(self._cache, first, [r.source for r in rows])
        prefill(self.target, self._cache, first, [r.tokens[:-1] for r in rows])
        if self.drafter is not None:
            self.drafter.start(first, rows)
        self._sync()
        for item in items:
            item.trace.prefill_s = (time.perf_counter() - started) / len(items)

    def _leave(self, active: list[Active], slot: int) -> None:
        """The last row takes the freed slot, so that active rows stay side by side."""
        assert self._cache is not None
        last = active.pop()
        if slot < len(active):
            self._cache.move(len(active), slot, len(last.row.tokens) - 1)
            if self.drafter is not None:
                self.drafter.move(len(active), slot, last.row)
            active[slot] = last

    def limit(self, item: Active) -> int:
        """Most tokens worth proposing: the target adds one itself, so the last one of a text never is."""
        return min(self.gamma, item.remaining - 1, self.target.max_positions - len(item.row.tokens) - 1)

    def noise(self, rows: Sequence[Row]) -> Tensor:
        """[B, 2 gamma + 1] uniforms, a fixed number from each row's own stream whatever is proposed: draft, acceptance, next token."""
        return torch.stack([uniforms(r.generator, 2 * self.gamma + 1) for r in rows])

    def _round(self, active: list[Active]) -> list[list[int]]:
        clock = [time.perf_counter()]
        rows = [a.row for a in active]
        limits = [self.limit(a) for a in active]
        law = self._law(rows)
        p_law = law(None)
        u = self.noise(rows).to(self.target.device) if not p_law.greedy or self.simulate is not None else None
        text = self._text(rows) if p_law.needs_text else None
        offer = Offer(None, ["none"] * len(rows), 0)
        if self.drafter is not None and max(limits) > 0:
            offer = self.drafter.propose(Batch(rows, limits, law, None if u is None else u[:, : self.gamma], text))
        proposal = offer.proposal
        self._tick(clock)
        scores = self._verify(rows, proposal, p_law, text)
        self._tick(clock)
        accepted_B, next_B = accept(scores, proposal, p_law, None if u is None else u[:, self.gamma :], simulate=self.simulate)
        report = [accepted_B[:, None], next_B[:, None]]
        if proposal is not None:
            report += [proposal.counts_B[:, None], proposal.tokens_BG]
        found = torch.cat(report, 1).tolist()  # the round's one host read
        self._tick(clock)
        news = [self.commit(a, offer.asked[b], found[b][3:], found[b][2] if proposal is not None else 0, found[b][0], found[b][1])
                for b, a in enumerate(active)]  # fmt: skip
        self._tick(clock)
        taken = [b - a for a, b in itertools.pairwise(clock)]
        share_time([a.trace.rounds[-1] for a in active], offer.asked, offer.steps, taken)
        return news

    def _tick(self, clock: list[float]) -> None:
        self._sync()
        clock.append(time.perf_counter())

    def _law(self, rows: Sequence[Row]) -> Callable[[Tensor | None], Law]:
        """The rows' law, packed once for as long as the rows stay the same."""
        samplings = tuple(r.sampling for r in rows)
        if samplings != self._laws[0]:
            self._laws = samplings, {}
        made = self._laws[1]

        def law(head_ids: Tensor | None) -> Law:
            key = None if head_ids is None else id(head_ids)
            if key not in made:
                made[key] = Law.of(
                    samplings, vocab=self.target.vocab, device=self.target.device, eos=self.eos, ids_K=head_ids, steady=self.steady
                )
            return made[key]

        return law

    def _text(self, rows: Sequence[Row]) -> Text:
        """The rows' texts, with room for a block behind each."""
        width = max(len(r.tokens) for r in rows) + self.gamma + 1
        ids = torch.tensor([r.tokens + [0] * (width - len(r.tokens)) for r in rows], device=self.target.device)
        length, prompt = (torch.tensor(n, device=ids.device) for n in ([len(r.tokens) for r in rows], [r.prompt_length for r in rows]))
        return Text(ids, length, prompt)

    def _verify(self, rows: list[Row], proposal: Proposal | None, law: Law, text: Text | None) -> Tensor:
        assert self._cache is not None
        ids_BG1 = torch.tensor([[r.tokens[-1]] for r in rows], device=self.target.device)
        if proposal is not None:
            ids_BG1 = torch.cat([ids_BG1, proposal.tokens_BG], 1)
            if text is not None:
                at_BG = text.length_B[:, None] + torch.arange(proposal.tokens_BG.shape[1], device=ids_BG1.device)
                text.ids_BS.scatter_(1, at_BG, proposal.tokens_BG)
        return verify(self.target, self._cache, ids_BG1, [len(r.tokens) - 1 for r in rows], law, text)

    # -- both ---------------------------------------------------------------------------------------------------------------

    def commit(self, item: Active, asked: Asked, offered: list[int], count: int, accepted: int, following: int) -> list[int]:
        """Append what was accepted and the target's own token, up to an end; record the round.

        Args:
            offered: the proposed tokens, of which the first ``count`` are real and the first ``accepted`` passed.
            following: the target's own token.
        """
        trace, row = item.trace, item.row
        passed = [*offered[:accepted], following]
        new = passed
        if not item.request.ignore_eos:
            stop = next((i for i, t in enumerate(new) if t in self.eos), None)
            if stop is not None:
                new, trace.finish = new[: stop + 1], "eos"
        if item.stops is not None:
            stop = item.stops.feed(new)
            if stop is not None:
                new, trace.finish = new[: stop + 1], "stop"
        kept = min(accepted, len(new))
        # Tokens proposed behind an end that was emitted were never judged.
        proposed = count if len(new) > accepted else kept
        if self.drafter is not None:
            self.drafter.commit(row, asked, count, accepted)
        row.tokens += new
        trace.tokens += new
        trace.rounds.append(
            Round(cast(Kind, asked) if asked in PROPOSERS and count else "none", proposed, kept, len(new), len(passed) - len(new))
        )
        trace.drafting_stopped += asked == "full"
        if trace.finish is None and item.remaining <= 0:
            trace.finish = "length"
        if trace.finish is None and len(row.tokens) >= self.target.max_positions:
            trace.finish = "context"
        return new
