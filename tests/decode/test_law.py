"""Each row of a block gets the law of its own settings: against transformers' processors, position by position."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draftstill.decode.sampling import Law, Sampling, Text, probabilities
from draftstill.errors import DraftstillError
from tests.decode.conftest import make_model

V, S, EOS = 23, 24, (4, 9)
KEPT = torch.tensor([0, 2, 3, 4, 7, 8, 11, 12, 15, 20, 22])
ALONE = [
    Sampling(0.0), Sampling(0.6), Sampling(1.0, top_k=5), Sampling(1.0, top_p=0.7), Sampling(1.0, min_p=0.2),
    Sampling(1.0, repetition_penalty=1.7), Sampling(1.0, repetition_penalty=0.6), Sampling(1.0, no_repeat_ngram=1),
    Sampling(1.0, no_repeat_ngram=2), Sampling(1.0, no_repeat_ngram=3), Sampling(1.0, min_new_tokens=3),
    Sampling(1.0, logit_bias=((3, 4.0), (8, -math.inf), (21, -2.0))),
]  # fmt: skip
TOGETHER = [
    Sampling(0.7, 6, 0.8, 0.1, 1.5, 2, 4, ((7, 2.5),)),
    Sampling(0.0, 0, 1.0, 0.0, 1.3, 3, 2, ((2, 1.0), (9, 3.0))),
    Sampling(1.4, 0, 0.9, 0.05, 1.0, 1, 0, ()),
    Sampling(0.9, 100, 1.0, 0.3, 1.2, 0, 6, ((22, -1.0),)),
]


def block(rows: int, positions: int, seed: int = 0, columns: int = V) -> tuple[torch.Tensor, Text]:
    """Random logits and repetitive texts of different lengths, with garbage past their ends."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 10, (rows, S), generator=g)
    length = torch.randint(1, S - positions + 1, (rows,), generator=g)
    length[0] = min(2, S - positions + 1)  # shorter than some n-grams
    prompt = (length - torch.randint(0, 4, (rows,), generator=g)).clamp_min(1)
    return 3 * torch.randn(rows, positions, columns, generator=g), Text(ids, length, prompt)


def oracle(s: Sampling, logits_V: torch.Tensor, ids: list[int], prompt: int, kept: torch.Tensor | None = None):
    """(scores, law) of one position by transformers, in its order; a trimmed draft is a whole one whose other ids are cut off."""
    first = LogitsProcessorList()
    if s.logit_bias:
        first.append(SequenceBiasLogitsProcessor({(i,): v for i, v in s.logit_bias}))
    if s.repetition_penalty != 1:
        first.append(RepetitionPenaltyLogitsProcessor(s.repetition_penalty))
    if s.no_repeat_ngram:
        first.append(NoRepeatNGramLogitsProcessor(s.no_repeat_ngram))
    if s.min_new_tokens:
        first.append(MinNewTokensLengthLogitsProcessor(prompt, s.min_new_tokens, list(EOS)))
    whole = logits_V
    if kept is not None:
        whole = torch.zeros(V).index_copy_(0, kept, logits_V)
    text = torch.tensor([ids])
    scores = first(text, whole[None])
    if kept is not None:
        scores = scores[:, kept]
    if s.greedy:
        return scores[0], torch.nn.functional.one_hot(scores[0].argmax(), scores.shape[1]).float()
    then = LogitsProcessorList()
    if s.temperature != 1:
        then.append(TemperatureLogitsWarper(s.temperature))
    if s.top_k:
        then.append(TopKLogitsWarper(s.top_k))
    if s.top_p < 1:
        then.append(TopPLogitsWarper(s.top_p))
    if s.min_p:
        then.append(MinPLogitsWarper(s.min_p))
    return scores[0], then(text, scores)[0].softmax(-1)


def apply(law: Law, logits: torch.Tensor, text: Text | None) -> tuple[torch.Tensor, torch.Tensor]:
    scores = law.scores(logits, text)
    return scores, law.probabilities(scores)


