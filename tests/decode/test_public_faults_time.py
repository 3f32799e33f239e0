"""Publicly known faults of timing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from draftstill.decode import (
    Decoder,
    ModelDrafter,
    Network,
    Request,
    engine,
    programs,
    static,
    theory,
)
from draftstill.decode.trace import metrics
from tests.decode.faults import BACKENDS, ROOT, decoder, prompt_of, shows

pytestmark = pytest.mark.usefixtures("uncompiled")


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
