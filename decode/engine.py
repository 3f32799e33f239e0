"""The decoder: rounds of propose, verify, accept, commit. Plain decoding is the same engine without a drafter.

Rows differ in prompt, length, seed and acceptance; each equals its own batch-1 run. Finished rows leave, waiting ones
enter. The prompt's last token is fed by the first round, so the first new token is an ordinary one.
Shape suffixes: B active rows, G proposed tokens, G1 = G + 1, V vocabulary.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from draftstill.decode.acceptance import Proposal, accept_greedy, accept_sampled
from draftstill.decode.drafters import Asked, Drafter, Row
from draftstill.decode.network import Network, StaticCache, prefill
from draftstill.decode.sampling import Sampling, draw, probabilities, uniforms
from draftstill.decode.trace import Round, Trace
from draftstill.errors import DraftstillError

_SLOT_STEP = 256
"""Caches grow in steps of this many positions, so that texts of changing lengths do not reallocate each time."""


@dataclass(slots=True)
class Request:
    """One text to write."""

    prompt: Sequence[int]
    max_new_tokens: int
    seed: int = 0
    ignore_eos: bool = False
    """Run to the length limit: all arms of a timing then do the same work."""


@dataclass(slots=True)
class _Active:
    index: int
    request: Request
    row: Row
    trace: Trace = field(default_factory=lambda: Trace(0))

    @property
    def remaining(self) -> int:
        return self.request.max_new_tokens - len(self.trace.tokens)


class Decoder:
    """Writes texts with a target and, if there is one, a drafter.

    Args:
        target: the model whose answer counts.
        drafter: None is plain decoding (gamma = 0).
        sampling: the law of both p and q.
        eos: ids that end a text; they are emitted.
        rows: texts decoded side by side.
    """

    def __init__(self, target: Network, drafter: Drafter | None = None, *, gamma: int = 0, sampling: Sampling | None = None,
                 eos: Iterable[int] = (), rows: int = 1) -> None:  # fmt: skip
        self.target, self.drafter = target, drafter
        self.gamma = gamma if drafter is not None else 0
        self.sampling = sampling or Sampling(0.0)
        self.eos, self.rows = frozenset(eos), rows
        self._cache: StaticCache | None = None
        self._sync = torch.cuda.synchronize if target.device.type == "cuda" else (lambda: None)

    @torch.inference_mode()
    def run(self, requests: Sequence[Request], on_tokens: Callable[[int, Trace, list[int]], None] | None = None,
            on_finish: Callable[[int, Trace], None] | None = None) -> list[Trace]:  # fmt: skip
        """Write all texts; returns their traces in the order of the requests.

        ``on_tokens(index, trace, new)`` is called after each round of a row, ``on_finish(index, trace)`` at its end.
        """
        for n, request in enumerate(requests):
            self._check(n, request)
        if not requests:
            return []
        longest = max(len(r.prompt) + r.max_new_tokens for r in requests)
        self._reserve(min(self.rows, len(requests)), min(longest, self.target.max_positions))
        waiting = deque(enumerate(requests))
        active: list[_Active] = []
        done: list[Trace | None] = [None] * len(requests)
        while waiting or active:
            entering: list[_Active] = []
            while waiting and len(active) + len(entering) < self.rows:
                index, request = waiting.popleft()
                item = _Active(
                    index, request, Row(list(request.prompt), torch.Generator().manual_seed(request.seed)), Trace(len(request.prompt))
                )
                if request.max_new_tokens == 0:
                    item.trace.finish = "length"
                    done[index] = item.trace
                else:
                    entering.append(item)
            self._enter(len(active), entering)
            active += entering
            if not active:
                break
            news = self._round(active)
            for slot in range(len(active) - 1, -1, -1):
                item = active[slot]
                if on_tokens:
                    on_tokens(item.index, item.trace, news[slot])
                if item.trace.finish:
                    done[item.index] = item.trace
                    if on_finish:
                        on_finish(item.index, item.trace)
                    self._leave(active, slot)
        return [t for t in done if t is not None]

    def _check(self, n: int, request: Request) -> None:
        prompt, limit = request.prompt, self.target.max_positions
        if not prompt:
            raise DraftstillError(f"prompt {n} is empty", mend="a prompt needs at least one token")
        if min(prompt) < 0 or max(prompt) >= self.target.vocab:
            bad = next(t for t in prompt if not 0 <= t < self.target.vocab)
            raise DraftstillError(f"prompt {n} holds token id {bad}, outside the target's vocabulary of {self.target.vocab}",
                                  mend="tokenise with the target's own tokenizer")  # fmt: skip
        if len(prompt) >= limit and request.max_new_tokens > 0:
            raise DraftstillError(f"prompt {n} has {len(prompt)} tokens; the target's context holds {limit}", mend="shorten the prompt")
        if request.max_new_tokens < 0:
            raise DraftstillError("max_new_tokens is negative", value=request.max_new_tokens)

    def _reserve(self, rows: int, positions: int) -> None:
        slots = -(-(positions + self.gamma + 1) // _SLOT_STEP) * _SLOT_STEP
        if self._cache is None or self._cache.rows < rows or self._cache.slots < slots:
            self._cache = None  # free the old one first
            self._cache = self.target.new_cache(rows, slots)
        if self.drafter is not None:
            self.drafter.reserve(rows, slots)

    def _enter(self, first: int, items: Sequence[_Active]) -> None:
        """Prefill rows side by side from slot ``first`` on: everything but each prompt's last token."""
        assert self._cache is not None
        if not items:
            return
        started = time.perf_counter()
        rows = [item.row for item in items]
        prefill(self.target, self._cache, first, [r.tokens[:-1] for r in rows])
        if self.drafter is not None:
            self.drafter.start(first, rows)
        self._sync()
        for item in items:
            item.trace.prefill_s = (time.perf_counter() - started) / len(items)

    def _leave(self, active: list[_Active], slot: int) -> None:
        """The last row takes the freed slot, so that active rows stay side by side."""
        assert self._cache is not None
        last = active.pop()
        if slot < len(active):
            self._cache.move(len(active), slot, len(last.row.tokens) - 1)
            if self.drafter is not None:
                self.drafter.move(len(active), slot, last.row)
            active[slot] = last

    def _round(self, active: list[_Active]) -> list[list[int]]:
        clock = [time.perf_counter()]
        rows = [a.row for a in active]
        # The target adds one token itself, so the last one of a text is never worth proposing.
        limits = [min(self.gamma, a.remaining - 1, self.target.max_positions - len(a.row.tokens) - 1) for a in active]
        proposal, asked, steps = self._propose(rows, limits)
        self._tick(clock)
        p_or_best = self._verify(rows, proposal)
        self._tick(clock)
        accepted, following = self._accept(rows, proposal, p_or_best)
        self._tick(clock)
        offered = proposal.tokens_BG.tolist() if proposal else [[]] * len(rows)
        counts = proposal.counts_B.tolist() if proposal else [0] * len(rows)
        news = [self._commit(a, asked[b], offered[b], counts[b], accepted[b], following[b]) for b, a in enumerate(active)]
        self._tick(clock)
        share = [(b - a) / len(active) for a, b in zip(clock, clock[1:], strict=False)]
        for item in active:
            last = item.trace.rounds[-1]
            last.draft_s, last.verify_s, last.sample_s, last.host_s = share
            last.draft_steps = steps if last.kind == "model" else 0
        return news

    def _tick(self, clock: list[float]) -> None:
        self._sync()
        clock.append(time.perf_counter())

    def _propose(self, rows: list[Row], limits: list[int]) -> tuple[Proposal | None, list[Asked], int]:
        if self.drafter is None or max(limits) <= 0:
            return None, ["none"] * len(rows), 0
        return self.drafter.propose(rows, limits, self.sampling)

    def _verify(self, rows: list[Row], proposal: Proposal | None) -> torch.Tensor:
        """Processed probabilities [B, G1, V] of the target, or its argmax [B, G1] when greedy."""
        assert self._cache is not None
        ids_BG1 = torch.tensor([[r.tokens[-1]] for r in rows], device=self.target.device)
        if proposal is not None:
            ids_BG1 = torch.cat([ids_BG1, proposal.tokens_BG], 1)
        hidden = self.target.forward(ids_BG1, self._cache, [len(r.tokens) - 1 for r in rows])
        logits = self.target.logits(hidden)
        return logits.argmax(-1) if self.sampling.greedy else logits

    def _accept(self, rows: list[Row], proposal: Proposal | None, scores: torch.Tensor) -> tuple[list[int], list[int]]:
        if self.sampling.greedy:
            if proposal is None:
                return [0] * len(rows), scores[:, 0].tolist()
            accepted_B, next_B = accept_greedy(scores, proposal)
        else:
            G1, V = scores.shape[1:]
            p_BG1V = probabilities(scores.view(-1, V), self.sampling).view(-1, G1, V)
            # A fixed number per row and round, whatever its neighbours propose.
            u = torch.stack([uniforms(r.generator, self.gamma + 1) for r in rows]).to(scores.device)
            if proposal is None:
                return [0] * len(rows), draw(p_BG1V[:, 0], u[:, -1]).tolist()
            accepted_B, rest_BV = accept_sampled(p_BG1V, proposal, u[:, : G1 - 1])
            next_B = draw(rest_BV, u[:, -1])
        accepted, following = torch.stack([accepted_B, next_B]).tolist()  # the round's one host read
        return accepted, following

    def _commit(self, item: _Active, asked: Asked, offered: list[int], count: int, accepted: int, following: int) -> list[int]:
        """Append what was accepted and the target's own token, up to an EOS."""
        trace, row = item.trace, item.row
        new = [*offered[:accepted], following]
        if not item.request.ignore_eos:
            stop = next((i for i, t in enumerate(new) if t in self.eos), None)
            if stop is not None:
                new = new[: stop + 1]
                trace.finish = "eos"
        kept = min(accepted, len(new))
        # Tokens proposed behind an EOS that was emitted were never judged.
        proposed = count if len(new) > accepted else kept
        if self.drafter is not None:
            self.drafter.commit(row, asked, accepted)
        row.tokens += new
        trace.tokens += new
        trace.rounds.append(Round(asked if asked in ("model", "lookup") and count else "none", proposed, kept, len(new)))
        trace.drafting_stopped += asked == "full"
        if trace.finish is None and item.remaining <= 0:
            trace.finish = "length"
        if trace.finish is None and len(row.tokens) >= self.target.max_positions:
            trace.finish = "context"
        return new
