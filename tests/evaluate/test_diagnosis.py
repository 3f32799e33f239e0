"""Diagnosis: planted losses are found where they were planted, and each piece of advice follows from its figures."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from draftstill.decode import derive
from draftstill.decode.theory import expected_tokens
from draftstill.decode.trace import Round, Trace
from draftstill.evaluate.advice import Conditions, advise
from draftstill.evaluate.diagnosis import Text, diagnose, text_of
from draftstill.evaluate.token_kinds import KINDS, pieces_of, token_kinds
from tests.pipeline import make_tokenizer, words

GAMMA = 3
FLAT = dict.fromkeys(range(1, 9), 1.0)


def made(pieces: Sequence[str], alpha: Sequence[float], *, domain: str = "own", entropy: Sequence[float] | None = None, seed: int = 0, name: str = "p",
         context: int | None = None) -> Text:  # fmt: skip
    """A text along which a draft of this acceptance went."""
    n = len(pieces)
    trace = derive([1, 2], list(range(n)), alpha, GAMMA, most=n, ended=False, seed=seed, context=context)
    return Text(name, domain, list(pieces), trace, list(alpha), [1 - a for a in alpha], list(entropy or [2.0] * n))


def by_name(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {r["name"]: r for r in rows}


# --- kinds of tokens ----------------------------------------------------------------------------------------------------------

PROSE = """ARTICLE 4. TERM

4.2 Payment Terms
The Supplier shall pay Acme Corporation $1,250.50 within 30 days, as set out below. Nothing in this clause limits it.

    total = unit_price * count;
    if (total > limit) { raise(); }

