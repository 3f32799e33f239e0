"""Scoring a running server: documented pages of vLLM and SGLang and answers of llama.cpp, faked. A real llama.cpp: tests/slow."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftstill.distill import Prompt, parse_counters
from draftstill.errors import DraftstillError
from draftstill.evaluate import served_score
from draftstill.evaluate.adapters import ADAPTERS, adapter_of
from draftstill.evaluate.served_score import Watched, measure, own_figures, served_table
from draftstill.recipe import Recipe
from draftstill.runfolder import read_json
from tests.distill.fake_server import Fake, fake
from tests.pipeline import borrowed, command, opened

GAMMA, STEPS, ACCEPTED = 3, 5, [3, 0, 1, 2, 3]
"""Of each answer: steps of three drafted tokens, and how many each accepted."""
TRAINED = ("corpus", "responses", "recording", "draft")


@dataclasses.dataclass
class State:
    """A server's counters since it was started, and what it does wrong."""

    kind: str
    requests: int = 7
    tokens: int = 900
    steps: int = 40
    drafted: int = 120
    accepted: int = 77
    at: list[int] = dataclasses.field(default_factory=lambda: [30, 27, 20])
    running: int = 0
    drafts: bool = True
    counts_accepted: bool = True
    metrics: bool = True
    foreign: int = 0
    """Requests of somebody else with each of ours."""
    lag: int = 0
    """Readings of the metrics page that still show the old counters."""
    seconds_per_token: float = 0.01
    _page: str = ""
    _late: int = 0

    def page(self) -> str:
        label = '{engine="0",model_name="m"}'
        if self.kind == "vllm":
            spec = f"""# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{label} {self.steps}.0
vllm:spec_decode_num_draft_tokens_total{label} {self.drafted}.0
vllm:spec_decode_num_draft_tokens_created{label} 1.7e+09
"""
            kept = f"vllm:spec_decode_num_accepted_tokens_total{label} {self.accepted}.0\n" + "".join(
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="{i}"}} {n}.0\n'
                for i, n in enumerate(self.at)
            )
            return f"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{label} {self.running}.0
vllm:num_requests_waiting{label} 0.0
vllm:generation_tokens_total{label} {self.tokens}.0
vllm:request_success_total{{engine="0",finished_reason="stop",model_name="m"}} 3.0
vllm:request_success_total{{engine="0",finished_reason="length",model_name="m"}} {self.requests - 3}.0
{(spec + (kept if self.counts_accepted else "")) if self.drafts else ""}"""
        if self.kind == "sglang":
            return f"""sglang:num_running_reqs{{model_name="m"}} {self.running}.0
sglang:num_requests_total{{model_name="m"}} {self.requests}.0
sglang:generation_tokens_total{{model_name="m"}} {self.tokens}.0
sglang:spec_verify_calls_total{{model_name="m"}} {self.steps}.0
sglang:spec_accept_length{{model_name="m"}} 9.99
"""
        return f"""llamacpp:tokens_predicted_total {self.tokens}
