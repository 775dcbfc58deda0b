"""Charts of the Metaflow cards: Vega-Lite specifications with their data inside."""

import math
from collections.abc import Mapping, Sequence

from olmo_core_jax.compare.curves import Gap, Rows, rolling_max

POINTS = 400
"""Points a line at most: a card is rewritten every few seconds."""

NOISE = "reference against itself"
COLOURS = {"reference": "#f0a35e", "this run": "#0b7285", NOISE: "#c9d3dc"}

Lines = Mapping[str, tuple[Sequence[int], Sequence[float]]]


def lines(title: str, series: Lines, colours: Mapping[str, str] = COLOURS) -> dict:
    """Curves over each other: name -> (updates, values); the reference is the thick one. colours: by name."""
    wide = {n: 4 if n == "reference" else 1.4 for n in series}
    marks = {n: {"type": "line", "strokeJoin": "round", "strokeWidth": w} for n, w in wide.items()}
    axis = {"title": None, "scale": {"zero": False}}
    layers = [_layer(marks[n], _data(n, *s), axis) for n, s in series.items()]
    return _chart(title, layers, 190, colours)


def gaps(title: str, ours: Gap, noise: Gap, limit: float) -> dict:
    """|gap| as points on a logarithmic axis over the reference's own noise; limit: a dashed line.

    A zero is drawn at the smallest value that is not zero. noise may be empty.
    """
    sizes = [abs(v) for v in (*ours.values, *noise.values) if v and math.isfinite(v)]
    floor = min(sizes, default=1e-9)
    low, high = (math.floor(math.log10(v)) for v in (floor, 10 * max([limit, *sizes])))
    axis = {
        "title": None,
        "scale": {"type": "log", "domain": [10.0**low, 10.0**high]},
        "axis": {"format": ".0e", "values": [10.0**e for e in range(low, high + 1)]},
    }
    layers = []
    if noise.values:
        ys = rolling_max([abs(v) for v in noise.values], max(1, len(noise.values) // 60))
        data = _data(NOISE, noise.steps, [max(y, floor) for y in ys])
        layers.append(_layer({"type": "area"}, data, axis))
        # An area's own floor, 0, has no logarithm.
        layers[0]["encoding"]["y2"] = {"datum": 10.0**low}
    data = _data("this run", ours.steps, [max(abs(v), floor) for v in ours.values])
    layers.append(_layer({"type": "point", "filled": True, "size": 12}, data, axis))
    layers.append(
        {
            "data": {"values": [{"value": limit}]},
            "mark": {"type": "rule", "strokeDash": [6, 4]},
            "encoding": {
                "y": {"field": "value", "type": "quantitative"},
                "color": {"value": "#c92a2a"},
            },
        }
    )
    return _chart(title, layers, 140)


def _chart(
    title: str, layers: list[dict], height: int, colours: Mapping[str, str] = COLOURS
) -> dict:
    names = [row["run"] for layer in layers for row in layer["data"]["values"][:1] if "run" in row]
    colour = {
        "field": "run",
        "type": "nominal",
        "scale": {"domain": names, "range": [colours[n] for n in names]},
        "legend": {"orient": "top", "title": None} if len(names) > 1 else None,
    }
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "title": {"text": title, "anchor": "start", "fontSize": 13},
        "width": "container",
        "height": height,
        "encoding": {"color": colour},
        "layer": layers or [{"data": {"values": []}, "mark": "line"}],
    }


def _data(name: str, steps: Sequence[int], ys: Sequence[float]) -> list[dict]:
    pairs = zip(*_thinned(steps, ys), strict=True)
    return [{"update": s, "value": v, "run": name} for s, v in pairs if math.isfinite(v)]


def _layer(mark: dict, data: list[dict], axis: dict) -> dict:
    return {
        "data": {"values": data},
        "mark": mark,
        "encoding": {
            "x": {"field": "update", "type": "quantitative", "axis": {"grid": False}},
            "y": {"field": "value", "type": "quantitative"} | axis,
        },
    }


def curve(rows: Rows, metric: str) -> tuple[list[int], list[float]]:
    """A metric's updates and values, in order."""
    steps = sorted(s for s in rows if metric in rows[s])
    return steps, [rows[s][metric] for s in steps]


def _thinned(steps: Sequence[int], ys: Sequence[float]) -> tuple[Sequence[int], Sequence[float]]:
    """The value farthest from its bucket's mean stands for the bucket: a spike stays visible."""
    size = math.ceil(len(steps) / POINTS)
    if size <= 1:
        return steps, ys
    kept = []
    for start in range(0, len(steps), size):
        bucket = range(start, min(start + size, len(steps)))
        mean = sum(ys[i] for i in bucket) / len(bucket)
        kept.append(max(bucket, key=lambda i: abs(ys[i] - mean)))
    return [steps[i] for i in kept], [ys[i] for i in kept]
