"""Drafters without a model, the choice of gamma, and where texts stop."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch

from draftstill.decode import AdaptiveGamma, BigramDrafter, Decoder, ModelDrafter, Network, Request, bigram_table, measure_costs
from draftstill.decode.adaptive import Judged
from draftstill.decode.stops import StopText
from draftstill.decode.theory import best_gamma, expected_tokens
from tests.decode.conftest import noised


def test_bigram_table_is_the_most_frequent_successor():
    texts = [torch.randint(0, 12, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (1, 2, 40, 300)]
    table = bigram_table(texts, 14).tolist()
    pairs = Counter(p for t in texts for p in itertools.pairwise(t))
    for first in range(14):
        after = {b: n for (a, b), n in pairs.items() if a == first}
        assert table[first] == (min(after, key=lambda b: (-after[b], b)) if after else -1)
    assert bigram_table([], 3).tolist() == [-1, -1, -1] == bigram_table([[1]], 3).tolist()


def test_a_bigram_that_is_right_is_accepted(target):
    plain = Decoder(Network(target)).run([Request([5, 6], 40)])[0].tokens
    table = bigram_table([[6, *plain]], 96)
    trace = Decoder(Network(target), BigramDrafter(table, 3, torch.device("cpu"))).run([Request([5, 6], 40)])[0]
    assert trace.tokens == plain and sum(r.accepted for r in trace.rounds) > 0
    assert {r.kind for r in trace.rounds} <= {"bigram", "none"}


def history(accepted, judged):
    return Judged(accepted, judged)


def test_adaptive_gamma_is_the_best_of_the_cost_curve():
    v = {1: 1.1, 2: 1.15, 3: 1.9, 4: 1.6}  # a step in the curve, as float32 has on CPUs
    policy = AdaptiveGamma(0.1, v, 4, prior_weight=0.001)
    for alpha in (0.0, 0.05, 0.3, 0.5, 0.7, 0.9, 1.0):
        speeds = {0: 1.0} | {g: expected_tokens(alpha, g) / (0.1 * g + v[g]) for g in v}
        chosen = policy.choose(history(1000 * alpha, 1000))
        assert speeds[chosen] == pytest.approx(max(speeds.values()), rel=1e-3)
    assert policy.choose(history(0, 1000)) == 0 and policy.choose(history(1000, 1000)) == 4
    assert policy.choose(history(600, 1000)) == 2  # gamma 3 pays the step for little
    assert best_gamma(0.6, 0.1, v, 4)[0] == 2


def test_adaptive_gamma_forgets_and_probes():
    policy = AdaptiveGamma(0.3, {1: 1.2, 2: 1.3}, 2, half_life=8, probe_every=5)
    h = Judged()
    for _ in range(20):
        policy.learn(h, 2, 0)
    assert policy.choose(h) == 0
    idle = 0
    while policy.choose(h) == 0:
        policy.learn(h, 0, 0)
        idle += 1
    assert idle == 5
    for _ in range(20):
        policy.learn(h, 1, 1)
    assert policy.choose(h) == 2
    with pytest.raises(ValueError, match="gamma"):
        AdaptiveGamma(0.1, {1: 1.0}, 2)


def test_adaptive_gamma_and_confidence_are_recorded(target):
    costs = measure_costs(Network(target), {"draft": Network(noised(target, 0.3))}, 8, 3, repeats=3)
    policy = AdaptiveGamma(costs.c_by_gamma("draft", 3), costs.v_by_gamma(), 3)
    drafter = ModelDrafter(Network(noised(target, 0.3)), 1, policy=policy, min_confidence=0.25)
    engine = Decoder(Network(target), drafter).run([Request([1, 2, 3], 20)])[0].engine
    assert engine["drafter"]["policy"] == "adaptive" and engine["drafter"]["min_confidence"] == 0.25 and engine["gamma"] == 3
    assert engine["drafter"]["c"] == costs.c_by_gamma("draft", 3) and engine["backend"] == "eager"


def test_an_unsure_draft_proposes_less(target):
    draft = Network(noised(target, 0.3))
    proposed = []
    for limit in (0.0, 0.3, 0.6, 1.0):
        traces = Decoder(Network(target), ModelDrafter(draft, 4, min_confidence=limit)).run([Request([1, 2, 3], 40)])
        proposed.append(sum(r.proposed for r in traces[0].rounds))
    assert proposed == sorted(proposed, reverse=True) and proposed[0] > proposed[-1] == 0


@pytest.mark.parametrize(("pieces", "stops", "found"), [
    (["xa", "b", "c"], ["ab"], 1), (["a", "b"], ["ab", "b"], 1), (["stop"], ["to"], 0), (["a"] * 30 + ["b"], ["ab"], 30), (["ab"], ["ba"], None),
    (["é", "à"], ["éà"], 1), (["", "a", "", "b"], ["ab"], 3),
])  # fmt: skip
def test_stop_strings_are_found_however_the_tokens_fall(pieces, stops, found):
    for cuts in range(1, len(pieces) + 1):
        watch = StopText(stops, lambda ids: "".join(pieces[i] for i in ids))
        at, hit = 0, None
        while at < len(pieces) and hit is None:
            hit = watch.feed(range(at, min(at + cuts, len(pieces))))
            hit = None if hit is None else at + hit
            at += cuts
        assert hit == found


def test_traces_account_for_the_run(target):
    """Prefill and the four parts of the rounds are most of a run even where forwards cost next to nothing; the benchmark wants 95%."""
    decoder = Decoder(Network(target), ModelDrafter(Network(noised(target, 0.3)), 3), rows=2)
    decoder.run([Request([1, 2, 3], 30, seed=s) for s in range(5)])
    assert decoder.accounted is not None and 0.5 < decoder.accounted <= 1.0