def check(samplings: list[Sampling], positions: int, seed: int, ids_K: torch.Tensor | None = None, **kw) -> None:
    logits, text = block(len(samplings), positions, seed, V if ids_K is None else len(ids_K))
    scores, laws = apply(Law.of(samplings, vocab=V, device="cpu", eos=EOS, ids_K=ids_K, **kw), logits, text)
    for b, s in enumerate(samplings):
        for i in range(positions):
            ids = text.ids_BS[b, : text.length_B[b] + i].tolist()
            want_scores, want_law = oracle(s, logits[b, i], ids, text.prompt_B[b].item(), ids_K)
            if want_scores.max() > -torch.inf:
                assert torch.equal(scores[b, i], want_scores), (s, b, i)
                assert torch.equal(laws[b, i] > 0, want_law > 0), (s, b, i)
                assert torch.allclose(laws[b, i], want_law, atol=1e-6), (s, b, i)


@pytest.mark.parametrize("ids_K", [None, KEPT], ids=["whole", "trimmed"])
@pytest.mark.parametrize("sampling", ALONE + TOGETHER, ids=str)
def test_every_setting_equals_transformers(sampling, ids_K):
    for seed, (rows, positions) in enumerate([(1, 1), (3, 4), (2, 5)]):
        for packed in (False, True):
            check([sampling] * rows, positions, seed, ids_K, packed=packed)


@pytest.mark.parametrize("ids_K", [None, KEPT], ids=["whole", "trimmed"])
def test_rows_of_different_settings_equal_transformers(ids_K):
    every = ALONE + TOGETHER
    for seed in range(30):
        g = torch.Generator().manual_seed(seed)
        rows, positions = 1 + seed % 4, 1 + seed % 5
        check([every[i] for i in torch.randint(len(every), (rows,), generator=g)], positions, seed, ids_K)


@pytest.mark.parametrize("columns", [V, 1031])
def test_a_row_has_the_bits_of_its_own_batch(columns):
    """Beside other settings, packed, or alone as plain numbers."""
    every = ALONE + TOGETHER
    logits, text = block(len(every), 4, 3, columns)
    mixed = Law.of(every, vocab=columns, device="cpu", eos=EOS)
    assert mixed.uniform is None
    scores, laws = apply(mixed, logits, text)
    for b, s in enumerate(every):
        own = Text(text.ids_BS[b : b + 1], text.length_B[b : b + 1], text.prompt_B[b : b + 1])
        for packed in (False, True):
            law = Law.of([s], vocab=columns, device="cpu", eos=EOS, packed=packed)
            assert law.uniform == (None if packed else s)
            alone_scores, alone = apply(law, logits[b : b + 1], own)
            assert torch.equal(alone, laws[b : b + 1]), s
            # A position with nothing left to choose from is only mended for those who sample.
            assert torch.equal(alone_scores, scores[b : b + 1]) or s.greedy
        if not s.needs_text and not s.logit_bias:
            assert torch.equal(probabilities(logits[b : b + 1], s), laws[b : b + 1])


def test_what_changes_nothing_costs_nothing():
    logits, _ = block(2, 3)
    for s in (Sampling(0.0), Sampling(0.7, 5, 0.9, 0.1)):
        law = Law.of([s, s], vocab=V, device="cpu")
        assert law.scores(logits, None) is logits and law.greedy == s.greedy and not law.needs_text
    bias = Law.of([Sampling(0.0, logit_bias=((3, 100.0),))], vocab=V, device="cpu")
    assert not bias.needs_text and (bias.scores(logits[:1], None).argmax(-1) == 3).all()
    assert Law.of([Sampling(0.0), Sampling(0.0, top_k=3)], vocab=V, device="cpu").greedy
    # Room for other settings is for rows that can be set.
    plain = Law.of([Sampling(1.0)] * 2, vocab=V, device="cpu", features=["no_repeat_ngram", "logit_bias"], longest_ngram=3)
    assert plain.scores(logits, None) is logits


