"""Segments of a stage that moved between shapes."""

import json

import pytest

from olmo_core_jax.compare.curves import CE, GRAD_NORM, LR, TPS, read_metrics
from olmo_core_jax.recipes import load_recipe
from olmo_core_jax.report.segments import Segment, read_attempts, segments, table


def test_segments_of_a_stage_that_moved(tmp_path):
    folder = tmp_path / "stage1_train"
    (folder / "attempts").mkdir(parents=True)
    shapes = {1: ("v5p-4x4x8", 128), 2: ("v5p-4x4x8", 128), 3: ("tpu7x-4x4x4", 128)}
    for number, (shape, devices) in shapes.items():
        facts = {"attempt": number, "shape": shape, "devices": devices}
        (folder / "attempts" / f"{number:05d}.json").write_text(json.dumps(facts))
    # Attempt 2 repeats update 3, attempt 3 repeats update 5.
    steps = [(1, 1), (2, 1), (3, 1), (3, 2), (4, 2), (5, 2), (5, 3), (6, 3)]
    lines = [json.dumps({"step": s, "attempt": a, TPS: 100.0 * a}) for s, a in steps]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    metrics = read_metrics(str(folder / "metrics.jsonl"))
    found = segments(metrics, read_attempts(str(tmp_path), "stage1_train"))
    assert found == [
        Segment("v5p-4x4x8", 128, 1, 4, attempts=2, tps=150.0),
        Segment("tpu7x-4x4x4", 128, 5, 6, attempts=1, tps=300.0),
    ]
    assert "| tpu7x-4x4x4 | 128 | 5 to 6 | 1 | 300 |" in table(found).markdown()


def test_the_training_card_shows_them(tmp_path):
    """A stage that changed its shape after update 2: both shapes, their updates, tokens a second and device."""
    pytest.importorskip("metaflow")
    from olmo_core_jax.report.training_card import Training

    folder = tmp_path / "stage1_train"
    (folder / "attempts").mkdir(parents=True)
    (folder / "metrics").mkdir()
    for number, shape, devices in ((1, "v5p-4x4x8", 128), (2, "2 x tpu7x-4x4x4", 256)):
        facts = {"attempt": number, "shape": shape, "devices": devices}
        (folder / "attempts" / f"{number:05d}.json").write_text(json.dumps(facts))
    lines = [
        {"step": s, "attempt": 1 + (s > 2), CE: 3.0, GRAD_NORM: 1.0, LR: 1e-3, TPS: 500.0 * s}
        for s in (1, 2, 3, 4)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics" / "metrics.jsonl").write_text(text)
    recipe = load_recipe("laptop")
    alone = recipe.stage1.model_copy(update={"reference": None})
    card = Training(recipe.model_copy(update={"stage1": alone}), "stage1")
    card.update(str(tmp_path))
    shown = json.dumps([component.render() for component in card.components], default=str)
    assert "| v5p-4x4x8 | 128 | 1 to 2 | 1 | 750 |" in shown
    assert "| 2 x tpu7x-4x4x4 | 256 | 3 to 4 | 1 | 1,750 |" in shown
