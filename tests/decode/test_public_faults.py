"""Faults that other decoders and benchmarks were reported for: each row of the list is a kind, and is shown here or where COVERED says.

Sources stand in the docstrings.
"""

from __future__ import annotations

import ast
import importlib
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from draftstill.decode import (
    AdaptiveGamma,
    Decoder,
    LookupDrafter,
    ModelDrafter,
    Network,
    Request,
    Sampling,
)
from draftstill.decode.trace import Trace, check, metrics
from tests.decode.conftest import make_model, noised, small_model
from tests.decode.faults import BACKENDS, CPU, KINDS, ROOT, SHOWN, decoder, drafter_of, identities, prompt_of, shows
from tests.decode.test_greedy import cache_free, oracle
from tests.decode.test_law import oracle as processed
from tests.decode.test_sampling import chi_squared, two_token_law

ROWS = [1, 2, 4, 5, 7, 8, 10, 11, 13, 14, 16, 17, 19, 20, 22, 23, 25, 26, 28, 29, 31, 32, 34, 35, 37, 38]
COVERED: dict[int, tuple[str, ...]] = {
    4: ("tests/decode/test_greedy.py::test_eos_ends_the_text_wherever_it_falls",),
    5: ("tests/decode/test_greedy.py::test_length_limit_is_exact", "tests/decode/test_greedy.py::test_repetitive_prompt_is_looked_up"),
    8: ("tests/decode/test_sampling.py::test_residual_keeps_its_precision", "tests/decode/test_sampling.py::test_whole_law_of_one_round_by_enumeration"),
    17: ("tests/decode/test_trace.py::test_every_metric_on_a_known_trace",),
    19: ("tests/decode/test_greedy.py::test_draft_with_a_shorter_context_stops_drafting",
         "tests/decode/test_families.py::test_learned_positions_end_where_the_draft_does", "tests/decode/test_greedy.py::test_target_context_ends_the_text"),
    28: ("tests/decode/test_sampling.py::test_first_two_tokens_follow_the_target", "tests/decode/test_sampling.py::test_q_is_the_law_that_was_sampled"),
    35: ("tests/decode/test_static.py::test_asking_for_graphs_without_cuda_is_said", "tests/decode/test_static.py::test_programs_compile_whole"),
}  # fmt: skip
"""Rows that are shown whole elsewhere. Of row 28, a temperature of the draft's own is not offered: p and q share one ``Sampling``."""
NOT_OFFERED = {38: "no call returns scores or log-probabilities; text never goes on behind EOS (row 4)"}
pytestmark = pytest.mark.usefixtures("uncompiled")


def test_every_row_of_the_list_is_shown():
    """Each row has a test here, or tests elsewhere that exist, or is about something that is not offered."""
    for path in Path(__file__).parent.glob("test_public_faults_*.py"):
        importlib.import_module(f"tests.decode.{path.stem}")
    assert set(SHOWN) | set(COVERED) | set(NOT_OFFERED) == set(ROWS)
    for places in COVERED.values():
        for path, name in (place.split("::") for place in places):
            assert name in {n.name for n in ast.parse((ROOT / path).read_text()).body if isinstance(n, ast.FunctionDef)}, (path, name)
    words = ("score", "logit", "prob")
    offered = {n for kind in (Trace, Request) for n in kind.__dataclass_fields__} | set(Decoder.run.__annotations__)
    assert not [n for n in offered if any(w in n for w in words)], "scores are returned: row 38 needs a test"


# --- counting ------------------------------------------------------------------------------------------------------------------


