"""The report as one HTML page: inline CSS, SVG and JSON, no script that runs, no network, under 1 MB.

Model and corpus text is hostile until escaped. Three layers: everything is escaped where it enters, embedded JSON cannot close
its element, and a content security policy forbids scripts and requests should the first two ever miss something.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from html import escape
from typing import Any

from draftstill.evaluate import charts
from draftstill.evaluate.report import (
    ARMS,
    NOTES,
    Score,
    arms_at,
    busy,
    comparison_lines,
    conditions,
    confidence,
    has_interval,
    losslessness,
    number,
    outcome,
    share,
    span,
    temperatures,
    times,
    verdict,
    with_prefill,
)

MOST_BYTES = 1_000_000
_EXAMPLES, _EXAMPLE_CHARS, _PROMPT_CHARS = 8, 50_000, 2000
"""What is shown of the examples, in characters of markup (for the prompt: of text, which escapes can make eight times longer)."""

_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_BADGE = {
    "winner": ("good", "Faster"),
    "pays": ("good", "Faster"),
    "unclear": ("maybe", "No clear winner"),
    "none": ("bad", "Do not speculate"),
    "broken": ("bad", "Not lossless"),
}
_PARTS = ("draft", "verify", "sample", "host")

_CSS = """
:root{color-scheme:light dark;--bg:#fff;--ink:#1b1f24;--soft:#59636e;--line:#d5dae0;--panel:#f5f7f9;
--slow:#d1242f18;--good:#116932;--maybe:#8a5a00;--bad:#b3202a;
--plain:#6e7781;--untuned:#c26a00;--tuned:#0a5fb4;--lookup:#0f7b5f;--composite:#a03e86;--draft:#0a5fb4;--verify:#9aa5b1;--sample:#d08700;--host:#6b4a94;
--acc:#bfe5c8;--cor:#ffd3bd;--bon:#c6dcfb}
@media(prefers-color-scheme:dark){:root{--bg:#14171b;--ink:#e6eaee;--soft:#9da7b1;--line:#353c44;--panel:#1d2228;
--slow:#ff6b6b1f;--good:#56d68a;--maybe:#e3b341;--bad:#ff7b72;
--plain:#8b949e;--untuned:#f0963c;--tuned:#5aa9ff;--lookup:#3fc79a;--composite:#e58ac8;--draft:#5aa9ff;--verify:#68737f;--sample:#e3b341;--host:#b392f0;
--acc:#1d4d2c;--cor:#6b3216;--bon:#1d3f70}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1080px;padding:24px 20px 60px;background:var(--bg);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif;
-webkit-print-color-adjust:exact;print-color-adjust:exact}
h1{font-size:1.55rem;line-height:1.35;margin:.4em 0 .7em;font-weight:600}
h2{font-size:1.15rem;margin:2.2em 0 .4em;border-top:1px solid var(--line);padding-top:1em}
h3{font-size:1rem;margin:1.4em 0 .3em}
p{margin:.4em 0 .8em;max-width:78ch}
.kicker,.note,figcaption{color:var(--soft);font-size:.88rem}
.badge{display:inline-block;font-weight:700;padding:.15em .7em;border-radius:99px;border:2px solid;margin-right:.7em}
.good{color:var(--good)}.maybe{color:var(--maybe)}.bad{color:var(--bad)}
.warn{border-left:4px solid var(--bad);background:var(--panel);padding:.7em 1em;font-weight:600}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(210px,1fr));gap:12px;margin:0 0 1em}
.tile{background:var(--panel);border:1px solid var(--line);border-radius:8px;padding:12px 14px}
.tile b{display:block;font-size:1.5rem;line-height:1.3;font-weight:650;white-space:nowrap}
.tile span{color:var(--soft);font-size:.88rem}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:0 10px;border-bottom:1px solid var(--line);white-space:nowrap;height:34px}
th{font-weight:600;color:var(--soft);font-size:.85rem;vertical-align:bottom}
th:first-child,td:first-child{text-align:left}
td.svg,th.svg{padding:0;text-align:left}.tight th,.tight td{padding:0 5px;font-size:.85rem}
tr.best td{background:var(--panel);font-weight:650}
small{color:var(--soft);font-weight:400}
svg{display:block;max-width:100%}svg.chart{height:auto}.bar{max-width:none}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(380px,1fr));gap:24px}
figure{margin:0}
.tick{font-size:11px;fill:var(--soft);text-anchor:middle}.end{text-anchor:end}.start{text-anchor:start}
.label{font-size:12px;fill:var(--soft);text-anchor:middle}.rowlabel{font-size:13px;fill:var(--ink);text-anchor:end}
.inbar{font-size:11px;text-anchor:middle;fill:var(--bg);font-weight:600}.i-verify{fill:#10151a}
.grid,.axis{stroke:var(--line);fill:none}.one{stroke:var(--ink);stroke-width:1.5}.rule{stroke:var(--ink);stroke-dasharray:5 4;fill:none}
.slower{fill:var(--slow)}.predicted{fill:var(--bg);stroke:var(--ink);stroke-width:1.2}.thick{stroke-width:2.5!important}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:4px 18px;padding:0;margin:.4em 0;font-size:.88rem;color:var(--soft)}
.legend li{display:flex;align-items:center;gap:6px}.swatch{width:14px;height:14px;border-radius:3px;display:inline-block}
.tokens{white-space:pre-wrap;overflow-wrap:anywhere;background:var(--panel);border:1px solid var(--line);border-radius:8px;padding:12px 14px;
line-height:2;unicode-bidi:isolate}
.tokens q{quotes:none;color:var(--soft)}
.a,.c,.b{border-radius:3px;padding:1px 0;-webkit-box-decoration-break:clone;box-decoration-break:clone}
.a{background:var(--acc);border-bottom:2px solid var(--good)}
.c{background:var(--cor)}.b{background:var(--bon)}
.c::after{content:"\\00d7";font-size:.75em;font-weight:700;vertical-align:.35em;color:var(--bad)}
.b::after{content:"+";font-size:.75em;font-weight:700;vertical-align:.35em;color:var(--tuned)}
dl{display:grid;grid-template-columns:max-content 1fr;gap:4px 18px;background:var(--panel);border:1px solid var(--line);border-radius:8px;padding:14px;margin:0}
dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere}
@media print{body{max-width:none;padding:0;font-size:12px}h2{break-after:avoid}figure,.tokens,table{break-inside:avoid}}
"""
_CSS += "".join(f".c-{k}{{fill:var(--{v})}}.s-{k}{{stroke:var(--{v});stroke-width:2;fill:none}}" for k, v in
                {**{a: a for a in ARMS}, "deploy": "tuned", "alpha": "untuned", "top1": "composite"}.items())  # fmt: skip
_CSS += "".join(f".p-{k}{{fill:var(--{k})}}.b-{k}{{background:var(--{k})}}" for k in _PARTS)


def text(value: object) -> str:
    """Escaped for HTML; characters that cannot be seen or that turn the line around become their code point in brackets."""
    return escape(_UNSEEN.sub(lambda m: f"[U+{ord(m[0]):04X}]", str(value)))


def embedded(value: Any) -> str:
    """JSON that cannot end its script element or open a comment in it; still JSON."""
    out = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return out.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def page(score: Score) -> str:
    """The whole page."""
    numbers = {k: v for k, v in score.items() if k != "examples"}
    html = _page(score, numbers)
    if len(html.encode("utf-8", "replace")) >= MOST_BYTES:
        html = _page(score, {**numbers, "arms": [{k: v for k, v in a.items() if k != "per_prompt"} for a in score["arms"]]})
    return html


def _page(score: Score, numbers: Mapping[str, Any]) -> str:
    t = score["winner"]["temperature"]
    kind, word = _BADGE[outcome(score)]
    warning = busy(score)
    if warning and outcome(score) in ("winner", "pays"):
        kind, word = "maybe", "Timing disturbed"
    return "".join([
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">',
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none';style-src 'unsafe-inline';base-uri 'none';form-action 'none'\">",
        f"<title>{text(word)}: draft for {text(score['target']['name'])}</title><style>{_CSS}</style></head><body>",
        f'<p class="kicker">Draftstill score: can a small draft model speed up <b>{text(score["target"]["name"])}</b> on this text?</p>',
        f'<h1><span class="badge {kind}">{text(word)}</span>{text(verdict(score))}</h1>',
        f'<p class="warn">Warning: {text(warning)}.</p>' if warning else "",
        _tiles(score),
        _candidates(score),
        _charts(score, t),
        _why(score),
        _audit(score),
        _examples(score),
        _conditions(score),
        f'<script type="application/json" id="score">{embedded(numbers)}</script></body></html>\n',
    ])  # fmt: skip


def _tiles(score: Score) -> str:
    winner, arms = score["winner"], arms_at(score, score["winner"]["temperature"])
    metric = lambda arm, name: (arms.get(arm) or {"metrics": {}})["metrics"].get(name)  # noqa: E731
    tried = {n: a for n, a in arms.items() if a["speedup"]}
    best = winner["arm"] or max(tried, key=lambda n: tried[n]["speedup"]["estimate"], default=None)
    speed = tried[best]["speedup"] if best in tried else None
    ok, _ = losslessness(score)
    greedy = (score.get("audit") or {}).get("greedy_fp32") or {}
    accepted = [share(metric(n, "token_acceptance")) for n in ("untuned", "tuned")]
    chosen = ARMS.get(best or "", "no candidate")
    tiles = [
        (times(speed["estimate"]) if speed else "-", f"speed of plain decoding, {chosen}"
         + (f"; {confidence(score)} interval {span(speed)}" if span(speed) else "")),
        (f"{accepted[0].rstrip('%')} → {accepted[1]}", "draft tokens accepted, before → after training"),
        (f"{number(metric('plain', 'tokens_per_s'), 1)} → {number(metric(best, 'tokens_per_s'), 1)}", f"tokens per second, plain → {chosen}"),
        ("not audited" if ok is None else "lossless" if ok else "NOT lossless",
         f"{greedy['identical']} of {greedy['prompts']} greedy outputs identical" if greedy.get("prompts") else "no outputs were compared"),
    ]  # fmt: skip
    return '<div class="tiles">' + "".join(f'<div class="tile"><b>{text(a)}</b><span>{text(b)}</span></div>' for a, b in tiles) + "</div>"


def _table(head: list[str], rows: list[tuple[str, list[str]]], svg: int, css: str = "") -> str:
    tag = lambda name, n, x: f"<{name}{' class=svg' if n == svg else ''}>{x}</{name}>"  # noqa: E731
    body = "".join(f"<tr{kind}>{''.join(tag('td', n, x) for n, x in enumerate(cells))}</tr>" for kind, cells in rows)
    top = "".join(tag("th", n, x) for n, x in enumerate(head))
    return f'<div class="scroll"><table class="{css}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _bounds(interval: Mapping[str, Any] | None, show: Any = number) -> str:
    return f" <small>{text(span(interval, show, '–'))}</small>" if span(interval, show) else ""


def _candidates(score: Score) -> str:
    every = [
        x for a in score["arms"] for x in (*(a["speedup"][k] for k in ("low", "high") if a["speedup"]), a["predicted"]) if x is not None
    ]
    scale = charts.speed_scale(every)
    out = ["<h2>Candidates</h2><p>Right of the line at 1x is faster than plain decoding. Dot and bar: measured speed-up with its "
           f"{text(confidence(score))} interval. "
           "Hollow diamond: predicted from the counts. Two candidates whose bars overlap widely may not differ.</p>"]  # fmt: skip
    head = ["candidate", f"speed-up{charts.speed_axis(scale)}", "measured", "predicted", "tokens accepted", "tokens/s"]
    for t in temperatures(score):
        deployed = t == score["winner"]["temperature"]
        rows = []
        for name, a in arms_at(score, t).items():
            best = deployed and outcome(score) == "winner" and name == score["winner"]["arm"]
            speed = "1 by definition" if name == "plain" else times((a["speedup"] or {}).get("estimate")) + _bounds(a["speedup"])
            rows.append((" class=best" if best else "", [
                ("★ " if best else "") + ARMS[name], charts.speed_bar(scale, name, a["speedup"], a["predicted"], has_interval(a["speedup"])),
                speed, times(a["predicted"]), share(a["metrics"].get("token_acceptance")) + _bounds(a["acceptance"], share),
                number(a["tokens_per_s"], 1)]))  # fmt: skip
        out.append(f"<h3>Temperature {t:g}{' (deployment)' if deployed else ''}</h3>{_table(head, rows, 1)}")
    out.append("<ul>" + "".join(f"<li>{text(line)}</li>" for line in comparison_lines(score)) + "</ul>")
    return "".join(out)


def _charts(score: Score, t: float) -> str:
    arms = arms_at(score, t)
    at = [
        charts.Series(n, ARMS[n], [(i, y) for i, y in enumerate(a["metrics"].get("acceptance_at") or [], 1) if y is not None])
        for n, a in arms.items()
    ]
    at = [s for s in at if s.points]
    positions = list(range(1, 1 + max((int(s.points[-1][0]) for s in at), default=0)))
    curve = score["training"]["curve"]
    curve = [*curve[: -1 : max(1, len(curve) // 100)], *curve[-1:]]  # a long training would draw thousands of markers
    names = (
        ("deploy", f"alpha at temperature {t:g}", "alpha_deploy"),
        ("alpha", "alpha at temperature 1", "alpha"),
        ("top1", "top-1 agreement", "top1"),
    )
    grown = [charts.Series(k, label, [(p["tokens"], p[f]) for p in curve if p.get(f) is not None]) for k, label, f in names]
    need = (arms.get("tuned") or {}).get("break_even")
    split = [(ARMS[n], [(part, 1000 * a["metrics"][f"{part}_s"] / a["metrics"]["emitted"]) for part in _PARTS])
             for n, a in arms.items() if a["metrics"].get("emitted")]  # fmt: skip
    return "".join([
        f"<h2>Where the time goes, temperature {t:g}</h2><p>Milliseconds per token of output. A draft pays when the verify part shrinks by "
        "more than the draft part adds.</p>",
        f"<figure>{charts.stacked(split, 'ms')}</figure><h2>Acceptance and training</h2><div class=pair>",
        f"<figure><h3>Acceptance by position, temperature {t:g}</h3>{charts.lines(at, 'position in the draft', 'acceptance', x_ticks=positions)}",
        "<figcaption>Share of tokens accepted at each position, given that all before it in the round were. Far positions rest on few "
        "rounds.</figcaption></figure>",
        "<figure><h3>Held-out alpha while training</h3>",
        charts.lines([s for s in grown if s.points], "training tokens", "alpha", rule=(need, f"break-even {need:.2f}") if need is not None else None),
        f"<figcaption>On target-written text that was not trained on. Below the dashed line speculation at temperature {t:g} loses."
        "</figcaption></figure></div>",
    ])  # fmt: skip


def _why(score: Score) -> str:
    rows = []
    for t in temperatures(score):
        for name, a in arms_at(score, t).items():
            if name == "plain":
                continue
            measured = (a["speedup"] or {}).get("estimate")
            gap = f"{100 * (measured / a['predicted'] - 1):+.1f}%" if measured and a["predicted"] else "-"
            bar = charts.alpha_bar(name, a["alpha"], a["break_even"]) if a["alpha"] is not None else ""
            need = number(a["break_even"], 3) if a["break_even"] is not None else "none" if a["alpha"] is not None else "-"
            rows.append(("", [f"{ARMS[name]}, {t:g}", bar, number(a["alpha"], 3), need, str(a["gamma"]), number(a["metrics"].get("tau")), number(a["c"], 3),
                              number(a["v"], 3), times(a["ceiling"]), times(a["predicted"]), times(measured), gap]))  # fmt: skip
    head = [
        "candidate, temperature",
        "alpha, break-even",
        "alpha",
        "needed",
        "gamma",
        "tau",
        "c",
        "v",
        "ceiling",
        "predicted",
        "measured",
        "gap",
    ]
    return f"<h2>Why: predicted and measured</h2>{_table(head, rows, 1, 'tight')}<p class=note>{text(NOTES.format(confidence=confidence(score)))} \
ceiling: the speed-up of a draft that is always right. gap: measured over predicted; what the formula does not see. needed: the break-even alpha, below which \
this draft loses (shaded side of the tick); none: even a perfect draft would.</p>"


def _audit(score: Score) -> str:
    ok, found = losslessness(score)
    css, word = {None: ("maybe", "Not audited"), True: ("good", "Passed"), False: ("bad", "Failed")}[ok]
    total = with_prefill(score, score["winner"]["temperature"])
    whole = "; ".join(f"{ARMS[n]} {times(x)}" for n, x in total.items())
    return (f'<h2>Is the output still the target\'s?</h2><p><b class="{css}">{word}</b>: {text(found)}.</p>'
            + (f"<p class=note>The speed-ups above are of decoding. With the prompt's prefill counted in: {text(whole)}.</p>" if whole else ""))  # fmt: skip


def _examples(score: Score) -> str:
    if not score["examples"]:
        return ""
    css = {"accepted": "a", "corrected": "c", "bonus": "b"}
    out = ['<h2>Token by token</h2><ul class="legend"><li><span class="a">underlined</span> guessed by the draft and accepted</li>'
           '<li><span class="c">cross</span> the draft was wrong here; the target\'s own token</li>'
           '<li><span class="b">plus</span> all guesses passed; one more from the target</li><li>plain: no guess was made</li></ul>']  # fmt: skip
    for e in score["examples"][:_EXAMPLES]:
        pieces, spans, room = e["pieces"], [], _EXAMPLE_CHARS
        for piece in pieces:
            shown = text(piece["text"])
            if piece["kind"] in css:
                shown = f'<span class="{css[piece["kind"]]}">{shown}</span>'
            room -= len(shown)
            if room < 0:
                break
            spans.append(shown)
        more = f" <small>[{len(pieces) - len(spans)} more tokens not shown]</small>" if len(spans) < len(pieces) else ""
        kept = sum(p["kind"] == "accepted" for p in pieces) / max(1, len(pieces))
        prompt = e["prompt"] if len(e["prompt"]) <= _PROMPT_CHARS else "…" + e["prompt"][-_PROMPT_CHARS:]
        out.append(f"<h3>{text(e['prompt_id'])}</h3><p class=note>{text(ARMS.get(e['arm'], e['arm']))}, temperature {e['temperature']:g}: "
                   f'the draft wrote {share(kept)} of this text.</p>'
                   f'<div class="tokens" dir="auto"><q>{text(prompt)}</q>{"".join(spans)}{more}</div>')  # fmt: skip
    out.append("<p class=note>These excerpts are held-out corpus and model text. They stay in this file; publishing leaves them out.</p>")
    return "".join(out)


def _conditions(score: Score) -> str:
    items = "".join(f"<dt>{text(label)}</dt><dd>{text(value)}</dd>" for label, value in conditions(score))
    return f"<h2>Conditions</h2><dl>{items}</dl>"
