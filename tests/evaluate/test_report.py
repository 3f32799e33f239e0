"""The sentence for each outcome, the last screen, and a page that hostile text cannot break."""

from __future__ import annotations

import copy
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from draftstill.evaluate.card import card
from draftstill.evaluate.html import MOST_BYTES, page
from draftstill.evaluate.markup import embedded
from draftstill.evaluate.report import to_markdown, to_terminal, with_prefill, write_reports
from draftstill.evaluate.sentences import verdict
from draftstill.evaluate.wording import losslessness, outcome
from tests.evaluate.test_card import recipe_for

SAMPLE = json.loads((Path(__file__).parent / "sample_score.json").read_text())


@pytest.fixture
def score() -> dict[str, Any]:
    return copy.deepcopy(SAMPLE)


def arm(score: dict[str, Any], name: str, temperature: float = 0.7) -> dict[str, Any]:
    return next(a for a in score["arms"] if a["arm"] == name and a["temperature"] == temperature)


# --- the verdict -----------------------------------------------------------------------------------------------------------


def test_a_clear_winner_is_named_with_its_interval_and_what_training_did(score: dict[str, Any]) -> None:
    text = verdict(score)
    assert text.startswith("At temperature 0.7, the tuned draft decodes at 1.71x the speed of plain decoding (95% interval 1.63 to 1.83)")
    assert "training raised token acceptance from 12.1% to 50.8%" in text
    assert text.count(". ") == 0 and text.endswith(".")


def test_no_arm_above_plain_says_do_not_speculate(score: dict[str, Any]) -> None:
    for a in score["arms"]:
        if a["speedup"]:
            a["speedup"] = {"estimate": 0.81, "low": 0.78, "high": 0.84, "method": "BCa"}
    arm(score, "tuned")["speedup"] = {"estimate": 0.93, "low": 0.90, "high": 0.96, "method": "BCa"}
    score["winner"].update(arm=None, speedup=None, clear=False)
    text = verdict(score)
    assert text.startswith("Do not speculate at temperature 0.7") and "the tuned draft, ran at 0.93x" in text and "0.90 to 0.96" in text
    assert "Do not speculate" in page(score) and "50.8%" in text


def test_a_named_winner_that_is_slower_is_not_believed(score: dict[str, Any]) -> None:
    score["winner"]["speedup"] = {"estimate": 0.97, "low": 0.95, "high": 0.99, "method": "BCa"}
    assert outcome(score) == "none"


def test_an_interval_around_one_is_no_clear_winner_whatever_the_flag_says(score: dict[str, Any]) -> None:
    score["winner"]["speedup"] = {"estimate": 1.04, "low": 0.97, "high": 1.12, "method": "BCa"}
    text = verdict(score)
    assert text.startswith("No clear winner at temperature 0.7") and "0.97 to 1.12" in text and "gains nothing" in text


def test_two_arms_alike_are_named_as_alike(score: dict[str, Any]) -> None:
    score["winner"]["clear"] = False
    for c in score["comparisons"]:
        if c["temperature"] == 0.7 and c["a"] == "composite":
            c["ratio"] = {"estimate": 0.99, "low": 0.93, "high": 1.05, "method": "BCa"}
    text = verdict(score)
    assert text.startswith("Speculation pays") and "not told apart from lookup with the tuned draft behind it" in text


def test_one_prompt_proves_nothing(score: dict[str, Any]) -> None:
    score["winner"]["speedup"] = {"estimate": 1.8, "low": 1.8, "high": 1.8, "method": "none: one prompt"}
    assert "No clear winner" in verdict(score) and "too few prompts for an interval" in verdict(score)


@pytest.mark.parametrize(
    "change",
    [
        {"greedy_fp32": {"prompts": 4, "identical": 3, "arm_names": ["tuned"]}},
        {"self_pair": {"token_acceptance": 0.99}},
        {"sampling": {"p_value": 1e-6, "draws": 20000}},
    ],
)
def test_a_failed_audit_silences_the_speed(score: dict[str, Any], change: dict[str, Any]) -> None:
    score["audit"].update(change)
    text = verdict(score)
    assert text.startswith("Not lossless, so no speed-up is claimed") and "1.71x" not in text
    assert "**FAILED**" in to_markdown(score) and "NO, see the report" in to_terminal(score, {})


def test_without_an_audit_nothing_is_claimed_about_the_output(score: dict[str, Any]) -> None:
    score["audit"] = {
        "greedy_fp32": {"prompts": 0, "identical": 0, "arm_names": []},
        "self_pair": {"token_acceptance": 1.0},
        "sampling": None,
    }
    assert losslessness(score)[0] is None
    assert "the output was not audited" in verdict(score) and "Lossless:   not audited" in to_terminal(score, {})


