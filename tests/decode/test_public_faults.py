"""Faults that other decoders and benchmarks were reported for: each row of the list is a kind, and is shown here or where COVERED says.

Sources stand in the docstrings.
"""

from __future__ import annotations

import ast
import gc
import itertools
import os
import subprocess
import sys
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
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
    engine,
    programs,
    static,
    theory,
)
from draftstill.decode.trace import Trace, check, metrics
from draftstill.errors import DraftstillError
from tests.decode.conftest import make_model, noised
from tests.decode.test_greedy import cache_free, oracle
from tests.decode.test_law import oracle as processed
from tests.decode.test_sampling import chi_squared, two_token_law

ROOT = Path(__file__).resolve().parents[2]
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
SHOWN: dict[int, list[str]] = {}
CPU = torch.device("cpu")
BACKENDS = ["eager", "static"]


def shows(*rows: int) -> Callable[[Any], Any]:
    """Marks a test with the rows that it shows."""

    def mark(test: Any) -> Any:
        for row in rows:
            SHOWN.setdefault(row, []).append(test.__name__)
        return test

    return mark


def test_every_row_of_the_list_is_shown():
    """Each row has a test here, or tests elsewhere that exist, or is about something that is not offered."""
    assert set(SHOWN) | set(COVERED) | set(NOT_OFFERED) == set(ROWS)
    for places in COVERED.values():
        for path, name in (place.split("::") for place in places):
            assert name in {n.name for n in ast.parse((ROOT / path).read_text()).body if isinstance(n, ast.FunctionDef)}, (path, name)
    words = ("score", "logit", "prob")
    offered = {n for kind in (Trace, Request) for n in kind.__dataclass_fields__} | set(Decoder.run.__annotations__)
    assert not [n for n in offered if any(w in n for w in words)], "scores are returned: row 38 needs a test"


# --- what the tests share ------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def one_thread():
    """As it is run everywhere else; tiny models gain nothing from more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch):
    """Static rounds as plain Python, wherever a test asks for the backend ``static``."""
    monkeypatch.setattr(programs.torch, "compile", lambda body, **options: body)
    monkeypatch.setattr(programs, "packed", lambda *networks: False)  # these need no tracing


@pytest.fixture(scope="module")
def draft(target):
    return noised(target, 0.3)


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


# --- counting ------------------------------------------------------------------------------------------------------------------

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


def small_model():
    """12 tokens, a law far from uniform: texts that repeat themselves and end often."""
    model = make_model(vocab=12, sharp=3.0)
    with torch.no_grad():
        model.lm_head.weight.mul_(4)
    return model


@pytest.fixture(scope="module")
def small():
    """The small target, its draft and its trimmed draft."""
    near = noised(small_model(), 0.3)
    return Network(small_model()), Network(near), Network(near, head_ids=torch.tensor([0, 1, 3, 4, 7, 8, 11]))


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


# --- seeds, settings, vocabularies ---------------------------------------------------------------------------------------------

_OTHER_PROCESS = """
import torch
torch.set_num_threads(1)
from tests.decode.conftest import make_model, noised
from draftstill.decode import Decoder, ModelDrafter, Network, Request, Sampling
torch.manual_seed(12345)
target = make_model()
made = Decoder(Network(target), ModelDrafter(Network(noised(target, 0.3)), 3), sampling=Sampling(1.0), backend="eager")
print(*made.run([Request([5, 6, 7], 16, seed=7)])[0].tokens)
"""


@shows(13)
def test_a_seed_decides_and_nothing_else_does(target, draft):
    """In this process and another, alone and beside others, after other calls (vllm#6038, #9441, #13196, TensorRT-LLM#19487)."""
    other = subprocess.Popen([sys.executable, "-c", _OTHER_PROCESS], stdout=subprocess.PIPE, text=True, cwd=ROOT,
                             env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})  # fmt: skip
    ask = lambda seed: Request([5, 6, 7], 16, seed=seed)  # noqa: E731
    made = {
        (b, rows): decoder(target, ModelDrafter(Network(draft), 3), b, sampling=Sampling(1.0), rows=rows)
        for b in BACKENDS
        for rows in (1, 3)
    }
    torch.manual_seed(0)
    state = torch.get_rng_state()
    seven = made["eager", 1].run([ask(7)])[0].tokens
    assert made["eager", 1].run([ask(8)])[0].tokens != seven
    for (_, rows), one in made.items():
        one.run([Request([1] * 30, 9, seed=3, sampling=Sampling(0.0)), Request([2, 9], 5, seed=7)])
        for seeds in ([7, 8, 9], [8, 7, 9], [9, 8, 7])[: 3 if rows == 3 else 1]:
            written = dict(zip(seeds, [t.tokens for t in one.run([ask(s) for s in seeds])], strict=True))
            assert written[7] == seven and len({tuple(t) for t in written.values()}) == 3
    assert torch.equal(torch.get_rng_state(), state), "the caller's RNG was touched"
    assert list(map(int, other.communicate(timeout=100)[0].split())) == seven


