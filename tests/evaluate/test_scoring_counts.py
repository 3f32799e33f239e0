"""Counts derived along a target's text are those of decoding: round by round where nothing is drawn, in law where something is."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from draftstill.decode import (
    BigramDrafter,
    CompositeDrafter,
    Decoder,
    LookupDrafter,
    ModelDrafter,
    Network,
    Request,
    Sampling,
    bigram_table,
    derive,
)
from draftstill.decode.trace import Trace, check, metrics
from draftstill.evaluate.forced import forced
from tests.pipeline import REAL, make_model

MOST, COUNT = 20, 16
CPU = torch.device("cpu")


@cache
def networks() -> tuple[Network, Network, Network]:
    """Target, a draft that resembles it, and the draft with a trimmed head."""
    target, draft = make_model(), make_model(layers=4)
    with torch.no_grad():
        for p in draft.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(3)) * 0.08 * p.std())
    kept = torch.arange(0, REAL, 2)
    return Network(target, vocab=REAL), Network(draft, vocab=REAL), Network(draft, vocab=REAL, head_ids=kept)


@cache
def prompts(count: int) -> tuple[tuple[int, ...], ...]:
    rng = random.Random(5)
    # Words that come again, so that lookup finds something.
    return tuple(tuple(w for _ in range(3) for w in rng.choices(range(6, REAL), k=3)) * 2 for _ in range(count))


def requests(count: int, seed: int = 0) -> list[Request]:
    return [Request(list(p), MOST, seed=seed * 10_000 + n) for n, p in enumerate(prompts(count))]


def written(count: int, sampling: Sampling, eos: Sequence[int], seed: int = 0) -> list[Trace]:
    return Decoder(networks()[0], sampling=sampling, eos=eos, rows=128).run(requests(count, seed))


@cache
def table() -> torch.Tensor:
    return bigram_table([t.tokens for t in written(COUNT, Sampling(0.0), ())], REAL)


@cache
def ending() -> tuple[tuple[int, ...], list[Trace]]:
    """An end of text that stops some texts early and not all, and the greedy texts."""
    seen = Counter(t for trace in written(COUNT, Sampling(0.0), ()) for t in trace.tokens)
    eos = (next(t for t, n in seen.most_common() if 2 <= n <= 15),)
    return eos, written(COUNT, Sampling(0.0), eos)


@pytest.mark.parametrize("gamma", [1, 5])
@pytest.mark.parametrize("kind", ["model", "trimmed", "lookup", "bigram", "composite"])
def test_greedy_rounds_equal_the_decoders(kind: str, gamma: int) -> None:
    target, draft, trimmed = networks()
    model = trimmed if kind == "trimmed" else draft
    guessers: dict[str, Any] = {"lookup": LookupDrafter(gamma, REAL, CPU), "composite": LookupDrafter(4, REAL, CPU)}
    guesser = BigramDrafter(table(), gamma, CPU) if kind == "bigram" else guessers.get(kind)
    drafter: Any = ModelDrafter(model, gamma) if kind in ("model", "trimmed") else guesser
    if kind == "composite":
        drafter = CompositeDrafter(guessers[kind], ModelDrafter(model, gamma))
    eos, texts = ending()
    assert 1 <= sum(t.finish == "eos" for t in texts) < COUNT
    laws = forced(target, {"d": model}, [(p, t.tokens) for p, t in zip(prompts(COUNT), texts, strict=True)], Sampling(0.0))
    decoded = Decoder(target, drafter, eos=eos, rows=COUNT).run(requests(COUNT))
    accepted = 0
    for prompt, text, law, real in zip(prompts(COUNT), texts, laws, decoded, strict=True):
        keep = law["drafts"]["d"]["keep"] if kind in ("model", "trimmed", "composite") else None
        mine = derive(prompt, text.tokens, keep, gamma, most=MOST, ended=text.finish == "eos", guesser=guesser)
        check([mine])
        assert text.tokens == real.tokens == mine.tokens
        rounds = [[(r.kind, r.proposed, r.accepted, r.emitted) for r in t.rounds] for t in (mine, real)]
        assert rounds[0] == rounds[1]
        accepted += sum(r.accepted for r in mine.rounds)
    assert accepted > (2 if kind in ("lookup", "bigram") else 10), "nothing was compared"


def test_a_draft_context_that_fills_up_stops_the_guessing() -> None:
    trace = derive([5] * 8, [7] * 10, [1.0] * 10, 2, most=10, ended=False, context=11)
    assert [(r.kind, r.proposed) for r in trace.rounds][:2] == [("model", 2), ("model", 1)] and trace.drafting_stopped == len(
        trace.rounds
    ) - 3
    assert all(r.kind == "none" for r in trace.rounds[2:]), "the last token of a text is never guessed, context or not"


def accepted_counts(traces: Sequence[Trace], gamma: int) -> np.ndarray:
    """Rounds by accepted tokens, of whole rounds, and where in the text they began: early or late."""
    found = np.zeros((2, gamma + 1))
    for t in traces:
        at = 0
        for r in t.rounds:
            if r.proposed == gamma:
                found[int(at >= MOST // 2), r.accepted] += 1
            at += r.emitted
    return found.ravel()


GAMMA, TEXTS = 3, 400


LAW = Sampling(1.3)


@cache
def decoded() -> list[Trace]:
    target, draft, _ = networks()
    return Decoder(target, ModelDrafter(draft, GAMMA), sampling=LAW, rows=128).run(requests(TEXTS, 1))


@cache
def drawn() -> tuple[list[Trace], list[list[float]]]:
    """Texts of their own, and what is kept along them."""
    target, draft, _ = networks()
    texts = written(TEXTS, LAW, (), 2)
    laws = forced(target, {"d": draft}, [(p, t.tokens) for p, t in zip(prompts(TEXTS), texts, strict=True)], LAW)
    return texts, [law["drafts"]["d"]["keep"] for law in laws]


def derived(power: float) -> list[Trace]:
    """``power`` other than 1 is the planted fault: too much kept, or too little."""
    return [derive(p, t.tokens, [k**power for k in keep], GAMMA, most=MOST, ended=False, seed=n)
            for n, (p, t, keep) in enumerate(zip(prompts(TEXTS), *drawn(), strict=True))]  # fmt: skip


def p_value(traces: Sequence[Trace]) -> float:
    return float(stats.chi2_contingency(np.stack([accepted_counts(decoded(), GAMMA), accepted_counts(traces, GAMMA)])).pvalue)


def test_sampled_rounds_follow_the_decoders_law() -> None:
    mine = derived(1.0)
    assert p_value(mine) > 1e-3
    assert metrics(mine)["tau"] == pytest.approx(metrics(decoded())["tau"], rel=0.03)


@pytest.mark.parametrize("power", [0.7, 1.4])
def test_a_wrong_law_is_caught(power: float) -> None:
    assert p_value(derived(power)) < 1e-6


def test_the_same_draws_for_every_gamma_and_draft() -> None:
    """A position that is judged is judged alike whatever came before it."""
    keep = [random.Random(3).random() for _ in range(40)]
    marks = {}
    for gamma in (1, 2, 5):
        trace = derive([5, 6], list(range(40)), keep, gamma, most=40, ended=False, seed=9)
        marks[gamma] = [m if m in ("accepted", "corrected") else None for m in trace.marks()]
    for a in marks.values():
        for b in marks.values():
            assert all(x == y for x, y in zip(a, b, strict=True) if x and y)


def test_forced_figures_do_not_depend_on_who_shares_the_batch() -> None:
    target, draft, trimmed = networks()
    texts = [(p, t.tokens[: 5 + n]) for n, (p, t) in enumerate(zip(prompts(10), written(10, Sampling(0.7), ()), strict=True))]
    together = forced(target, {"a": draft, "b": trimmed}, texts, Sampling(0.7))
    for text, whole in zip(texts, together, strict=True):
        (alone,) = forced(target, {"b": trimmed}, [text], Sampling(0.7))
        assert alone["entropy"] == pytest.approx(whole["entropy"], abs=1e-4)
        for key, values in alone["drafts"]["b"].items():
            assert values == pytest.approx(whole["drafts"]["b"][key], abs=1e-4) and len(values) == len(text[1]), key
    inside, outside = (sum(together[0]["drafts"][n]["outside"]) for n in "ab")
    assert inside == 0 < outside, "half of the ids cannot be proposed by the trimmed head"
