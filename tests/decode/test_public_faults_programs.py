"""Publicly known faults of programs, caches and memory, and of families that keep other state."""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any

import pytest
import torch

from draftstill.decode import (
    CompositeDrafter,
    Decoder,
    LookupDrafter,
    ModelDrafter,
    Network,
    Request,
    Sampling,
    static,
)
from draftstill.errors import DraftstillError
from tests.decode.conftest import make_model, noised
from tests.decode.faults import BACKENDS, CPU, decoder, drafter_of, facts, identities, prompt_of, shows
from tests.decode.test_greedy import cache_free, oracle

pytestmark = pytest.mark.usefixtures("uncompiled")


# --- programs, caches, memory --------------------------------------------------------------------------------------------------


@shows(25)
@pytest.mark.parametrize("kind, lag", [("model", 0), ("model", 1), ("lookup", 0), ("composite", 0), ("adaptive", 0)])
def test_one_static_decoder_serves_prompts_of_any_length(monkeypatch, target, draft, kind, lag):
    """The texts and counts of eager rounds, and no more programs, tensors or cache at each call (gpt-fast#69, #184)."""
    monkeypatch.setattr(static, "lag_of", lambda device: lag)
    nets, asked = (Network(target), Network(draft), Network(draft)), list(itertools.product((3, 50), (5, 17, 64, 5, 1)))
    for law in (Sampling(0.0), Sampling(0.9, top_p=0.9)):
        one, eager = (decoder(nets[0], drafter_of(kind, *nets, 3), b, sampling=law) for b in ("static", "eager"))
        truth = {(new, n): facts(eager.run([Request(prompt_of(n, new), new, seed=n)])) for new, n in asked}
        seen = []
        for _ in range(2):
            for new, n in asked:
                assert facts(one.run([Request(prompt_of(n, new), new, seed=n)])) == truth[new, n], (n, new)
            seen.append((len(one._static.programs), len(one._static.laws), one._cache.bytes, id(one._static)))
        assert seen[0] == seen[1] and seen[0][0] <= 2 * 5


@shows(25)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_long_text_leaves_nothing_that_a_short_one_meets(backend):
    """Slots whose text has ended, in this call or an earlier one, do not reach past what the next round reads (gpt-fast#69)."""
    target = make_model(positions=1024)
    nets = Network(target), Network(noised(target, 0.3))
    long, short = Request(prompt_of(300), 4), Request(prompt_of(5), 20)
    alone = decoder(nets[0]).run([short])[0].tokens
    for drafter in (ModelDrafter(nets[1], 3), LookupDrafter(3, 96, CPU), None):
        within = decoder(nets[0], drafter, backend, rows=2)
        assert within.run([long, short])[1].tokens == alone
        after = decoder(nets[0], drafter, backend, rows=2)
        after.run([long, long])
        assert after.run([short])[0].tokens == alone


@shows(25)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", ["composite", "adaptive"])
def test_a_draft_reads_what_was_written_without_it(target, way, backend):
    """A draft equal to its target is always right, also after rounds that a guesser proposed for, or nobody
    (gpt-fast#184: acceptance that falls when rounds are compiled)."""
    net = Network(target)

    class OnAndOff:
        """Three rounds without a draft, one with."""

        most, turn = 3, 0

        def choose(self, history):
            return 3 if history.idle >= 3 else 0

        def learn(self, history, proposed, accepted):
            history.idle = 0 if proposed else history.idle + 1

        def describe(self):
            return {"policy": "on and off"}

    own = ModelDrafter(net, 3, policy=OnAndOff() if way == "adaptive" else None)
    one = decoder(net, CompositeDrafter(LookupDrafter(2, 96, CPU, shortest=1), own) if way == "composite" else own, backend, rows=2)
    rounds = [r for t in one.run([Request(prompt_of(17, 50), 50), Request(prompt_of(5), 40)]) for r in t.rounds]
    assert sum(r.kind == "model" for r in rounds) > 4 and sum(r.kind != "model" for r in rounds) > 4
    assert all(r.accepted == r.proposed for r in rounds if r.kind == "model")


