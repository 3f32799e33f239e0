"""Drafters without a model, the choice of gamma, and where texts stop."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch

from draftstill.decode import (
    AdaptiveGamma,
    BigramDrafter,
    Decoder,
    GoodputGamma,
    ModelDrafter,
    Network,
    Request,
    Sampling,
    bigram_table,
    measure_costs,
)
from draftstill.decode import costs as costs_module
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


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_costs_hold_the_law_where_it_is_asked_for(target, temperature, monkeypatch):
    """As many accepts as verify passes and as many draws as draft steps, whatever is timed; without a law neither."""
    calls = Counter()
    for name in ("accept", "draft_block", "verify"):
        real = getattr(costs_module, name)
        monkeypatch.setattr(costs_module, name, lambda *a, real=real, name=name, **k: calls.update([name]) or real(*a, **k))
    pair = Network(target), {"a": Network(noised(target, 0.3)), "b": Network(noised(target, 0.2), head_ids=torch.arange(0, 90, 2))}
    bare = measure_costs(*pair, 8, 3, repeats=2)
    assert not calls and bare.sampling is None
    law = Sampling(temperature, top_k=20, repetition_penalty=1.3)
    found = measure_costs(*pair, 8, 3, repeats=2, rows=3, sampling=law)
    rounds = 2 + 2
    assert calls == {"verify": rounds * (4 + 2), "accept": rounds * (4 + 2), "draft_block": rounds * 2 * 4}
    assert found.sampling["temperature"] == temperature and found.sampling["top_k"] == 20 and set(found.verify_s) == {"1", "2", "3", "4"}
    assert all(s > 0 for times in (found.verify_s, found.first_s, found.draft_s) for s in times.values())
    some = measure_costs(*pair, 8, 0, repeats=2, sampling=law, widths=[7, 3])
    assert list(some.verify_s) == ["1", "3", "7"], "the plain step always"


def test_every_step_holds_the_time_of_its_law(target, monkeypatch):
    """A plain step its own draw, a verify pass one law for each of its tokens, a draft step one."""
    import time

    real = costs_module.Law.probabilities

    def slow(self, scores):
        time.sleep(0.003 * scores.shape[1])
        return real(self, scores)

    monkeypatch.setattr(costs_module.Law, "probabilities", slow)
    found = measure_costs(Network(target), {"d": Network(noised(target, 0.3))}, 8, 3, repeats=2, sampling=Sampling(0.7))
    assert all(found.verify_s[str(w)] >= 0.003 * w for w in range(1, 5)) and min(found.first_s["d"], found.draft_s["d"]) >= 0.003


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


class OnceIn:
    """Drafts two tokens after so many idle rounds."""

    most = 2

    def __init__(self, every):
        self.every = every

    def choose(self, history):
        return 2 if history.idle >= self.every else 0

    def learn(self, history, proposed, accepted):
        history.idle = 0 if proposed else history.idle + 1

    def describe(self):
        return {"policy": "once in"}


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_draft_that_was_idle_catches_up(target, rows, temperature):
    """Texts, and what is accepted, are those of a draft that read along all the time: prompts and texts of very different lengths."""
    noisy = noised(target, 0.1)
    requests = [Request(list(range(1, 2 + length)), new, seed=length) for length, new in ((3, 40), (50, 12), (9, 60), (30, 5), (2, 33))]
    sampling = Sampling(temperature)
    plain = Decoder(Network(target), sampling=sampling, rows=rows).run(requests)
    lazy = Decoder(Network(target), ModelDrafter(Network(noisy), 2, policy=OnceIn(11)), sampling=sampling, rows=rows).run(requests)
    alone = [Decoder(Network(target), ModelDrafter(Network(noisy), 2, policy=OnceIn(11)), sampling=sampling).run([r])[0] for r in requests]
    count = lambda t: [(r.proposed, r.accepted) for r in t.rounds]  # noqa: E731
    for mine, one, text in zip(lazy, alone, plain, strict=True):
        assert mine.tokens == one.tokens and count(mine) == count(one), "a row does not depend on its neighbours"
        assert temperature or mine.tokens == text.tokens
    assert sum(r.accepted for t in lazy for r in t.rounds) > 5


def test_an_idle_draft_reads_nothing_and_then_all_rows_together(target, monkeypatch):
    draft = Network(noised(target, 0.1))
    fed = []
    real = draft.forward
    monkeypatch.setattr(draft, "forward", lambda ids, *rest: fed.append(tuple(ids.shape)) or real(ids, *rest))
    policy = GoodputGamma(0.1, {1: 5.0, 2: 5.0}, 2, rows=4, probe_every=20)
    Decoder(Network(target), ModelDrafter(draft, 2, policy=policy), rows=4).run([Request([1 + n, 2, 3], 30, seed=n) for n in range(4)])
    assert fed[0] == (4, 22) and len(fed) == 2 and fed[1][0] == 4, (
        "one probe in 30 rounds: all that was missed in one forward, and one step"
    )


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
