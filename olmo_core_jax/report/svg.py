"""Line charts as inline SVG: no library, no network, colours from the page's own style sheet.

A panel is one pair of axes; panels with the same x range stand under each other and line up.
"""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

WIDTH = 960
LEFT, RIGHT, TOP, BOTTOM = 68, 16, 34, 26


@dataclass(frozen=True)
class Series:
    """style: a class of the style sheet; an area is filled down to the axis."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    style: str
    kind: Literal["line", "dots", "area"] = "line"


@dataclass(frozen=True)
class Axis:
    """A value range on a pixel range, linear or logarithmic."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            value, low, high = math.log10(max(value, self.low)), math.log10(low), math.log10(high)
        share = (value - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)

    def ticks(self, count: int) -> list[float]:
        """Round values inside the range: powers of ten, or multiples of 1, 2 or 5 times one."""
        if self.log:
            first, last = round(math.log10(self.low)), round(math.log10(self.high))
            every = max(1, math.ceil((last - first) / count))
            return [10.0**e for e in range(first, last + 1, every)]
        rough = (self.high - self.low) / count or 1.0
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return [i * step for i in range(first, math.floor(self.high / step + 1e-9) + 1)]


def panel(
    title: str,
    series: Sequence[Series],
    *,
    x_range: tuple[float, float],
    height: int = 220,
    log: bool = False,
    limit: float | None = None,
    x_label: str | None = None,
) -> str:
    """One chart as an `<svg>` element; values that are not finite are left out.

    limit: a dashed line across; x_label None: the panel below has the numbers of the x axis.
    """
    floor = height - (8 if x_label is None else BOTTOM)
    x = Axis(*_widened(*x_range), LEFT, WIDTH - RIGHT)
    values = [v for s in series for v in s.ys if math.isfinite(v)]
    y = _y_axis(values + ([limit] if limit else []), floor, log)
    body = [_title(title, series), *_rows(y)]
    if x_label is not None:
        body += _columns(x, floor, x_label)
    body += [_path(s, x, y) for s in series]
    if limit is not None:
        body.append(_limit(limit, y))
    body.append(f'<line class="cursor" y1="{TOP}" y2="{floor}"/>')
    kind = "panel" if x_label is None else "panel end"
    return (
        f'<svg class="{kind}" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{html.escape(title)}">{"".join(body)}</svg>'
    )


def short(value: float) -> str:
    """A number in few characters: 0.002, 1.5, 3,000, 2e-5."""
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{value:,.4g}" if abs(value) < 1e3 else f"{value:,.0f}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def _y_axis(values: list[float], floor: float, log: bool) -> Axis:
    if log:
        positive = [v for v in values if v > 0] or [1e-9, 1e-6]
        low = 10.0 ** math.floor(math.log10(min(positive)))
        high = 10.0 ** math.ceil(math.log10(max(positive)) + 1e-9)
        return Axis(low, high if high > low else low * 10, floor, TOP, True)
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    margin = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    # Zero stays the floor of what is never negative.
    low = 0.0 if 0 <= low < (high - low) * 0.35 else low - margin
    return Axis(low, high + margin, floor, TOP)


def _widened(low: float, high: float) -> tuple[float, float]:
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _title(title: str, series: Sequence[Series]) -> str:
    """The title on the left, the legend on the right."""
    out = [f'<text class="title" x="{LEFT}" y="18">{html.escape(title)}</text>']
    right: float = WIDTH - RIGHT
    for s in reversed([s for s in series if s.label]):
        right -= 7.0 * len(s.label)
        out.append(f'<text class="legend" x="{right:.0f}" y="18">{html.escape(s.label)}</text>')
        right -= 24
        out.append(_mark(s, right))
        right -= 18
    return "".join(out)


def _mark(series: Series, x: float) -> str:
    """What a series looks like, in the legend."""
    if series.kind == "area":
        return f'<rect class="{series.style} area" x="{x}" y="9" width="18" height="10" rx="2"/>'
    if series.kind == "dots":
        dots = "".join(f"M{x + dx},14h0" for dx in (3, 9, 15))
        return f'<path class="{series.style} dots" d="{dots}"/>'
    return f'<line class="{series.style}" x1="{x}" y1="14" x2="{x + 18}" y2="14"/>'


def _rows(y: Axis) -> list[str]:
    """Horizontal grid lines with their values."""
    out = []
    for value in y.ticks(5):
        at = f"{y(value):.1f}"
        out.append(f'<line class="grid" x1="{LEFT}" y1="{at}" x2="{WIDTH - RIGHT}" y2="{at}"/>')
        out.append(f'<text class="tick y" x="{LEFT - 8}" y="{at}">{_tick(value, y.log)}</text>')
    return out


def _columns(x: Axis, floor: float, label: str) -> list[str]:
    """The x axis with its numbers."""
    out = [f'<line class="axis" x1="{LEFT}" y1="{floor}" x2="{WIDTH - RIGHT}" y2="{floor}"/>']
    for value in x.ticks(8):
        at = f"{x(value):.1f}"
        out.append(f'<text class="tick x" x="{at}" y="{floor + 18}">{value:,.0f}</text>')
    out.append(f'<text class="tick y" x="{LEFT - 8}" y="{floor + 14}">{html.escape(label)}</text>')
    return out


def _tick(value: float, log: bool) -> str:
    if not log:
        return short(value)
    return (
        f'10<tspan class="power" dy="-5">{str(round(math.log10(value))).replace("-", "−")}</tspan>'
    )


def _limit(limit: float, y: Axis) -> str:
    at = f"{y(limit):.1f}"
    return (
        f'<line class="limit" x1="{LEFT}" y1="{at}" x2="{WIDTH - RIGHT}" y2="{at}"/>'
        f'<text class="limit" x="{WIDTH - RIGHT - 4}" y="{y(limit) - 5:.1f}">'
        f"limit {short(limit)}</text>"
    )


def _path(series: Series, x: Axis, y: Axis) -> str:
    pairs = zip(series.xs, series.ys, strict=True)
    points = [(x(a), y(b)) for a, b in pairs if math.isfinite(b)]
    points = thinned(points, WIDTH - LEFT - RIGHT)
    if not points:
        return ""
    if series.kind == "dots":
        dots = "".join(f"M{px:.1f},{py:.1f}h0" for px, py in points)
        return f'<path class="{series.style} dots" d="{dots}"/>'
    line = "M" + "L".join(f"{px:.1f},{py:.1f}" for px, py in points)
    if series.kind == "line":
        return f'<path class="{series.style}" d="{line}"/>'
    floor = f"{y.start:.1f}"
    closed = f"{line}L{points[-1][0]:.1f},{floor}L{points[0][0]:.1f},{floor}Z"
    return f'<path class="{series.style} area" d="{closed}"/>'


def thinned(points: list[tuple[float, float]], columns: int) -> list[tuple[float, float]]:
    """At most two points a column, its lowest and highest, in their order: no spike is lost."""
    if len(points) <= 2 * columns:
        return points
    start, end = points[0][0], points[-1][0]
    kept: list[tuple[float, float]] = []
    column: list[tuple[float, float]] = []
    edge = 1
    for p in [*points, None]:
        if p is None or p[0] > start + edge * (end - start) / columns:
            if column:
                low, high = min(column, key=lambda q: q[1]), max(column, key=lambda q: q[1])
                kept += sorted({low, high})
            column = []
            while p is not None and p[0] > start + edge * (end - start) / columns:
                edge += 1
        if p is not None:
            column.append(p)
    return kept