def test_top_k_keeps_ties_and_greedy_the_first():
    logits = torch.tensor([[[1.0, 3.0, 3.0, 2.0, 2.0, 0.0]]])
    for packed in (False, True):
        law = Law.of([Sampling(1.0, top_k=3)], vocab=6, device="cpu", packed=packed)
        assert (law.probabilities(logits)[0, 0] > 0).tolist() == [False, True, True, True, True, False]
        greedy = Law.of([Sampling(0.0)], vocab=6, device="cpu", packed=packed, features=["temperature"] if packed else ())
        assert greedy.probabilities(logits)[0, 0].tolist() == [0, 1, 0, 0, 0, 0]


def test_a_position_with_every_token_banned_takes_the_first():
    text = Text(torch.tensor([[0, 1, 2, 3]]), torch.tensor([3]), torch.tensor([1]))
    logits = torch.tensor([[[0.5, 1.0, 2.0]]])
    for temperature in (0.0, 1.0):
        law = Law.of([Sampling(temperature, no_repeat_ngram=1)], vocab=3, device="cpu")
        assert apply(law, logits, text)[1].tolist() == [[[1, 0, 0]]]
    assert Law.of([Sampling(1e-40)], vocab=3, device="cpu").probabilities(logits).tolist() == [[[0, 0, 1]]]


@pytest.mark.parametrize("ids_K", [None, KEPT], ids=["whole", "trimmed"])
def test_padding_never_matters(ids_K):
    logits, text = block(4, 3, 5, V if ids_K is None else len(ids_K))
    law = Law.of(TOGETHER, vocab=V, device="cpu", eos=EOS, ids_K=ids_K)
    before = apply(law, logits, text)
    for garbage in (-1, 0, 5, V, 2**40):
        ids = text.ids_BS.clone()
        ids[torch.arange(S) >= text.length_B[:, None] + 2] = garbage
        wider = torch.cat([ids, torch.full((4, 9), garbage)], 1)
        for buffer in (ids, wider):
            after = apply(law, logits, Text(buffer, text.length_B, text.prompt_B))
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("largest", [None, 100])
@pytest.mark.parametrize("ids_K", [None, KEPT], ids=["whole", "trimmed"])
def test_set_equals_a_fresh_law(ids_K, largest):
    every = ALONE + TOGETHER
    features = frozenset().union(*(s.features for s in every))
    logits, text = block(3, 4, 7, V if ids_K is None else len(ids_K))
    room = {"packed": True, "features": features, "longest_ngram": 3, "largest_top_k": largest}
    law = Law.of([Sampling(0.0)] * 3, vocab=V, device="cpu", eos=EOS, ids_K=ids_K, **room)
    two = law.rows(slice(0, 2))
    for n, s in enumerate(every):
        law.set(1, s)
        law.set(2, every[n - 1])
        fresh = Law.of([Sampling(0.0), s, every[n - 1]], vocab=V, device="cpu", eos=EOS, ids_K=ids_K)
        assert torch.equal(apply(law, logits, text)[1], apply(fresh, logits, text)[1])
        part = Text(text.ids_BS[:2], text.length_B[:2], text.prompt_B[:2])
        assert torch.equal(apply(two, logits[:2], part)[1], apply(fresh, logits, text)[1][:2])
    assert law.fits(Sampling(top_k=101)) == (largest is None) and law.fits(Sampling(0.0, top_k=101))
    assert not law.fits(Sampling(no_repeat_ngram=4)) and not Law.of([Sampling(0.0)], vocab=V, device="cpu").fits(Sampling(0.0))
    with pytest.raises(AssertionError, match="no room"):
        Law.of([Sampling(0.0)], vocab=V, device="cpu", packed=True).set(0, Sampling(1.0))


