"""A stage's figures and verdicts, on curves small enough to work out by hand."""

import pytest

from olmo_core_jax.compare import checks, curves
from olmo_core_jax.compare.curves import Metrics
from olmo_core_jax.compare.stage import StageComparison


def curve(ce, norm, lr=(0.5, 1.0, 0.0), skipped=(0, 0, 0)):
    names = (curves.CE, curves.Z, curves.GRAD_NORM, curves.LR, curves.SKIPPED)
    rows = zip(ce, (0.1, 0.1, 0.1), norm, lr, skipped, strict=True)
    return {s: dict(zip(names, row, strict=True)) for s, row in enumerate(rows, 1)}


@pytest.fixture
def comparison():
    """Three updates: ours is off by 0.25 at the second, and its norm is nearer to fp64 twice."""
    reference = curve((7.0, 6.0, 5.0), (1.01, 1.0, 1.03))
    for step, exact in ((1, 1.0), (2, 1.0), (3, 1.0)):
        reference[step][curves.GRAD_NORM_FP64] = exact
    ours = Metrics(curve((7.0, 6.25, 5.0), (1.001, 1.01, 1.002)))
    second = curve((7.0, 6.0, 5.125), (1.0, 1.0, 1.0))
    digests = {1: "a", 2: "b", 3: "c"}
    return StageComparison("stage1", ours, reference, second, dict(digests), dict(digests), 0, 3)


def test_figures(comparison):
    f = comparison.figures()
    assert f["stage1/CE loss, max |difference|"] == 0.25
    assert f["stage1/CE loss, update of the max"] == 2
    assert f["stage1/CE loss, reference against itself"] == 0.125
    assert f["stage1/LR, max relative difference"] == 0
    assert f["stage1/updates compared"] == 3 and f["stage1/updates missing"] == 0
    assert f["stage1/batches compared"] == 3 and f["stage1/batches that differ"] == 0
    norm = "stage1/grad norm to fp64, first 50 updates"
    assert (f[f"{norm}: ours nearer"], f[f"{norm}: reference nearer"]) == (2, 1)
    assert f[f"{norm}: median relative difference"] == pytest.approx(0.002, abs=1e-12)
    assert f[f"{norm}: median relative difference (reference)"] == pytest.approx(0.01, abs=1e-12)


def test_what_differs_is_counted(comparison):
    comparison.reference[2][curves.SKIPPED] = 1.0
    comparison.batches[3] = "other"
    del comparison.batches[1]
    del comparison.metrics.rows[3]
    f = comparison.figures()
    assert f["stage1/skipped updates that differ"] == 1
    assert f["stage1/updates missing"] == 1
    assert f["stage1/batches that differ"] == 1, "the first has no digest, the third was not run"


def test_a_stage_that_stops_early_misses_nothing_beyond_its_end(comparison):
    comparison.last_step = 2
    del comparison.metrics.rows[3]
    assert comparison.missing() == []


LIMITS = {
    "stage1/CE loss, max |difference|": 2e-5,
    "stage1/grad norm, max relative difference": 2e-3,
    "stage1/LR, max relative difference": 1e-12,
    "stage1/skipped updates that differ": 0,
    "stage1/batches that differ": 0,
    "stage1/updates missing": 0,
    "stage1/repeated updates, max |difference|": 0,
    "stage1/end weights, max |difference| / largest weight": 1e-4,
    "heldout max |difference|": 1e-5,
    "KL mean": 1e-7,
    "landmarks/KL mean": 1e-7,
}


@pytest.fixture
def laptop():
    from olmo_core_jax.recipes import load_recipe

    return load_recipe("laptop")


def test_every_limit_is_on_the_edge_where_it_should_be(laptop):
    by_figure = {c.figure: c for c in checks.checks_of(laptop)}
    for figure, limit in LIMITS.items():
        check = by_figure[figure]
        assert check.holds(limit) and not check.holds(limit * 1.01 + 1e-15), figure
    top1 = by_figure["top-1 agreement"]
    assert top1.holds(0.9991) and not top1.holds(0.9989)
    stage2 = [c for c in by_figure if c.startswith("stage2/")]
    assert len(stage2) == len([c for c in by_figure if c.startswith("stage1/")]) == 8


def test_what_was_not_measured_has_not_passed(laptop):
    all_checks = checks.checks_of(laptop)
    figures = {c.figure: c.limit for c in all_checks}
    assert all(v.passed for v in checks.verdicts(figures, all_checks))
    for check in all_checks:
        without = {k: v for k, v in figures.items() if k != check.figure}
        (verdict,) = [v for v in checks.verdicts(without, all_checks) if not v.passed]
        assert (verdict.check, verdict.word) == (check, "not measured")
        broken = checks.verdicts(figures | {check.figure: float("nan")}, all_checks)
        assert [v.word for v in broken if not v.passed] == ["FAIL"]


def test_the_worst_landmark_counts():
    a = {"heldout max |difference|": 1e-6, "KL mean": 1e-9, "top-1 agreement": 1.0}
    b = {"heldout max |difference|": 1e-7, "KL mean": 1e-8, "top-1 agreement": 0.5}
    assert checks.worst_of([a, b]) == {
        "landmarks/heldout max |difference|": 1e-6,
        "landmarks/KL mean": 1e-8,
        "landmarks/top-1 agreement": 0.5,
    }
    assert checks.worst_of([a, {}]) == {}, "a landmark without figures is not passed over"
