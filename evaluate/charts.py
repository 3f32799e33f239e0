"""Small SVG charts for the report: strings, no library, no script. Colours come from the page's CSS, so one drawing serves
light, dark and print; every series also has its own marker or a printed value, so that no reading depends on colour.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from draftstill.evaluate.markup import text

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One line of a chart. ``key`` names its CSS colour (``c-tuned``) and its marker."""

    key: str
    label: str
    points: Sequence[Point]
    style: Literal["", "dash", "dots"] = ""
    bounds: Sequence[Point | None] = ()
    """Low and high end of each point's interval."""


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


def svg(width: float, height: float, body: Sequence[str], label: str, kind: str = "") -> str:
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    return f'<svg class="{kind}" {size} role="img" aria-label="{text(label)}">{"".join(body)}</svg>'


def marker(key: str, x: float, y: float, size: float = 4.5) -> str:
    css = f'class="c-{key}"'
    if key in ("untuned", "more1", "stock"):
        return f'<rect {css} x="{x - size + 0.5:g}" y="{y - size + 0.5:g}" width="{2 * size - 1:g}" height="{2 * size - 1:g}"/>'
    if key in ("lookup", "more2"):
        return f'<path {css} d="M{x:g} {y - size:g}l{size:g} {2 * size:g}h{-2 * size:g}z"/>'
    if key in ("composite", "more3"):
        return (
            f'<path {css} d="M{x:g} {y - size - 1:g}l{size + 1:g} {size + 1:g}l{-size - 1:g} {size + 1:g}l{-size - 1:g} {-size - 1:g}z"/>'
        )
    if key in ("bigram", "more4"):
        return f'<path {css} d="M{x - size:g} {y - size:g}h{2 * size:g}l{-size:g} {2 * size:g}z"/>'
    return f'<circle {css} cx="{x:g}" cy="{y:g}" r="{size:g}"/>'


def legend(entries: Sequence[Series]) -> str:
    """Lines and markers with their labels, as HTML."""
    items = [
        f"<li>{svg(26, 14, [_path(s, 'M1 7H25'), marker(s.key, 13, 7)], '')}{text(s.label)}</li>" for s in entries
    ]  # fmt: skip
    return f'<ul class="legend">{"".join(items)}</ul>'


def _path(s: Series, d: str) -> str:
    return f'<path class="s-{s.key}{" " + s.style if s.style else ""}" d="{d}"/>'


_BAR = (250.0, 34.0)
_WIDEST = 3.0
"""Ends of intervals are drawn up to so many times the largest estimate; a few prompts can make them endless."""


def speed_scale(estimates: Sequence[float], ends: Sequence[float]) -> Scale:
    """One scale for all interval bars, so that rows compare; 1.0 is always inside."""
    most = _WIDEST * max([1.0, *estimates])
    low, high = min([1.0, *estimates, *ends]), max([1.0, *estimates, *(min(e, most) for e in ends)])
    room = max(0.1, 0.06 * (high - low))
    return Scale(max(0.0, low - room), high + room, 8, _BAR[0] - 8)


def speed_axis(scale: Scale) -> str:
    marks = [f'<text x="{scale(t):g}" y="12" class="tick">{t:g}x</text>' for t in ticks(scale.low, scale.high)
             if 14 <= scale(t) <= _BAR[0] - 14]  # fmt: skip
    return svg(_BAR[0], 16, marks, "scale of the speed-up", "bar")


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
        body.append(marker(key, at, middle, 5.5))
    else:
        body.append(marker(key, one, middle, 5.5))
    if predicted is not None:
        x = scale(predicted)
        body.append(f'<path class="predicted" d="M{x:g} {middle - 14:g}l4 5l-4 5l-4-5z"/>')
        label += f", predicted {predicted:.2f}"
    return svg(width, height, body, label, "bar")


def alpha_bar(key: str, alpha: float, need: float | None) -> str:
    """alpha on 0..1 against the break-even, which is a tall tick with the losing side shaded."""
    scale = Scale(0, 1, 6, 134)
    edge = scale(1.0 if need is None else need)
    body = [f'<rect class="slower" x="6" y="4" width="{edge - 6:g}" height="18"/>', '<path class="axis" d="M6 13H134"/>',
            f'<path class="one" d="M{edge:g} 0V26"/>', marker(key, scale(alpha), 13, 5)]  # fmt: skip
    return svg(140, 26, body, f"alpha {alpha}, break-even {need}", "bar")


def share_bar(key: str, value: float | None) -> str:
    """A share of 1 as a filled track."""
    filled = "" if value is None else f'<rect class="c-{key}" x="0" y="7" width="{90 * min(value, 1.0):.1f}" height="12" rx="2"/>'
    return svg(96, 26, [f'<rect class="track" x="0" y="7" width="90" height="12" rx="2"/>{filled}'],
               "nothing to divide by" if value is None else f"{value:.1%}", "bar")  # fmt: skip


