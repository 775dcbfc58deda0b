"""Curves are read as they were written, whatever a killed writer left behind."""

import json
import random

import pytest

from olmo_core_jax.compare import curves
from olmo_core_jax.errors import UserError


def line(step, attempt=1, **values):
    return json.dumps({"step": step, "attempt": attempt, **values}) + "\n"


def test_newest_attempt_counts_and_a_repeat_is_compared(tmp_path):
    file = tmp_path / "metrics.jsonl"
    first = "".join(line(s, **{curves.CE: 7.0 - s, "throughput/device/TPS": 10}) for s in (1, 2, 3))
    second = line(3, 2, **{curves.CE: 4.0, "throughput/device/TPS": 99}) + line(
        4, 2, **{curves.CE: 3.0}
    )
    file.write_text(first + second)
    metrics = curves.read_metrics(str(file))
    assert [metrics.rows[s][curves.CE] for s in (1, 2, 3, 4)] == [6.0, 5.0, 4.0, 3.0]
    assert metrics.repeated == {3}
    assert metrics.repeat_difference == 0.0, "speed may differ, the loss did not"
    file.write_text(first + line(3, 2, **{curves.CE: 4.0 + 2**-40}))
    assert curves.read_metrics(str(file)).repeat_difference == 2**-40


def test_a_repeat_that_turns_into_nan_is_no_zero(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text(line(1, **{curves.CE: 1.0}) + line(1, 2, **{curves.CE: float("nan")}))
    assert curves.read_metrics(str(file)).repeat_difference == float("inf")


def test_half_a_line_of_a_killed_writer_costs_no_update(tmp_path):
    file = tmp_path / "metrics.jsonl"
    torn = line(2, **{curves.CE: 2.0})[:17]
    file.write_text(line(1, **{curves.CE: 1.0}) + torn + line(2, 2, **{curves.CE: 2.0}) + torn)
    metrics = curves.read_metrics(str(file))
    assert sorted(metrics.rows) == [1, 2]
    assert metrics.attempt_of[2] == 2


@pytest.mark.parametrize("block", [2**24, 50])
def test_reader_follows_a_growing_file(tmp_path, monkeypatch, block):
    monkeypatch.setattr(curves, "BLOCK", block)
    file = tmp_path / "metrics.jsonl"
    reader = curves.MetricsReader(str(file))
    assert reader.read().rows == {}
    text = "".join(line(s, **{curves.CE: float(s)}) for s in range(1, 30))
    for end in (10, 11, 300, 301, len(text)):
        file.write_text(text[:end])
        whole = text[:end].count("\n")
        assert sorted(reader.read().rows) == list(range(1, whole + 1))


def test_csv_names_its_fault(tmp_path):
    file = tmp_path / "curve.csv"
    file.write_text("step,train/CE loss\n1,7.5\n2,\n3,nan\n")
    rows = curves.read_csv(str(file))
    assert (
        rows[1] == {curves.CE: 7.5} and rows[2] == {} and rows[3][curves.CE] != rows[3][curves.CE]
    )
    file.write_text("Step,optim/LR\n5,0.25\n")
    assert curves.read_csv(str(file)) == {5: {curves.LR: 0.25}}
    for text, said in (
        ("a,b\n1,2\n", "step"),
        ("step,a\n1,x\n", "line 2"),
        ("step,a\n", "no updates"),
    ):
        file.write_text(text)
        with pytest.raises(UserError, match=said):
            curves.read_csv(str(file))
    with pytest.raises(UserError, match="missing"):
        curves.read_csv(str(tmp_path / "missing.csv"))


def test_gap_is_signed_relative_and_honest_about_nan():
    a = {1: {"m": 1.0}, 2: {"m": 2.5}, 3: {"m": 0.0}, 9: {"m": 1.0}}
    b = {1: {"m": 1.5}, 2: {"m": 2.0}, 3: {"m": 0.0}, 4: {"m": 1.0}}
    gap = curves.gap(a, b, "m")
    assert (gap.steps, gap.values) == ([1, 2, 3], [-0.5, 0.5, 0.0])
    assert curves.gap(a, b, "m", relative=True).values == [-0.5 / 1.5, 0.25, 0.0]
    assert (gap.largest, gap.at, gap.up_to(1).steps) == (0.5, 1, [1])
    broken = curves.gap({1: {"m": 1.0}, 2: {"m": float("nan")}}, b, "m")
    assert broken.largest != broken.largest and broken.at == 2
    nothing = curves.gap({}, b, "m")
    assert nothing.largest != nothing.largest and nothing.at == 0


def test_rolling_max_equals_the_plain_definition():
    rng = random.Random(0)
    for n, reach in ((1, 1), (7, 2), (100, 5), (30, 40)):
        values = [rng.random() for _ in range(n)]
        plain = [max(values[max(0, i - reach) : i + reach + 1]) for i in range(n)]
        assert curves.rolling_max(values, reach) == plain


def test_digests_of_both_sides(tmp_path):
    theirs, ours = tmp_path / "batches.csv", tmp_path / "instances.jsonl"
    theirs.write_text("step,sha256\n1,AA\n2,bb\n")
    assert curves.read_digests(str(theirs)) == {1: "aa", 2: "bb"}
    ours.write_text(
        line(1, tokens_digest="aa") + line(1, 2, tokens_digest="aa") + line(2, tokens_digest="x")
    )
    assert curves.read_instances(str(ours)) == ({1: "aa", 2: "x"}, 0)
    ours.write_text(line(1, tokens_digest="aa") + line(1, 2, tokens_digest="ab"))
    assert curves.read_instances(str(ours)) == ({1: "ab"}, 1)
    assert curves.read_instances(str(tmp_path / "none")) == ({}, 0)
    theirs.write_text("step,digest\n1,aa\n")
    with pytest.raises(UserError, match="sha256"):
        curves.read_digests(str(theirs))
