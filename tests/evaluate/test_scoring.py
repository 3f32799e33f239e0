"""The score of a tiny run: every figure follows from the cells, and the cells do not depend on what else is scored."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from draftstill.errors import DraftstillError
from draftstill.evaluate import paired_ratio, pooled_ratio, scoring
from draftstill.evaluate.scoring import score, winner
from draftstill.runfolder import read_json
from tests.pipeline import REAL, SETTINGS, borrowed, finished, opened

ARMS = ("plain", "untuned", "tuned", "lookup", "composite")
TEMPERATURES = (0.0, 0.7)
TRAINED = ("corpus", "responses", "recording", "draft")
PROMPTS = SETTINGS["evaluate"]["prompts"]


@pytest.fixture(scope="module")
def folder() -> Path:
    return finished() / "run" / "score"


@pytest.fixture(scope="module")
def result(folder: Path) -> dict[str, Any]:
    return read_json(folder / "score.json")


def cells(folder: Path, temperature: float) -> list[dict[str, Any]]:
    return [read_json(p) for p in sorted((folder / "cells").glob(f"t{temperature:g}-*.json"))]


def tokens(folder: Path) -> dict[tuple[str, str, str], list[int]]:
    """By file, prompt and arm."""
    return {
        (path.name, cell["prompt"], arm): trace["tokens"]
        for path in sorted((folder / "cells").iterdir())
        for cell in [read_json(path)]
        for arm, trace in cell["arms"].items()
    }


def seconds(trace: dict[str, Any]) -> float:
    return sum(r["draft_s"] + r["verify_s"] + r["sample_s"] + r["host_s"] for r in trace["rounds"])


# --- the figures ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("arm", ARMS)
def test_every_figure_follows_from_the_cells(arm: str, temperature: float, folder: Path, result: dict[str, Any]) -> None:
    (row,) = [a for a in result["arms"] if a["arm"] == arm and a["temperature"] == temperature]
    mine = [c["arms"][arm] for c in cells(folder, temperature)]
    plain = [c["arms"]["plain"] for c in cells(folder, temperature)]
    assert len(mine) == PROMPTS
    rounds = [r for t in mine for r in t["rounds"]]
    total = lambda name: sum(r[name] for r in rounds)  # noqa: E731
    emitted, took = sum(len(t["tokens"]) for t in mine), sum(map(seconds, mine))
    m = row["metrics"]
    assert (m["rounds"], m["proposed"], m["accepted"], m["emitted"]) == (len(rounds), total("proposed"), total("accepted"), emitted)
    assert m["tau"] == pytest.approx(emitted / len(rounds)) and row["tokens_per_s"] == pytest.approx(emitted / took)
    assert m["token_acceptance"] == (pytest.approx(total("accepted") / total("proposed")) if total("proposed") else None)
    assert [p["emitted"] for p in row["per_prompt"]] == [len(t["tokens"]) for t in mine]
    assert [p["seconds"] for p in row["per_prompt"]] == pytest.approx([seconds(t) for t in mine])
    assert row["gamma"] == {"plain": 0, "untuned": 2, "tuned": 2, "lookup": 3, "composite": 3}[arm]
    if arm == "plain":
        assert row["speedup"] is row["c"] is row["v"] is row["predicted"] is row["alpha"] is row["acceptance"] is None
        assert m["tau"] == 1.0 and m["proposed"] == 0
        return
    costs = read_json(folder / "costs.json")  # measured apart from the arms, so that the prediction can be wrong
    verify = costs["verify_s"]
    c = costs["draft_s"]["untuned" if arm == "untuned" else "tuned"] / verify["1"] if arm != "lookup" else 0.0
    v = statistics.fmean(verify[str(1 + r["proposed"])] for r in rounds) / verify["1"]
    assert row["c"] == pytest.approx(c) and row["v"] == pytest.approx(v)
    assert row["predicted"] == pytest.approx((emitted / len(rounds)) / (total("draft_steps") / len(rounds) * c + v))
    plain_s, plain_n = [seconds(t) for t in plain], [len(t["tokens"]) for t in plain]
    speed = (sum(plain_s) / sum(plain_n)) / (took / emitted)
    assert row["speedup"]["estimate"] == pytest.approx(speed), "a ratio of sums, not a mean of ratios"
    keys = {"confidence": 0.95, "resamples": 200, "seed": 0}
    assert row["speedup"] == paired_ratio(plain_s, [seconds(t) for t in mine], plain_n, [len(t["tokens"]) for t in mine], **keys).to_json()
    per = lambda name: [sum(r[name] for r in t["rounds"]) for t in mine]  # noqa: E731
    pooled = pooled_ratio(per("accepted"), per("proposed"), **keys)
    assert row["acceptance"] == (pooled.to_json() if pooled else None)
    alphas = [a for cell in cells(folder, temperature) for a in cell["alpha"].get(arm, ())]
    assert row["alpha"] == (pytest.approx(statistics.fmean(alphas)) if arm in ("tuned", "untuned") else None)


def test_comparisons_are_paired_ratios_of_two_arms(folder: Path, result: dict[str, Any]) -> None:
    pairs = {(c["temperature"], c["a"], c["b"]) for c in result["comparisons"]}
    assert len(pairs) == len(result["comparisons"]) == 6 * len(TEMPERATURES)
    for c in result["comparisons"]:
        rows = cells(folder, c["temperature"])
        speed = {
            arm: sum(len(r["arms"][arm]["tokens"]) for r in rows) / sum(seconds(r["arms"][arm]) for r in rows) for arm in (c["a"], c["b"])
        }
        assert c["ratio"]["estimate"] == pytest.approx(speed[c["a"]] / speed[c["b"]])


def test_all_arms_do_the_same_work_on_the_same_prompts(folder: Path, result: dict[str, Any]) -> None:
    names = [c["prompt"] for c in cells(folder, 0.0)]
    assert names == [c["prompt"] for c in cells(folder, 0.7)] and len(set(names)) == PROMPTS
    assert {p["prompt"] for a in result["arms"] for p in a["per_prompt"]} == set(names)
    for written in tokens(folder).values():
        assert len(written) == SETTINGS["evaluate"]["max_new_tokens"] and max(written) < REAL
    for cell in cells(folder, 0.0):
        assert len({tuple(cell["arms"][arm]["tokens"]) for arm in ARMS}) == 1, "greedy arms differ in float32"
    for cell in cells(folder, 0.7):
        assert len(cell["alpha"]["tuned"]) == SETTINGS["evaluate"]["max_new_tokens"]


def test_the_audit_passes(result: dict[str, Any]) -> None:
    audit = result["audit"]
    assert audit["greedy_fp32"]["identical"] == audit["greedy_fp32"]["prompts"] == SETTINGS["evaluate"]["audit_prompts"]
    assert "transformers" in audit["greedy_fp32"]["arm_names"]
    assert audit["self_pair"]["token_acceptance"] == 1.0
    assert audit["sampling"]["p_value"] > 1e-4


@torch.no_grad()
def test_alpha_is_the_overlap_of_the_two_models(folder: Path) -> None:
    """Against transformers in float64, along what plain decoding wrote."""
    from transformers import AutoModelForCausalLM

    home = finished()
    models = [AutoModelForCausalLM.from_pretrained(p).double() for p in (home / "target", home / "run" / "draft" / "model")]
    from draftstill.corpus import read_documents
    from draftstill.distill import encode
    from tests.pipeline import make_tokenizer

    documents = {d.id: d.text for d in read_documents(home / "run" / "corpus", "test")}
    for temperature in TEMPERATURES:
        cell = cells(folder, temperature)[1]
        name, at = cell["prompt"].rsplit("@", 1)
        prompt = encode(make_tokenizer(), documents[name][int(at) :])[:8]
        ids = torch.tensor([[*prompt, *cell["arms"]["plain"]["tokens"]]])
        z_p, z_q = (m(ids, use_cache=False).logits[0, len(prompt) - 1 : -1, :REAL] for m in models)
        if temperature:
            truth = torch.minimum((z_p / temperature).softmax(-1), (z_q / temperature).softmax(-1)).sum(-1)
        else:
            truth = (z_p.argmax(-1) == z_q.argmax(-1)).double()
            assert z_p.argmax(-1).tolist() == cell["arms"]["plain"]["tokens"], "plain decoding at temperature 0 is the argmax"
        assert cell["alpha"]["tuned"] == pytest.approx(truth.tolist(), abs=1e-4)


def test_training_shows_in_the_score(result: dict[str, Any]) -> None:
    row = {a["arm"]: a for a in result["arms"] if a["temperature"] == 0.7}
    assert row["tuned"]["alpha"] > row["untuned"]["alpha"] + 0.03


# --- what the cells do not depend on ------------------------------------------------------------------------------------------


def test_other_candidates_in_another_order_write_the_same_tokens(folder: Path, tmp_path: Path) -> None:
    keys = {"candidates": ["composite", "tuned"], "temperatures": [0.7], "audit_prompts": 0}
    score(*opened(borrowed(tmp_path, *TRAINED, evaluate=keys)))
    found, whole = tokens(tmp_path / "run" / "score"), tokens(folder)
    assert len(found) == PROMPTS * 3
    assert all(whole[key] == written for key, written in found.items())


def test_a_self_pair_has_alpha_1(tmp_path: Path) -> None:
    """The target as its own untrained draft."""
    path = borrowed(tmp_path, *TRAINED[:3], draft={"source": str(finished() / "target")}, train={"max_steps": 1, "eval_steps": 1},
                    evaluate={"candidates": ["untuned"]})  # fmt: skip
    result = score(*opened(path))
    for row in result["arms"]:
        if row["arm"] == "untuned":
            assert row["alpha"] == pytest.approx(1.0, abs=1e-5)
            assert row["metrics"]["token_acceptance"] == 1.0 and row["metrics"]["tau"] == 3.0
    assert result["training"]["curve"][0]["alpha_deploy"] == pytest.approx(1.0, abs=1e-5)
    assert result["draft"]["layers"] == []


def test_a_trimmed_draft_head_stays_exact_and_its_alpha_counts_the_loss(tmp_path: Path, result: dict[str, Any]) -> None:
    path = borrowed(tmp_path, *TRAINED, draft={"head_tokens": 60}, evaluate={"candidates": ["tuned"], "audit_prompts": 0})
    trimmed = score(*opened(path))
    for cell in cells(tmp_path / "run" / "score", 0.0):
        assert cell["arms"]["tuned"]["tokens"] == cell["arms"]["plain"]["tokens"]
    whole = {a["temperature"]: a["alpha"] for a in result["arms"] if a["arm"] == "tuned"}
    row = {a["temperature"]: a["alpha"] for a in trimmed["arms"] if a["arm"] == "tuned"}
    assert 0 < row[0.7] < whole[0.7]


# --- stopping ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["cell", "audit", "report"])
def test_an_interrupted_score_goes_on(place: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = borrowed(tmp_path, *TRAINED)
    real, written = scoring.write_json, []

    def counted(to: Path, value: Any) -> None:
        if place == "cell" and len(written) == 4:
            raise KeyboardInterrupt
        written.append(Path(to).name)
        real(to, value)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(scoring, "write_json", counted)
        if place != "cell":
            patch.setattr(scoring, {"audit": "audit", "report": "write_reports"}[place], stop)
        score(*opened(path))
    work = tmp_path / "run" / "score.partial" / "cells"
    kept = {p.name: p.stat().st_mtime_ns for p in work.iterdir()}
    assert len(kept) == (4 if place == "cell" else PROMPTS * len(TEMPERATURES))
    again: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(scoring, "write_json", lambda to, value: again.append(Path(to).name) or real(to, value))
        score(*opened(path))
    done = tmp_path / "run" / "score"
    assert {n: (done / "cells" / n).stat().st_mtime_ns for n in kept} == kept and not set(again) & set(kept)
    assert ("audit.json" in again) == (place != "report")
    assert tokens(done) == tokens(folder)
    assert score(*opened(path)) == read_json(done / "score.json")


def test_held_out_documents_too_short_for_a_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "read_documents", lambda *_: [])
    with pytest.raises(DraftstillError, match="held-out") as caught:
        score(*opened(borrowed(tmp_path, *TRAINED)))
    assert caught.value.key == "respond.prompt_tokens"


# --- the winner -------------------------------------------------------------------------------------------------------------


def arm(name: str, low: float, estimate: float, temperature: float = 0.7) -> dict[str, Any]:
    return {"arm": name, "temperature": temperature, "speedup": {"low": low, "estimate": estimate, "high": 2 * estimate - low}}


def against(a: str, b: str, low: float, high: float, temperature: float = 0.7) -> dict[str, Any]:
    return {"temperature": temperature, "a": a, "b": b, "ratio": {"low": low, "estimate": (low + high) / 2, "high": high}}


PLAIN = {"arm": "plain", "temperature": 0.7, "speedup": None}


@pytest.mark.parametrize(("arms", "comparisons", "name", "clear"), [
    ([PLAIN], [], None, True),
    ([PLAIN, arm("tuned", 0.99, 1.5)], [], None, True),
    ([PLAIN, arm("tuned", 1.01, 1.2)], [], "tuned", True),
    ([PLAIN, arm("tuned", 1.1, 1.2), arm("lookup", 1.2, 1.3)], [against("lookup", "tuned", 1.02, 1.2)], "lookup", True),
    ([PLAIN, arm("tuned", 1.1, 1.2), arm("lookup", 1.2, 1.3)], [against("lookup", "tuned", 0.98, 1.2)], "lookup", False),
    ([PLAIN, arm("tuned", 1.3, 1.4), arm("lookup", 1.2, 1.3)], [against("lookup", "tuned", 0.8, 0.97)], "tuned", True),
    ([PLAIN, arm("tuned", 1.3, 1.4), arm("lookup", 1.2, 1.3)], [against("lookup", "tuned", 0.8, 1.01)], "tuned", False),
    # An arm that does not beat plain decoding is no rival, however wide its interval.
    ([PLAIN, arm("tuned", 1.1, 1.2), arm("lookup", 0.5, 1.19)], [against("lookup", "tuned", 0.5, 1.9)], "tuned", True),
    # Other temperatures have no say.
    ([PLAIN, arm("tuned", 1.1, 1.2), arm("lookup", 1.5, 1.9, 0.0)], [against("lookup", "tuned", 0.5, 1.9, 0.0)], "tuned", True),
    ([PLAIN, arm("a", 1.3, 1.6), arm("b", 1.2, 1.5), arm("c", 1.1, 1.2)],
     [against("b", "a", 0.8, 0.99), against("c", "a", 0.6, 1.05), against("c", "b", 0.6, 1.5)], "a", False),
])  # fmt: skip
def test_winner(arms: list[dict[str, Any]], comparisons: list[dict[str, Any]], name: str | None, clear: bool) -> None:
    found = winner(arms, comparisons, 0.7)
    assert (found["arm"], found["clear"], found["temperature"]) == (name, clear, 0.7)
    assert (found["speedup"] is None) == (name is None)


def test_the_arms_take_turns_in_going_first(folder: Path) -> None:
    """A disturbance that grows with time must not meet the same arm each time."""
    first = [next(iter(cell["arms"])) for cell in cells(folder, 0.0)]
    assert len(set(first)) == min(len(first), len(ARMS))


def test_timed_greedy_texts_are_compared_with_plain(folder: Path, result: dict[str, Any]) -> None:
    timed = result["audit"]["greedy_timed"]
    assert timed["prompts"] == PROMPTS and timed["identical"] == dict.fromkeys([a for a in ARMS if a != "plain"], PROMPTS)