def percent(x: float) -> str:
    return f"{x:.0%}"


def lines(series: Sequence[Series], x_label: str, y_label: str, *, places: Sequence[float] | None = None, y_span: Point = (0.0, 1.0),
          show: Callable[[float], str] = percent, tell: Callable[[float], str] | None = None, rule: tuple[float, str] | None = None,
          width: float = 460, height: float = 250) -> str:  # fmt: skip
    """Lines; nothing where there are no points.

    Args:
        places: values on the horizontal axis, drawn equally far apart; default: a linear axis.
        show, tell: a value on the vertical axis, and in the text that appears over a point.
        rule: a dashed level with a label.
    """
    xs = [x for s in series for x, _ in s.points]
    if not xs:
        return ""
    tell = tell or (lambda v: f"{v:.1%}")
    if places:
        even = Scale(-0.3, len(places) - 0.7, 48, width - 16)
        x: Callable[[float], float] = lambda v: even(list(places).index(v))  # noqa: E731
    else:
        x = Scale(*((min(xs), max(xs)) if max(xs) > min(xs) else (min(xs) - 0.5, max(xs) + 0.5)), 48, width - 16)
    y = Scale(*y_span, height - 40, 12)
    body = [f'<path class="grid" d="M48 {y(t):g}H{width - 16:g}"/><text class="tick end" x="42" y="{y(t) + 4:g}">{show(t)}</text>'
            for t in ticks(*y_span)]  # fmt: skip
    body += [f'<text class="tick" x="{x(t):g}" y="{height - 22:g}">{short(t)}</text>' for t in places or ticks(min(xs), max(xs))]
    body.append(f'<text class="label" x="{(32 + width) / 2:g}" y="{height - 4:g}">{text(x_label)}</text>')
    if rule:
        body.append(f'<path class="rule" d="M48 {y(rule[0]):g}H{width - 16:g}"/>'
                    f'<text class="tick end" x="{width - 18:g}" y="{y(rule[0]) + 14:g}">{text(rule[1])}</text>')  # fmt: skip
    for s in series:
        if len(s.points) > 1:
            body.append(_path(s, "M" + "L".join(f"{x(a):g} {y(b):g}" for a, b in s.points)))
        for (a, _), ends in zip(s.points, s.bounds, strict=False):
            if ends is not None:
                low, high = y(ends[0]), y(ends[1])
                body.append(f'<path class="s-{s.key}" d="M{x(a):g} {low:g}V{high:g}M{x(a) - 4:g} {low:g}h8M{x(a) - 4:g} {high:g}h8"/>')
        for a, b in s.points:
            body.append(f"<g><title>{text(s.label)}, {text(x_label)} {short(a)}: {tell(b)}</title>{marker(s.key, x(a), y(b))}</g>")
    return svg(width, height, body, f"{y_label} by {x_label}", "chart") + legend(series)


def stacked(rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], unit: str, *, width: float = 460) -> str:
    """One bar per row, cut into parts (CSS class ``p-NAME``); values stand in the parts that have room, the sum behind the bar."""
    longest = max((sum(v for _, v in parts) for _, parts in rows), default=0.0)
    if not longest:
        return ""
    row = 44.0
    scale = Scale(0, longest, 0, width - 70)
    body = []
    for n, (label, parts) in enumerate(rows):
        top, at = n * row + 18, 0.0
        body.append(f'<text class="rowlabel" x="0" y="{top - 5:g}">{text(label)}</text>')
        for name, value in parts:
            w = scale(value)
            title = f"<title>{text(label)}: {name} {value:.2f} {unit}</title>"
            body.append(f'<rect class="p-{name}" x="{at:g}" y="{top:g}" width="{w:g}" height="20">{title}</rect>')
            if w > 34:
                body.append(f'<text class="inbar i-{name}" x="{at + w / 2:g}" y="{top + 14:g}">{value:.1f}</text>')
            at += w
        body.append(f'<text class="tick start" x="{at + 6:g}" y="{top + 14:g}">{sum(v for _, v in parts):.1f} {unit}</text>')
    keys = [name for name, _ in rows[0][1]]
    swatches = "".join(f'<li><span class="swatch b-{k}"></span>{k}</li>' for k in keys)
    return svg(width, len(rows) * row + 6, body, f"time per token in {unit}", "chart") + f'<ul class="legend">{swatches}</ul>'


def short(x: float) -> str:
    """A number for an axis: ``1.5k``."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(x) >= size:
            return f"{x / size:.3g}{letter}"
    return f"{x:g}"