@shows(20)
def test_the_draft_reads_the_text_as_it_is(target, draft):
    """Different tokenizers are refused by both names; nothing is added to what the draft reads, at any round (HF#46936, #46124)."""
    from draftstill.vocabulary import check_vocabulary

    named = lambda name, tokens: types.SimpleNamespace(name_or_path=name, get_vocab=lambda: {t: i for i, t in enumerate(tokens)})  # noqa: E731
    with pytest.raises(DraftstillError, match="one/target.*other/draft"):
        check_vocabulary(named("one/target", ["<s>", "a", "b"]), named("other/draft", ["<s>", "b", "a"]), 3, 3)
    for bos_first in (True, False):
        read: dict[int, int] = {}
        network = Network(draft)
        forward = network.forward

        def spy(ids, cache, starts, read=read, forward=forward):
            for row, start in zip(ids.tolist(), starts, strict=True):
                read.update(enumerate(row, start))
            return forward(ids, cache, starts)

        network.forward = spy
        prompt = [*([0] if bos_first else []), *prompt_of(6)]
        (trace,) = decoder(target, ModelDrafter(network, 4)).run([Request(prompt, 24)])
        text = prompt + trace.tokens
        assert trace.tokens == oracle(target, prompt, 24) and 0 not in trace.tokens
        # What stands at each position in the end is the text; only the last block's rejected tokens may lie past it.
        known = len(text) - len(trace.rounds[-1:]) * 5
        assert [read[i] for i in range(known)] == text[:known] and sum(read[i] == 0 for i in range(known)) == bos_first


@shows(22)
def test_an_id_that_the_target_lacks_never_reaches_it(target):
    """From a wider draft, its vocabulary told; from the prompt; from a guess (llama.cpp#28158, #17480)."""
    wide, truth = make_model(vocab=97, seed=3), oracle(target, [1, 2, 3], 20)
    with torch.no_grad():
        wide.lm_head.weight[96] *= 1000
    for backend in BACKENDS:
        assert decoder(target, ModelDrafter(Network(wide, vocab=96), 3), backend).run([Request([1, 2, 3], 20)])[0].tokens == truth
        for vocab in (96, 98):  # a table and a lookup that know more ids than the target
            for guesser in (BigramDrafter(torch.full((vocab,), vocab - 1), 3, CPU), LookupDrafter(3, vocab, CPU, shortest=1)):
                if vocab == 96:
                    assert decoder(target, guesser, backend).run([Request([1, 2, 3], 20)])[0].tokens == truth
        for bad in (96, 97, -1, 2**40):
            with pytest.raises(DraftstillError, match=f"{bad}, outside the target's vocabulary of 96"):
                decoder(target, LookupDrafter(3, 96, CPU), backend).run([Request([1, bad, 1, bad, 1], 5)])


