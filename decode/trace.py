"""What the decoder did, round by round, and every metric that follows from it. Pure Python: no torch.

Words (docs/metrics.md): a *round* is one target verify pass; *proposed* and *accepted* count draft tokens; the *bonus* is
the token the target adds itself. Counters come from emitted tokens only: a draft token behind EOS, a stop or the length
limit was neither proposed nor accepted, so a draft equal to its target scores exactly 1.0 however a text ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Kind = Literal["model", "lookup", "bigram", "none"]
Finish = Literal["eos", "stop", "length", "context"]


@dataclass(slots=True)
class Round:
    """One verify pass of one row. Seconds are the row's share of the batch's time."""

    kind: Kind
    """Who proposed."""
    proposed: int
    accepted: int
    emitted: int
    """accepted, plus 1 unless the text ended inside the accepted tokens."""
    cut: int = 0
    """Tokens that passed, or that the target added, behind the end of the text: dropped, and counted nowhere else."""
    draft_steps: int = 0
    """Draft forwards run, the wasted ones included."""
    draft_s: float = 0.0
    verify_s: float = 0.0
    sample_s: float = 0.0
    host_s: float = 0.0

    @property
    def seconds(self) -> float:
        return self.draft_s + self.verify_s + self.sample_s + self.host_s


@dataclass(slots=True)
class Trace:
    """One decoded row."""

    prompt_tokens: int
    tokens: list[int] = field(default_factory=list)
    """Emitted ids, EOS included."""
    rounds: list[Round] = field(default_factory=list)
    finish: Finish | None = None
    prefill_s: float = 0.0
    drafting_stopped: int = 0
    """Rounds that ran without a draft because the draft's context was full."""
    engine: dict[str, Any] = field(default_factory=dict)
    """How it ran: backend asked for and used, graphs captured and replayed, drafter and its options, simulated acceptance."""

    @property
    def decode_s(self) -> float:
        """Seconds from the end of prefill to the last token; the first token falls into the first round."""
        return sum(r.seconds for r in self.rounds)

    def marks(self) -> list[str]:
        """One of accepted, corrected, bonus, plain per emitted token."""
        out: list[str] = []
        for r in self.rounds:
            out += ["accepted"] * r.accepted
            if r.emitted > r.accepted:
                out.append("plain" if r.proposed == 0 else "bonus" if r.accepted == r.proposed else "corrected")
        return out

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def ratio(part: float, whole: float) -> float | None:
    """part / whole; None (never 0 or 1) where there is nothing to divide by."""
    return part / whole if whole else None


def metrics(traces: Iterable[Trace]) -> dict[str, Any]:
    """Counts summed over rows first, ratios after.

    Returns:
        rows, rounds, proposed, accepted, bonus, emitted, cut; bonus = corrected + extra + plain: the target's own token after a
        rejection, after a whole accepted block, and where nothing was proposed; emitted = accepted + bonus;
        token_acceptance = accepted / proposed;
        tau = emitted / rounds; tau_without_bonus = accepted / rounds; block_efficiency = emitted / (proposed + rounds);
        acceptance_at[i-1]: n(accepted >= i) / n(proposed >= i and accepted >= i-1), conditional;
        acceptance_at_unconditional[i-1]: n(accepted >= i) / n(proposed >= i);
        decode_s, prefill_s, draft_s, verify_s, sample_s, host_s; draft_steps;
        draft_step_s, verify_round_s: means; tokens_per_s = emitted / decode_s.
    """
    traces = list(traces)
    rounds = [r for t in traces for r in t.rounds]
    total = {name: sum(getattr(r, name) for r in rounds)
             for name in ("proposed", "accepted", "emitted", "cut", "draft_steps", "draft_s", "verify_s", "sample_s", "host_s")}  # fmt: skip
    depth = max((r.proposed for r in rounds), default=0)
    reached = lambda i: sum(r.accepted >= i for r in rounds)  # noqa: E731
    conditional = [ratio(reached(i), sum(r.proposed >= i and r.accepted >= i - 1 for r in rounds)) for i in range(1, depth + 1)]
    unconditional = [ratio(reached(i), sum(r.proposed >= i for r in rounds)) for i in range(1, depth + 1)]
    decode_s = sum(t.decode_s for t in traces)
    return {
        "rows": len(traces), "rounds": len(rounds), **total,
        "bonus": total["emitted"] - total["accepted"],
        "corrected": sum(r.emitted > r.accepted and r.accepted < r.proposed for r in rounds),
        "extra": sum(r.emitted > r.accepted and r.accepted == r.proposed > 0 for r in rounds),
        "plain": sum(r.emitted > r.accepted and r.proposed == 0 for r in rounds),
        "token_acceptance": ratio(total["accepted"], total["proposed"]),
        "tau": ratio(total["emitted"], len(rounds)),
        "tau_without_bonus": ratio(total["accepted"], len(rounds)),
        "block_efficiency": ratio(total["emitted"], total["proposed"] + len(rounds)),
        "acceptance_at": conditional, "acceptance_at_unconditional": unconditional,
        "decode_s": decode_s, "prefill_s": sum(t.prefill_s for t in traces),
        "draft_step_s": ratio(total["draft_s"], total["draft_steps"]),
        "verify_round_s": ratio(total["verify_s"] + total["sample_s"], len(rounds)),
        "tokens_per_s": ratio(total["emitted"], decode_s),
        "drafting_stopped": sum(t.drafting_stopped for t in traces),
    }  # fmt: skip


def check(traces: Sequence[Trace]) -> None:
    """The identities every trace obeys; an AssertionError here is a fault of ours."""
    for t in traces:
        assert sum(r.emitted for r in t.rounds) == len(t.tokens), "emitted tokens do not add up"
        for n, r in enumerate(t.rounds):
            assert 0 <= r.accepted <= r.proposed, "accepted more than proposed"
            assert r.emitted - r.accepted in (0, 1), "a round adds at most one token of its own"
            assert r.emitted >= 1, "a round emits at least one token"
            assert r.cut == 0 or n == len(t.rounds) - 1, "only the last round can drop tokens"
            assert r.emitted > r.accepted or n == len(t.rounds) - 1, "only the last round can end inside accepted tokens"