Signed by Dr. Miller on 2024-05-01 (the "Date").
"""


def kinds_of(text: str, cut: int | None = None) -> dict[str, set[str]]:
    """Pieces by kind: words with their leading space, or cut into so many characters."""
    if cut is None:
        pieces, word = [], ""
        for c in text:
            if c in " \n" and word.strip():
                pieces.append(word)
                word = ""
            word += c
        pieces.append(word)
    else:
        pieces = [text[i : i + cut] for i in range(0, len(text), cut)]
    found: dict[str, set[str]] = {}
    for piece, kind in zip(pieces, token_kinds(pieces), strict=True):
        assert kind in KINDS
        found.setdefault(kind, set()).add(piece.strip())
    return found


def test_each_kind_is_recognised_in_prose() -> None:
    found = kinds_of(PROSE)
    assert found["heading"] == {"ARTICLE", "4.", "TERM", "4.2", "Payment", "Terms"}
    assert {"Acme", "Corporation", "Miller", "Supplier"} <= found["name"] and "Nothing" not in found["name"]
    assert {"$1,250.50", "30", "2024-05-01"} == found["number"]
    assert {"total", "=", "unit_price", "if", "{"} <= found["code"]
    assert {"The", "Signed"} == found["line start"]
    assert {"shall", "pay", "within", "below.", "Nothing"} <= found["word"]


@pytest.mark.parametrize("cut", [1, 2, 3, 7])
def test_a_part_of_a_word_has_the_kind_of_the_word(cut: int) -> None:
    text = "it goes to Westminster for 123456 days"
    pieces = [text[i : i + cut] for i in range(0, len(text), cut)]
    for word, kind in (("Westminster", "name"), ("123456", "number"), ("days", "word")):
        begin, end = text.index(word), text.index(word) + len(word)
        inside = [k for n, k in enumerate(token_kinds(pieces)) if begin <= n * cut and min((n + 1) * cut, len(text)) <= end]
        assert set(inside) == {kind} or (cut == 7 and not inside), word


@pytest.mark.parametrize("pieces", [[], [""], ["", "a", ""], ["\n", " ", "\n\n"], ["\ufffd", "é", "日本"], ["```", "\n", "x", "\n", "```"]])
def test_odd_texts_have_a_kind_for_each_piece(pieces: list[str]) -> None:
    assert len(token_kinds(pieces)) == len(pieces)


def test_pieces_put_together_are_the_text() -> None:
    tokenizer = make_tokenizer()
    ids = [tokenizer.convert_tokens_to_ids(w) for w in (words()[9], ".", words()[50], ";", words()[60])]
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids) and len(pieces) == len(ids) and all(pieces)


def test_a_character_of_several_tokens_stands_with_the_last() -> None:
    class Bytes:
        def decode(self, ids: list[int], **_: Any) -> str:
            return bytes(ids).decode("utf-8", errors="replace")

    pieces = pieces_of(Bytes(), list("aé日b".encode()))
    assert pieces == ["a", "", "é", "", "", "日", "b"]
    assert pieces_of(Bytes(), list("é".encode())[:1]) == ["\ufffd"]


# --- where acceptance is lost -------------------------------------------------------------------------------------------------


def test_the_counts_are_the_traces() -> None:
    rng = random.Random(0)
    texts = [made([" x"] * 60, [rng.choice((1.0, 0.3)) for _ in range(60)], seed=s, name=str(s)) for s in range(6)]
    found = diagnose(texts, GAMMA)
    rounds = [r for t in texts for r in t.trace.rounds]
    assert found["tokens"] == 360 and found["rounds"] == len(rounds)
    assert found["judged"] == sum(r.accepted + (r.accepted < r.proposed) for r in rounds)
    assert found["right"] == pytest.approx(sum(r.accepted for r in rounds) / found["judged"])
    assert found["alpha"] == pytest.approx(sum(sum(t.alpha) for t in texts) / 360) and found["lost"] == pytest.approx(1.0)
    for group in ("output", "domain", "token_kind", "entropy_fifth"):
        assert sum(r["tokens"] for r in found[group]) == 360 and sum(r["judged"] for r in found[group]) == found["judged"]
        assert sum(r["lost"] for r in found[group]) == pytest.approx(1.0)
    block = found["block"]
    assert block[0]["conditional"] == block[0]["unconditional"] and [b["i"] for b in block] == [1, 2, 3]
    assert block[1]["reached"] == sum(r.proposed >= 2 and r.accepted >= 1 for r in rounds)
    assert block[2]["unconditional"] == pytest.approx(sum(r.accepted >= 3 for r in rounds) / sum(r.proposed >= 3 for r in rounds))
    assert json.loads(json.dumps(found)) == found


def test_a_planted_loss_is_found_in_its_kind_domain_place_and_entropy() -> None:
    pieces = ["The", *[" 12345", " word", " word", " word"] * 25]
    alpha = [0.1 if p == " 12345" else 0.95 for p in pieces]
    entropy = [4.0 if p == " 12345" else 0.5 for p in pieces]
    late = [a if i < 64 else 0.2 for i, a in enumerate(alpha)]
    texts = [made(pieces, late if s % 2 else alpha, entropy=entropy, seed=s) for s in range(16)]
    poor = [made(pieces, [0.3 * a for a in alpha], entropy=entropy, seed=s, domain="biology", name="b") for s in range(8)]
    found = diagnose(texts, GAMMA, others=poor)
    kinds, places, fields = (by_name(found[k]) for k in ("token_kind", "output", "domain"))
    assert kinds["number"]["right"] < 0.25 < kinds["word"]["right"] and kinds["number"]["alpha"] < 0.2
    assert fields["biology"]["alpha"] < fields["own"]["alpha"] - 0.15
    assert places["64-127"]["right"] < places["0-15"]["right"] - 0.1
    assert found["entropy_fifth"][-1]["to"] == 4.0 and found["entropy_fifth"][-1]["alpha"] < found["entropy_fifth"][0]["alpha"]
    assert found["sure"]["tokens"] == sum(e < 1.0 for t in texts for e in t.entropy) and 0.2 < found["sure"]["lost"] < 0.8


def test_further_domains_stand_in_their_table_only() -> None:
    own = [made([" x"] * 40, [0.9] * 40, seed=s, name=f"o{s}") for s in range(4)]
    other = [made([" 7"] * 80, [0.1] * 80, seed=s, name=f"b{s}", domain="biology") for s in range(4)]
    conditions = Conditions(dict.fromkeys(FLAT, 0.05), FLAT, {1: 1.5, 3: 2.0})
    alone, both = diagnose(own, GAMMA, conditions), diagnose(own, GAMMA, conditions, other)
    differing = {k for k in both if both[k] != alone[k]}
    assert differing <= {"domain", "advice"} and {d["name"]: d["tokens"] for d in both["domain"]} == {"own": 160, "biology": 320}
    assert sum(d["lost"] for d in both["domain"]) == pytest.approx(1.0)
    figures = lambda found: {a["what"]: (a["worth"], a["figures"].get("alpha")) for a in found["advice"]}  # noqa: E731
    assert figures(both) == figures(alone), "what to do follows from the own text"
    (more,) = [a for a in both["advice"] if a["what"] == "more data"]
    assert more["figures"]["domains_behind"] == ["biology"]


def test_the_worst_passages_come_first_and_do_not_overlap() -> None:
    good, bad = [1.0] * 60, [1.0] * 30 + [0.0] * 24 + [1.0] * 46
    pieces = [f" w{i}" for i in range(100)]
    found = diagnose([made(pieces[:60], good, name="good"), made(pieces, bad, name="bad")], GAMMA)["worst"]
    assert found[0]["prompt"] == "bad" and 25 <= found[0]["from"] <= 31 and found[0]["rejected"] >= 23
    assert [w["rejected"] for w in found] == sorted((w["rejected"] for w in found), reverse=True)
    assert all(w["rejected"] == sum(p["kind"] == "corrected" for p in w["pieces"]) for w in found)
    spans = [(w["from"], w["to"]) for w in found if w["prompt"] == "bad"]
    assert all(a[1] <= b[0] or b[1] <= a[0] for i, a in enumerate(spans) for b in spans[i + 1 :])
    assert all(w["prompt"] == "bad" for w in found), "a text without a rejection has no worst passage"


def test_rounds_beyond_the_drafts_context_are_counted() -> None:
    found = diagnose([made([" x"] * 40, [1.0] * 40, context=20)], GAMMA)
    assert found["context"]["rounds"] > 15 and found["context"]["share"] == pytest.approx(found["context"]["rounds"] / found["rounds"])


def test_a_law_of_another_text_is_refused() -> None:
    trace = Trace(2, [1, 2, 3], [Round("model", 2, 2, 3)])
    law = {"alpha": [1.0] * 3, "kl": [0.0] * 3, "entropy": [0.0] * 3, "outside": [0.0] * 3}
    assert text_of("p", "own", ["a", "b", "c"], trace, law).alpha == [1.0] * 3
    with pytest.raises(ValueError, match="p:"):
        text_of("p", "own", ["a", "b", "c"], trace, {**law, "kl": [0.0] * 2})
    with pytest.raises(ValueError):
        text_of("p", "own", ["a", "b", "c"], trace, {**law, "outside": [0.0] * 2})
    with pytest.raises(ValueError):
        diagnose([], GAMMA)


# --- what to do next ----------------------------------------------------------------------------------------------------------


def found_at(
    alpha: float, *, sure: float = 0.5, outside: float = 0.0, full: float = 0.0, domains: dict[str, float] | None = None
) -> dict[str, Any]:
    return {"gamma": GAMMA, "alpha": alpha, "sure": {"lost": sure}, "outside": outside, "context": {"share": full, "rounds": int(100 * full)},
            "domain": [{"name": n, "alpha": a} for n, a in (domains or {"own": alpha}).items()]}  # fmt: skip


def speeds(alpha: float, c: float) -> dict[int, float]:
    return {g: expected_tokens(alpha, g) / (g * c + 1) for g in (1, 2, 3, 4, 6, 8)}


def advised(found: dict[str, Any], conditions: Conditions) -> list[str]:
    made = advise(found, conditions)
    assert {a["what"] for a in made} == {
        "do not speculate",
        "another gamma",
        "another shape",
        "more data",
        "more head tokens",
        "a longer draft context",
    }
    assert all(a["because"] and a["figures"] and a["thresholds"] and a["keys"] for a in made) and json.dumps(made)
    flags = [a["advised"] for a in made]
    assert flags == sorted(flags, reverse=True), "the advised ones come first"
    return [a["what"] for a in made if a["advised"]]


@pytest.mark.parametrize(("alpha", "c", "extra", "want", "never"), [
    (0.20, 0.6, {}, "do not speculate", None),
    (0.90, 0.02, {}, "another gamma", "do not speculate"),
    (0.75, 0.40, {}, "another shape", "do not speculate"),
    (0.50, 0.02, {}, "more data", "do not speculate"),
    (0.70, 0.10, {"outside": 0.05}, "more head tokens", "a longer draft context"),
    (0.70, 0.10, {"full": 0.2}, "a longer draft context", "more head tokens"),
])  # fmt: skip
def test_advice(alpha: float, c: float, extra: dict[str, Any], want: str, never: str | None) -> None:
    told = advised(found_at(alpha, **extra), Conditions(dict.fromkeys(FLAT, c), FLAT, speeds(alpha, c)))
    assert want in told and never not in told
    if want == "do not speculate":
        assert told[0] == want


def test_the_gamma_in_use_is_not_advised_against_when_it_is_the_best() -> None:
    best = {1: 1.2, 2: 1.4, GAMMA: 1.5, 4: 1.51}
    assert "another gamma" not in advised(found_at(0.7), Conditions(dict.fromkeys(FLAT, 0.1), FLAT, best)), "1 % is noise"
    assert "another gamma" in advised(found_at(0.7), Conditions(dict.fromkeys(FLAT, 0.1), FLAT, {**best, 2: 1.56}))


def gamma_advice(best: dict[int, float], in_use: int | None, diagnosed: int) -> dict[str, Any]:
    conditions = Conditions(dict.fromkeys(FLAT, 0.1), FLAT, best, in_use=in_use)
    (entry,) = [a for a in advise({**found_at(0.7), "gamma": diagnosed}, conditions) if a["what"] == "another gamma"]
    return entry


def test_another_gamma_is_measured_against_the_recipes() -> None:
    """The diagnosis is made at the fastest gamma, so that one can never be improved upon."""
    best = {1: 1.2, 2: 1.5, 4: 1.3}
    told = gamma_advice(best, in_use=4, diagnosed=2)
    assert told["advised"] and told["worth"] == pytest.approx(1.5 / 1.3) and "the recipe's 4 1.30x" in told["because"]
    assert not gamma_advice(best, in_use=2, diagnosed=2)["advised"]
    untried = gamma_advice(best, in_use=3, diagnosed=2)
    assert untried["advised"] and untried["worth"] is None and "the recipe's 3 was not tried" in untried["because"]
    assert not gamma_advice({1: 0.8, 2: 0.9}, in_use=2, diagnosed=1)["advised"], "no gamma pays"


def test_the_largest_gamma_tried_may_not_be_the_best_there_is() -> None:
    told = gamma_advice({1: 1.2, 2: 1.4, 4: 1.6}, in_use=4, diagnosed=4)
    assert told["advised"] and "4 is the largest that was tried" in told["because"]
    assert not gamma_advice({1: 1.2, 2: 1.59, 4: 1.6}, in_use=4, diagnosed=4)["advised"], "the last step up gained nothing"
    assert not gamma_advice({4: 1.6}, in_use=4, diagnosed=4)["advised"], "one gamma is no sweep"
    assert not gamma_advice({1: 0.7, 2: 0.9}, in_use=2, diagnosed=2)["advised"]


def test_more_data_needs_a_sign_that_it_helps() -> None:
    flat = Conditions(dict.fromkeys(FLAT, 0.02), FLAT, speeds(0.5, 0.02), curve=[0.4, 0.5, 0.5, 0.5, 0.5, 0.5])
    assert "more data" not in advised(found_at(0.5, sure=0.1), flat)
    rising = Conditions(dict.fromkeys(FLAT, 0.02), FLAT, speeds(0.5, 0.02), curve=[0.40, 0.44, 0.46, 0.48, 0.49, 0.50])
    assert "more data" in advised(found_at(0.5, sure=0.1), rising)
    told = advise(found_at(0.5, sure=0.1, domains={"own": 0.55, "biology": 0.40}), flat)[0]
    assert told["what"] == "more data" and told["figures"]["domains_behind"] == ["biology"] and "biology" in told["because"]


def test_a_perfect_draft_that_cannot_pay_is_told_apart_from_a_poor_one() -> None:
    dear = advise(found_at(0.9), Conditions(dict.fromkeys(FLAT, 1.0), FLAT, {3: 0.9}))[0]
    assert dear["what"] == "do not speculate" and "even a perfect draft" in dear["because"]
    poor = advise(found_at(0.1), Conditions(dict.fromkeys(FLAT, 0.2), FLAT, {3: 0.7}))[0]
    assert poor["what"] == "do not speculate" and "perfect" not in poor["because"]


def test_without_conditions_there_is_no_advice() -> None:
    assert diagnose([made([" x"] * 9, [0.5] * 9)], GAMMA)["advice"] == []
    assert diagnose([made([" x"] * 9, [0.5] * 9)], GAMMA, Conditions(dict.fromkeys(FLAT, 0.1), FLAT, {3: 1.2}))["advice"]
