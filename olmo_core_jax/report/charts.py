"""The figure of a training stage: both curves, and under them the gap on a logarithmic scale."""

import json
import math

from olmo_core_jax.compare import checks, curves
from olmo_core_jax.compare.curves import Gap, Rows, rolling_max
from olmo_core_jax.compare.stage import StageComparison
from olmo_core_jax.report import svg
from olmo_core_jax.report.svg import Series

READOUT_POINTS = 1500
"""Updates whose numbers the page can show under the pointer."""


def stage_figure(c: StageComparison) -> str:
    """Loss, gradient norm and learning rate of both runs with their gaps, as HTML."""
    x_range = (1, max(c.last_step, c.metrics.last_step))
    panels = []
    for title, metric, name, kind in (
        ("Cross-entropy loss", curves.CE, checks.CE, "|difference|, nats"),
        ("Gradient norm", curves.GRAD_NORM, checks.GRAD_NORM, "|relative difference|"),
    ):
        panels.append(svg.panel(title, _overlay(c, metric), x_range=x_range, height=230))
        gaps = _gap_series(c.gap(metric), c.band(metric))
        limit = checks.limit_of(c.name, name)
        panels.append(
            svg.panel(
                kind, gaps, x_range=x_range, height=170, log=True, limit=limit, x_label="update"
            )
        )
    panels.append(
        svg.panel(
            "Learning rate", _overlay(c, curves.LR), x_range=x_range, height=150, x_label="update"
        )
    )
    data = json.dumps(_readout(c, x_range), separators=(",", ":"))
    script = f'<script type="application/json">{data}</script>'
    return f'<div class="figure" tabindex="0">{"".join(panels)}{script}</div>'


def _overlay(c: StageComparison, metric: str) -> list[Series]:
    return [
        Series("reference", *_points(c.reference, metric), "reference"),
        Series("this run", *_points(c.metrics.rows, metric), "ours"),
    ]


def _points(rows: Rows, metric: str) -> tuple[list[int], list[float]]:
    steps = sorted(s for s in rows if metric in rows[s])
    return steps, [rows[s][metric] for s in steps]


def _gap_series(ours: Gap, band: Gap) -> list[Series]:
    """|gap| over the reference's own noise; exact zeros at the lowest value that is not zero."""
    sizes = [abs(v) for v in (*ours.values, *band.values) if v and math.isfinite(v)]
    floor = min(sizes, default=1e-9)
    series = []
    if band.values:
        noise = rolling_max([abs(v) for v in band.values], max(1, len(band.values) // 60))
        label = "reference against itself (running maximum)"
        ys = [max(v, floor) for v in noise]
        series.append(Series(label, band.steps, ys, "band", "area"))
    ys = [max(abs(v), floor) for v in ours.values]
    return [*series, Series("this run", ours.steps, ys, "ours", "dots")]


def _readout(c: StageComparison, x_range: tuple[int, int]) -> dict:
    """What the page shows under the pointer: a row an update."""
    steps = sorted(c.metrics.rows)
    steps = steps[:: max(1, math.ceil(len(steps) / READOUT_POINTS))]
    names = {"CE loss": curves.CE, "gradient norm": curves.GRAD_NORM, "LR": curves.LR}
    rows = [
        [s, *([c.metrics.rows[s].get(m), c.reference.get(s, {}).get(m)] for m in names.values())]
        for s in steps
    ]
    frame = [svg.LEFT / svg.WIDTH, 1 - svg.RIGHT / svg.WIDTH, *x_range]
    return {"names": list(names), "rows": rows, "frame": frame}


SCRIPT = """
document.querySelectorAll(".figure").forEach(figure => {
  const {names, rows, frame: [left, right, first, last]} =
    JSON.parse(figure.querySelector("script").textContent);
  const box = figure.appendChild(document.createElement("div"));
  box.className = "readout";
  const cursors = figure.querySelectorAll(".cursor"), panel = figure.querySelector("svg");
  const show = on => { box.style.display = on ? "block" : "none";
    cursors.forEach(c => c.style.visibility = on ? "visible" : "hidden"); };
  figure.addEventListener("pointerleave", () => show(false));
  figure.addEventListener("pointermove", event => {
    const area = panel.getBoundingClientRect(), outer = figure.getBoundingClientRect();
    const share = ((event.clientX - area.left) / area.width - left) / (right - left);
    if (share < 0 || share > 1 || !rows.length) return show(false);
    const at = first + share * (last - first);
    const row = rows.reduce((a, b) => Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a);
    const x = left + (row[0] - first) / Math.max(1, last - first) * (right - left);
    cursors.forEach(c => { for (const k of ["x1", "x2"])
      c.setAttribute(k, x * c.ownerSVGElement.viewBox.baseVal.width); });
    box.textContent = ["update " + row[0]].concat(names.map((name, i) => {
      const [ours, theirs] = row[i + 1];
      if (ours === null) return name + " –";
      const gap = theirs === null ? "" : "   Δ " + (ours === theirs ? "0" : (ours - theirs).toExponential(1));
      return name + " " + Number(ours).toPrecision(7) + gap; })).join("\\n");
    show(true);
    const px = event.clientX - outer.left, wide = box.offsetWidth;
    box.style.left = (px + 16 + wide > outer.width ? px - wide - 16 : px + 16) + "px";
    box.style.top = event.clientY - outer.top + 14 + "px";
  });
});
"""
