"""The chart renderer: where a value lands, its ticks, and that thinning loses no spike."""

import re

import pytest

from olmo_core_jax.compare.curves import Gap
from olmo_core_jax.report import svg, vega


def test_axis_linear_and_logarithmic():
    assert svg.Axis(0, 10, 100, 200)(2.5) == 125
    log = svg.Axis(1e-8, 1e-4, 100, 0, log=True)
    assert log(1e-6) == pytest.approx(50)
    assert log(0.0) == log(1e-8) == 100, "a zero stands on the floor"
    assert log.ticks(5) == [1e-8, 1e-7, 1e-6, 1e-5, 1e-4]


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (1, 400, [50 * i for i in range(1, 9)]),
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (3.9, 4.2, [3.9, 3.95, 4.0, 4.05, 4.1, 4.15, 4.2]),
    ],
)
def test_ticks_are_round(low, high, ticks):
    count = 8 if high == 400 else 5 if high == 1 else 6
    assert svg.Axis(low, high, 0, 1).ticks(count) == pytest.approx(ticks)


def test_thinning_keeps_every_extreme():
    points = [(float(i), 1.0) for i in range(50_000)]
    points[31_415] = (31_415.0, 99.0)
    points[27_182] = (27_182.0, -5.0)
    kept = svg.thinned(points, 100)
    assert len(kept) <= 202
    assert (31_415.0, 99.0) in kept and (27_182.0, -5.0) in kept
    assert kept == sorted(kept)


def test_not_a_number_is_left_out():
    chart = svg.panel(
        "t", [svg.Series("a", [1, 2, 3], [1.0, float("nan"), 2.0], "ours")], x_range=(1, 3)
    )
    path = re.search(r'<path class="ours" d="([^"]+)"', chart)
    assert path and path[1].count(",") == 2 and "nan" not in chart


def test_short_numbers():
    assert [svg.short(v) for v in (0, 2e-5, 0.002, 1.5, 3000, 2.5e7, -1e-7)] == [
        "0", "2e-5", "0.002", "1.5", "3,000", "2.5e7", "-1e-7",
    ]  # fmt: skip


def test_vega_gap_has_no_zero_on_its_logarithmic_axis():
    ours = Gap("m", [1, 2, 3], [0.0, -2e-7, 1e-6])
    spec = vega.gaps("g", ours, Gap("m", [1, 2], [0.0, 0.0]), 2e-5)
    values = [v["value"] for layer in spec["layer"] for v in layer["data"]["values"]]
    assert min(values) == 2e-7 and max(values) == 2e-5
