"""An interrupted run against an unbroken one: equal ones are called the same, and any difference is found."""

import json
import shutil

import pytest
import tiny

from olmo_core_jax.experiments.resume.comparison import compare_runs


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    recipe = tiny.write_recipe(folder / "recipe", 8, every=4)
    tiny.train(tiny.context(recipe, folder / "a"))
    tiny.train(tiny.context(recipe, folder / "b"), stop_after=6)
    tiny.train(tiny.context(recipe, folder / "b"))
    return folder / "a", folder / "b"


def test_equal_runs_are_the_same(two_runs):
    found = compare_runs(*map(str, two_runs), "stage1", 8)
    assert found.same and found.updates == 8 and found.attempts == 2
    assert found.array_count == len(tiny.final_arrays(two_runs[0], 8))
    assert all(entry == (0.0, 0) for entry in found.largest.values())


def test_an_attempt_without_a_line_is_counted_by_the_next_ones_number(two_runs, tmp_path):
    other = tmp_path / "b"
    shutil.copytree(two_runs[1], other)
    file = other / "stage1_train/metrics/metrics.jsonl"
    file.write_text(file.read_text().replace('"attempt": 2', '"attempt": 3'))
    assert compare_runs(str(two_runs[0]), str(other), "stage1", 8).attempts == 3


@pytest.mark.parametrize("harm", ["loss", "batch", "array", "missing"])
def test_any_difference_is_found(two_runs, tmp_path, harm):
    other = tmp_path / "b"
    shutil.copytree(two_runs[1], other)
    stage = other / "stage1_train"
    if harm == "array":
        file = stage / "checkpoints/8/meta/metadata"
        meta = json.loads(file.read_text())
        meta["checksums"]["params/embed/weight"] ^= 1
        file.write_text(json.dumps(meta))
    elif harm == "batch":
        file = stage / "instances.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        lines[4]["tokens_digest"] = "0" * 64
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    else:
        file = stage / "metrics/metrics.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        if harm == "missing":
            del lines[3]
        else:
            lines[5]["train/CE loss"] += 2**-22
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = compare_runs(str(two_runs[0]), str(other), "stage1", 8)
    assert not found.same
    assert found.missing == ([4] if harm == "missing" else [])
    assert found.other_batches == ([5] if harm == "batch" else [])
    assert found.arrays == (["params/embed/weight"] if harm == "array" else [])
    assert found.largest["train/CE loss"] == ((2**-22, 6) if harm == "loss" else (0.0, 0))