llamacpp:requests_processing {self.running}
llamacpp:requests_deferred 0
llamacpp:spec_decode_num_drafts_total {self.steps}
llamacpp:spec_decode_num_draft_tokens_total {self.drafted}
llamacpp:spec_decode_num_accepted_tokens_total {self.accepted}
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} {self.at[0]}
"""

    def answer(self, path: str, body: Any) -> Any:
        if path == "/metrics":
            if not self.metrics:
                return 501, {"error": {"message": "This server does not support metrics endpoint. Start it with `--metrics`"}}
            if self._late:
                self._late -= 1
            else:
                self._page = self.page()
            return 200, self._page
        if path not in ("/v1/completions", "/generate", "/completion"):
            return 0, None
        self._page = self._page or self.page()
        most = body.get("max_tokens") or body.get("n_predict") or body["sampling_params"]["max_new_tokens"]
        ends = body.get("ignore_eos", body.get("sampling_params", {}).get("ignore_eos"))
        n = most if ends else most - 2
        self.requests += 1 + self.foreign
        self.tokens += n * (1 + self.foreign)
        if self.drafts:
            self.steps, self.drafted, self.accepted = self.steps + STEPS, self.drafted + GAMMA * STEPS, self.accepted + sum(ACCEPTED)
            self.at = [a + sum(k > i for k in ACCEPTED) for i, a in enumerate(self.at)]
        self._late = self.lag
        ids = list(range(10, 10 + n))
        if self.kind == "vllm":
            return 200, {"choices": [{"text": "x", "token_ids": ids, "finish_reason": "length"}], "usage": {"completion_tokens": n}}
        if self.kind == "sglang":
            meta: dict[str, Any] = {"completion_tokens": n, "finish_reason": {"type": "length"}}
            if self.drafts:
                meta |= {"spec_verify_ct": STEPS, "spec_num_proposed_drafts": GAMMA * STEPS, "spec_accept_rate": 0.9,
                         "spec_correct_drafts_histogram": [ACCEPTED.count(k) for k in range(GAMMA + 1)]}  # fmt: skip
                meta |= {"spec_num_correct_drafts": sum(ACCEPTED)} if self.counts_accepted else {}
            return 200, {"text": "x", "output_ids": ids, "meta_info": meta}
        timings: dict[str, Any] = {"predicted_n": n, "predicted_ms": 1000 * n * self.seconds_per_token}
        if self.drafts:
            timings |= {"draft_n": GAMMA * STEPS, **({"draft_n_accepted": sum(ACCEPTED)} if self.counts_accepted else {})}
        return 200, {"content": "x", "tokens": ids, "stop_type": "limit", "timings": timings}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_score, "_SETTLE_S", 0.4)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    return opened(borrowed(tmp_path_factory.mktemp("served")))[0]


PROMPTS = [Prompt(f"p{n}", [5 + n, 6, 7], 3) for n in range(4)]
KINDS = ("vllm", "sglang", "llama.cpp")


def run_fake(state: State, use: Callable[[Fake], Any]) -> Any:
    with fake(state.answer, state.kind, speculative="draft-simple" if state.drafts else None) as server:
        return use(server)


def measured(recipe: Recipe, state: State) -> dict[str, Any]:
    return run_fake(state, lambda s: measure(recipe, PROMPTS, Watched.at(s.url, "--server", wants_draft=True), None))  # type: ignore[no-any-return]


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_acceptance_is_that_of_our_requests_alone(kind: str, lag: int, recipe: Recipe) -> None:
    found = measured(recipe, State(kind, lag=lag))
    assert [t["temperature"] for t in found["temperatures"]] == list(recipe.evaluate.temperatures)
    for t in found["temperatures"]:
        a = t["acceptance"]
        assert (a["requests"], a["drafted"], a["accepted"]) == (4, 4 * GAMMA * STEPS, 4 * sum(ACCEPTED)), (
            "neither the past nor the warm-up counts"
        )
        assert a["acceptance"] == pytest.approx(sum(ACCEPTED) / (GAMMA * STEPS)) and a["steps"] == 4 * STEPS
        assert a["tau"] == pytest.approx(1 + sum(ACCEPTED) / STEPS) and a["gamma"] == GAMMA
        if kind != "llama.cpp":
            assert a["accepted_at"] == [4 * sum(k > i for k in ACCEPTED) for i in range(GAMMA)]
    assert found["kind"] == kind and found["validated"] == (kind == "llama.cpp") and found["watched"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_does_not_draft_is_an_error_and_no_zero(kind: str, recipe: Recipe) -> None:
    with pytest.raises(DraftstillError, match="drafted|speculate") as caught:
        measured(recipe, State(kind, drafts=False))
    assert caught.value.mend


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_count_of_accepted_tokens_is_an_error(kind: str, recipe: Recipe) -> None:
    state = State(kind, counts_accepted=False)
    if kind == "llama.cpp":
        state.accepted = 0
    with pytest.raises(DraftstillError, match="not how many it accepted"):
        measured(recipe, state)


@pytest.mark.parametrize("kind", KINDS)
def test_foreign_traffic_is_refused(kind: str, recipe: Recipe) -> None:
    with pytest.raises(DraftstillError, match="somebody else"):
        measured(recipe, State(kind, foreign=1))
    with pytest.raises(DraftstillError, match="under way"):
        measured(recipe, State(kind, running=2))


def test_a_server_without_a_metrics_page_is_scored_by_its_answers_and_says_so(recipe: Recipe) -> None:
    found = measured(recipe, State("llama.cpp", metrics=False))
    assert not found["watched"] and found["temperatures"][0]["acceptance"]["accepted"] == 4 * sum(ACCEPTED)
    assert "no metrics page" in served_table({**found, "own": []})
    with pytest.raises(DraftstillError, match="no drafted tokens"):
        measured(recipe, State("vllm", metrics=False))


def test_counters_that_go_backwards_are_a_restart() -> None:
    adapter = ADAPTERS["vllm"]
    before, after = (parse_counters(State("vllm", steps=n).page()) for n in (40, 10))
    with pytest.raises(DraftstillError, match="restarted"):
        adapter.delta(before, after, adapter.steps)


def test_more_accepted_than_drafted_is_refused() -> None:
    before = parse_counters(State("vllm").page())
    after = parse_counters(State("vllm", steps=45, drafted=135, accepted=97).page())
    with pytest.raises(DraftstillError, match="20 accepted of 15"):
        ADAPTERS["vllm"].record(before, after, [{}], 10)


@pytest.mark.parametrize("names", [("spec_num_proposed_drafts", "spec_num_correct_drafts"), ("spec_draft_token_num", "spec_accept_token_num"),
                                   ("spec_proposed_drafts", "spec_accepted_drafts")])  # fmt: skip
def test_sglangs_names_of_several_versions_are_read(names: tuple[str, str]) -> None:
    answer = {"meta_info": {"spec_verify_ct": 5, names[0]: 15, names[1]: 9}}
    found = ADAPTERS["sglang"].record({}, {}, [answer, answer], 20)
    assert (found.steps, found.drafted, found.accepted, found.accepted_at) == (10, 30, 18, None)


def test_a_server_of_another_kind_is_refused(recipe: Recipe) -> None:
    with pytest.raises(DraftstillError, match="none of"):
        adapter_of("openai", "http://x")
    with fake(lambda path, body: (0, None), "openai") as server, pytest.raises(DraftstillError, match="none of"):
        Watched.at(server.url, "--server", wants_draft=True)
    with pytest.raises(DraftstillError, match="did not answer"):
        Watched.at("http://127.0.0.1:9", "--server", wants_draft=True)


def test_speed_is_paired_with_a_baseline_of_the_same_kind(recipe: Recipe) -> None:
    fast, slow = State("llama.cpp", seconds_per_token=0.01), State("llama.cpp", seconds_per_token=0.016, drafts=False)
    with fake(fast.answer, "llama.cpp", speculative="draft-simple") as a, fake(slow.answer, "llama.cpp") as b:
        served, baseline = Watched.at(a.url, "--server", wants_draft=True), Watched.at(b.url, "--baseline-server", wants_draft=False)
        found = measure(recipe, PROMPTS, served, baseline)
        orders = [path for path, _ in a.calls if path == "/completion"]
    row = found["temperatures"][0]
    assert row["speedup"]["estimate"] == pytest.approx(1.6) and row["speed_of"] == "decode" and row["same_texts"] == len(PROMPTS)
    assert row["tokens_per_s"] == pytest.approx(100) and row["baseline_tokens_per_s"] == pytest.approx(62.5)
    assert len(orders) == 2 * (1 + 4 + 1 + 4), "acceptance and timing apart, each warmed up"
    timing = [b for b in a.asked("/completion") if b["ignore_eos"] and b["n_predict"] == recipe.evaluate.max_new_tokens]
    natural = [b for b in a.asked("/completion") if not b["ignore_eos"]]
    assert len(timing) == len(natural) == 2 * len(PROMPTS), "fixed length for timing, natural end for acceptance"
    assert [b["prompt"] for b in natural[:4]] == [p.ids for p in PROMPTS]


def test_whole_requests_are_timed_where_the_server_does_not_say_more(recipe: Recipe) -> None:
    with fake(State("vllm").answer, "vllm") as a, fake(State("vllm", drafts=False).answer, "vllm") as b:
        found = measure(
            recipe, PROMPTS, Watched.at(a.url, "--server", wants_draft=True), Watched.at(b.url, "--baseline-server", wants_draft=False)
        )
    assert found["temperatures"][0]["speed_of"] == "whole requests" and found["temperatures"][0]["speedup"]["estimate"] > 0


def test_our_own_figures_are_those_of_the_servers_gamma() -> None:
    row = {"arm": "tuned", "temperature": 0.0, "domain": "own", "acceptance": {"estimate": 0.5}, "counts": None, "speedup": None}
    score = {"publish": "tuned", "sweep": [{**row, "gamma": g} for g in (1, 3, 6)] + [{**row, "gamma": 3, "domain": "biology"}], "arms": []}
    at = lambda gamma: own_figures(score, {"temperatures": [{"temperature": 0.0, "acceptance": {"gamma": gamma}}]})  # noqa: E731
    assert at(2.9)[0]["gamma"] == 3 and at(5.8)[0]["gamma"] == 6 and at(4.4) == []
    assert at(None) == [], "a gamma that is not told is none of ours"


def test_the_table_names_the_gamma_of_both_and_compares_nothing_without(recipe: Recipe) -> None:
    found = measured(recipe, State("llama.cpp"))
    row = {"arm": "tuned", "domain": "own", "acceptance": {"estimate": 0.5}, "counts": None, "speedup": None, "gamma": 3}
    score = {"publish": "tuned", "sweep": [{**row, "temperature": t} for t in recipe.evaluate.temperatures], "arms": []}

    def lines(gamma: float | None) -> tuple[list[str], list[str]]:
        for t in found["temperatures"]:
            t["acceptance"]["gamma"] = gamma
        told = served_table({**found, "own": own_figures(score, found)}).splitlines()
        return [x for x in told if " server    " in x], [x for x in told if "our own" in x]

    theirs, ours = lines(2.9)
    assert len(theirs) == len(ours) == 2 and all("2.90" in x for x in theirs) and all(" 3 " in x and "50.0%" in x for x in ours)
    theirs, ours = lines(None)
    assert all("does not say its gamma" in x and "%" not in x for x in ours) and all(" - " in x for x in theirs)
    assert all("not scored at this gamma" in x for x in lines(8.0)[1])


def test_the_verb_writes_the_figures_beside_the_score(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = borrowed(tmp_path, *TRAINED, "score")
    assert command("evaluate", path, "--baseline-server", "http://127.0.0.1:9") == 1
    for kind in ("vllm", "sglang"):
        with fake(State(kind).answer, kind, speculative="STANDALONE") as server:
            assert command("evaluate", path, "--server", server.url) == 0
            asked = server.calls
    out = capsys.readouterr().out
    assert "our own" in out and "not yet on a real server" in out
    found = read_json(tmp_path / "run" / "score" / "served.json")
    assert set(found["servers"]) == {"vllm", "sglang"}
    prompts = {tuple(b["input_ids"]) for p, b in asked if p == "/generate"}
    assert len(prompts) == 3, "the score's own prompts"
    with fake(State("vllm", foreign=2).answer, "vllm") as server:
        assert command("evaluate", path, "--server", server.url) == 1
    assert read_json(tmp_path / "run" / "score" / "served.json") == found, "a refused measurement writes nothing"
