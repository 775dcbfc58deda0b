"""Two arms side by side, on curves small enough to work out by hand."""

import json
from dataclasses import replace

import pytest

from olmo_core_jax.compare import curves
from olmo_core_jax.experiments.heads import card
from olmo_core_jax.experiments.heads.comparison import FAST, Ablation, Trained, compare_arms

STEPS = 8


def arm(name, shift=0.0, tps=100.0):
    """Loss 8, 7, ... 1; speed tps + 1, tps + 2, ... from the second update on."""
    rows = {
        s: {curves.CE: 9.0 - s + shift, curves.LR: 0.5, curves.SKIPPED: 0.0}
        | ({curves.TPS: tps + s} if s > 1 else {})
        for s in range(1, STEPS + 1)
    }
    batches = {s: f"digest {s}" for s in rows}
    return Trained(name, rows, batches, {"params.q": 1, "params.k": 2}, {"code": 5.0 + shift})


@pytest.fixture
def found():
    return Ablation(arm("4x12"), arm("2x24", 0.25, 205.0), STEPS)


def test_figures(found):
    assert found.fair
    f = found.figures()
    assert found.tail == (7, 8), "of a short run its last quarter"
    assert f["4x12/CE loss, mean of updates 7 to 8"] == 1.5
    assert f["2x24/CE loss, mean of updates 7 to 8"] == 1.75
    assert f["CE loss, max |difference|"] == 0.25
    assert f["2x24/heldout/code"] == 5.25
    assert (f["4x12/tokens per second and device"], f["tokens per second, ratio"]) == (105, 2.0)
    assert found.baseline.speed(FAST) == 108
    assert f["tokens per second, ratio of the fastest tenths"] == 213 / 108


def test_differences_are_the_ablated_arms_minus_the_baselines(found):
    assert found.gap.steps == list(range(1, STEPS + 1))
    assert found.gap.values == [0.25] * STEPS


def test_a_long_run_is_judged_by_its_last_50_updates():
    assert Ablation(arm("4x12"), arm("2x24"), 400).tail == (351, 400)


@pytest.mark.parametrize(
    ("what", "spoil"),
    [
        ("updates that an arm lacks", lambda a: a.rows.pop(3)),
        ("updates with other batches", lambda a: a.batches.update({3: "other"})),
        ("updates with other batches", lambda a: a.batches.pop(3)),
        ("updates with another learning rate", lambda a: a.rows[3].update({curves.LR: 0.25})),
        ("arrays that start otherwise, of 2", lambda a: a.start.update({"params.k": 3})),
        ("arrays that start otherwise, of 2", lambda a: a.start.pop("params.k")),
    ],
)
@pytest.mark.parametrize("which", [0, 1])
def test_what_makes_a_comparison_unfair(found, which, what, spoil):
    spoil(found.arms[which])
    assert {name: n for name, n in found.unfair().items() if n} == {what: 1}
    assert not found.fair
    assert f"NOT a fair comparison of 4x12 and 2x24: 1 {what}." == card.summary(found)
    assert "FAIL" in card.fairness_table(found).markdown()


def test_arms_without_first_weights_are_not_called_fair(found):
    bare = Ablation(*(replace(a, start={}) for a in found.arms), STEPS)
    assert not bare.fair and "no first weights found" in card.summary(bare)


def test_what_a_job_leaves_is_read(tmp_path):
    """The files of a run root, not the objects."""
    for name, loss in (("4x12", 5.0), ("2x24", 4.5)):
        train = tmp_path / name / "stage1_train"
        (train / "metrics").mkdir(parents=True)
        row = {"step": 1, "attempt": 1, curves.CE: loss, curves.LR: 0.5}
        (train / "metrics/metrics.jsonl").write_text(json.dumps(row) + "\n")
        batch = {"step": 1, "attempt": 1, "tokens_digest": "ab"}
        (train / "instances.jsonl").write_text(json.dumps(batch) + "\n")
        meta = tmp_path / name / "convert_weights/checkpoints/0/meta"
        meta.mkdir(parents=True)
        (meta / "metadata").write_text(json.dumps({"checksums": {"params.q": 7}}))
    found = compare_arms({n: str(tmp_path / n) for n in ("4x12", "2x24")}, 1)
    assert found.fair and found.gap.values == [-0.5] and not found.baseline.heldout
    row = card.figure_table(found, {}).rows[-1]
    assert row[1:] == ["–", "–", "–"], "an update that was never timed has no speed"


def test_the_card_shows_both_arms(found):
    pytest.importorskip("metaflow")
    drawn = []
    card.draw(drawn, found, {"parameters": 400_944, "FLOPs a token": 1_977_840.0})
    shown = json.dumps([c.render() for c in drawn], ensure_ascii=False)
    for text in ("400,944", "1,977,840", "4 heads of 12", "2 heads of 24", "× 2.000", "+0.250000"):
        assert text in shown
    assert sum(c.render()["type"] == "vegaChart" for c in drawn) == 3
