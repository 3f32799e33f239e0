"""What the tests of publicly known faults share: which rows of the list a test shows, drafters of every kind, and what holds of every trace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftstill.decode import (
    AdaptiveGamma,
    BigramDrafter,
    CompositeDrafter,
    Decoder,
    LookupDrafter,
    ModelDrafter,
    Network,
)
from draftstill.decode.trace import Trace, check, metrics

ROOT = Path(__file__).resolve().parents[2]
SHOWN: dict[int, list[str]] = {}
CPU = torch.device("cpu")
BACKENDS = ["eager", "static"]
"""``static``: rounds of static shapes, as plain Python where the fixture ``uncompiled`` is used."""


def shows(*rows: int) -> Callable[[Any], Any]:
    """Marks a test with the rows that it shows."""

    def mark(test: Any) -> Any:
        for row in rows:
            SHOWN.setdefault(row, []).append(test.__name__)
        return test

    return mark


def prompt_of(length: int, seed: int = 0, vocab: int = 96) -> list[int]:
    return torch.randint(1, vocab, (length,), generator=torch.Generator().manual_seed(1000 * seed + length)).tolist()


def decoder(target: Any, drafter: Any = None, backend: str = "eager", **options: Any) -> Decoder:
    network = target if isinstance(target, Network) else Network(target)
    return Decoder(network, drafter, backend="compile" if backend == "static" else "eager", **options)


def facts(traces: list[Trace]) -> list[Any]:
    return [
        (t.tokens, t.finish, t.drafting_stopped, [(r.kind, r.proposed, r.accepted, r.emitted, r.cut) for r in t.rounds]) for t in traces
    ]


def identities(traces: list[Trace], gamma: int) -> None:
    """What holds of every trace and of every sum of traces."""
    check(traces)
    for group in (*([t] for t in traces), traces):
        m, rounds = metrics(group), [r for t in group for r in t.rounds]
        assert m["emitted"] == sum(len(t.tokens) for t in group) == m["accepted"] + m["corrected"] + m["extra"] + m["plain"]
        assert m["bonus"] == m["corrected"] + m["extra"] + m["plain"] and m["accepted"] <= m["proposed"]
        rates = [m["token_acceptance"], *m["acceptance_at"], *m["acceptance_at_unconditional"], m["block_efficiency"]]
        assert all(r is None or 0.0 <= r <= 1.0 for r in rates)
        assert (m["token_acceptance"] is None) == (m["proposed"] == 0)
        assert m["tau_without_bonus"] <= min(gamma, m["tau"]) and 1.0 <= m["tau"] <= gamma + 1
        assert m["tau"] == pytest.approx(m["emitted"] / len(rounds)) and len(m["acceptance_at"]) <= gamma
        assert m["cut"] == sum(r.cut for r in rounds)
    for t in traces:
        assert t.finish and len(t.marks()) == len(t.tokens)
        for r in t.rounds:
            assert (r.kind == "none") == (r.proposed == 0), "who proposed is said exactly where something was proposed"
            assert r.proposed + (r.emitted - r.accepted) <= gamma + 1
            assert r.cut == 0 or t.finish in ("eos", "stop")


KINDS = ["none", "self", "model", "trimmed", "confident", "adaptive", "lookup", "bigram", "composite", "composite_trimmed"]


def drafter_of(kind: str, target: Network, draft: Network, trimmed: Network, gamma: int) -> Any:
    vocab = target.vocab
    if kind == "none":
        return None
    if kind == "self":
        return ModelDrafter(target, gamma)
    if kind == "confident":
        return ModelDrafter(draft, gamma, min_confidence=0.4)
    if kind == "adaptive":
        return ModelDrafter(
            draft, gamma, policy=AdaptiveGamma(0.15, {g: 1 + 0.05 * g for g in range(1, gamma + 1)}, gamma, prior_weight=2, probe_every=2)
        )
    if kind == "bigram":
        return BigramDrafter((torch.arange(vocab) + 1) % vocab, gamma, CPU)
    lookup = LookupDrafter(gamma, vocab, CPU, shortest=1)
    if kind == "lookup":
        return lookup
    model = ModelDrafter(trimmed if "trimmed" in kind else draft, max(1, gamma - 1) if "composite" in kind else gamma)
    return CompositeDrafter(lookup, model) if "composite" in kind else model
