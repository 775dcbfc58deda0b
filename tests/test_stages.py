"""The table of stages against the jobs, the flows and each other."""

import argparse
import ast
import importlib
import pkgutil
from pathlib import Path

import pytest

import olmo_core_jax.jobs
from olmo_core_jax import cli, stages
from olmo_core_jax.errors import UserError
from olmo_core_jax.launch.job import job_of

FOLDERS = [
    *(s.name for s in stages.STAGES.values() if not s.part),
    "eval_landmarks/100",
    "eval_landmarks/stage2-7",
    "replay/stage1-380-20",
    "replay/stage2-0-120",
]


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_job_writes_the_folder_that_names_it(folder):
    """Flags of the table, read by the job itself, lead back to the folder."""
    job = job_of(folder, "laptop", "/r")
    own = importlib.import_module(f"olmo_core_jax.{job.module}").JOB
    parser = argparse.ArgumentParser()
    own.flags(parser)
    assert own.folder(parser.parse_args(job.flags)) == folder


def test_folders_of_parts():
    assert stages.landmark_folder(100) == "eval_landmarks/100"
    assert stages.landmark_folder(7, "stage2") == "eval_landmarks/stage2-7"
    assert stages.replay_folder("380:20") == stages.replay_folder("stage1/380:20")
    assert stages.replay_folder("stage2/0:120") == "replay/stage2-0-120"


@pytest.mark.parametrize(
    "folder",
    [
        "stage9",
        "stage1_train/1",
        "stage1_train/",
        "eval_landmarks",
        "eval_landmarks/x",
        "/",
        "replay",
        "replay/stage1",
        "replay/stage1-380",
        "replay/1-2-x",
    ],
)
def test_other_folders_are_unknown(folder):
    with pytest.raises(
        UserError, match=r"unknown stage .*: one of .*eval_landmarks/STEP.*replay/STAGE-N-K"
    ):
        stages.stage_of(folder)


def test_every_job_is_a_stage_and_a_verb():
    found = {
        f"jobs.{m.name}"
        for m in pkgutil.iter_modules(olmo_core_jax.jobs.__path__)
        if hasattr(importlib.import_module(f"olmo_core_jax.jobs.{m.name}"), "JOB")
    }
    listed = {s.module for s in stages.STAGES.values()}
    assert found == {m for m in listed if m.startswith("jobs.")}
    assert {s.verb for s in stages.STAGES.values()} <= {c.name for c in cli.app.registered_commands}


def test_the_flow_has_the_stages_in_the_order_of_the_table():
    flow = ast.parse(Path(__file__).parents[1].joinpath("flows", "reproduce.py").read_text())
    steps = [n.name for n in ast.walk(flow) if isinstance(n, ast.FunctionDef)]
    assert [s for s in steps if s in stages.STAGES] == [s.name for s in stages.PIPELINE]


def test_what_comes_before_a_stage_comes_before_it():
    for at, stage in enumerate(stages.PIPELINE):
        assert set(stage.upstream) <= {s.name for s in stages.PIPELINE[:at]}
    for stage in stages.EXPERIMENTS:
        assert set(stage.upstream) <= {s.name for s in stages.PIPELINE}