def test_a_busy_machine_is_said_everywhere(score: dict[str, Any]) -> None:
    score["conditions"]["other_cores"] = 0.21
    warning = "other processes kept 0.21 cores busy"
    for text in (verdict(score), to_markdown(score), page(score), " ".join(to_terminal(score, {}).split())):
        assert warning in text and "not to be trusted" in text
    assert ">Timing disturbed<" in page(score)
    score["conditions"]["other_cores"] = 0.2
    assert "not to be trusted" not in verdict(score) + page(score)


def test_acceptance_that_fell_is_not_called_a_rise(score: dict[str, Any]) -> None:
    arm(score, "untuned")["metrics"]["token_acceptance"] = 0.6
    assert "training lowered token acceptance from 60.0% to 50.8%" in verdict(score)
    score["arms"] = [a for a in score["arms"] if a["arm"] != "untuned"]
    assert "the tuned draft has a token acceptance of 50.8%" in verdict(score)


def test_nothing_is_said_of_training_where_no_gamma_is_common(score: dict[str, Any]) -> None:
    """The verdict, the tile of the page and the card look at one pair of figures; an untuned row at a gamma of its own is no part of it."""
    for a in score["arms"]:
        if a["arm"] == "untuned":
            a["gamma"] += 1
    texts = [verdict(score), to_markdown(score), page(score), card(score, recipe_for())]
    assert all("the tuned draft has a token acceptance of 50.8%" in text.replace("\\", "") for text in texts)
    assert not any("raised token acceptance" in text or "before → after training" in text for text in texts)


# --- what timed it ---------------------------------------------------------------------------------------------------------


def test_the_gpu_is_named(score: dict[str, Any]) -> None:
    texts = lambda: [to_markdown(score), page(score), card(score, recipe_for())]  # noqa: E731
    plain = texts()
    score["conditions"].update(device="cuda", accelerator="NVIDIA H200")
    assert all("cuda (NVIDIA H200), " in text for text in texts()[:2]) and "cuda (NVIDIA H200), " in texts()[2]
    score["conditions"].update(device="cpu", accelerator=None)
    assert texts()[2] == plain[2] and "None" not in texts()[0]


@pytest.mark.parametrize(("commits", "says"), [
    ([], None), (["a" * 40], None), ([None], None), (["a" * 40, "b" * 40 + " with changes"], "aaaaaaaaaaaa, bbbbbbbbbbbb with changes"),
    (["a" * 40, None], "aaaaaaaaaaaa, one that was not noted"),
])  # fmt: skip
def test_several_states_of_the_source_are_warned_of(score: dict[str, Any], commits: list[str | None], says: str | None) -> None:
    score["conditions"]["commits"] = commits
    for text in (to_markdown(score), page(score), card(score, recipe_for())):
        assert (f"2 states of Draftstill's source timed this score ({says})" in text.replace("&#x27;", "'")) == (says is not None)


# --- Markdown and terminal -------------------------------------------------------------------------------------------------


def test_the_markdown_tables_have_every_arm_and_no_ragged_row(score: dict[str, Any]) -> None:
    score["target"]["name"] = "odd | name\nwith a line"
    lines = to_markdown(score).splitlines()
    widths = {line.replace("\\|", "").count("|") for line in lines if line.startswith("| ") and "tok/s" not in line}
    assert widths == {6, 11, 3}  # candidates, all figures, conditions
    assert sum(line.startswith("| draft after training | 3 |") for line in lines) == 2
    assert any("50.8% [4" in line.replace("\\", "") and "1.71x [1.63x, 1.83x]" in line.replace("\\", "") for line in lines)
    assert any(line.startswith("| **draft after training** | 3 |") for line in lines), "the winner is marked"


def test_prefill_dilutes_the_gain(score: dict[str, Any]) -> None:
    assert 1.0 < with_prefill(score, 0.7)["tuned"] < arm(score, "tuned")["speedup"]["estimate"]


def screens() -> list[dict[str, Any]]:
    worst = copy.deepcopy(SAMPLE)
    worst["winner"]["clear"] = False
    worst["conditions"]["other_cores"] = 0.93
    for c in worst["comparisons"]:
        c["ratio"] = {"estimate": 1.0, "low": 0.9, "high": 1.1, "method": "BCa"}
    broken = copy.deepcopy(SAMPLE)
    broken["audit"]["greedy_fp32"]["identical"] = 1
    broken["conditions"]["other_cores"] = 1.5
    nothing = copy.deepcopy(SAMPLE)
    nothing["winner"].update(arm=None, speedup=None, clear=False)
    return [SAMPLE, worst, broken, nothing]


