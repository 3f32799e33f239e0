"""Small SVG charts for the report: strings, no library, no script. Colours come from the page's CSS, so one drawing serves
light, dark and print; every series also has its own marker or a printed value, so that no reading depends on colour.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any


@dataclass(frozen=True)
class Series:
    """One line of a chart. ``key`` names its CSS colour (``c-tuned``) and its marker."""

    key: str
    label: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Scale:
    """A linear map from [low, high] to [left, right], clipped at the ends."""

    low: float
    high: float
    left: float
    right: float

    def __call__(self, x: float) -> float:
        part = (min(max(x, self.low), self.high) - self.low) / (self.high - self.low)
        return round(self.left + part * (self.right - self.left), 1)


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers between low and high, at most ``most``."""
    size = 10.0**-6
    while True:
        for step in (1, 2, 5):
            width = step * size
            first = -(-low // width)
            count = int(high / width - first + 1e-9) + 1
            if count <= most:
                return [round((first + i) * width, 9) for i in range(count)]
        size *= 10


def _svg(width: float, height: float, body: Sequence[str], label: str, kind: str = "") -> str:
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    return f'<svg class="{kind}" {size} role="img" aria-label="{escape(label)}">{"".join(body)}</svg>'


def _marker(key: str, x: float, y: float, size: float = 4.5) -> str:
    css = f'class="c-{key}"'
    if key in ("untuned", "alpha"):
        return f'<rect {css} x="{x - size + 0.5:g}" y="{y - size + 0.5:g}" width="{2 * size - 1:g}" height="{2 * size - 1:g}"/>'
    if key == "lookup":
        return f'<path {css} d="M{x:g} {y - size:g}l{size:g} {2 * size:g}h{-2 * size:g}z"/>'
    if key in ("composite", "top1"):
        return (
            f'<path {css} d="M{x:g} {y - size - 1:g}l{size + 1:g} {size + 1:g}l{-size - 1:g} {size + 1:g}l{-size - 1:g} {-size - 1:g}z"/>'
        )
    return f'<circle {css} cx="{x:g}" cy="{y:g}" r="{size:g}"/>'


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """Markers with their labels, as HTML."""
    items = [f"<li>{_svg(14, 14, [_marker(key, 7, 7)], '')}{escape(label)}</li>" for key, label in entries]
    return f'<ul class="legend">{"".join(items)}</ul>'


_BAR = (300.0, 34.0)


def speed_scale(values: Sequence[float]) -> Scale:
    """One scale for all interval bars, so that rows compare; 1.0 is always inside."""
    low, high = min([1.0, *values]), max([1.0, *values])
    room = max(0.1, 0.06 * (high - low))
    return Scale(max(0.0, low - room), high + room, 8, _BAR[0] - 8)


def speed_axis(scale: Scale) -> str:
    marks = [f'<text x="{scale(t):g}" y="12" class="tick">{t:g}x</text>' for t in ticks(scale.low, scale.high)]
    return _svg(_BAR[0], 16, marks, "scale of the speed-up", "bar")


def speed_bar(scale: Scale, key: str, interval: dict[str, Any] | None, predicted: float | None, bounded: bool) -> str:
    """A dot with its interval on the common scale, a line at 1.0, slower than plain shaded, the prediction as a hollow tick."""
    width, height = _BAR
    middle, one = height / 2, scale(1.0)
    body = [f'<rect class="slower" x="0" y="0" width="{one:g}" height="{height:g}"/>', f'<path class="one" d="M{one:g} 0V{height:g}"/>']
    label = "plain decoding, 1 by definition"
    if interval:
        low, high, at = (scale(interval[k]) for k in ("low", "high", "estimate"))
        label = f"measured {interval['estimate']:.2f}, interval {interval['low']:.2f} to {interval['high']:.2f}"
        if bounded:
            body.append(
                f'<path class="s-{key} thick" d="M{low:g} {middle:g}H{high:g}M{low:g} {middle - 6:g}v12M{high:g} {middle - 6:g}v12"/>'
            )
        body.append(_marker(key, at, middle, 5.5))
    else:
        body.append(_marker(key, one, middle, 5.5))
    if predicted is not None:
        x = scale(predicted)
        body.append(f'<path class="predicted" d="M{x:g} {middle - 14:g}l4 5l-4 5l-4-5z"/>')
        label += f", predicted {predicted:.2f}"
    return _svg(width, height, body, label, "bar")


def alpha_bar(key: str, alpha: float | None, need: float | None) -> str:
    """alpha on 0..1 against the break-even, which is a tall tick with the losing side shaded."""
    scale = Scale(0, 1, 6, 134)
    edge = scale(1.0 if need is None else need)
    body = [f'<rect class="slower" x="6" y="4" width="{edge - 6:g}" height="18"/>', '<path class="axis" d="M6 13H134"/>',
            f'<path class="one" d="M{edge:g} 0V26"/>']  # fmt: skip
    if alpha is not None:
        body.append(_marker(key, scale(alpha), 13, 5))
    return _svg(140, 26, body, f"alpha {alpha}, break-even {need}", "bar")


def lines(series: Sequence[Series], x_label: str, y_label: str, *, x_ticks: Sequence[float] | None = None,
          rule: tuple[float, str] | None = None, width: float = 460, height: float = 250) -> str:  # fmt: skip
    """Lines over shares in 0..1. ``rule`` is a dashed level with a label."""
    xs = [x for s in series for x, _ in s.points]
    if not xs:
        return '<p class="note">Nothing was measured here.</p>'
    span = (min(xs), max(xs)) if max(xs) > min(xs) else (min(xs) - 0.5, max(xs) + 0.5)
    x, y = Scale(*span, 48, width - 16), Scale(0, 1, height - 40, 12)
    body = [f'<path class="grid" d="M48 {y(t):g}H{width - 16:g}"/><text class="tick end" x="42" y="{y(t) + 4:g}">{t:.0%}</text>'
            for t in (0, 0.2, 0.4, 0.6, 0.8, 1.0)]  # fmt: skip
    body += [f'<text class="tick" x="{x(t):g}" y="{height - 22:g}">{_short(t)}</text>' for t in x_ticks or ticks(*span)]
    body.append(f'<text class="label" x="{(32 + width) / 2:g}" y="{height - 4:g}">{escape(x_label)}</text>')
    if rule:
        body.append(f'<path class="rule" d="M48 {y(rule[0]):g}H{width - 16:g}"/>'
                    f'<text class="tick end" x="{width - 18:g}" y="{y(rule[0]) + 14:g}">{escape(rule[1])}</text>')  # fmt: skip
    for s in series:
        if len(s.points) > 1:
            path = "L".join(f"{x(a):g} {y(b):g}" for a, b in s.points)
            body.append(f'<path class="s-{s.key}" d="M{path}"/>')
        for a, b in s.points:
            body.append(f"<g><title>{escape(s.label)}, {escape(x_label)} {_short(a)}: {b:.1%}</title>{_marker(s.key, x(a), y(b))}</g>")
    return _svg(width, height, body, f"{y_label} by {x_label}", "chart") + legend([(s.key, s.label) for s in series])


def stacked(rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], unit: str, *, width: float = 700) -> str:
    """One bar per row, cut into parts (CSS class ``p-NAME``); values stand in the parts that have room, the sum behind the bar."""
    longest = max((sum(v for _, v in parts) for _, parts in rows), default=0.0)
    if not longest:
        return '<p class="note">Nothing was measured here.</p>'
    left, row = 190.0, 34.0
    scale = Scale(0, longest, 0, width - left - 90)
    body = []
    for n, (label, parts) in enumerate(rows):
        top, at = n * row + 4, left
        body.append(f'<text class="rowlabel" x="{left - 10:g}" y="{top + 17:g}">{escape(label)}</text>')
        for name, value in parts:
            w = scale(value)
            title = f"<title>{escape(label)}: {name} {value:.2f} {unit}</title>"
            body.append(f'<rect class="p-{name}" x="{at:g}" y="{top:g}" width="{w:g}" height="24">{title}</rect>')
            if w > 34:
                body.append(f'<text class="inbar i-{name}" x="{at + w / 2:g}" y="{top + 16:g}">{value:.1f}</text>')
            at += w
        body.append(f'<text class="tick start" x="{at + 6:g}" y="{top + 16:g}">{sum(v for _, v in parts):.1f} {unit}</text>')
    keys = [name for name, _ in rows[0][1]]
    swatches = "".join(f'<li><span class="swatch b-{k}"></span>{k}</li>' for k in keys)
    return _svg(width, len(rows) * row + 6, body, f"time per token in {unit}", "chart") + f'<ul class="legend">{swatches}</ul>'


def _short(x: float) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(x) >= size:
            return f"{x / size:.3g}{letter}"
    return f"{x:g}"
