"""The page's style sheet: one for light, dark, print and a phone. No colour is needed to read anything."""

from __future__ import annotations

PARTS = ("draft", "verify", "sample", "host")
"""Of a round's time, as they stand in a trace."""
SERIES = ("plain", "stock", "untuned", "tuned", "lookup", "bigram", "composite", "more1", "more2", "more3", "more4")
"""Lines and markers that a chart can have, each in its own colour."""

_SHEET = """
:root{color-scheme:light dark;--bg:#fff;--ink:#1b1f24;--soft:#59636e;--line:#d5dae0;--panel:#f5f7f9;
--slow:#d1242f18;--good:#116932;--maybe:#8a5a00;--bad:#b3202a;
--plain:#6e7781;--stock:#5b4bb7;--untuned:#c26a00;--bigram:#7a5c00;--tuned:#0a5fb4;--lookup:#0f7b5f;--composite:#a03e86;
--more1:#9a3b6a;--more2:#b3202a;--more3:#3c6e00;--more4:#00707c;
--draft:#0a5fb4;--verify:#9aa5b1;--sample:#d08700;--host:#6b4a94;--acc:#bfe5c8;--cor:#ffd3bd;--bon:#c6dcfb}
@media(prefers-color-scheme:dark){:root{--bg:#14171b;--ink:#e6eaee;--soft:#9da7b1;--line:#353c44;--panel:#1d2228;
--slow:#ff6b6b1f;--good:#56d68a;--maybe:#e3b341;--bad:#ff7b72;
--plain:#8b949e;--stock:#a99bf5;--untuned:#f0963c;--bigram:#c9a227;--tuned:#5aa9ff;--lookup:#3fc79a;--composite:#e58ac8;
--more1:#f09abf;--more2:#ff7b72;--more3:#9bd14b;--more4:#4fd0dc;
--draft:#5aa9ff;--verify:#68737f;--sample:#e3b341;--host:#b392f0;--acc:#1d4d2c;--cor:#6b3216;--bon:#1d3f70}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1120px;padding:24px 20px 60px;background:var(--bg);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif;overflow-wrap:anywhere;
-webkit-print-color-adjust:exact;print-color-adjust:exact}
h1{font-size:1.9rem;line-height:1.25;margin:.3em 0 .4em;font-weight:650;max-width:46ch;text-wrap:balance}
h2{font-size:1.2rem;margin:2.2em 0 .4em;border-top:1px solid var(--line);padding-top:1em}
h3{font-size:1rem;margin:1.4em 0 .3em}
p,li{max-width:78ch}p{margin:.4em 0 .8em}
.kicker,.note,figcaption{color:var(--soft);font-size:.88rem}.kicker{margin:0}
.badge{display:inline-block;font-size:1.05rem;font-weight:700;padding:.2em .9em;border-radius:99px;color:var(--bg);margin:.7em 0 0}
b.good{color:var(--good)}b.maybe{color:var(--maybe)}b.bad{color:var(--bad)}
.badge.good{background:var(--good)}.badge.maybe{background:var(--maybe)}.badge.bad{background:var(--bad)}
.lead{font-size:1.02rem;margin-bottom:1.2em}
.warn{border-left:4px solid var(--bad);background:var(--panel);padding:.7em 1em;font-weight:600}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(210px,100%),1fr));gap:12px;margin:0 0 1em}
.tile{background:var(--panel);border:1px solid var(--line);border-radius:8px;padding:12px 14px}
.tile b{display:block;font-size:1.5rem;line-height:1.3;font-weight:650}
.tile span{color:var(--soft);font-size:.88rem}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;overflow-wrap:normal}
th,td{text-align:right;padding:0 8px;border-bottom:1px solid var(--line);white-space:nowrap;height:34px}
th{font-weight:600;color:var(--soft);font-size:.85rem;vertical-align:bottom}
th:first-child,td:first-child{text-align:left}
td.svg,th.svg{padding:0;text-align:left}.tight th,.tight td{padding:0 6px;font-size:.85rem;height:30px}
tr.best td{background:var(--panel);font-weight:650}
small{color:var(--soft);font-weight:400}
code{font-size:.86em;background:var(--panel);border:1px solid var(--line);border-radius:4px;padding:0 .3em;overflow-wrap:anywhere}
ol{padding-left:1.4em}ol li{margin:.5em 0;padding-left:.3em}
details{margin:.8em 0}summary{cursor:pointer;color:var(--soft);font-size:.92rem}
svg{display:block;max-width:100%}svg.chart{height:auto}.bar{max-width:none}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(400px,100%),1fr));gap:8px 28px}
.pair>*{min-width:0}figure{margin:0}
.tick{font-size:11px;fill:var(--soft);text-anchor:middle}.end{text-anchor:end}.start{text-anchor:start}
.label{font-size:12px;fill:var(--soft);text-anchor:middle}.rowlabel{font-size:13px;fill:var(--ink)}
.inbar{font-size:11px;text-anchor:middle;fill:var(--bg);font-weight:600}.i-verify{fill:#10151a}
.grid,.axis{stroke:var(--line);fill:none}.one{stroke:var(--ink);stroke-width:1.5}.rule{stroke:var(--ink);stroke-dasharray:5 4;fill:none}
.slower{fill:var(--slow)}.track{fill:var(--line)}.predicted{fill:var(--bg);stroke:var(--ink);stroke-width:1.2}.thick{stroke-width:2.5!important}
.dash{stroke-dasharray:7 4}.dots{stroke-dasharray:2 4}
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
dt{color:var(--soft)}dd{margin:0;min-width:0;overflow-wrap:anywhere}
@media(max-width:600px){body{padding:14px 14px 40px}h1{font-size:1.4rem}dl{grid-template-columns:1fr;gap:0}dd{margin-bottom:.6em}}
@media print{body{max-width:none;padding:0;font-size:12px}h2{break-after:avoid}figure,.tokens,table{break-inside:avoid}}
"""

CSS = (
    _SHEET
    + "".join(f".c-{k}{{fill:var(--{k})}}.s-{k}{{stroke:var(--{k});stroke-width:2;fill:none}}" for k in SERIES)
    + "".join(f".p-{k}{{fill:var(--{k})}}.b-{k}{{background:var(--{k})}}" for k in PARTS)
)
