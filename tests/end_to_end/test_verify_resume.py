"""flows/verify_resume.py as a person runs it, on a model that trains in seconds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

ROOT = Path(__file__).parents[2]


def run_flow(cwd: Path, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, str(ROOT / "flows" / "verify_resume.py"), "run", *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=1500,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def recipe(tmp_path) -> str:
    return tiny.write_recipe(tmp_path / "recipe", 40)


def cut(recipe: str, folder: Path, interrupt: str, updates: int = 30, every: int = 5):
    from olmo_core_jax.experiments.resume import launch

    return launch.short_plan(recipe, str(folder / "runs"), "1", updates, every, interrupt)


@pytest.mark.parametrize(
    "plan, message",
    [
        ("21:save", r"no checkpoint of update 21 is written: choose a multiple of --every 5"),
        ("7:foo", r"interruption '7:foo': write UPDATE:KIND"),
        ("7:term,7:kill", r"updates have to grow"),
        ("31:kill", r"update 31 .* --updates 30"),
        ("30:save", r"update 30 .* --updates 30"),
    ],
)
def test_an_interruption_that_cannot_happen_is_refused_before_anything_runs(
    tmp_path, recipe, plan, message
):
    from olmo_core_jax.launch.flow_entry import StageError

    with pytest.raises(StageError, match=message):
        cut(recipe, tmp_path, plan)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("numbers", [{"updates": 0}, {"every": 0}, {"updates": 41}])
def test_so_many_updates_have_to_be_there(tmp_path, recipe, numbers):
    from olmo_core_jax.launch.flow_entry import StageError

    with pytest.raises(StageError, match=r"--updates|--every"):
        cut(recipe, tmp_path, "", **numbers)


def test_the_short_recipe_ends_and_saves_where_it_is_told(tmp_path, recipe):
    from olmo_core_jax.recipes import load_recipe

    plan = cut(recipe, tmp_path, "7:term,13:kill,20:save")
    stage = load_recipe(plan.recipe).stage1
    assert (stage.last_step, stage.checkpoints.every, plan.stages) == (30, 5, ["stage1"])


def test_fewer_attempts_than_interruptions_prove_nothing():
    from olmo_core_jax.experiments.resume import launch
    from olmo_core_jax.launch.flow_entry import StageError

    launch.require_all_interrupted("", 1)
    launch.require_all_interrupted("7:term,13:kill", 3)
    launch.require_all_interrupted("7:term,13:kill", 4)  # the machine was lost once, too
    with pytest.raises(StageError, match="2 interruptions were planned, but there are 2 attempts"):
        launch.require_all_interrupted("7:term,13:kill", 2)


@pytest.mark.slow
def test_runs_that_were_finished_before_do_not_pass_for_interrupted_ones(tmp_path, recipe):
    """The second flow finds both runs done: nothing is interrupted, and they are equal all the same."""
    flags = (
        "--recipe",
        recipe,
        "--updates",
        "8",
        "--every",
        "4",
        "--output",
        str(tmp_path / "runs"),
    )
    code, output = run_flow(tmp_path, *flags, "--interrupt", "2:kill")
    assert code == 0 and "bit for bit: 8 updates in 2 attempts" in output, output
    code, output = run_flow(tmp_path, *flags, "--interrupt", "2:kill,5:term")
    assert code != 0 and "2 interruptions were planned, but there are 2 attempts" in output, output


@pytest.mark.slow
def test_an_interrupted_run_is_the_unbroken_one(tmp_path, recipe):
    code, output = run_flow(
        tmp_path,
        *("--recipe", recipe, "--updates", "14", "--every", "4"),
        *("--interrupt", "3:term,7:kill,12:save", "--output", str(tmp_path / "runs")),
    )
    assert code == 0, output
    assert "is the unbroken run, bit for bit: 14 updates in 4 attempts" in output


@pytest.mark.slow
def test_a_plan_beyond_the_end_is_refused(tmp_path, recipe):
    code, output = run_flow(
        tmp_path, "--recipe", recipe, "--updates", "5", "--output", str(tmp_path / "runs")
    )
    assert code != 0 and "update 7 does not come before the last of --updates 5" in output, output
