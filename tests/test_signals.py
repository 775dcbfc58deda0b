"""The real job, killed and told to stop at real moments."""

import random
import shutil
import signal
import time

import pytest
import tiny
from processes import finish, read_until, start_training

from olmo_core_jax import recipes
from olmo_core_jax.errors import CRASH, OK, PREEMPTED

UPDATES = 300


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """(recipe, run root) of a job that nothing interrupted, and the seconds that it took."""
    folder = tmp_path_factory.mktemp("unbroken")
    recipe = tiny.write_recipe(folder / "recipe", UPDATES, every=20)
    tiny.build_index(folder / "run", recipes.load_recipe(recipe))
    began = time.monotonic()
    code, output = finish(start_training(recipe, folder / "run"))
    assert code == OK, output
    return recipe, folder / "run", time.monotonic() - began


def fresh(unbroken, tmp_path):
    """A run root that has nothing but the index."""
    recipe, whole, _ = unbroken
    shutil.copytree(whole / "build_index", tmp_path / "build_index")
    return recipe, tmp_path


def finish_and_compare(unbroken, recipe, root):
    code, output = finish(start_training(recipe, root))
    assert code == OK, output
    tiny.assert_same_run(unbroken[1], root, UPDATES)


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("begins with our own", id="compile", marks=pytest.mark.slow),
        pytest.param("update 1/", id="step"),
        pytest.param("checkpoint 40:", id="save", marks=pytest.mark.slow),
    ],
)
def test_sigterm_exits_with_42_in_time_and_the_rest_is_exact(unbroken, tmp_path, moment):
    recipe, root = fresh(unbroken, tmp_path)
    job = start_training(recipe, root)
    read_until(job, moment)
    told = time.monotonic()
    job.send_signal(signal.SIGTERM)
    code, output = finish(job)
    assert code == PREEMPTED, output
    assert time.monotonic() - told < 30
    assert not (root / "stage1_train/result.json").exists()
    finish_and_compare(unbroken, recipe, root)


def test_sigterm_during_import_is_42(unbroken, tmp_path):
    recipe, root = fresh(unbroken, tmp_path)
    job = start_training(recipe, root)
    read_until(job, "recipe tiny")
    job.send_signal(signal.SIGTERM)
    code, output = finish(job)
    assert code == PREEMPTED and "Traceback" not in output, output


@pytest.mark.slow
def test_grace_ends_a_compile_that_does_not(unbroken, tmp_path):
    """The step cannot be interrupted; the job leaves by itself, and what is saved stays whole."""
    recipe, root = fresh(unbroken, tmp_path)
    job = start_training(recipe, root, OLMO_GRACE_SECONDS="0")
    read_until(job, "checkpoint 40:")
    job.send_signal(signal.SIGTERM)
    code, output = finish(job)
    assert code == PREEMPTED, output
    finish_and_compare(unbroken, recipe, root)


def kill_somewhere(unbroken, recipe, root, rng) -> None:
    job = start_training(recipe, root)
    time.sleep(rng.uniform(0, 1.1 * unbroken[2]))
    job.kill()
    finish(job)


@pytest.mark.slow
def test_killed_a_few_times_at_random(unbroken, tmp_path):
    recipe, root = fresh(unbroken, tmp_path)
    rng = random.Random(1)
    for _ in range(3):
        kill_somewhere(unbroken, recipe, root, rng)
    if (root / "stage1_train/result.json").exists():
        tiny.assert_same_run(unbroken[1], root, UPDATES)
    else:
        finish_and_compare(unbroken, recipe, root)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50))
def test_killed_at_50_random_moments(unbroken, tmp_path, seed):
    recipe, root = fresh(unbroken, tmp_path)
    kill_somewhere(unbroken, recipe, root, random.Random(100 + seed))
    if not (root / "stage1_train/result.json").exists():
        finish_and_compare(unbroken, recipe, root)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_killed_during_a_save(unbroken, tmp_path, seed):
    recipe, root = fresh(unbroken, tmp_path)
    job = start_training(recipe, root)
    read_until(job, f"checkpoint {20 * (1 + seed % 5)}:")
    time.sleep(random.Random(seed).uniform(0, 0.15))
    job.kill()
    finish(job)
    finish_and_compare(unbroken, recipe, root)


@pytest.mark.slow
def test_a_lost_disk_ends_the_job_at_the_next_save(unbroken, tmp_path):
    recipe, root = fresh(unbroken, tmp_path)
    checkpoints = root / "stage1_train" / "checkpoints"
    job = start_training(recipe, root)
    read_until(job, "checkpoint 40:")
    checkpoints.rename(root / "taken away")
    checkpoints.write_text("no folder any more")
    code, output = finish(job, timeout=60)
    assert code == CRASH and "could not be written" in output, output
    checkpoints.unlink()
    (root / "taken away").rename(checkpoints)
    finish_and_compare(unbroken, recipe, root)


@pytest.mark.slow
def test_interruptions_as_planned(unbroken, tmp_path):
    """The second attempt is killed before it has logged a line."""
    recipe, root = fresh(unbroken, tmp_path)
    codes = []
    for _ in range(4):
        job = start_training(recipe, root, "--interrupt", "30:term,31:kill,100:save")
        codes.append(finish(job)[0])
    assert codes == [PREEMPTED, -signal.SIGKILL, -signal.SIGKILL, OK]
    tiny.assert_same_run(unbroken[1], root, UPDATES)


@pytest.mark.slow
def test_two_trainers_never(unbroken, tmp_path):
    from olmo_core_jax.errors import LOCKED

    recipe, root = fresh(unbroken, tmp_path)
    first = start_training(recipe, root)
    read_until(first, "process 0 of 1")
    code, output = finish(start_training(recipe, root))
    assert code == LOCKED, output
    assert finish(first)[0] == OK
    tiny.assert_same_run(unbroken[1], root, UPDATES)
