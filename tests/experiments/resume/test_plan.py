"""Planned interruptions: which plans are taken, and what an attempt that was ended by one leaves."""

import contextlib
import json
import os
import signal

import pytest
import tiny

from olmo_core_jax.errors import Preempted, UserError
from olmo_core_jax.experiments.resume.plan import Interruption, of_attempt, parse_plan
from olmo_core_jax.jobs import train as jobs_train


def test_a_plan_gives_every_attempt_its_own():
    plan = "7:term, 13:kill,20:save"
    assert parse_plan(plan) == [
        Interruption(7, "term"),
        Interruption(13, "kill"),
        Interruption(20, "save"),
    ]
    assert of_attempt(plan, 2) == Interruption(13, "kill")
    assert of_attempt(plan, 4) is None and of_attempt("", 1) is None


@pytest.mark.parametrize(
    "plan", ["7", "7:stop", "x:kill", "7:kill,7:kill", "9:kill,8:term", "1:kill"]
)
def test_a_plan_that_cannot_be_is_refused(plan):
    with pytest.raises(UserError, match=r"interruption"):
        parse_plan(plan)


class Killed(BaseException):
    """Ends an attempt at the place where SIGKILL would."""


@pytest.mark.parametrize("plan", ["2:kill", "3:term,4:kill"])
def test_an_attempt_that_was_killed_before_its_first_line_counts(tmp_path, monkeypatch, plan):
    recipe = tiny.write_recipe(tmp_path / "recipe", 6, every=5)
    received = []

    def attempt() -> None:
        at = tiny.context(recipe, tmp_path / "run")
        at.args.interrupt = plan

        def receive(pid: int, number: int) -> None:
            received.append(number)
            if number == signal.SIGKILL:
                raise Killed
            at.stop.request()

        monkeypatch.setattr(os, "kill", receive)
        with contextlib.ExitStack() as open_things:
            jobs_train._trainer(at, open_things).run()

    planned = parse_plan(plan)
    for _ in planned:
        with pytest.raises((Killed, Preempted)):
            attempt()
    kept = (tmp_path / "run/stage1_train/attempts/00001.json").read_bytes()
    attempt()  # nothing is planned for it
    assert len(received) == len(planned)
    last = len(planned) + 1
    assert tiny.rows(tmp_path / "run")[-1]["attempt"] == last
    notes = sorted((tmp_path / "run/stage1_train/attempts").iterdir())
    assert [json.loads(note.read_text())["attempt"] for note in notes] == [*range(1, last + 1)]
    assert notes[0].read_bytes() == kept


def test_what_else_lies_beside_the_attempts_is_no_attempt(tmp_path):
    at = tiny.context(tiny.write_recipe(tmp_path / "recipe", 6), tmp_path / "run")
    assert jobs_train._begun(at) == 0
    folder = tmp_path / "run/stage1_train/attempts"
    folder.mkdir(parents=True)
    for name in ("00001.json", "00010.json", ".00011.json.1f2e3d4c.partial", "notes.json"):
        (folder / name).write_text("{}")
    assert jobs_train._begun(at) == 10