@pytest.mark.parametrize("ids_K", [None, KEPT], ids=["whole", "trimmed"])
@pytest.mark.parametrize("samplings", [TOGETHER[:1] * 3, TOGETHER[1:2] * 3, [Sampling(0.8, top_k=4)] * 3, TOGETHER[:3]], ids=len)
def test_compiles_whole(samplings, ids_K):
    logits, text = block(3, 3, 2, V if ids_K is None else len(ids_K))
    for packed in (False, True):
        law = Law.of(samplings, vocab=V, device="cpu", eos=EOS, ids_K=ids_K, packed=packed)

        @torch.compile(fullgraph=True, backend="aot_eager", dynamic=False)
        def compiled(logits, ids, length, prompt, law=law):
            return apply(law, logits, Text(ids, length, prompt))

        with torch.inference_mode():
            got = compiled(logits, text.ids_BS, text.length_B, text.prompt_B)
            assert all(torch.equal(a, b) for a, b in zip(got, apply(law, logits, text), strict=True))
            if law.uniform is None:  # what set() writes, the compiled function sees
                law.set(0, samplings[-1])
                again = compiled(logits, text.ids_BS, text.length_B, text.prompt_B)
                assert all(torch.equal(a, b) for a, b in zip(again, apply(law, logits, text), strict=True))
    torch.compiler.reset()


@pytest.mark.parametrize(
    "key, bad",
    [
        ("temperature", -0.1), ("temperature", math.inf), ("temperature", math.nan), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.1),
        ("min_p", -0.1), ("min_p", 1.1), ("repetition_penalty", 0.0), ("repetition_penalty", math.nan), ("no_repeat_ngram", -1),
        ("min_new_tokens", -1), ("logit_bias", ((-1, 0.0),)), ("logit_bias", ((1, math.inf),)), ("logit_bias", ((1, math.nan),)),
        ("logit_bias", ((1, 0.0), (1, 2.0))),
    ],
)  # fmt: skip
def test_bad_settings_are_refused_by_key(key, bad):
    with pytest.raises(DraftstillError, match=key) as error:
        Sampling(**{key: bad})
    assert error.value.key == key and error.value.mend


def test_a_biased_id_must_exist():
    with pytest.raises(DraftstillError, match="logit_bias") as error:
        Law.of([Sampling(logit_bias=((V, 1.0),))], vocab=V, device="cpu", ids_K=KEPT)
    assert error.value.value == V


def test_position_by_position_is_generate():
    """transformers' own loop, with every processor of greedy texts."""
    model, prompt, new, eos = make_model(), [5, 6, 7, 5, 6], 40, [11, 30]
    settings = Sampling(
        0.0, repetition_penalty=1.5, no_repeat_ngram=2, min_new_tokens=12, logit_bias=((3, 30.0), (11, 40.0), (8, -math.inf))
    )
    want = model.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=new, repetition_penalty=1.5, no_repeat_ngram_size=2, min_new_tokens=12,
        sequence_bias=[[[i], v] for i, v in settings.logit_bias], eos_token_id=eos, pad_token_id=0,
    )[0, len(prompt) :].tolist()  # fmt: skip

    law = Law.of([settings], vocab=96, device="cpu", eos=eos)
    buffer, written = torch.full((1, 64), -7), list(prompt)
    with torch.inference_mode():
        while len(written) < len(prompt) + new and (len(written) == len(prompt) or written[-1] not in eos):
            buffer[0, : len(written)] = torch.tensor(written)
            logits = model(torch.tensor([written])).logits[:, -1:]
            scores = law.scores(logits, Text(buffer, torch.tensor([len(written)]), torch.tensor([len(prompt)])))
            written.append(scores.argmax().item())
        # All of it as one block: what a verifying target computes.
        T = len(written) - len(prompt)
        logits = model(torch.tensor([written[:-1]])).logits[:, len(prompt) - 1 :]
        buffer[0, : len(written)] = torch.tensor(written)
        scores = law.scores(logits, Text(buffer, torch.tensor([len(prompt)]), torch.tensor([len(prompt)])))
    assert written[len(prompt) :] == want and len(want) > 12
    assert scores.shape[1] == T and scores.argmax(-1)[0].tolist() == want
    plain = Law.of([dataclasses.replace(settings, repetition_penalty=1.0, no_repeat_ngram=0)], vocab=96, device="cpu", eos=eos)
    text = Text(buffer, torch.tensor([len(prompt)]), torch.tensor([len(prompt)]))
    assert plain.scores(logits, text).argmax(-1)[0].tolist() != want, "the processors did nothing: the test shows nothing"
