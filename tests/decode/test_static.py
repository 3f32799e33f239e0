"""Rounds on device state: the same texts, counts and noise as eager rounds, compiled whole, read a round behind, slots reused."""

from __future__ import annotations

import time

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
    Request,
    Sampling,
    bigram_table,
    make_network,
    programs,
    static,
)
from draftstill.decode.trace import check
from tests.decode.conftest import make_model, noised
from tests.decode.test_families import t5 as make_t5

CPU = torch.device("cpu")
LENGTHS = [1, 2, 7, 33, 7, 12, 3, 40]
PROMPTS = [torch.randint(1, 96, (n,), generator=torch.Generator().manual_seed(50 + i)).tolist() for i, n in enumerate(LENGTHS)]
SAMPLINGS = {
    "greedy": [Sampling(0.0)],
    "sampled": [Sampling(0.8, top_p=0.9)],
    "mixed": [Sampling(0.0), Sampling(0.9, top_k=8), Sampling(1.0, repetition_penalty=1.3, no_repeat_ngram=2, min_new_tokens=3)],
}


@pytest.fixture
def uncompiled(monkeypatch):
    """The loop and its programs as plain Python."""
    monkeypatch.setattr(programs.torch, "compile", lambda body, **options: body)
    monkeypatch.setattr(programs, "packed", lambda *networks: False)  # these need no tracing


def make_drafter(name, target):
    table = bigram_table(PROMPTS, 96)
    draft = Network(noised(target, 0.3))
    costs = {g: 1 + 0.02 * g for g in range(1, 5)}
    return {
        "plain": lambda: None,
        "model": lambda: ModelDrafter(draft, 3),
        "trimmed": lambda: ModelDrafter(Network(noised(target, 0.3), head_ids=torch.arange(0, 96, 2)), 3),
        "confident": lambda: ModelDrafter(draft, 4, min_confidence=0.5),
        "adaptive": lambda: ModelDrafter(draft, 4, policy=AdaptiveGamma(0.1, costs, 4, prior_weight=2)),
        "lookup": lambda: LookupDrafter(4, 96, CPU),
        "bigram": lambda: BigramDrafter(table, 3, CPU),
        "composite": lambda: CompositeDrafter(LookupDrafter(5, 96, CPU), ModelDrafter(draft, 3)),
        "short": lambda: ModelDrafter(Network(noised(make_model(positions=32), 0.1)), 3),
    }[name]()


def requests(samplings, ignore_eos=False):
    return [
        Request(p, 4 + 5 * (i % 4), seed=i, sampling=samplings[i % len(samplings)], ignore_eos=ignore_eos) for i, p in enumerate(PROMPTS)
    ]


def facts(traces):
    return [
        (t.tokens, t.finish, t.drafting_stopped, [(r.kind, r.proposed, r.accepted, r.emitted, r.cut) for r in t.rounds]) for t in traces
    ]


NAMES = ["plain", "model", "trimmed", "confident", "adaptive", "lookup", "bigram", "composite", "short"]


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("law", SAMPLINGS)
@pytest.mark.parametrize("name", NAMES)
def test_static_rounds_equal_eager_ones(uncompiled, monkeypatch, target, name, law, lag):
    monkeypatch.setattr(static, "lag_of", lambda device: lag)
    made = [Decoder(Network(target), make_drafter(name, target), rows=3, eos=[11, 40], backend=b) for b in ("eager", "compile")]
    for asked in (requests(SAMPLINGS[law]), requests(SAMPLINGS[law], ignore_eos=True)):
        eager, device = (d.run(asked) for d in made)
        check(device)
        assert facts(device) == facts(eager)
    engine = device[0].engine
    assert engine["backend"] == "compile" and engine["runs"] > 0 and "fallback" not in engine
    assert engine["lag"] == (lag if name in ("plain", "model", "trimmed", "confident", "short") else 0)


@pytest.mark.parametrize("law", ["greedy", "sampled", "mixed"])
def test_programs_compile_whole(monkeypatch, target, law):
    """fullgraph: no host read and no branch on a value in a whole round. One program a size and window, whatever the lengths."""
    monkeypatch.setattr(programs, "COMPILE", {**programs.COMPILE, "backend": "aot_eager"})
    plainly = lambda model: Network(model, pack_weights=False)  # noqa: E731
    decoder = Decoder(plainly(target), ModelDrafter(plainly(noised(target, 0.3)), 3), rows=2, eos=[11], backend="compile")
    plain = Decoder(Network(target), make_drafter("model", target), rows=2, eos=[11], backend="eager")
    asked = requests(SAMPLINGS[law])[:5]
    for order in (asked, asked[::-1]):
        assert facts(decoder.run(order)) == facts(plain.run(order))
    assert decoder.describe()["programs"] == decoder.describe()["compiled"] == 2


