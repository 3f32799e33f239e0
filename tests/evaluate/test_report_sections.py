"""The reports of a score of schema 2: every section by what was measured, none without."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

from draftstill.evaluate.html import MOST_BYTES, page
from draftstill.evaluate.next_steps import next_steps
from draftstill.evaluate.reading import as_read, ranked, speed
from draftstill.evaluate.report import to_markdown, to_terminal
from draftstill.evaluate.sections_acceptance import training
from draftstill.evaluate.sentences import headline, ranking_lines, verdict
from draftstill.evaluate.tracking import summary_of
from draftstill.evaluate.wording import outcome, times
from tests.evaluate.test_report import HOSTILE, Seen

HERE = Path(__file__).parent
SAMPLE = json.loads((HERE / "sample_score_2.json").read_text())
FIRST = json.loads((HERE / "sample_score.json").read_text())


@pytest.fixture
def score() -> dict[str, Any]:
    return copy.deepcopy(SAMPLE)


def all_reports(score: dict[str, Any]) -> list[str]:
    return [page(score), to_markdown(score), to_terminal(score, {})]


def plain_text(report: str) -> str:
    return " ".join(report.replace("\\", "").split())


def body_of(html: str) -> str:
    return html[html.index("<body>") : html.index('<script type="application/json"')]


WINNER = {"estimate": 1.5, "low": 1.3, "high": 1.7, "method": "bootstrap-t: simultaneous"}


def rival(score: dict[str, Any], to_settle: int | None) -> None:
    score["winner"].update(
        arm="tuned", gamma=2, candidate="tuned", speedup=WINNER, clear=False, to_settle=to_settle,
        rivals=[{"arm": "composite", "gamma": 2, "ratio": {"estimate": 1.02, "low": 0.95, "high": 1.1, "method": "bootstrap-t"}, "to_settle": to_settle}],
    )  # fmt: skip


SECTIONS = ("Candidates", "What to do next", "How many guesses a round", "Where the time goes", "Held-out alpha", "Where acceptance is lost",
            "By position in the block", "By position in the output", "By kind of token", "By the target&#x27;s entropy", "By domain", "Other texts",
            "Why: break-even", "Under load", "Is the output still", "Token by token", "Conditions", "Passages with most rejections")  # fmt: skip


def test_the_page_has_every_section_and_no_empty_one() -> None:
    html = page(SAMPLE)
    assert [s for s in SECTIONS if s not in html] == []
    seen = Seen(html)
    assert not seen.faults and not seen.stack
    assert "<table></table>" not in html and "<figure></figure>" not in html and ">nan" not in html and ">None<" not in html
    assert len(html.encode()) < 500_000


@pytest.mark.parametrize(
    ("key", "value", "gone"),
    [
        ("load", None, ["Under load"]), ("domains", {}, ["Other texts"]), ("examples", [], ["Token by token"]), ("sweep", [], ["How many guesses"]),
        ("diagnosis", {}, ["By kind of token", "By domain", "Passages with"]), ("training", {"curve": [], "curves": {}}, ["Held-out alpha"]),
        ("comparisons", [], ["Every pair"]),
    ],
)  # fmt: skip
def test_a_section_without_data_is_left_out(score: dict[str, Any], key: str, value: object, gone: list[str]) -> None:
    assert all(g in page(SAMPLE) for g in gone)
    score[key] = value
    html = body_of(page(score))
    assert not [g for g in gone if g in html] and not Seen(page(score)).faults
    assert to_markdown(score) and to_terminal(score, {})


def test_the_sweep_shows_measured_predicted_and_formula(score: dict[str, Any]) -> None:
    html = page(score)
    figure = html[html.index("<h3>draft after training: fastest at gamma") :]
    figure = figure[: figure.index("</figure>")]
    rows = [r for r in score["sweep"] if (r["arm"], r["domain"], r["temperature"]) == ("tuned", "own", score["winner"]["temperature"])]
    for r in rows:
        for label, value in (
            ("measured", r["speedup"]["estimate"]),
            ("predicted", r["predicted"]),
            ("formula", r["counts"]["iid"]["predicted"]),
        ):
            assert f"<title>{label}, gamma {r['swept']}: {times(value)}</title>" in figure
    assert figure.count("h8M") == len(rows), "every measured point has its interval"
    assert 's-composite dash"' in figure and 's-untuned dots"' in figure, "lines differ in more than colour"


def test_the_best_gamma_is_named_everywhere(score: dict[str, Any]) -> None:
    rival(score, 40)
    tried = sorted({r["swept"] for r in score["sweep"] if r["arm"] == "tuned"})
    assert f"its best gamma is 2 of {', '.join(map(str, tried))}" in verdict(score)
    assert "Best gamma of draft after training: 2 (" in plain_text(to_markdown(score))


def test_no_clear_winner_says_how_many_prompts_would_tell(score: dict[str, Any]) -> None:
    rival(score, 1234)
    assert outcome(score) == "pays"
    for report in all_reports(score):
        assert "1,234 timed prompts would tell" in plain_text(report) or "time 1,234 prompts" in plain_text(report)
    rival(score, None)
    assert "how many prompts would tell cannot be said" in ranking_lines(score)[0]


def test_a_fastest_arm_within_its_interval_is_unclear_and_one_below_is_no_speculation(score: dict[str, Any]) -> None:
    fast = {"estimate": 1.2, "low": 0.9, "high": 1.6, "method": "bootstrap-t: simultaneous"}
    score["winner"].update(arm=None, gamma=None, candidate=None, speedup=None, clear=True, rivals=[], to_settle=77,
                           fastest={"arm": "lookup", "gamma": 6, "speedup": fast})  # fmt: skip
    assert outcome(score) == "unclear" and "prompt lookup ran at 1.20x" in verdict(score) and "77 timed prompts" in verdict(score)
    assert "may be chance" in headline(score) and ">No clear winner<" in page(score)
    fast.update(estimate=0.97, low=0.9, high=1.05)
    assert (
        outcome(score) == "unclear"
        and headline(score).startswith("Not proven")
        and "does not exclude that it gains something" in verdict(score)
    )
    assert ">Do not speculate<" not in page(score) and "Do not speculate" not in verdict(score), "its interval reaches above 1"
    fast.update(estimate=0.97, low=0.9, high=0.99)
    assert outcome(score) == "none" and headline(score).startswith("Do not speculate") and "prompt lookup, ran at 0.97x" in verdict(score)
    assert next_steps(score)
    fast.update(estimate=0.97, low=0.97, high=0.97, method="none: one prompt")
    assert outcome(score) == "unclear", "one prompt says nothing either way"
    fast.update(method="none: all prompts have the same ratio")
    assert outcome(score) == "none"
    score["winner"]["fastest"] = None
    assert outcome(score) == "unclear" and "Not measured" in headline(score) and verdict(score).startswith("Not measured")
    assert "Do not speculate" not in body_of(page(score)) and next_steps(score)


def test_a_slower_fastest_arm_is_not_served(score: dict[str, Any]) -> None:
    slow = {"estimate": 0.97, "low": 0.9, "high": 1.05, "method": "bootstrap-t: simultaneous"}
    score["winner"].update(arm=None, gamma=None, candidate=None, speedup=None, clear=True, rivals=[], to_settle=None,
                           fastest={"arm": "lookup", "gamma": 6, "speedup": slow})  # fmt: skip
    score.update(diagnosis={}, load=None)
    score["conditions"]["other_cores"] = 0.0
    assert [s.what for s in next_steps(score)] == ["serve the target as it is"]


def test_endless_intervals_are_not_printed(score: dict[str, Any]) -> None:
    score["arms"][1]["speedup"] = {"estimate": 1.3, "low": 2e-22, "high": 7e21, "method": "t: 2 prompts"}
    for report in all_reports(score)[1:]:
        assert "e+" not in report and "000000" not in report
    assert ">99x" in times(7e21)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("greedy_fp32", {"prompts": 2, "identical": 1, "arm_names": ["tuned"]}),
        ("self_pair", {"token_acceptance": 0.999}),
        ("ties", {"dtype": "bfloat16", "steps": 4, "texts": 8, "identical": 6, "tied": 1, "failed": 1}),
        ("sampling", {"p_value": 1e-9, "draws": 384, "arm": "tuned", "temperature": 0.7}),
        ("identities", {"traces": 5, "broken": 1, "first": "more accepted than proposed"}),
    ],
)
def test_each_failed_check_of_the_audit_silences_the_speed(score: dict[str, Any], key: str, value: object) -> None:
    score["audit"][key] = value
    assert outcome(score) == "broken" and headline(score).startswith("Do not use this")
    for report in all_reports(score):
        assert "Not lossless" in report
    assert ">Not lossless<" in page(score) and "use none of these drafts" in to_markdown(score)


def test_ties_are_said_and_pass(score: dict[str, Any]) -> None:
    score["audit"]["ties"] = {"dtype": "bfloat16", "steps": 4, "texts": 8, "identical": 7, "tied": 1, "failed": 0}
    assert outcome(score) != "broken"
    assert "in bfloat16 7 of 8 are, 1 part from it where the target is at a tie, 0 elsewhere" in page(score)


def test_advice_reaches_all_three(score: dict[str, Any]) -> None:
    found = score["diagnosis"]["tuned"]["advice"]
    for a in found:
        a["advised"] = a["what"] == "more data"
    because = next(a["because"] for a in found if a["what"] == "more data")
    assert [s.what for s in next_steps(score)].count("more data") == 1
    for report in all_reports(score)[:2]:
        assert "more data" in report and because in plain_text(report)
    for a in found:
        a["advised"] = False
    assert next_steps(score), "there is always something to do"


@pytest.mark.parametrize(("stops", "says"), [(None, "still paid at 16 requests at once"), (16, "stops paying at 16 requests")])
def test_load_says_where_speculation_stops_paying(score: dict[str, Any], stops: int | None, says: str) -> None:
    score["load"].update(stops_paying_at=stops, adaptive_never_slower=False, adaptive_slower_at=[4])
    html = page(score)
    assert says in html and "slower than plain decoding beyond the interval at 4 requests at once" in html
    for b in score["load"]["batches"]:
        for name in ("plain", "fixed", "adaptive"):
            assert f"{b['arms'][name]['tokens_per_s']:.1f}" in html


def batch(rows: int, fixed: tuple[float, float]) -> dict[str, Any]:
    low, high = fixed
    arm = {
        "tokens_per_s": 10.0,
        "mean_gamma": 1.0,
        "ratio": {"estimate": (low + high) / 2, "low": low, "high": high, "method": "bootstrap-t"},
    }
    return {"rows": rows, "other_cores": 0.01, "arms": {"plain": arm, "fixed": arm, "adaptive": arm}}


@pytest.mark.parametrize(
    ("stops", "never", "step"),
    [
        (None, True, "speculate up to 16 requests at once"),
        (4, True, "decode plainly from 4 requests at once on, or let gamma follow goodput"),
        (4, False, "decode plainly from 4 requests at once on"),
        (4, None, "decode plainly from 4 requests at once on"),
        (1, True, "decode plainly under load, or let gamma follow goodput"),
        (1, None, "decode plainly under load"),
    ],
)
def test_what_load_advises(score: dict[str, Any], stops: int | None, never: bool | None, step: str) -> None:
    score["load"].update(stops_paying_at=stops, adaptive_never_slower=never, adaptive_slower_at=[] if never else [4],
                         batches=[batch(n, (0.9, 1.2)) for n in (1, 4, 16)])  # fmt: skip
    assert step in [s.what for s in next_steps(score)]
    assert page(score)


def test_load_says_its_lowest_bound_and_its_neighbours(score: dict[str, Any]) -> None:
    score["load"].update(stops_paying_at=4, adaptive_never_slower=True, adaptive_slower_at=[], blocks=8,
                         batches=[batch(1, (0.91, 1.2)), batch(4, (0.97, 1.2))])  # fmt: skip
    html = body_of(page(score))
    assert "at no batch slower than plain decoding beyond the interval (lowest bound 0.91x)" in html and "over 8 repetitions" in html
    assert "up to 0.01 cores" in html and "not to be trusted" not in html
    score["load"]["batches"][1]["other_cores"] = 0.7
    assert "up to 0.70 cores meanwhile, at 4 requests at once: these figures are not to be trusted" in body_of(page(score))


def test_a_winner_without_a_draft_is_served_whatever_the_draft_is_worth(score: dict[str, Any]) -> None:
    """Lookup won clearly; the diagnosis says that the tuned draft alone is not worth its memory."""
    score["conditions"]["other_cores"] = 0.0
    for a in score["diagnosis"]["tuned"]["advice"]:
        a["advised"] = a["what"] == "do not speculate"
    score["winner"].update(arm="lookup", gamma=6, candidate=None, speedup=WINNER, clear=True, rivals=[])
    told = [s.what for s in next_steps(score)]
    assert any(w.startswith("serve with prompt lookup") for w in told) and any(
        w.startswith("do not speculate with this draft alone") for w in told
    )
    score["winner"].update(arm="tuned", gamma=2, candidate="tuned")
    assert not any(s.what.startswith("serve") for s in next_steps(score)), "of the draft itself the two would contradict each other"


TIED = {"dtype": "bfloat16", "steps": 8, "texts": 16, "identical": 15, "tied": 1, "failed": 0}


@pytest.mark.parametrize(
    ("audit", "headline_says", "verdict_says"),
    [
        ({"ties": TIED}, "the target's distribution is kept",
         "the target's distribution is kept, 15 of 16 greedy texts are identical in bfloat16, the rest part at ties"),
        ({"ties": None}, "the target's distribution is kept", "the target's distribution is kept, 4 of 4 greedy texts are identical"),
        ({"ties": None, "sampling": None}, "4 of 4 greedy texts are identical", "by the audit 4 of 4 greedy texts are identical"),
        ({"sampling": {"p_value": None, "draws": 384, "arm": "tuned"}, "ties": TIED}, "15 of 16 greedy texts are identical in bfloat16",
         "by the audit 15 of 16 greedy texts are identical in bfloat16, the rest part at ties"),
        (None, "was not checked", "the output was not audited"),
    ],
)  # fmt: skip
def test_what_is_kept_is_what_was_tested(
    score: dict[str, Any], audit: dict[str, Any] | None, headline_says: str, verdict_says: str
) -> None:
    rival(score, None)
    sound = {"greedy_fp32": {"prompts": 4, "identical": 4, "arm_names": ["tuned"]}, "self_pair": {"token_acceptance": 1.0},
             "sampling": {"p_value": 0.3, "draws": 384, "arm": "tuned", "temperature": 0.7}}  # fmt: skip
    score["audit"] = None if audit is None else {**sound, **audit}
    assert headline_says in headline(score) and verdict_says in verdict(score)
    for report in (*all_reports(score), headline(score)):
        assert "unchanged" not in report and "no change of output" not in report
        if audit is None or not (audit.get("sampling", sound["sampling"]) or {}).get("p_value"):
            assert "distribution is kept" not in report
    if audit and "sampling" in audit and audit["sampling"]:
        assert "sampling was not tested" in page(score)


@pytest.mark.parametrize(
    ("mode", "says", "never"),
    [
        ("hidden", "Held-out alpha while training", "at least"), (None, "Held-out alpha while training", "at least"),
        ("topk", "Alpha, at least, on held-out text while training", "Held-out alpha"),
        ("text", "Mean probability of the written token, on held-out text", "Held-out alpha"),
    ],
)  # fmt: skip
def test_the_training_curve_is_called_what_it_is(score: dict[str, Any], mode: str | None, says: str, never: str) -> None:
    score["corpus"]["recording"] = {"mode": "topk", "heldout_mode": mode}
    for a in score["arms"]:
        a["break_even"] = None if a["break_even"] is None else 0.123
    html = body_of(page(score))
    assert says in html and never not in html
    assert ("break-even 0.12" in training(as_read(score))) == (mode in ("hidden", None)), "a bound is not compared with the break-even"
    if mode == "text":
        assert "alpha at temperature" not in html and "top-1 agreement" not in html


def test_several_drafts_have_no_common_break_even(score: dict[str, Any]) -> None:
    for a in score["arms"]:
        a["break_even"] = None if a["break_even"] is None else 0.123
    assert "break-even 0.12" in training(as_read(score))
    score["training"]["curves"]["other"] = score["training"]["curves"]["tuned"]
    assert "break-even" not in training(as_read(score))


def test_what_is_timed_and_what_is_counted_is_headed_so(score: dict[str, Any]) -> None:
    text, html = plain_text(to_markdown(score)), body_of(page(score))
    assert "token acceptance (timed) | alpha (all texts) | tau (timed)" in text and "Here tau is of the timed texts" in html
    row = next(r for r in score["sweep"] if r["arm"] == "tuned" and r["domain"] == "own")
    row["counts"]["metrics"]["tau"] = 7.77
    assert "7.77" in body_of(page(score)), "the sweep's tau is of the same texts as its acceptance"


def test_warm_up_stands_in_the_conditions(score: dict[str, Any]) -> None:
    score["conditions"]["warm_up_s"] = 12.34
    assert all("12.3 s of first rounds, captures and compilation" in plain_text(r) for r in (page(score), to_markdown(score)))
    del score["conditions"]["warm_up_s"]
    assert "captures and compilation" not in page(score)


def test_ranking_is_by_speed_with_plain_decoding_in_its_place() -> None:
    t = SAMPLE["winner"]["temperature"]
    order = ranked(SAMPLE, t)
    arms = {a["arm"]: a for a in SAMPLE["arms"] if a["temperature"] == t}
    found = [1.0 if n == "plain" else speed(arms[n])["estimate"] for n in order]  # type: ignore[index]
    assert found == sorted(found, reverse=True) and set(order) == set(arms)


def test_acceptance_before_and_after_is_at_one_gamma(score: dict[str, Any]) -> None:
    untuned = next(a for a in score["arms"] if a["arm"] == "untuned" and a["temperature"] == score["winner"]["temperature"])
    same = next(
        r
        for r in score["sweep"]
        if (r["arm"], r["temperature"], r["domain"], r["swept"]) == ("tuned", untuned["temperature"], "own", untuned["swept"])
    )
    same["counts"]["metrics"]["token_acceptance"] = 0.4321
    assert "to 43.2%" in verdict(score)


def test_hostile_text_stays_text_in_every_new_section(score: dict[str, Any]) -> None:
    for worst in score["diagnosis"]["tuned"]["worst"]:
        worst.update(prompt=HOSTILE, domain=HOSTILE)
        for piece in worst["pieces"]:
            piece["text"] = HOSTILE
    for group in ("domain", "token_kind", "output", "entropy_fifth"):
        for row in score["diagnosis"]["tuned"][group]:
            row["name"] = HOSTILE
    for a in score["diagnosis"]["tuned"]["advice"]:
        a.update(what=HOSTILE, because=HOSTILE, keys=[HOSTILE], advised=True)
    score["domains"] = {HOSTILE + name: d for name, d in score["domains"].items()}
    for rows in (score["arms"], score["sweep"]):
        for a in rows:
            if a["arm"] == "lookup":
                a["arm"] = HOSTILE
    score["load"]["fixed"]["arm"] = HOSTILE
    score["target"]["name"] = HOSTILE
    html = page(score).encode("utf-8", "replace").decode()
    seen, calm = Seen(html), Seen(page(SAMPLE))
    assert not seen.faults and not seen.stack and {t for t, _ in seen.tags} <= {t for t, _ in calm.tags} | {"code"}
    assert not [a for _, attributes in seen.tags for a in attributes if a.startswith("on") or a in ("src", "href", "style")]
    assert not set(html) & set("\u2028\u2029\u202e\x00")
    text = to_markdown(score)
    assert "<script" not in text and "<img" not in text and "<svg" not in text
    assert set(re.findall(r"</?(\w+)", text)) == {"details", "summary"}


def test_too_much_json_gives_way_and_says_so(score: dict[str, Any]) -> None:
    for a in score["arms"]:
        a["per_prompt"] = a["per_prompt"] * 400
    html = page(score)
    assert len(html.encode()) < MOST_BYTES
    left = json.loads(Seen(html).scripts[0])
    assert left["left_out"] == ["arms.per_prompt", "domains.arms"] and left["winner"] == score["winner"]
    score["sweep"][0]["metrics"]["more"] = "x" * MOST_BYTES
    left = json.loads(Seen(page(score)).scripts[0])
    assert "sweep" in left["left_out"] and "sweep" not in left
    score["conditions"]["more"] = "x" * MOST_BYTES
    assert set(json.loads(Seen(page(score)).scripts[0])) == {"schema", "winner", "left_out"}


def test_an_older_score_reads_like_a_new_one() -> None:
    found = as_read(FIRST)
    assert found["schema"] == 2 and as_read(found) is found and outcome(FIRST) == outcome(found)
    assert {r["arm"] for r in found["sweep"]} == {a["arm"] for a in FIRST["arms"]} and "per_prompt" not in found["sweep"][0]
    html = body_of(page(FIRST))
    assert "Under load" not in html and "Other texts" not in html and "By position in the block" in html


def test_the_summary_for_trackers_holds_figures_only_where_there_are_some(score: dict[str, Any]) -> None:
    found = summary_of(score)
    assert found["score/verdict"] == verdict(score) and found["score/outcome"] == outcome(score) and found["score/lossless"] == 1
    assert None not in found.values() and found["score/tuned/alpha"] == pytest.approx(next(
        a["alpha"] for a in score["arms"] if a["arm"] == "tuned" and a["temperature"] == score["winner"]["temperature"]))  # fmt: skip
    assert "score/plain/speedup" not in found and summary_of(FIRST)["score/winner"] == "tuned"