@shows(1, 16)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_counts_add_up_whoever_drafts_and_wherever_texts_end(small, kind, backend):
    """Nothing behind an end is counted as accepted or emitted, and no rate leaves [0, 1] (vllm#56101, sglang#11572)."""
    eos, ends, cut = [5, 9], set(), 0
    laws = [Sampling(0.0), Sampling(1.0), Sampling(0.7, top_k=6)]
    asked = [
        Request(prompt_of(1 + i % 5, i, 12), 1 + i % 12, seed=i, sampling=laws[i // 12 % 3], ignore_eos=i % 12 == 7) for i in range(36)
    ]
    truth = decoder(small[0], eos=eos, rows=36).run(asked)
    for gamma in (1, 2, 3, 4, 5, 6, 32) if backend == "eager" else (1, 4, 32):
        traces = decoder(small[0], drafter_of(kind, *small, gamma), backend, eos=eos, rows=36).run(asked)
        identities(traces, gamma)
        for t, r, plain in zip(traces, asked, truth, strict=True):
            stop = next((i for i, x in enumerate(t.tokens) if x in eos and not r.ignore_eos), None)
            assert (t.finish, len(t.tokens)) == (("length", r.max_new_tokens) if stop is None else ("eos", stop + 1))
            if r.sampling.greedy:
                assert (t.tokens, t.finish) == (plain.tokens, plain.finish)
            if kind == "self":
                assert all(x.accepted == x.proposed for x in t.rounds), "a draft equal to its target is always right"
            if r.max_new_tokens == 1:
                assert [x.proposed for x in t.rounds] == [0], "the one token is the target's own"
            ends |= {len(t.tokens)} if t.finish == "eos" else set()
            cut += sum(x.cut for x in t.rounds)
    assert len(ends) >= 6 and (cut > 0 or kind not in ("self", "model")), "texts ended in too few places: the test shows little"
    proposed = sum(r.proposed for t in traces for r in t.rounds)
    assert (proposed > 0) == (kind != "none")


@shows(26)
def test_the_first_token_is_an_ordinary_one(target, draft):
    """It is the target's, is checked for ends, and counts against the limit (litgpt#2307)."""
    for n in (1, 3):
        prompt = prompt_of(n)
        truth = oracle(target, prompt, 12)
        for backend, drafter in itertools.product(BACKENDS, (None, ModelDrafter(Network(draft), 4))):
            for count, trace in zip(
                range(1, 13), decoder(target, drafter, backend, rows=4).run([Request(prompt, c) for c in range(1, 13)]), strict=True
            ):
                assert trace.tokens == truth[:count]
            (ended,) = decoder(target, drafter, backend, eos=[truth[0]]).run([Request(prompt, 12)])
            assert ended.tokens == truth[:1] and ended.finish == "eos" and metrics([ended])["accepted"] <= 1


# --- laws ----------------------------------------------------------------------------------------------------------------------


def first_two(traces: list[Trace], vocab: int) -> np.ndarray:
    counts = np.zeros((vocab, vocab))
    for t in traces:
        counts[t.tokens[0], t.tokens[1]] += 1
    return counts.ravel()


@shows(2)
@pytest.mark.parametrize("sizes", [(16, 20), (20, 16)])
def test_padding_is_never_drafted_and_changes_no_law(sizes):
    """Heads of different sizes over one tokenizer, padding rows huge (HF#45307)."""
    target, draft = make_model(vocab=sizes[0], sharp=3.0), make_model(vocab=sizes[1], seed=8, layers=1, sharp=3.0)
    with torch.no_grad():
        for m in (target, draft):
            m.lm_head.weight[12:] *= 100
    net, small, prompt, proposed = Network(target, vocab=12), Network(draft, vocab=12), [3, 1, 4], set()

    class Watched(ModelDrafter):
        def propose(self, batch):
            offer = super().propose(batch)
            proposed.update([] if offer.proposal is None else offer.proposal.tokens_BG.unique().tolist())
            return offer

    plain = decoder(net).run([Request(prompt, 30)])[0].tokens
    assert decoder(net, Watched(small, 3)).run([Request(prompt, 30)])[0].tokens == plain and max(plain) < 12
    traces = decoder(net, Watched(small, 3), sampling=Sampling(1.0), rows=500).run([Request(prompt, 3, seed=s) for s in range(2000)])
    assert chi_squared(first_two(traces, 12), two_token_law(target, prompt, Sampling(1.0), 12).ravel()) > 1e-4
    assert proposed and max(proposed) < 12


@pytest.mark.parametrize("kind", ["confident", "adaptive"])
def test_deciding_how_much_to_draft_changes_no_law(small, kind):
    """A block that stops where the draft is unsure, and a gamma chosen from what was accepted, look at nothing that is not yet judged."""
    sampling, prompt = Sampling(1.0), [3, 1, 4, 1]
    net, draft, _ = small
    costs = {g: 1 + 0.3 * g for g in range(1, 5)}
    drafter = ModelDrafter(draft, 4, min_confidence=0.3) if kind == "confident" else ModelDrafter(
        draft, 4, policy=AdaptiveGamma(0.02, costs, 4, prior_alpha=0.4, prior_weight=1, probe_every=1))  # fmt: skip
    traces = decoder(net, drafter, sampling=sampling, rows=500).run([Request(prompt, 6, seed=s) for s in range(3000)])
    law = two_token_law(small_model(), prompt, sampling, 12)
    assert chi_squared(first_two(traces, 12), law.ravel()) > 1e-4
    # Later tokens, too: the law of the third given the first two, on the most frequent pair.
    pair = np.unravel_index(law.argmax(), law.shape)
    third = two_token_law(small_model(), [*prompt, *map(int, pair)], sampling, 12)
    after = [t for t in traces if tuple(t.tokens[:2]) == pair]
    counts = np.bincount([t.tokens[2] for t in after], minlength=12).astype(float)
    assert chi_squared(counts, third.sum(1)) > 1e-4
    widths = {r.proposed for t in traces for r in t.rounds[:2]}
    assert len(widths) > 2 and sum(r.accepted for t in traces for r in t.rounds) > 0, "always the same width: the test shows nothing"
    identities(traces[:200], 4)


@pytest.mark.parametrize("kind", ["model", "trimmed", "lookup", "composite"])
def test_laws_that_look_at_the_text_hold_inside_a_block(small, kind):
    """Penalty, bias, top-k and min-p: the second token's law knows the first, drafted or not. Enumerated with transformers' processors."""
    sampling = Sampling(0.9, top_k=8, min_p=0.02, repetition_penalty=1.4, logit_bias=((3, 1.5), (7, -2.0)))
    prompt, model = [3, 1, 4, 1, 5, 3, 1], small_model()
    with torch.no_grad():
        first = processed(sampling, model(torch.tensor([prompt])).logits[0, -1], prompt, len(prompt))[1]
        texts = [[*prompt, t] for t in range(12)]
        second = [
            processed(sampling, z, text, len(prompt))[1] for z, text in zip(model(torch.tensor(texts)).logits[:, -1], texts, strict=True)
        ]
    law = (first[:, None] * torch.stack(second)).double().numpy().ravel()
    plain = two_token_law(model, prompt, Sampling(0.9, top_k=8, min_p=0.02), 12).ravel()
    assert abs(law - plain).sum() > 0.2, "the processors did nothing: the test shows nothing"
    traces = decoder(small[0], drafter_of(kind, *small, 3), sampling=sampling, rows=500).run(
        [Request(prompt, 4, seed=s) for s in range(3000)]
    )
    assert chi_squared(first_two(traces, 12), law) > 1e-4
    assert sum(r.proposed for t in traces for r in t.rounds) > 0


@shows(14)
@pytest.mark.parametrize("backend", BACKENDS)
def test_processors_act_at_every_position_of_a_block(target, draft, backend):
    """Repetition penalty, banned n-grams and bias, as in transformers' generate (vllm#22987, #42744, #38467)."""
    prompt = [5, 6, 7, 5, 6, 7, 5]
    favourite = max(set(found := oracle(target, prompt, 24)), key=found.count)
    ways = [Sampling(0.0, repetition_penalty=1.5), Sampling(0.0, no_repeat_ngram=2), Sampling(0.0, logit_bias=((favourite, -100.0),)),
            Sampling(0.0, repetition_penalty=1.5, no_repeat_ngram=2, logit_bias=((favourite, -100.0),))]  # fmt: skip
    truth = []
    for s in ways:
        extra = {"sequence_bias": [[[i], v] for i, v in s.logit_bias]} if s.logit_bias else {}
        out = target.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False, max_new_tokens=24,
                              repetition_penalty=s.repetition_penalty, no_repeat_ngram_size=s.no_repeat_ngram, pad_token_id=0, **extra)  # fmt: skip
        truth.append(out[0, len(prompt) :].tolist())
    for drafter in (None, ModelDrafter(Network(target), 4), ModelDrafter(Network(draft), 4), LookupDrafter(4, 96, CPU)):
        together = decoder(target, drafter, backend, rows=4).run([Request(prompt, 24, sampling=s) for s in ways])
        alone = [decoder(target, drafter, backend, sampling=s).run([Request(prompt, 24)])[0] for s in ways]
        assert [t.tokens for t in together] == [t.tokens for t in alone] == truth
        check(together)
    assert truth[0] != found != truth[1] and favourite not in truth[2] + truth[3]
    if backend == "eager":  # a draft equal to its target stays right: its law knows the block, too
        m = metrics(decoder(target, ModelDrafter(Network(target), 4), rows=4).run([Request(prompt, 24, sampling=s) for s in ways]))
        assert m["accepted"] == m["proposed"] > 0
    for bad in ({"typical_p": 0.9}, {"frequency_penalty": 1.0}, {"num_beams": 4}):
        with pytest.raises(TypeError, match=next(iter(bad))):
            Sampling(**bad)


@shows(7)
@pytest.mark.parametrize("way", ["neighbours", "halves", "near"])
def test_ties_fall_to_the_first_id(way):
    """Greedy float32 texts do not depend on speculation where every argmax is shared by two ids, or nearly so
    (HF#39421, mlx-lm#1423, openvino.genai#4476)."""
    model, asked = make_model(), [Request(prompt_of(n), 24) for n in (1, 7, 33)]
    with torch.no_grad():
        w = model.lm_head.weight
        if way == "halves":
            w[48:] = w[:48]
        else:
            w[1::2] = w[::2] * (1 + 1e-5 * (way == "near"))
    truth = [cache_free(model, r.prompt, 24) for r in asked]
    assert way == "near" or not any(t % 2 if way == "neighbours" else t >= 48 for t in sum(truth, [])), "not the first of equals"
    nets = Network(model), Network(noised(model, 0.2))
    for backend, gamma in itertools.product(BACKENDS, (1, 4, 7)):
        for drafter in (None, ModelDrafter(nets[0], gamma), ModelDrafter(nets[1], gamma), LookupDrafter(gamma, 96, CPU)):
            traces = decoder(nets[0], drafter, backend, rows=3).run(asked)
            assert [t.tokens for t in traces] == truth, (backend, gamma)
