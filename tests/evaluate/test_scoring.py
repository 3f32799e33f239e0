"""The score of a tiny run: every figure follows from the cells."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from draftstill.decode.theory import expected_tokens
from draftstill.errors import DraftstillError
from draftstill.evaluate import domains, paired_ratio, pooled_ratio
from draftstill.evaluate.scoring import score
from draftstill.runfolder import read_json
from tests.pipeline import REAL, SETTINGS, borrowed, finished, opened

ARMS = ("plain", "untuned", "tuned", "lookup", "composite")
TEMPERATURES = (0.0, 0.7)
TRAINED = ("corpus", "responses", "recording", "draft")
PROMPTS, LENGTH = SETTINGS["evaluate"]["prompts"], SETTINGS["evaluate"]["max_new_tokens"]


@pytest.fixture(scope="module")
def folder() -> Path:
    return finished() / "run" / "score"


@pytest.fixture(scope="module")
def result(folder: Path) -> dict[str, Any]:
    return read_json(folder / "score.json")


def cells(folder: Path, temperature: float, arm: str, gamma: int | None = None) -> list[dict[str, Any]]:
    """The timings of an arm, prompt by prompt."""
    found = [read_json(p) for p in sorted((folder / "cells" / "timing" / "own" / f"t{temperature:g}").glob("*/*.json"))]
    return [c for c in found if c["arm"] == arm and gamma in (None, c["gamma"])]


def texts(folder: Path, temperature: float) -> list[dict[str, Any]]:
    return read_json(folder / "cells" / "texts" / "own" / f"t{temperature:g}-0000.json")["rows"]


def laws(folder: Path, temperature: float, weights: str) -> list[dict[str, Any]]:
    """Of the trained draft with these weights."""
    found = [read_json(p) for p in (folder / "cells" / "laws" / "own" / f"t{temperature:g}-0000").iterdir()]
    return next(c["rows"] for c in found if c["made"][0] == weights)


def seconds(cell: dict[str, Any]) -> float:
    return sum(r["draft_s"] + r["verify_s"] + r["sample_s"] + r["host_s"] for r in cell["trace"]["rounds"])


# --- the figures ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("arm", ARMS)
def test_every_figure_follows_from_the_cells(arm: str, temperature: float, folder: Path, result: dict[str, Any]) -> None:
    (row,) = [a for a in result["arms"] if a["arm"] == arm and a["temperature"] == temperature]
    mine = cells(folder, temperature, arm)
    assert len(mine) == PROMPTS == len({c["prompt"] for c in mine})
    rounds = [r for c in mine for r in c["trace"]["rounds"]]
    total = lambda name: sum(r[name] for r in rounds)  # noqa: E731
    emitted, took = sum(len(c["trace"]["tokens"]) for c in mine), sum(map(seconds, mine))
    m = row["metrics"]
    assert (m["rounds"], m["proposed"], m["accepted"], m["emitted"]) == (len(rounds), total("proposed"), total("accepted"), emitted)
    assert m["tau"] == pytest.approx(emitted / len(rounds)) and row["tokens_per_s"] == pytest.approx(emitted / took)
    assert m["token_acceptance"] == (pytest.approx(total("accepted") / total("proposed")) if total("proposed") else None)
    assert [p["seconds"] for p in row["per_prompt"]] == pytest.approx(list(map(seconds, mine)))
    assert row["gamma"] == {"plain": 0, "untuned": 2, "tuned": 2, "lookup": 3, "composite": 3}[arm]
    if arm == "plain":
        assert row["speedup"] is row["c"] is row["v"] is row["predicted"] is row["alpha"] is row["acceptance"] is row["counts"] is None
        assert m["tau"] == 1.0 and m["proposed"] == 0
        return
    costs = read_json(folder / "costs.json")[f"{temperature:g}"]  # measured apart from the arms, so that the prediction can be wrong
    verify = costs["verify_s"]
    name = "untuned" if arm == "untuned" else "tuned"
    drafting = lambda n: costs["first_s"][name] + (n - 1) * costs["draft_s"][name] if n else 0.0  # noqa: E731
    v = statistics.fmean(verify[str(1 + r["proposed"])] for r in rounds) / verify["1"]
    assert row["c"] == pytest.approx(0.0 if arm == "lookup" else drafting(2) / 2 / verify["1"]) and row["v"] == pytest.approx(v)
    spent = sum(drafting(r["draft_steps"]) + verify[str(1 + r["proposed"])] for r in rounds) / verify["1"]
    assert row["predicted"] == pytest.approx(emitted / spent), "each round at its own numbers of steps and tokens"
    plain_s, plain_n = [c["plain_s"] for c in mine], [c["plain_tokens"] for c in mine]
    assert plain_s == pytest.approx(list(map(seconds, cells(folder, temperature, "plain")))), "one group, one plain run"
    assert row["speedup"]["estimate"] == pytest.approx((sum(plain_s) / sum(plain_n)) / (took / emitted)), (
        "a ratio of sums, not a mean of ratios"
    )
    keys = {"confidence": 0.95, "resamples": 200, "seed": 0}
    assert (
        row["speedup"]
        == paired_ratio(plain_s, list(map(seconds, mine)), plain_n, [len(c["trace"]["tokens"]) for c in mine], **keys).to_json()
    )
    per = lambda name: [sum(r[name] for r in c["trace"]["rounds"]) for c in mine]  # noqa: E731
    pooled = pooled_ratio(per("accepted"), per("proposed"), **keys)
    assert row["acceptance"] == (pooled.to_json() if pooled else None)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_counts_follow_from_the_texts(temperature: float, folder: Path, result: dict[str, Any]) -> None:
    written = texts(folder, temperature)
    assert len(written) == PROMPTS and all(len(t["tokens"]) == LENGTH or t["finish"] == "eos" for t in written)
    for row in result["arms"]:
        if row["temperature"] != temperature or row["arm"] == "plain":
            continue
        counts = row["counts"]
        m = counts["metrics"]
        assert counts["prompts"] == PROMPTS and m["emitted"] == sum(len(t["tokens"]) for t in written)
        assert sum(counts["histogram"]) == m["rounds"] and sum(a * n for a, n in enumerate(counts["histogram"])) == m["accepted"]
        assert counts["tau"]["estimate"] == pytest.approx(m["emitted"] / m["rounds"]) and m["accepted"] <= m["proposed"]
        if temperature == 0 and counts["ended"] == 0 and row["arm"] != "plain":
            timed = {k: row["metrics"][k] for k in ("rounds", "proposed", "accepted", "emitted", "draft_steps")}
            assert {k: m[k] for k in timed} == timed, "in float32 a greedy decoder takes just these rounds"
            assert counts["predicted"]["estimate"] == pytest.approx(row["predicted"])
        if row["arm"] == "tuned":
            alpha = statistics.fmean(a for text in laws(folder, temperature, result["draft"]["weights_sha256"]) for a in text["alpha"])
            assert row["alpha"] == counts["iid"]["alpha"] == pytest.approx(alpha)
            assert counts["iid"]["tau"] == pytest.approx(expected_tokens(alpha, 2))


def test_comparisons_are_paired_ratios_of_two_arms(folder: Path, result: dict[str, Any]) -> None:
    pairs = {(c["temperature"], c["a"], c["b"]) for c in result["comparisons"]}
    assert len(pairs) == len(result["comparisons"]) == 6 * len(TEMPERATURES)
    for c in result["comparisons"]:
        speed = {}
        for arm in (c["a"], c["b"]):
            mine = cells(folder, c["temperature"], arm)
            speed[arm] = sum(len(x["trace"]["tokens"]) for x in mine) / sum(map(seconds, mine))
        assert c["ratio"]["estimate"] == pytest.approx(speed[c["a"]] / speed[c["b"]])


def test_all_arms_do_the_same_work_on_the_same_prompts(folder: Path, result: dict[str, Any]) -> None:
    for t in TEMPERATURES:
        by_arm = {arm: cells(folder, t, arm) for arm in ARMS}
        assert len({tuple(c["prompt"] for c in mine) for mine in by_arm.values()}) == 1
        assert [c["prompt"] for c in by_arm["plain"]] == [x["prompt"] for x in texts(folder, t)]
        for mine in by_arm.values():
            for c in mine:
                assert len(c["trace"]["tokens"]) == LENGTH and max(c["trace"]["tokens"]) < REAL, "timing runs to a fixed length"
    for number in range(PROMPTS):
        assert len({tuple(cells(folder, 0.0, arm)[number]["trace"]["tokens"]) for arm in ARMS}) == 1, "greedy arms differ in float32"


def test_the_audit_passes(result: dict[str, Any]) -> None:
    audit = result["audit"]
    assert audit["greedy_fp32"]["identical"] == audit["greedy_fp32"]["prompts"] == SETTINGS["evaluate"]["audit_prompts"]
    assert audit["self_pair"]["token_acceptance"] == 1.0
    timed = audit["greedy_timed"]
    assert timed["prompts"] == PROMPTS and timed["identical"] == dict.fromkeys([a for a in ARMS if a != "plain"], PROMPTS)


@torch.no_grad()
def test_alpha_is_the_overlap_of_the_two_models(folder: Path, result: dict[str, Any]) -> None:
    """Against transformers in float64, along what plain decoding wrote."""
    from transformers import AutoModelForCausalLM

    home = finished()
    models = [AutoModelForCausalLM.from_pretrained(p).double() for p in (home / "target", home / "run" / "draft" / "model")]
    from draftstill.corpus import read_documents
    from draftstill.distill import encode
    from tests.pipeline import make_tokenizer

    documents = {d.id: d.text for d in read_documents(home / "run" / "corpus", "test")}
    for temperature in TEMPERATURES:
        text, law = texts(folder, temperature)[1], laws(folder, temperature, result["draft"]["weights_sha256"])[1]
        name, at = text["prompt"].rsplit("@", 1)
        prompt = encode(make_tokenizer(), documents[name][int(at) :])[:8]
        ids = torch.tensor([[*prompt, *text["tokens"]]])
        z_p, z_q = (m(ids, use_cache=False).logits[0, len(prompt) - 1 : -1, :REAL] for m in models)
        x = torch.tensor(text["tokens"])[:, None]
        if temperature:
            p, q = ((z / temperature).softmax(-1) for z in (z_p, z_q))
            truth, keep = torch.minimum(p, q).sum(-1), (q / p).gather(1, x)[:, 0].clamp(max=1)
        else:
            truth, keep = (z_p.argmax(-1) == z_q.argmax(-1)).double(), (z_q.argmax(-1) == x[:, 0]).double()
            assert z_p.argmax(-1).tolist() == text["tokens"], "plain decoding at temperature 0 is the argmax"
        assert law["alpha"] == pytest.approx(truth.tolist(), abs=1e-4) and law["keep"] == pytest.approx(keep.tolist(), abs=1e-4)
        p, q = z_p.log_softmax(-1), z_q.log_softmax(-1)
        assert law["kl"] == pytest.approx((p.exp() * (p - q)).sum(-1).tolist(), abs=1e-3)
        assert law["entropy"] == pytest.approx((-p.exp() * p).sum(-1).tolist(), abs=1e-3)


def test_training_shows_in_the_score(result: dict[str, Any]) -> None:
    row = {a["arm"]: a for a in result["arms"] if a["temperature"] == 0.7}
    assert row["tuned"]["alpha"] > row["untuned"]["alpha"] + 0.03
    assert result["publish"] == "tuned" and set(result["diagnosis"]) == {"tuned"}


def test_the_arms_take_turns_in_going_first(folder: Path) -> None:
    """A disturbance that grows with time must not meet the same arm each time."""
    first = []
    for number in range(PROMPTS):
        here = sorted((folder / "cells" / "timing" / "own" / "t0" / f"{number:04d}").iterdir(), key=lambda p: p.stat().st_mtime_ns)
        first.append(read_json(here[0])["arm"])
    assert len(set(first)) == PROMPTS


# --- pairs and heads ----------------------------------------------------------------------------------------------------------


def test_a_self_pair_has_alpha_1(tmp_path: Path) -> None:
    """The target as its own untrained draft."""
    path = borrowed(tmp_path, *TRAINED[:3], draft={"source": str(finished() / "target")}, train={"max_steps": 1, "eval_steps": 1},
                    evaluate={"candidates": ["untuned"]})  # fmt: skip
    result = score(*opened(path))
    for row in result["arms"]:
        if row["arm"] == "untuned":
            assert row["alpha"] == pytest.approx(1.0, abs=1e-5)
            for m in (row["metrics"], row["counts"]["metrics"]):
                assert m["token_acceptance"] == 1.0 and m["tau"] == pytest.approx(3.0)
    assert result["training"]["curve"][0]["alpha_deploy"] == pytest.approx(1.0, abs=1e-5)
    assert result["draft"]["layers"] == [] and result["publish"] == "tuned"


def test_a_trimmed_draft_head_stays_exact_and_its_alpha_counts_the_loss(tmp_path: Path, result: dict[str, Any]) -> None:
    path = borrowed(tmp_path, *TRAINED, draft={"head_tokens": 60}, evaluate={"candidates": ["tuned"], "audit_prompts": 0})
    trimmed = score(*opened(path))
    folder = tmp_path / "run" / "score"
    for mine, plain in zip(cells(folder, 0.0, "tuned"), cells(folder, 0.0, "plain"), strict=True):
        assert mine["trace"]["tokens"] == plain["trace"]["tokens"]
    whole = {a["temperature"]: a["alpha"] for a in result["arms"] if a["arm"] == "tuned"}
    row = {a["temperature"]: a["alpha"] for a in trimmed["arms"] if a["arm"] == "tuned"}
    assert 0 < row[0.7] < whole[0.7]
    assert trimmed["diagnosis"]["tuned"]["outside"] > 0


def test_held_out_documents_too_short_for_a_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(domains, "stored_documents", lambda *_: [])
    with pytest.raises(DraftstillError, match="held-out") as caught:
        score(*opened(borrowed(tmp_path, *TRAINED)))
    assert caught.value.key == "respond.prompt_tokens"
