"""The build_index job, and the laptop's batches as real OLMo-core trained on them."""

import csv
import json
from pathlib import Path

import pytest
from mixes import make_recipe

from olmo_core_jax import recipes
from olmo_core_jax.data.instance_log import digest
from olmo_core_jax.data.loader import Loader
from olmo_core_jax.data.preflight import preflight
from olmo_core_jax.data.stage_data import build_stage_data, open_stage_data
from olmo_core_jax.errors import OK, USER_ERROR
from olmo_core_jax.jobs.build_index import JOB
from olmo_core_jax.jobs.common import main


@pytest.fixture
def job(make_mix, tmp_path):
    """(mix, run) where run() is the job's exit code."""
    mix = make_mix()

    def run(*more: str, updates: int = 20) -> int:
        recipe = make_recipe(mix, updates=updates)
        (tmp_path / "recipe.yaml").write_text(recipes.dump_recipe(recipe))
        return main(
            JOB,
            ["--recipe", str(tmp_path / "recipe.yaml"), "--run-root", str(tmp_path / "run"), *more],
        )

    return mix, run


def files(folder: Path) -> dict[str, int]:
    return {str(p): p.stat().st_mtime_ns for p in folder.rglob("*") if p.suffix != ".txt"}


def test_result_and_second_run(job, tmp_path):
    _, run = job
    assert run() == OK
    result = json.loads((tmp_path / "run/build_index/result.json").read_text())
    assert result["figures"]["stage1_files"] == 5
    assert result["figures"]["stage1_updates_an_epoch"] == 26
    assert len(result["notes"]["stage1_fingerprint"]) == 64
    assert Path(result["outputs"]["stage1_index"]).is_file()
    before = files(tmp_path / "run")
    assert run() == OK
    assert files(tmp_path / "run") == before


def test_an_interrupted_run_goes_on(job, tmp_path):
    _, run = job
    assert run() == OK
    folder = tmp_path / "run/build_index"
    index = (folder / "stage1/index.json").read_bytes()
    for left in (folder / "result.json", folder / "stage1/order_epoch1.u32.json"):
        left.unlink()
    assert run() == OK
    assert (folder / "stage1/index.json").read_bytes() == index


def test_bad_data_end_with_a_user_error(job, tmp_path, capfd):
    mix, run = job
    path = list(mix.files)[3]
    Path(path).unlink()
    assert run() == USER_ERROR
    said = capfd.readouterr().out
    assert f"{path} does not exist" in said and "Traceback" not in said
    assert not (tmp_path / "run/build_index/stage1").exists()


def test_too_little_data_ends_with_a_user_error(job, capfd):
    _, run = job
    assert run(updates=27) == USER_ERROR
    assert "set stage1.epochs to 2" in capfd.readouterr().out


def test_another_process_than_the_first_writes_nothing(job, tmp_path):
    _, run = job
    topology = json.dumps(
        {"distributed": {"mode": "explicit", "num_processes": 2, "process_id": 1}}
    )
    assert run("--topology", topology) == OK
    assert not (tmp_path / "run/build_index").exists()


@pytest.mark.parametrize("stage", ["stage1", "stage2"])
def test_the_laptops_batches_are_those_that_olmo_core_trained_on(tmp_path, stage):
    recipe = recipes.load_recipe("laptop")
    section = recipe.stage(stage)
    build_stage_data(str(tmp_path), recipe, stage)
    index, order = open_stage_data(str(tmp_path), section)
    assert preflight(index, order, section, stage)["epochs"] == 1
    with open(section.reference.batches) as f:
        expected = {int(row["step"]): row["sha256"] for row in csv.DictReader(f)}
    with Loader(index, order, last_step=section.last_step) as loader:
        found = {step: digest(batch.tokens) for step, _, batch in loader}
    assert found == expected and len(found) == section.last_step
