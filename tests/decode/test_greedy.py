"""Greedy decoding is the target's own, token by token, whatever the draft, gamma or prompt."""

from __future__ import annotations

import itertools

import pytest
import torch

from draftstill.decode import CompositeDrafter, Decoder, LookupDrafter, ModelDrafter, Network, Request, Sampling
from draftstill.decode.trace import check, metrics
from tests.decode.conftest import make_model, noised

PROMPTS = {n: torch.randint(1, 96, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (1, 2, 7, 33)}


def oracle(model, prompt, count, eos=None):
    """transformers' own greedy generation."""
    out = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), max_new_tokens=count,
                         do_sample=False, eos_token_id=eos, pad_token_id=0)  # fmt: skip
    return out[0, len(prompt) :].tolist()


def cache_free(model, prompt, count):
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax().item())
    return tokens[len(prompt) :]


def drafter(name, drafts, gamma, vocab=96):
    if name == "lookup":
        return LookupDrafter(gamma, vocab, torch.device("cpu"))
    if name == "composite":
        return CompositeDrafter(LookupDrafter(gamma + 1, vocab, torch.device("cpu")), ModelDrafter(Network(drafts["noised"]), gamma))
    return ModelDrafter(Network(drafts[name]), gamma)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
def test_forward_equals_transformers(kind):
    model = make_model(kind)
    net = Network(model)
    ids = torch.randint(0, 96, (1, 40))
    with torch.no_grad():
        truth = model(ids).logits
    cache = net.new_cache(1, 64)
    hidden = torch.cat([net.forward(ids[:, a:b], cache, [a]) for a, b in itertools.pairwise([0, 20, 21, 25, 40])], 1)
    assert torch.allclose(net.logits(hidden), truth, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
def test_plain_equals_cache_free_and_generate(kind):
    model = make_model(kind)
    for prompt in PROMPTS.values():
        got = Decoder(Network(model)).run([Request(prompt, 24)])[0].tokens
        assert got == cache_free(model, prompt, 24) == oracle(model, prompt, 24)


@pytest.mark.parametrize("name", ["self", "noised", "independent", "constant", "other_kind", "lookup", "composite"])
def test_speculative_equals_plain(target, drafts, name):
    plain = Decoder(Network(target))
    truth = {n: plain.run([Request(p, 40)])[0].tokens for n, p in PROMPTS.items()}
    assert truth[7] == oracle(target, PROMPTS[7], 40)
    for gamma in (1, 2, 3, 4, 5, 6, 16, 32):
        decoder = Decoder(Network(target), drafter(name, drafts, gamma), gamma=gamma + 1)
        for n, prompt in PROMPTS.items():
            trace = decoder.run([Request(prompt, 40)])[0]
            assert trace.tokens == truth[n], (name, gamma, n)
            check([trace])


def test_repetitive_prompt_is_looked_up(target):
    prompt = [1, 2, 3] * 5
    truth = Decoder(Network(target)).run([Request(prompt, 30)])[0].tokens
    got = Decoder(Network(target), LookupDrafter(4, 96, torch.device("cpu")), gamma=4).run([Request(prompt, 30)])[0]
    assert got.tokens == truth
    assert metrics([got])["proposed"] > 0


def test_self_pair_accepts_exactly_everything(target):
    for sampling, eos in itertools.product([Sampling(0.0), Sampling(1.0), Sampling(0.7, top_k=9, top_p=0.9)], [(), (5, 17)]):
        for gamma in range(1, 6):
            decoder = Decoder(Network(target), ModelDrafter(Network(target), gamma), gamma=gamma, sampling=sampling, eos=eos)
            traces = decoder.run([Request(PROMPTS[7], n, seed=n) for n in range(1, 13)])
            check(traces)
            m = metrics(traces)
            assert m["accepted"] == m["proposed"] and m["tau"] <= gamma + 1
            assert m["token_acceptance"] == (1.0 if m["proposed"] else None)


@pytest.mark.parametrize("gamma", range(1, 9))
@pytest.mark.parametrize("kind", ["self", "lookup"])
def test_length_limit_is_exact(target, drafts, kind, gamma):
    for count in (0, 1, 2, 3, 5, 8):
        trace = Decoder(Network(target), drafter(kind, drafts, gamma), gamma=gamma).run([Request([1, 2, 3] * 5, count)])[0]
        assert len(trace.tokens) == count and trace.finish == "length"


def test_eos_ends_the_text_wherever_it_falls(target):
    plain = Decoder(Network(target)).run([Request(PROMPTS[7], 12)])[0].tokens
    for cut, gamma in itertools.product(range(12), (1, 3, 5, 8)):
        eos = plain[cut]
        first = plain.index(eos)
        decoder = Decoder(Network(target), ModelDrafter(Network(target), gamma), gamma=gamma, eos=[eos, 95])
        trace = decoder.run([Request(PROMPTS[7], 12)])[0]
        assert trace.tokens == plain[: first + 1] and trace.finish == "eos"
        m = metrics([trace])
        assert m["accepted"] <= m["emitted"] == first + 1 and m["accepted"] == m["proposed"]
        check([trace])
        held = decoder.run([Request(PROMPTS[7], 12, ignore_eos=True)])[0]
        assert held.tokens == plain


def test_rows_of_a_batch_equal_their_own_runs(target, drafts):
    lengths = [1, 2, 7, 33, 7, 12, 3]
    prompts = [torch.randint(1, 96, (n,), generator=torch.Generator().manual_seed(50 + i)).tolist() for i, n in enumerate(lengths)]
    requests = [Request(p, 5 + 7 * (i % 3), seed=i) for i, p in enumerate(prompts)]
    for name, sampling in itertools.product(["noised", "lookup", "composite", None], [Sampling(0.0), Sampling(0.8, top_p=0.95)]):
        make = lambda rows, name=name, s=sampling: Decoder(Network(target), drafter(name, drafts, 3) if name else None, gamma=4 if name else 0,  # noqa: E731
                                                           sampling=s, rows=rows, eos=[11])  # fmt: skip
        alone = [make(1).run([r])[0] for r in requests]
        for rows in (2, 3, 7):
            together = make(rows).run(requests)
            assert [t.tokens for t in together] == [t.tokens for t in alone], (name, sampling, rows)
            assert [t.finish for t in together] == [t.finish for t in alone]
            check(together)


def test_padded_vocabularies_run_and_never_emit_padding():
    for target_size, draft_size in ((96, 128), (128, 96)):
        target, draft = make_model(vocab=target_size), make_model(vocab=draft_size, seed=4, layers=1)
        with torch.no_grad():
            for m in (target, draft):
                m.lm_head.weight[90:] *= 100  # padding rows that would win every argmax
        net, small = Network(target, vocab=90), Network(draft, vocab=90)
        plain = Decoder(net).run([Request([1, 2, 3], 30)])[0].tokens
        got = Decoder(net, ModelDrafter(small, 3), gamma=3).run([Request([1, 2, 3], 30)])[0]
        assert got.tokens == plain and max(plain) < 90


def test_draft_with_a_shorter_context_stops_drafting(target):
    short = noised(make_model(positions=32), 0.1)
    for n in (20, 31, 32, 33, 40):
        prompt = torch.randint(1, 96, (n,), generator=torch.Generator().manual_seed(n)).tolist()
        truth = Decoder(Network(target)).run([Request(prompt, 40)])[0].tokens
        trace = Decoder(Network(target), ModelDrafter(Network(short), 4), gamma=4).run([Request(prompt, 40)])[0]
        assert trace.tokens == truth and trace.drafting_stopped > 0
        assert (metrics([trace])["proposed"] > 0) == (n <= 32)


def test_target_context_ends_the_text():
    model = make_model(positions=48)
    for gamma in (0, 1, 5):
        maker = ModelDrafter(Network(model), gamma) if gamma else None
        trace = Decoder(Network(model), maker, gamma=gamma).run([Request(PROMPTS[33], 100)])[0]
        assert trace.finish == "context" and len(trace.tokens) == 48 - 33


def test_repeated_calls_give_the_same_and_reuse_the_cache(target, drafts):
    decoder = Decoder(Network(target), drafter("composite", drafts, 3), gamma=4, sampling=Sampling(1.0))
    first = decoder.run([Request(PROMPTS[33], 20, seed=3)])[0].tokens
    size = decoder._cache.bytes
    for n in (5, 17, 33, 5, 1):
        decoder.run([Request([3] * n, 50 if n == 17 else 3)])
    assert decoder._cache.bytes == size
    assert decoder.run([Request(PROMPTS[33], 20, seed=3)])[0].tokens == first


def test_bad_prompts_are_refused(target):
    from draftstill.errors import DraftstillError

    decoder = Decoder(Network(target))
    for prompt in ([], [96], [-1], [1] * 256):
        with pytest.raises(DraftstillError):
            decoder.run([Request(prompt, 3)])


def test_refuses_models_it_would_run_wrongly():
    from transformers import AutoModelForCausalLM, BloomConfig, MambaConfig, MixtralConfig

    from draftstill.errors import DraftstillError

    small = {
        "vocab_size": 16,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    for config in (MambaConfig(state_size=4, **small), BloomConfig(n_layer=1, n_head=2, **small),
                   MixtralConfig(intermediate_size=8, num_key_value_heads=2, num_local_experts=2, **small)):  # fmt: skip
        model = AutoModelForCausalLM.from_config(config)
        for key in ("target.source", "draft.source"):
            with pytest.raises(DraftstillError, match=f"{key}: models of type {config.model_type!r}"):
                Network(model, key=key)


def test_a_cast_model_keeps_its_rotary_angles():
    """Module.to(bfloat16) casts the frequency buffer as well; at position 2,000 the angle would be off by radians."""
    exact, cast = Network(make_model(positions=4096)), Network(make_model(positions=4096).to(torch.bfloat16))
    exact.new_cache(1, 3000), cast.new_cache(1, 3000)
    assert torch.equal(cast.cos, exact.cos.to(torch.bfloat16)) and torch.equal(cast.sin, exact.sin.to(torch.bfloat16))
