"""A run root written by version 0.1.0, before the package was laid out by subject, is still read, trusted and continued.

run_of_0_1/ is a tiny run of both stages (8 and 4 updates) with its recipe and data; tests work on a copy.
"""

import json
import shutil
from pathlib import Path

import pytest
import tiny

from olmo_core_jax import recipes, stages
from olmo_core_jax.checkpoint import inspection
from olmo_core_jax.data.audit import audit
from olmo_core_jax.errors import OK
from olmo_core_jax.jobs import build_index, convert_weights, evaluate, train, warm_adam
from olmo_core_jax.jobs.common import main

KEPT = Path(__file__).parent / "run_of_0_1"
JOBS = {
    "convert_weights": (convert_weights.JOB,),
    "build_index": (build_index.JOB,),
    "stage1_train": (train.JOB, "--stage=stage1"),
    "eval_landmarks/4": (evaluate.JOB, "--stage=stage1", "--step=4"),
    "warm_adam": (warm_adam.JOB,),
    "stage2_train": (train.JOB, "--stage=stage2"),
    "final_eval": (evaluate.JOB, "--final"),
}


@pytest.fixture
def old(tmp_path) -> Path:
    """The run and its recipe in another place than where it was made."""
    old = tmp_path / "old"
    shutil.copytree(KEPT, old)
    written = old / "run/recipe.yaml"
    written.write_text(written.read_text().replace("/tmp/projects/old", str(old)))
    return old


def run(old: Path, folder: str) -> int:
    job, *flags = JOBS[folder]
    arguments = [f"--recipe={old}/recipe/tiny.yaml", f"--run-root={old}/run", *flags]
    return main(job, [*arguments, '--topology={"platform": "cpu"}'])


def test_every_stage_of_the_table_is_there():
    assert {folder.partition("/")[0] for folder in JOBS} == {
        stage.name for stage in stages.PIPELINE
    }


@pytest.mark.parametrize("folder", JOBS)
def test_finished_stages_stay_finished(old, folder):
    result = old / "run" / folder / "result.json"
    before = result.read_bytes()
    assert run(old, folder) == OK
    assert result.read_bytes() == before


def test_training_goes_on_from_an_old_checkpoint(old):
    """The last four updates again: the same curve, up to what another processor rounds differently."""
    shutil.rmtree(old / "run/stage1_train/checkpoints/8")
    (old / "run/stage1_train/result.json").unlink()
    assert run(old, "stage1_train") == OK
    lines = tiny.rows(old / "run")
    assert [row["step"] for row in lines] == [*range(1, 9), *range(5, 9)]
    first = {row["step"]: row["train/CE loss"] for row in lines if row["attempt"] == 1}
    for row in lines[8:]:
        assert row["attempt"] == 2
        assert row["train/CE loss"] == pytest.approx(first[row["step"]], abs=1e-5)


def test_checkpoints_audit_and_recipe_are_read(old):
    recipe = recipes.load_recipe(str(old / "run/recipe.yaml"))
    kept = json.loads((old / "run/stage1_train/result.json").read_text())["inputs"]["recipe"]
    assert recipes.digest(recipe) == kept
    assert not inspection.verify(str(old / "run/stage1_train/checkpoints/8")).problems
    assert [found.ok for found in audit(str(old / "run"))] == [True, True]
