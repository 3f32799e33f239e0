"""Every supported family runs as transformers runs it, and what would run wrongly is refused by name."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, T5Config, T5ForConditionalGeneration

from draftstill.decode import Decoder, ModelDrafter, Network, Request, refuse_unsupported
from draftstill.decode.encdec import EncoderDecoderNetwork, make_network
from draftstill.decode.families import DECODER_ONLY, SUPPORTED, plain_head
from draftstill.decode.layers import Linear, can_pack, pack
from draftstill.decode.network import prefill
from draftstill.decode.trace import metrics
from draftstill.errors import DraftstillError
from tests.decode.conftest import FAMILIES, make_model, noised
from tests.decode.test_greedy import cache_free, oracle

MAIN = ["mistral_window", "qwen3_window", "gemma", "gemma2", "gemma3", "gpt2", "gpt_neox", "opt", "phi"]
"""One of each: what is slow runs on these."""
LENGTHS = (1, 2, 7, 8, 9, 33)
PROMPTS = {n: torch.randint(1, 96, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in LENGTHS}


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, atol=1e-5 * b.abs().max().item(), rtol=1e-5)


def in_pieces(net: Network, ids: torch.Tensor, cuts=(0, 20, 21, 25, 40)) -> torch.Tensor:
    cache = net.new_cache(1, 64)
    return net.logits(torch.cat([net.forward(ids[:, a:b], cache, [a]) for a, b in itertools.pairwise(cuts)], 1))


def test_every_supported_family_is_tested():
    kinds = {maker.model_type for maker, _ in FAMILIES.values()}
    assert kinds == set(DECODER_ONLY)
    assert {FAMILIES[k][0].model_type for k in MAIN} >= kinds - {"llama", "qwen2"}


@pytest.mark.parametrize("kind", FAMILIES)
def test_forward_equals_transformers(kind):
    model = make_model(kind, layers=3)
    net = Network(model)
    ids = torch.randint(0, 96, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        truth = model(ids).logits
    assert close(in_pieces(net, ids), truth)
    assert truth.std() > 0.1 and net.logits(torch.zeros(net.hidden)).shape == (96,)
    assert net.parameters == sum(p.numel() for p in model.parameters()) - 2 * 32 * (model.config.model_type == "opt")


@pytest.mark.parametrize("kind", MAIN)
def test_rows_at_their_own_positions_equal_each_alone(kind):
    """Below, at and above the window; starts as host integers and as a tensor (static shapes)."""
    net = Network(make_model(kind))
    texts = [torch.randint(0, 96, (1, n + 4), generator=torch.Generator().manual_seed(n)) for n in (3, 7, 8, 25)]
    starts = [t.shape[1] - 4 for t in texts]
    alone = []
    for text, start in zip(texts, starts, strict=True):
        cache = net.new_cache(1, 40)
        net.forward(text[:, :start], cache, [0])
        alone.append(net.forward(text[:, start:], cache, [start]))
    for form, width in itertools.product((list, torch.tensor), (4, 1)):
        cache = net.new_cache(5, 40)
        for row, (text, start) in enumerate(zip(texts, starts, strict=True)):
            net.forward(text[:, :start], cache.view(row, 1), [0])
        ids = torch.cat([t[:, -4:] for t in texts])
        got = torch.cat([net.forward(ids[:, i : i + width], cache, form([s + i for s in starts])) for i in range(0, 4, width)], 1)
        assert close(got, torch.cat(alone))


@pytest.mark.parametrize("kind", MAIN)
def test_greedy_equals_transformers_and_speculation_changes_nothing(kind):
    model = make_model(kind, layers=3)
    draft = noised(model, 0.3)
    plain = Decoder(Network(model))
    truth = {}
    for n, prompt in PROMPTS.items():
        truth[n] = plain.run([Request(prompt, 12)])[0].tokens
        assert truth[n] == oracle(model, prompt, 12)
        assert n == 33 or truth[n] == cache_free(model, prompt, 12)
    traces = []
    for gamma in (1, 3, 6):
        decoder = Decoder(Network(model), ModelDrafter(Network(draft), gamma), gamma=gamma)
        for n, prompt in PROMPTS.items():
            traces += decoder.run([Request(prompt, 12)])
            assert traces[-1].tokens == truth[n], (gamma, n)
    m = metrics(traces)
    assert 0 < m["accepted"] < m["proposed"]


@pytest.mark.parametrize("kind", ["gemma2", "gemma3", "gpt2", "phi"])
def test_the_static_forward_compiles_whole(kind):
    net = Network(make_model(kind))
    step = torch.compile(
        lambda ids, starts: net.logits(net.forward(ids, cache, starts)), fullgraph=True, backend="aot_eager", dynamic=False
    )
    ids = torch.randint(0, 96, (2, 3), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        for starts in ([0, 4], [11, 2]):
            cache = net.new_cache(2, 16)
            got = step(ids, torch.tensor(starts))
            cache = net.new_cache(2, 16)
            assert close(got, net.logits(net.forward(ids, cache, starts)))


@pytest.mark.parametrize("kind", FAMILIES)
def test_bfloat16_is_as_near_to_float32_as_transformers_is(kind):
    model = make_model(kind)
    ids = torch.randint(0, 96, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        exact = model(ids).logits
        theirs = model.to(torch.bfloat16)(ids).logits.float()
    ours = in_pieces(Network(model), ids)
    error = lambda a, b: (a - b).pow(2).mean().sqrt().item()  # noqa: E731
    assert error(ours, theirs) < 1.5 * error(theirs, exact) and error(ours, exact) < 1.3 * error(theirs, exact)


@pytest.mark.parametrize("kind", ["gemma2", "gpt2", "phi"])
def test_padded_vocabularies_and_kept_ids(kind):
    target, draft = make_model(kind), noised(make_model(kind), 0.1)
    with torch.no_grad():
        for m in (target, draft):
            m.lm_head.weight[90:] *= 100
    kept = torch.arange(0, 90, 2)
    whole, small = Network(draft, vocab=90), Network(draft, vocab=90, head_ids=kept)
    hidden = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    assert close(small.logits(hidden), whole.logits(hidden)[:, kept]) and whole.logits(hidden).shape == (3, 90)
    assert (whole.parameters - small.parameters) == 90 * 32 + (45 if kind == "phi" else 0)
    net = Network(target, vocab=90)
    plain = Decoder(net).run([Request([1, 2, 3], 20)])[0].tokens
    got = Decoder(net, ModelDrafter(small, 3), gamma=3).run([Request([1, 2, 3], 20)])[0]
    assert got.tokens == plain and max(plain) < 90 and metrics([got])["proposed"] > 0


@pytest.mark.parametrize("kind", ["gpt2", "opt"])
def test_learned_positions_end_where_the_draft_does(kind):
    target, short = make_model(kind, positions=128), make_model(kind, positions=32)
    assert Network(short).max_positions == 32
    for n in (20, 32, 40):
        prompt = torch.randint(1, 96, (n,), generator=torch.Generator().manual_seed(n)).tolist()
        truth = Decoder(Network(target)).run([Request(prompt, 40)])[0].tokens
        assert truth == oracle(target, prompt, 40)
        trace = Decoder(Network(target), ModelDrafter(Network(short), 4), gamma=4).run([Request(prompt, 40)])[0]
        assert trace.tokens == truth and trace.drafting_stopped > 0
        assert (metrics([trace])["proposed"] > 0) == (n <= 32)
    last = Decoder(Network(target), ModelDrafter(Network(short), 4), gamma=4).run([Request([5] * 120, 40)])[0]
    assert last.finish == "context" and len(last.tokens) == 8
    assert last.tokens == oracle(target, [5] * 120, 8)


# Refusals.

REFUSED = {
    "mamba": ({}, "recurrent or convolutional state"), "mamba2": ({}, "recurrent or convolutional state"),
    "lfm2": ({}, "recurrent or convolutional state"), "lfm3": ({}, r"state \(conv\)"), "qwen3_next": ({}, r"state \(linear_attention\)"),
    "jamba": ({}, "recurrent or convolutional state"), "recurrent_gemma": ({}, "recurrent or convolutional state"),
    "rwkv": ({}, "recurrent or convolutional state"), "falcon_h1": ({}, "recurrent or convolutional state"),
    "bamba": ({}, "recurrent or convolutional state"), "qwen3_5": ({}, r"state \(linear_attention\)"), "minimax": ({}, r"state \(linear_attention\)"),
    "mixtral": ({}, r"'mixtral' \(mixture of experts\)"), "qwen3_moe": ({}, r"'qwen3_moe' \(mixture of experts\)"),
    "gemma3": ({}, "model_type 'gemma3_text'"), "llava": ({}, "model_type 'llama'"), "bart": ({}, "'bart' are not supported by the decoder"),
    "phi3": ({}, "supported: llama, mistral"), "cohere2": ({}, "'cohere2'"), "olmo2": ({}, "'olmo2'"),
    "llama": ({"hidden_act": "tanh"}, "activation 'tanh'"),
    "mistral": ({"layer_types": ["sliding_attention"], "num_hidden_layers": 1}, "layers of type sliding_attention"),
    "qwen2": ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rotary scaling 'dynamic'"),
    "qwen3": ({"sliding_window": None, "layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}, "without sliding_window"),
    "gemma": ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    "gemma2": ({"clip_qkv": 8.0}, "clip_qkv"), "gemma3_text": ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    "gpt2": ({"add_cross_attention": True}, "add_cross_attention"), "gpt_neox": ({"logit_scale": 0.5}, "logit_scale"),
    "opt": ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantization_config"), "phi": ({"hidden_act": "mish"}, "activation 'mish'"),
    "t5": ({"feed_forward_proj": "gated-tanh"}, "activation 'tanh'"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_refuses_by_name(kind):
    switches, says = REFUSED[kind]
    config = AutoConfig.for_model(kind, **switches)
    with pytest.raises(DraftstillError, match=says) as caught:
        refuse_unsupported(config, "draft.source")
    assert f"{kind!r}" in caught.value.problem and caught.value.key == "draft.source" and caught.value.mend
    assert kind in SUPPORTED or all(k in str(caught.value) for k in SUPPORTED)


def test_refuses_rotary_scaling_of_one_layer_type_and_partial_rotary():
    gemma = AutoConfig.for_model("gemma3_text")
    refuse_unsupported(gemma)
    gemma.rope_parameters["full_attention"] = {"rope_type": "longrope", "rope_theta": 1e6}
    with pytest.raises(DraftstillError, match="'gemma3_text' with rotary scaling 'longrope'"):
        refuse_unsupported(gemma)
    with pytest.raises(DraftstillError, match="'llama' with partial_rotary_factor 0.5"):
        refuse_unsupported(AutoConfig.for_model("llama", partial_rotary_factor=0.5))


def test_refuses_code_that_transformers_does_not_have():
    model = make_model("llama")
    model.__class__ = type("OwnForCausalLM", (type(model),), {})
    with pytest.raises(DraftstillError, match="'llama' model runs code of its own"):
        Network(model)


def test_heads_that_are_more_than_a_product_say_so():
    plain = {k for k in FAMILIES if Network(make_model(k)).plain_head}
    assert set(FAMILIES) - plain == {"gemma2", "phi", "phi_norms"}
    assert plain == {k for k in FAMILIES if plain_head(make_model(k).config)} and not plain_head(T5Config())


# Encoder and decoder.


def t5(gated=True, scaled=True, seed=0, **extra):
    torch.manual_seed(seed)
    config = T5Config(
        vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=3, num_heads=4, relative_attention_num_buckets=8,
        relative_attention_max_distance=20, feed_forward_proj="gated-gelu" if gated else "relu", pad_token_id=0, eos_token_id=None,
        decoder_start_token_id=0, n_positions=64, **({} if scaled else {"tie_word_embeddings": False}), **extra,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        model.lm_head.weight = torch.nn.Parameter(torch.randn(96, 32))
        for name, p in model.named_parameters():
            if "relative_attention_bias" in name:
                p.mul_(8)
            elif p.dim() == 1:
                p.add_(0.1 * torch.randn_like(p))
            elif name.endswith(("SelfAttention.q.weight", "EncDecAttention.q.weight")):
                p.mul_(3)
    return model


SOURCES = [torch.randint(1, 96, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (1, 5, 12, 30)]


@pytest.mark.parametrize("gated, scaled", [(True, True), (True, False), (False, True)])
def test_t5_equals_transformers(gated, scaled):
    model = t5(gated, scaled)
    net = make_network(model)
    assert isinstance(net, EncoderDecoderNetwork) and net.encoder and net.start_ids == [0] and net.max_positions == 64 and net.plain_head
    assert net.parameters == sum(p.numel() for p in model.parameters())
    width = max(map(len, SOURCES))
    source = torch.tensor([s + [0] * (width - len(s)) for s in SOURCES])
    ids = torch.randint(0, 96, (len(SOURCES), 40), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        truth = model(input_ids=source, attention_mask=(source != 0).long(), decoder_input_ids=ids).logits
        cache = net.new_cache(len(SOURCES) + 1, 48, source=width + 3)
        net.read(cache, 0, SOURCES)
        pieces = [net.forward(ids[:, a:b], cache, [a] * len(SOURCES)) for a, b in itertools.pairwise([0, 20, 21, 25, 40])]
        assert close(net.logits(torch.cat(pieces, 1)), truth)
        # Texts that begin alike keep the sources of their rows.
        for count in (0, 6):
            net.read(cache, 0, SOURCES)
            prefill(net, cache, 0, [ids[0, :count].tolist()] * len(SOURCES))
            got = net.logits(net.forward(ids[:1, count : count + 1].expand(len(SOURCES), 1), cache, [count] * len(SOURCES)))
            alike = model(
                input_ids=source, attention_mask=(source != 0).long(), decoder_input_ids=ids[:1, : count + 1].expand(len(SOURCES), -1)
            )
            assert close(got, alike.logits[:, -1:])
        # Rows of their own position, host integers and static; rows read one by one, and one moved to another place.
        for form in (list, torch.tensor):
            cache = net.new_cache(len(SOURCES) + 1, 48, source=width)
            for row in range(len(SOURCES)):
                place = len(SOURCES) if row == 0 else row
                net.read(cache, place, SOURCES[row : row + 1])
                net.forward(ids[row : row + 1, : 5 + 7 * row], cache.view(place, 1), [0])
            cache.move(len(SOURCES), 0, 5)
            starts = [5 + 7 * row for row in range(len(SOURCES))]
            for width_T in (3, 1):
                new = torch.stack([ids[row, s : s + width_T] for row, s in enumerate(starts)])
                got = net.logits(net.forward(new, cache, form(starts)))
                assert close(got, torch.stack([truth[row, s : s + width_T] for row, s in enumerate(starts)]))


def test_t5_writes_what_generate_writes():
    model = t5()
    net = make_network(model, vocab=90)
    with torch.no_grad():
        model.lm_head.weight[90:] = 0
    written = set()
    for source in SOURCES:
        cache = net.new_cache(2, 32, source=len(source))
        with torch.inference_mode():
            net.read(cache, 0, [source, source])
            tokens = list(net.start_ids)
            for at in range(24):
                hidden = net.forward(torch.tensor([tokens[-1:]] * 2), cache, [at, at])
                best = net.logits(hidden)[:, -1].argmax(-1).tolist()
                assert best[0] == best[1]
                tokens.append(best[0])
        # transformers sizes its cache by the encoder's depth, so it cannot use one where the decoder is deeper.
        truth = model.generate(torch.tensor([source]), attention_mask=torch.ones(1, len(source), dtype=torch.long), max_new_tokens=24,
                               do_sample=False, use_cache=False)  # fmt: skip
        assert truth[0].tolist() == tokens
        written |= set(tokens)
    assert len(written) > 8


def test_t5_compiles_in_bfloat16_and_refuses_what_it_must():
    model = t5()
    ids = torch.randint(0, 96, (1, 12), generator=torch.Generator().manual_seed(3))
    ask = {"input_ids": torch.tensor([SOURCES[2]]), "decoder_input_ids": ids}
    with torch.no_grad():
        exact = model(**ask).logits
        theirs = model.to(torch.bfloat16)(**ask).logits.float()
        net = make_network(model)
        cache = net.new_cache(1, 16, source=12)
        net.read(cache, 0, SOURCES[2:3])
        step = torch.compile(
            lambda ids, starts: net.logits(net.forward(ids, cache, starts)), fullgraph=True, backend="aot_eager", dynamic=False
        )
        ours = step(ids, torch.tensor([0]))
    error = lambda a, b: (a - b).pow(2).mean().sqrt().item()  # noqa: E731
    assert error(ours, theirs) < 1.5 * error(theirs, exact)
    for sources in ([[]], [[1] * 13]):
        with pytest.raises(AssertionError, match="room for 1 to 12"):
            net.read(cache, 0, sources)
    with pytest.raises(DraftstillError, match="'t5' have an encoder"):
        Network(model)
    with pytest.raises(DraftstillError, match="float16"):
        make_network(model.to(torch.float16))
    assert type(make_network(make_model())) is Network and not Network.encoder
    refuse_unsupported(AutoConfig.for_model("t5"))
    with pytest.raises(ValueError, match="T5Config"):  # loaded another way than a causal model
        AutoModelForCausalLM.from_config(T5Config())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_packed_maps_are_the_plain_ones(dtype, bias):
    """However many rows: each row's result is that of the plain product, within the rounding of its dtype."""
    if not can_pack(dtype):
        pytest.skip("no packed kernels for this dtype here")
    generator = torch.Generator().manual_seed(0)
    plain = Linear(torch.randn(70, 48, generator=generator).to(dtype), torch.randn(70, generator=generator).to(dtype) if bias else None)
    laid_out = pack(plain)
    for shape in ((1, 1), (1, 2), (1, 3), (2, 1), (4, 1), (1, 7), (3, 5), (1, 40)):
        x = torch.randn(*shape, 48, generator=generator).to(dtype)
        exact = torch.nn.functional.linear(x.double(), plain.weight.double(), None if plain.bias is None else plain.bias.double())
        error = (laid_out(x).double() - exact).abs().max()
        assert laid_out(x).shape == exact.shape and error <= (plain(x).double() - exact).abs().max() * 2 + 1e-5


def test_packing_is_an_option_and_is_told(monkeypatch):
    model = make_model("llama")
    plain = Network(model, pack_weights=False)
    assert not plain.packed and Network(model).packed == can_pack(torch.float32)
    assert plain.parameters == Network(model).parameters == sum(p.numel() for p in model.parameters())
    monkeypatch.setattr("draftstill.decode.network.can_pack", lambda dtype: False)
    (trace,) = Decoder(Network(model)).run([Request([1, 2, 3], 12)])
    assert trace.engine["packed"] is False and trace.tokens == Decoder(plain).run([Request([1, 2, 3], 12)])[0].tokens