def test_asking_for_graphs_without_cuda_is_said(target):
    (trace,) = Decoder(Network(target), backend="graphs").run([Request([1, 2], 3)])
    assert trace.engine["backend"] == "eager" and trace.engine["asked"] == "graphs" and "CUDA" in trace.engine["fallback"]

    class Other(LookupDrafter.__mro__[1].__mro__[-1]):  # a drafter of no known kind
        gamma = 2

    assert "static form" in programs.fallback("compile", Network(target), Other())
    if Network(target).packed:
        (trace,) = Decoder(Network(target), backend="compile").run([Request([1, 2], 3)])
        assert trace.engine["backend"] == "eager" and "pack_weights=False" in trace.engine["fallback"]


def test_simulated_acceptance_is_the_rate_asked_for(uncompiled, target):
    """Whatever the draft is worth. The trace says that it is simulated."""
    for backend in ("eager", "compile"):
        for rate in (0.0, 0.6, 1.0):
            decoder = Decoder(Network(target), make_drafter("model", target), simulate=rate, backend=backend, rows=4)
            traces = decoder.run([Request([3, 4, 5], 150, seed=s) for s in range(8)])
            judged = sum(r.accepted + (r.accepted < r.proposed) for t in traces for r in t.rounds)
            accepted = sum(r.accepted for t in traces for r in t.rounds)
            assert abs(accepted / judged - rate) <= 4 * (rate * (1 - rate) / judged) ** 0.5
            assert traces[0].engine["simulated_acceptance"] == rate


@pytest.mark.parametrize("lag", [0, 1])
def test_encoder_decoders_and_windows_have_static_rounds(uncompiled, monkeypatch, lag):
    """T5 with sources of changing lengths; a sliding-window target with learned-position drafts of a shorter context."""
    monkeypatch.setattr(static, "lag_of", lambda device: lag)
    for kind in ("t5", "gemma2", "gpt2"):
        model = make_t5() if kind == "t5" else make_model(kind)
        for sampling in (Sampling(0.0), Sampling(0.9)):
            made = [Decoder(make_network(model), ModelDrafter(make_network(noised(model, 0.2)), 3), sampling=sampling, rows=3, eos=[11], backend=b)
                    for b in ("eager", "compile")]  # fmt: skip
            eager, device = (d.run(requests([sampling])) for d in made)
            assert facts(device) == facts(eager), kind


def test_tables_that_a_program_reads_stay(uncompiled, target):
    """One network, two decoders: the longer text of the second makes longer tables; the first's programs still have theirs."""
    network = Network(make_model(positions=4096))
    tables = [t.data_ptr() for t in network._tables[0]]
    first = Decoder(network, backend="compile")
    (before,) = first.run([Request([1, 2, 3], 20)])
    Decoder(network).run([Request([5] * 1500, 3)])
    assert [t.data_ptr() for t in network._tables[0]] != tables
    assert any([t.data_ptr() for t in old[0]] == tables for old, *_ in network._outgrown if old[0] is not None)
    (after,) = first.run([Request([1, 2, 3], 20)])
    assert after.tokens == before.tokens


@pytest.mark.parametrize("lag", [0, 1])
def test_making_programs_is_in_no_round_however_late_it_happens(uncompiled, monkeypatch, lag):
    """A window is outgrown in the middle of a text, and read a round behind."""
    monkeypatch.setattr(static, "lag_of", lambda device: lag)
    slow = programs.Program.prepare

    def prepare(self, pool):
        time.sleep(0.3)
        slow(self, pool)

    monkeypatch.setattr(programs.Program, "prepare", prepare)
    decoder = Decoder(Network(make_model(positions=1024)), backend="compile")
    (trace,) = decoder.run([Request([1] * 240, 30)])
    assert trace.engine["programs"] == 2 and trace.engine["warm_s"] >= 0.6
    assert max(r.seconds for r in trace.rounds) < 0.25