@shows(19, 25)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_draft_near_its_end_beside_a_long_guess(backend):
    """Its tokens follow its own text, however many a guesser proposes for a neighbour: a draft equal to its target is right."""
    target, short = Network(make_model()), Network(make_model(positions=32))
    text = torch.randperm(95, generator=torch.Generator().manual_seed(0)).add(1).tolist()[:30]
    for n in (26, 28, 30):
        one = decoder(target, CompositeDrafter(LookupDrafter(16, 96, CPU), ModelDrafter(short, 3)), backend, rows=2)
        guessed, drafted = (t.rounds[0] for t in one.run([Request(list(range(1, 18)) * 2, 30), Request(text[:n], 30)]))
        assert (guessed.kind, guessed.proposed) == ("lookup", 16) and (drafted.kind, drafted.accepted) == ("model", 3), n


@shows(25)
@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(1.0)], ids=["greedy", "sampled"])
def test_a_decoder_that_may_propose_more_than_its_drafter_does_not(target, draft, sampling):
    """Rounds on the device propose what eager ones do."""
    asked = [Request(prompt_of(7), 20, seed=1, sampling=sampling)]
    made = [decoder(target, ModelDrafter(Network(draft), 2), b, gamma=4).run(asked) for b in BACKENDS]
    assert facts(made[0]) == facts(made[1])


def live_tensors() -> int:
    gc.collect()
    return sum(type(o) is torch.Tensor for o in gc.get_objects())


@shows(25)
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_hundred_calls_leave_nothing_behind(target, draft, backend):
    """Greedy and sampled by turns, prompts of changing lengths: no more tensors, programs, laws or cache; the same call, the same text."""
    lookup, model = LookupDrafter(3, 96, CPU), ModelDrafter(Network(draft), 3)
    one = decoder(target, CompositeDrafter(lookup, model), backend, rows=2)
    lengths, laws, first, counted = (5, 17, 64, 1, 40, 3, 9), [Sampling(0.0), Sampling(0.8, top_p=0.9)], {}, []
    for call in range(200):
        n, law = lengths[call % 7], laws[call % 2]
        asked = [Request(prompt_of(n), 2 + n % 5, seed=n, sampling=law)]
        found = facts(one.run(asked))
        assert first.setdefault((n, law), found) == found
        if call in (27, 111, 199):
            stores = (len(one._static.programs), len(one._static.laws)) if backend == "static" else (len(one._laws[1]),)
            counted.append((live_tensors(), one._cache.bytes, model.cache.bytes, *stores))
    assert counted[0] == counted[1] == counted[2] and len(first) == 14


def test_settings_that_change_at_each_call_leave_nothing_behind(target, draft):
    """A service sees any temperature: programs and laws kept for each would never end."""
    one = decoder(target, ModelDrafter(Network(draft), 2), "static")
    counted = []
    for call in range(40):
        one.run([Request([1, 2, 3], 4, sampling=Sampling(0.5 + call / 100))])
        counted.append(len(one._static.programs))
    assert counted[-1] == counted[19] <= 16


@shows(25)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_longer_text_frees_the_old_caches_first(backend):
    """Not when Python next looks for cycles: two caches may not fit."""
    model = make_model(positions=1024)
    one = decoder(model, ModelDrafter(Network(model), 3), backend)
    one.run([Request(prompt_of(9), 4)])
    old = [weakref.ref(c.keys[0]) for c in (one._cache, one.drafter.cache)]
    gc.collect()
    gc.disable()
    try:
        one.run([Request(prompt_of(300), 4)])
        assert [r() is None for r in old] == [True, True]
    finally:
        gc.enable()