@pytest.mark.parametrize("score", screens())
def test_the_last_screen_fits(score: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    screen = to_terminal(score, {"html": tmp_path / "runs/demo/score/report.html"})
    lines = screen.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    assert "runs/demo/score/report.html" in screen and "draftstill run my.yaml" in screen
    assert "12.1%" in screen and "50.8%" in screen and "1.71x" in screen and "0.93x" in screen


# --- the page --------------------------------------------------------------------------------------------------------------


class Seen(HTMLParser):
    """Tags, attributes and the text of elements, as a browser's tokeniser would find them."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.stack: list[str] = []
        self.faults: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "rect", "path", "circle") and not self.get_starttag_text().endswith("/>"):
            self.stack.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("rect", "path", "circle"):
            return
        if not self.stack or self.stack.pop() != tag:
            self.faults.append(tag)

    def handle_data(self, data: str) -> None:
        if self.stack and self.stack[-1] == "script":
            self.scripts[-1] += data


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'><!--&\u2028\u2029\u202e\x00\ud800</style><svg onload=x>"


def test_hostile_text_stays_text_everywhere(score: dict[str, Any], tmp_path: Path) -> None:
    for example in score["examples"]:
        example.update(prompt=HOSTILE, prompt_id=HOSTILE)
        example["pieces"] = [{"text": HOSTILE, "kind": k} for k in ("accepted", "corrected", "bonus", "plain")]
    for section in ("target", "draft", "corpus", "conditions"):
        for key, value in score[section].items():
            if isinstance(value, str):
                score[section][key] = HOSTILE
    for a in score["arms"]:
        for row in a["per_prompt"]:
            row["prompt"] = HOSTILE
    html = write_reports(score, tmp_path)["html"].read_text(encoding="utf-8")
    seen, calm = Seen(html), Seen(page(SAMPLE))
    assert not seen.faults and not seen.stack
    assert {t for t, _ in seen.tags} == {t for t, _ in calm.tags}, "hostile text opened an element"
    assert not [a for _, attributes in seen.tags for a in attributes if a.startswith("on") or a in ("src", "href", "style")]
    assert len(seen.scripts) == 1 and json.loads(seen.scripts[0])["target"]["name"] == HOSTILE
    assert not set(html) & set("\u2028\u2029\u202e\x00"), "an invisible or line-turning character reached the page"
    assert "<script>" not in (tmp_path / "report.md").read_text() and "<img" not in (tmp_path / "report.md").read_text()


def test_embedded_json_is_the_same_json() -> None:
    value = {"a": HOSTILE, "b": [1.5, None, True]}
    assert json.loads(embedded(value)) == value
    assert not set("<>&\u2028") & set(embedded(value))
    with pytest.raises(ValueError):
        embedded(float("nan"))


def test_the_page_asks_for_nothing_and_runs_nothing() -> None:
    html = page(SAMPLE)
    for word in ("http:", "https:", "//", "url(", "@import", "@font-face", "src=", "href=", "<link", "javascript:"):
        assert word not in html, word
    seen = Seen(html)
    assert all(a.get("type") == "application/json" for t, a in seen.tags if t == "script")
    assert any("default-src 'none'" in (a.get("content") or "") for t, a in seen.tags if t == "meta")
    assert "prefers-color-scheme:dark" in html and "@media print" in html
    assert len(html.encode()) < 200_000


def test_the_page_stays_under_a_megabyte(score: dict[str, Any]) -> None:
    long = "&\u202e" * 250
    score["examples"] = [{**score["examples"][0], "prompt": long * 1000, "pieces": [{"text": long, "kind": "accepted"}] * 5000}] * 50
    for a in score["arms"]:
        a["per_prompt"] = a["per_prompt"] * 400
    score["training"]["curve"] = score["training"]["curve"] * 200
    html = page(score)
    assert len(html.encode()) < MOST_BYTES
    assert "more tokens not shown" in html
    json.loads(Seen(html).scripts[0])


def test_the_page_opens_with_the_verdict_and_marks_tokens_twice() -> None:
    html = page(SAMPLE)
    body = html[html.index("<body>") :]
    assert body.index(verdict(SAMPLE)[:60]) < body.index("<h2>") < body.index("Token by token")
    for css in (".a{background:var(--acc);border-bottom", ".c::after{content:", ".b::after{content:"):
        assert css in html  # background and mark
    for heading in (
        "Candidates",
        "Where the time goes",
        "By position in the block",
        "Held-out alpha",
        "predicted and measured",
        "Conditions",
    ):
        assert heading in body


def test_what_was_not_measured_breaks_nothing(score: dict[str, Any]) -> None:
    score.update(comparisons=[], examples=[], training={"curve": []})
    score["conditions"]["git"] = None
    score["arms"] = [a for a in score["arms"] if a["arm"] in ("plain", "lookup")]
    for a in score["arms"]:
        a.update(acceptance=None, predicted=None, c=None, v=None)
        a["metrics"].update(token_acceptance=None, acceptance_at=[None, None])
    score["winner"].update(arm=None, speedup=None, clear=False)
    assert not Seen(page(score)).faults
    assert ">nan" not in page(score) and "None" not in to_markdown(score)
    assert len(to_terminal(score, {}).splitlines()) <= 24