@shows(22)
@pytest.mark.parametrize("what", ["narrow model", "wide model", "wide table"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drafter_of_another_vocabulary_is_refused(target, what, temperature):
    """By a clear error, or decoded with rightly: an id of 96 read from an embedding of 96 rows is out of bounds (llama.cpp#28158)."""
    if what == "wide table":
        drafter: Any = BigramDrafter(torch.full((98,), 97), 3, CPU)
    else:
        wide = make_model(vocab=97 if what == "wide model" else 90, seed=3)
        with torch.no_grad():
            wide.lm_head.weight[-1] *= 1000
        drafter = ModelDrafter(Network(wide), 3)
    try:
        (trace,) = decoder(target, drafter, sampling=Sampling(temperature)).run([Request([1, 2, 3], 12)])
    except DraftstillError as refusal:
        assert "vocabular" in str(refusal)
    else:
        assert temperature or trace.tokens == oracle(target, [1, 2, 3], 12)


@shows(23)
def test_a_score_states_every_setting_and_nothing_leaks_in(target):
    """Its JSON names what the figures depend on, and a model's own generation config samples nothing greedy (vllm#33497)."""
    import json

    from draftstill.evaluate.about import conditions as stated
    from draftstill.evaluate.assembling import Found
    from draftstill.recipe import Corpus, Recipe, Target

    recipe = Recipe(run_dir=".", target=Target(source="."), corpus=Corpus(source="."))
    cell = {"arm": "plain", "other_cores": 0.0, "trace": {"engine": {"backend": "eager"}}}
    made = stated(recipe, [Found("own", 0.0, [], [], {}, [{("plain", 0): cell}])], 0.0, 4)
    wanted = {
        "rows",
        "backend",
        "temperatures",
        "top_k",
        "top_p",
        "gamma",
        "lookup_gamma",
        "dtype",
        "device",
        "seed",
        "versions",
        "machine",
        "threads",
        "max_new_tokens",
    }
    sample = json.loads((ROOT / "tests" / "evaluate" / "sample_score.json").read_text())["conditions"]
    for conditions in (made, sample):
        assert wanted <= set(conditions) and None not in [conditions[k] for k in wanted]
        assert {"python", "torch", "transformers", "draftstill"} <= set(conditions["versions"])
    assert made["temperatures"]
    model, prompt = make_model(), prompt_of(7)
    model.generation_config.update(do_sample=True, temperature=0.6, top_k=3, top_p=0.5, repetition_penalty=2.0, max_new_tokens=2)
    for made in (decoder(model), decoder(model, ModelDrafter(Network(model), 3))):
        assert made.run([Request(prompt, 20)])[0].tokens == cache_free(target, prompt, 20)


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


# --- stop strings --------------------------------------------------------------------------------------------------------------

ALPHABET = [f"{chr(97 + t % 26)}{chr(65 + t // 26)}" for t in range(96)]


def join(ids: list[int]) -> str:
    return "".join(ALPHABET[t] for t in ids)


@shows(29)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["self", "model", "lookup", "none"])
def test_stop_strings_cut_where_plain_decoding_cuts(target, draft, kind, backend):
    """Inside a block, over two rounds, from inside one token into another; counts are cut as well (HF#48039)."""
    prompt = prompt_of(7)
    truth = oracle(target, prompt, 16)
    text, nets = join(truth), (Network(target), Network(draft), Network(draft))
    asked, ends = [], []
    for i, size in itertools.product(range(len(text)), (1, 2, 3, 4, 7)):
        if i + size <= len(text) and (i + size) % 3 == 0:
            stop = text[i : i + size]
            asked.append(Request(prompt, 16, stop=[stop, "never there"]))
            ends.append(next(n for n in range(1, 17) if stop in join(truth[:n])))
    assert len(set(ends)) >= 8
    for gamma in (1, 3, 4, 8):
        traces = decoder(nets[0], drafter_of(kind, *nets, gamma), backend, rows=12, detokenize=join).run(asked)
        for t, n in zip(traces, ends, strict=True):
            assert t.tokens == truth[:n] and t.finish == "stop", (gamma, n)
        identities(traces, gamma)
        m = metrics(traces)
        assert m["emitted"] == sum(ends) and (kind != "self" or m["accepted"] == m["proposed"])
        assert m["cut"] > 0 or kind in ("none", "lookup")


@shows(29)
def test_stop_strings_beside_other_ends(target):
    """The first end wins; a character split over tokens counts once it is whole; the prompt's own text does not count (HF#48039)."""
    prompt = prompt_of(7)
    truth = oracle(target, prompt, 16)
    first = truth.index(truth[6])
    make = lambda read, eos=(): decoder(target, ModelDrafter(Network(target), 5), detokenize=read, eos=eos)  # noqa: E731
    ask = lambda stop, **kw: Request(prompt, 16, stop=[stop], **kw)  # noqa: E731
    for at in range(2, 12):
        stop = join(truth[at - 1 : at + 1])
        end = next(n for n in range(1, 17) if stop in join(truth[:n]))
        (trace,) = make(join, [truth[6]]).run([ask(stop)])
        assert (trace.finish, len(trace.tokens)) == (("eos", first + 1) if first + 1 < end else ("stop", end))
        (held,) = make(join, [truth[6]]).run([ask(stop, ignore_eos=True)])
        assert (held.finish, len(held.tokens)) == ("stop", end)
    assert make(join).run([ask(join(prompt))])[0].finish == "length"
    halves = {t: bytes([b]) for t, b in zip(dict.fromkeys(truth), itertools.cycle("é".encode() + "ß".encode()), strict=False)}
    read = lambda ids: b"".join(halves.get(t, b"-") for t in ids).decode(errors="replace")  # noqa: E731
    whole = [next((n for n in range(1, 17) if c in read(truth[:n])), None) for c in "éß"]
    assert any(whole)
    for c, n in zip("éß", whole, strict=True):
        (trace,) = make(read).run([ask(c)])
        assert len(trace.tokens) == (n or 16) and trace.finish == ("stop" if n else "length")
    pieces = dict(zip(dict.fromkeys(truth), ["w", "xa", "b", "c", "d", "e"], strict=False))
    spoken = lambda ids: "".join(pieces.get(t, ".") for t in ids)  # noqa: E731
    (trace,) = make(spoken).run([ask("ab")])
    assert (n := next((n for n in range(1, 17) if "ab" in spoken(truth[:n])), None)) and trace.tokens == truth[:n]
    for bad, says in ((Request(prompt, 4, stop=[""]), "empty stop"), (Request(prompt, 4, stop=["x"]), "detokenize")):
        with pytest.raises(DraftstillError, match=says):
            decoder(target, detokenize=join if says == "empty stop" else None).run([bad])


# --- time ----------------------------------------------------------------------------------------------------------------------


class Clock:
    """Time passes only where it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def takes(self, seconds: float | Callable[..., float], call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kw: Any) -> Any:
            self.now += seconds(*args) if callable(seconds) else seconds
            return call(*args, **kw)

        return timed


def on_a_clock(monkeypatch, model: Any, backend: str, gamma: int, verify: float, draft: float, host: float = 0.0) -> tuple[Clock, Decoder]:
    """A warm self-pair whose prompts of 9 tokens take 1 s, whose rounds take what they are told to."""
    clock = Clock()
    monkeypatch.setattr(engine, "time", clock)
    monkeypatch.setattr(static, "time", clock)
    target, small = Network(model), Network(model)
    target.forward = clock.takes(lambda ids, *_: 1.0 if ids.shape[1] == 8 else verify, target.forward)
    small.forward = clock.takes(lambda ids, *_: 0.0 if ids.shape[1] == 8 else draft, small.forward)
    one = decoder(target, ModelDrafter(small, gamma) if gamma else None, backend)
    one.run([Request(prompt_of(9), 20)])  # compiling and capturing is in no figure
    one.commit, clock.now = clock.takes(host, one.commit), 0.0
    return clock, one


@shows(32)
@pytest.mark.parametrize("backend", BACKENDS)
def test_parts_of_the_time_add_up_and_a_perfect_draft_gains_what_the_formula_says(monkeypatch, target, backend):
    """Draft, verify, sampling and host time are all of the decode time (llama.cpp#3649, #25908, Spec-Bench#29)."""
    clock, one = on_a_clock(monkeypatch, target, backend, 4, 1.0, 0.5, host=0.25)
    (trace,) = one.run([Request(prompt_of(9), 20)])
    m = metrics([trace])
    assert (m["rounds"], m["draft_steps"], m["tau"], m["token_acceptance"]) == (4, 16, 5.0, 1.0)
    assert (m["draft_s"], m["verify_s"] + m["sample_s"], m["host_s"]) == pytest.approx((8.0, 4.0, 1.0))
    assert m["decode_s"] == pytest.approx(clock.now - trace.prefill_s) == pytest.approx(13.0) and m["prefill_s"] == pytest.approx(1.0)
    assert m["draft_step_s"] == pytest.approx(0.5) and m["verify_round_s"] == pytest.approx(1.0)
    speeds = [
        metrics(on_a_clock(monkeypatch, target, backend, g, 1.0, 0.5)[1].run([Request(prompt_of(9), 20)]))["tokens_per_s"] for g in (0, 4)
    ]
    predicted = theory.predicted_speedup(theory.expected_tokens(1.0, 4), 4, 0.5)
    assert speeds[1] / speeds[0] == pytest.approx(predicted) == pytest.approx(5 / 3)
    # Higher tau, lower speed: it is the speed that is compared.
    wide, narrow = (metrics(on_a_clock(monkeypatch, target, backend, g, 1.0, 1.5)[1].run([Request(prompt_of(9), 20)])) for g in (4, 0))
    assert wide["tau"] > narrow["tau"] and wide["tokens_per_s"] < narrow["tokens_per_s"] and theory.ceiling(4, 1.5) < 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_draft_steps_that_led_to_no_proposal_are_counted(monkeypatch, target, backend):
    """Their time is in draft_s; without their number the time of a step would be too long, or not be there."""
    clock, one = on_a_clock(monkeypatch, target, backend, 3, 1.0, 0.5)
    one.drafter.min_confidence = 1.0
    if backend == "static":
        one._static = None  # programs know the confidence they were made with
        one.run([Request(prompt_of(9), 10)])
    m = metrics(one.run([Request(prompt_of(9), 10)]))
    assert m["proposed"] == 0 and m["draft_s"] > 0
    assert m["draft_step_s"] == pytest.approx(0.5)


@shows(32)
def test_compiling_is_in_no_round(monkeypatch, target):
    """The first call's rounds take as long as the second's; what compiling took stands apart, in ``warm_s``."""
    clock, one = on_a_clock(monkeypatch, target, "static", 4, 1.0, 0.5)
    monkeypatch.setattr(programs.Program, "prepare", clock.takes(100.0, programs.Program.prepare))
    one._static = None
    (first,), (second,) = (one.run([Request(prompt_of(9), 10)]) for _ in range(2))
    assert first.engine["warm_s"] >= 200.0 and second.engine["warm_s"] == 0.0
    assert metrics([first])["decode_s"] == pytest.approx(metrics([second])["decode_s"]) == pytest.approx(2 * (4 * 0.5 + 1.0))


@shows(34)
@pytest.mark.parametrize("backend", BACKENDS)
def test_prefill_is_in_no_decode_rate(monkeypatch, target, backend):
    """Both arms by one rule: from the end of prefill to the last token, the first token included; the whole apart (rMLX#446, #480)."""
    import json

    from draftstill.evaluate.report import with_prefill

    for gamma, decode_s in ((0, 1.0), (4, 2 * (4 * 0.05 + 0.1))):
        clock, one = on_a_clock(monkeypatch, target, backend, gamma, 0.1, 0.05)
        m = metrics(one.run([Request(prompt_of(9), 10)]))
        assert (m["prefill_s"], m["decode_s"], m["tokens_per_s"]) == pytest.approx((1.0, decode_s, 10 / decode_s))
        assert clock.now == pytest.approx(1.0 + decode_s)
    if backend == "eager":
        score = json.loads((ROOT / "tests" / "evaluate" / "sample_score.json").read_text())
        whole, arms = with_prefill(score, 0.7), {a["arm"]: a for a in score["arms"] if a["temperature"] == 0.7}
        cost = {n: (a["metrics"]["decode_s"] + a["metrics"]["prefill_s"]) / a["metrics"]["emitted"] for n, a in arms.items()}
        assert whole["tuned"] == pytest.approx(cost["plain"] / cost["tuned"]) and whole["tuned"] < arms["tuned"]["speedup"]["estimate"]
        for a in arms.values():
            assert a["tokens_per_s"] == pytest.approx(a["metrics"]["emitted"] / a["metrics"]["decode_s"], rel=1e-3)


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
