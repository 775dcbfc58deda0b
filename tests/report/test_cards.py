"""Cards follow a stage from before its first file to after its last."""

import json

import pytest
from synthetic import reference_curve, write_run, write_stage

from olmo_core_jax.compare.curves import BPS, Metrics
from olmo_core_jax.report import cards, training_card
from olmo_core_jax.results import read_result

pytest.importorskip("metaflow")


class FakeCard(list):
    """Stands for `current.card[id]`: a list of components that can be refreshed."""

    refreshed = 0

    def refresh(self):
        self.refreshed += 1

    def rendered(self):
        return json.dumps([c.render() for c in self], default=str)


def kind(component):
    return component.render()["type"]


def test_training_card_follows_the_run(tmp_path, monkeypatch):
    import random

    monkeypatch.setattr(cards, "PAUSE", 0)
    root = write_run(tmp_path, steps=(60, 20), finished=False)
    rows = reference_curve(60, random.Random(3))
    write_stage(root / "stage1_train", {s: rows[s] for s in range(1, 11)})
    (root / "recipe.yaml").rename(tmp_path / "later.yaml")
    card = FakeCard()
    live = cards.stage_card(card, str(root), "stage1_train")
    live.refresh()
    assert len(card) == 1, "before the job has claimed the run root there is nothing to show"
    (tmp_path / "later.yaml").rename(root / "recipe.yaml")
    live.refresh()
    progress = next(c for c in card if kind(c) == "progressBar")
    assert progress.render()["value"] == 10 and progress.render()["max"] == 60
    assert "4.7 s left" in progress.render()["details"]
    assert "Update **10**" in card.rendered()
    write_stage(root / "stage1_train", rows)
    live.refresh()
    assert progress.render()["value"] == 60 and progress.render()["details"] == "done"
    assert sum(kind(c) == "vegaChart" for c in card) == 5
    live.finished(read_result(str(root), "stage1_train"))
    assert "Finished in 1 min 01 s" in card.rendered()


@pytest.mark.parametrize("folder", ["convert_weights", "eval_landmarks/60", "final_eval"])
def test_other_cards_show_their_figures(tmp_path, folder):
    root = str(write_run(tmp_path, steps=(60, 20)))
    card = FakeCard()
    live = cards.stage_card(card, root, folder)
    live.finished(read_result(root, folder))
    shown = card.rendered()
    expected = {
        "convert_weights": "their logits compared",
        "eval_landmarks/60": "shakespeare",
        "final_eval": "22 of 22 checks hold",
    }
    assert expected[folder] in shown
    assert (tmp_path / "run/final_eval/report.html").exists() == (folder == "final_eval")


def test_a_card_that_cannot_be_drawn_ends_no_stage(tmp_path, capsys):
    root = write_run(tmp_path, steps=(60, 20))
    (tmp_path / "stage1.csv").unlink()
    card = FakeCard()
    live = cards.stage_card(card, str(root), "stage1_train")
    live.refresh()
    assert "stage1.csv" in capsys.readouterr().err
    live.failed("exit code 44 (diverged training)")
    assert "exit code 44" in card.rendered()


def test_time_left():
    rows = {s: {BPS: 4.0 if s > 1 else 0.1} for s in range(1, 11)}
    assert training_card.eta(Metrics(rows), 50) == "10.0 s left at 4 updates/s"
    assert training_card.eta(Metrics(), 50) == "starting"
    assert training_card.eta(Metrics(rows), 10) == "done"


def test_a_card_that_takes_long_to_draw_is_drawn_less_often(tmp_path, monkeypatch):
    import time

    root = write_run(tmp_path, steps=(60, 20))
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    card = FakeCard()
    live = cards.stage_card(card, str(root), "warm_adam")
    draw = live._update
    monkeypatch.setattr(live, "_update", lambda: (draw(), clock.__setitem__(0, clock[0] + 3.0)))
    live.refresh()
    drawn = card.refreshed
    for _ in range(10):
        clock[0] += 5
        live.refresh()
    assert card.refreshed == drawn, "it rests for 60 seconds"
    clock[0] += 15
    live.refresh()
    assert card.refreshed == drawn + 1
