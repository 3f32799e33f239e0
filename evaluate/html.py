"""The report as one HTML page: inline CSS, SVG and JSON, no script that runs, no network, under 1 MB.

Model and corpus text is hostile until escaped. Three layers: everything is escaped where it enters, embedded JSON cannot close
its element, and a content security policy forbids scripts and requests should the first two ever miss something.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from draftstill.evaluate import sections_acceptance as acceptance
from draftstill.evaluate import sections_speed as speeds
from draftstill.evaluate.circumstances import conditions
from draftstill.evaluate.markup import embedded, pair, section, text
from draftstill.evaluate.next_steps import next_steps
from draftstill.evaluate.reading import Score, as_read
from draftstill.evaluate.sections_load import load
from draftstill.evaluate.sentences import headline, verdict
from draftstill.evaluate.style import CSS
from draftstill.evaluate.wording import busy, losslessness, outcome, warnings

MOST_BYTES = 1_000_000
_BADGE = {
    "winner": ("good", "Faster"),
    "pays": ("good", "Faster"),
    "unclear": ("maybe", "No clear winner"),
    "none": ("bad", "Do not speculate"),
    "broken": ("bad", "Not lossless"),
}


def page(score: Score) -> str:
    """The whole page. Where it would be too long, the JSON that it carries gives way first: ``left_out`` says what is missing."""
    html = ""
    for numbers in _ever_less({k: v for k, v in score.items() if k != "examples"}):
        html = _page(as_read(score), numbers)
        if len(html.encode("utf-8", "replace")) < MOST_BYTES:
            break
    return html


def _ever_less(numbers: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield numbers
    thin: Callable[[Any], Any] = lambda rows: [{k: v for k, v in a.items() if k != "per_prompt"} for a in rows]  # noqa: E731
    less = {**numbers, "arms": thin(numbers["arms"]), "left_out": ["arms.per_prompt", "domains.arms"]}
    if "domains" in numbers:
        less["domains"] = {name: {k: v for k, v in d.items() if k != "arms"} for name, d in numbers["domains"].items()}
    yield less
    less = {**{k: v for k, v in less.items() if k not in ("sweep", "training", "diagnosis")},
            "left_out": [*less["left_out"], "sweep", "training", "diagnosis"]}  # fmt: skip
    yield less
    yield {"schema": numbers["schema"], "winner": numbers["winner"], "left_out": ["everything else: see score.json"]}


def _page(score: Score, numbers: Mapping[str, Any]) -> str:
    kind, word = _BADGE[outcome(score)]
    if busy(score) and outcome(score) in ("winner", "pays"):
        kind, word = "maybe", "Timing disturbed"
    name = score["target"]["name"]
    return "".join([
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">',
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none';style-src 'unsafe-inline';base-uri 'none';form-action 'none'\">",
        f"<title>{text(word)}: draft for {text(name)}</title><style>{CSS}</style></head><body>",
        f'<p class="kicker">Draftstill score: can a small draft model speed up <b>{text(name)}</b> on this text?</p>',
        f'<p class="badge {kind}">{text(word)}</p><h1>{text(headline(score))}</h1><p class="lead">{text(verdict(score))}</p>',
        *(f'<p class="warn">Warning: {text(warning)}.</p>' for warning in warnings(score)),
        speeds.tiles(score),
        speeds.candidates(score),
        _next(score),
        speeds.sweep(score),
        section("Time and training", pair(speeds.time_split(score), acceptance.training(score))),
        acceptance.lost(score),
        acceptance.domains(score),
        speeds.why(score),
        load(score),
        _audit(score),
        acceptance.examples(score),
        _conditions(score),
        f'<script type="application/json" id="score">{embedded(numbers)}</script></body></html>\n',
    ])  # fmt: skip


def _next(score: Score) -> str:
    items = [
        f"<li><b>{text(s.what)}</b>: {text(s.because)}. {' '.join(f'<code>{text(k)}</code>' for k in s.keys)}</li>"
        for s in next_steps(score)
    ]
    return section("What to do next", f"<ol>{''.join(items)}</ol>")


def _audit(score: Score) -> str:
    ok, found = losslessness(score)
    css, word = {None: ("maybe", "Not audited"), True: ("good", "Passed"), False: ("bad", "Failed")}[ok]
    return section("Is the output still the target's?", f'<p><b class="{css}">{word}</b>: {text(found)}.</p>')


def _conditions(score: Score) -> str:
    items = "".join(f"<dt>{text(label)}</dt><dd>{text(value)}</dd>" for label, value in conditions(score))
    return section("Conditions", f"<dl>{items}</dl>")
