"""Publicly known faults of seeds, settings, vocabularies and stop strings."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import types
from typing import Any

import pytest
import torch

from draftstill.decode import (
    BigramDrafter,
    LookupDrafter,
    ModelDrafter,
    Network,
    Request,
    Sampling,
)
from draftstill.decode.trace import metrics
from draftstill.errors import DraftstillError
from tests.decode.conftest import make_model
from tests.decode.faults import BACKENDS, CPU, ROOT, decoder, drafter_of, identities, prompt_of, shows
from tests.decode.test_greedy import cache_free, oracle

pytestmark = pytest.mark.usefixtures("uncompiled")


# --- seeds, settings, vocabularies ---------------------------------------------------------------------------------------------

_OTHER_PROCESS = """
import torch
torch.set_num_threads(1)
from tests.decode.conftest import make_model, noised, small_model
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