@shows(13)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_call_that_broke_off_leaves_nothing_behind(target, draft, backend):
    """Texts and counts are those of a decoder that never saw it."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    one = decoder(target, ModelDrafter(Network(draft), 3), backend, rows=2, sampling=Sampling(1.0))
    asked = [Request(prompt_of(n), 12, seed=n) for n in (9, 3, 1)]
    before = facts(one.run(asked))
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            one.run([Request(prompt_of(n), 20) for n in (20, 8, 33)], on_tokens=stop)
    assert facts(one.run(asked)) == before


@shows(31)
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(0.8, top_p=0.9)], ids=["greedy", "sampled"])
def test_the_next_replay_overwrites_nothing_that_was_handed_out(sampling):
    """Results and traces of a run stay as they are when its graphs run again; models of one shape share no buffers
    (HF#48199, pytorch#120309, gpt-fast#232)."""
    target, same = make_model().cuda(), make_model(seed=4).cuda()
    net, small = Network(target), Network(same)
    one = Decoder(net, ModelDrafter(small, 3), sampling=sampling, rows=2, backend="graphs")
    asked = [Request(prompt_of(n), 24, seed=n) for n in (5, 12, 3)]
    first = one.run(asked)
    kept = facts(first)
    one.run([Request(prompt_of(n, 9), 30, seed=n + 1) for n in (7, 2, 33, 4)])
    assert facts(first) == kept and facts(one.run(asked)) == kept
    assert kept == facts(Decoder(net, ModelDrafter(small, 3), sampling=sampling, rows=2, backend="eager").run(asked))
    engine = first[0].engine
    assert engine["backend"] == "graphs" and engine["graphs_captured"] > 0 and engine["graphs_replayed"] > 0
    places = [{t.data_ptr() for t in (*cache.keys, *cache.values)} for cache in (one._cache, one.drafter.cache)]
    assert not places[0] & places[1]


@shows(37)
@pytest.mark.parametrize("backend", BACKENDS)
def test_long_drafts_change_nothing_up_to_the_last_position(backend):
    """Any gamma, and texts that end just before, at and past the target's context (TensorRT-LLM#2208, #11300)."""
    model = make_model(positions=40)
    net, small, prompt = Network(model), Network(noised(model, 0.2)), prompt_of(3)
    truth = oracle(make_model(), prompt, 37)
    for gamma in (1, 2, 4, 8, 16, 32):
        for draft in (net, small):
            one = decoder(net, ModelDrafter(draft, gamma), backend)
            for new in (20, 36, 37, 38, 100) if gamma in (1, 32) and draft is net else (20,):
                (trace,) = one.run([Request(prompt, new)])
                assert trace.tokens == truth[:new] and trace.finish == ("length" if new <= 37 else "context"), (gamma, new)
                identities([trace], gamma)
        lookup = decoder(net, LookupDrafter(gamma, 96, CPU, shortest=1), backend)
        assert lookup.run([Request(prompt, 99)])[0].tokens == truth
        with pytest.raises(DraftstillError, match="context holds 40"):
            lookup.run([Request([1] * 40, 1)])
        assert len(lookup.run([Request([1] * 39, 5)])[0].tokens) == 1


# --- families ------------------------------------------------------------------------------------------------------------------


@shows(10)
@pytest.mark.parametrize("kind", ["mistral_window", "gemma2", "gemma3"])
def test_windows_hold_in_steps_of_many_tokens(kind):
    """Prompts below, at and far past a window of 8: transformers' own text, at every gamma (HF#48280, #47447)."""
    model = make_model(kind, sharp=12.0)
    net, small = Network(model), Network(noised(model, 0.3))
    asked = {n: Request(prompt_of(n), 40 if n == 30 else 12) for n in (7, 8, 9, 30)}
    truth = {n: oracle(model, r.prompt, r.max_new_tokens) for n, r in asked.items()}
    assert truth[8] == cache_free(model, asked[8].prompt, 12)
    for backend, gamma in [*itertools.product(["eager"], range(1, 7)), ("static", 3)]:
        one = decoder(net, ModelDrafter(small, gamma), backend, rows=4)
        assert [t.tokens for t in one.run(list(asked.values()))] == list(truth.values()), (backend, gamma)
        assert one.run([asked[30]])[0].tokens == truth[30]


STATEFUL = {
    "mamba": {"state_size": 4}, "lfm2": {"layer_types": ["conv", "full_attention"], "num_attention_heads": 2, "num_key_value_heads": 2},
    "qwen3_next": {"num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8,
                   "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 4, "linear_value_head_dim": 4,
                   "shared_expert_intermediate_size": 8, "head_dim": 4},
}  # fmt: skip


@shows(11)
@pytest.mark.parametrize("kind", STATEFUL)
def test_state_that_cannot_be_rolled_back_is_refused(kind):
    """As target and as draft, as a config and as a model, by its name (HF#46937, vllm#39273)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from draftstill.decode import refuse_unsupported

    config = AutoConfig.for_model(kind, vocab_size=32, hidden_size=8, intermediate_size=16, num_hidden_layers=2, **STATEFUL[kind])
    model = AutoModelForCausalLM.from_config(config)
    for key in ("target.source", "draft.source"):
        for refuse in (lambda key=key: refuse_unsupported(config, key), lambda key=key: Network(model, key=key)):
            with pytest.raises(DraftstillError, match=f"'{kind}'.*cannot be rolled back") as caught:
                refuse()
            assert caught.value.key == key and caught.value.mend
