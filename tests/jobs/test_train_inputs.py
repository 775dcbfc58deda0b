"""What a training stage begins with, told from files that somebody may have damaged."""

import argparse
import json
import subprocess
import sys

import pytest

from olmo_core_jax import recipes
from olmo_core_jax.errors import USER_ERROR, UserError
from olmo_core_jax.hardware.topology import Topology
from olmo_core_jax.jobs import train
from olmo_core_jax.jobs.common import Context, _parser
from olmo_core_jax.results import digest_of, read_result
from olmo_core_jax.signals import StopRequest


@pytest.fixture
def context(tmp_path):
    args = argparse.Namespace(stage="stage1")
    folder = str(tmp_path / "stage1_train")
    recipe = recipes.load_recipe("laptop")
    return Context(recipe, str(tmp_path), folder, args, Topology(), StopRequest(1.0))


def test_the_start_is_its_checksums_and_damage_is_named(context, tmp_path):
    assert train._start_digest(context) == digest_of("init_seed=0")
    meta = tmp_path / "convert_weights/checkpoints/0/meta/metadata"
    meta.parent.mkdir(parents=True)
    meta.write_text(json.dumps({"checksums": {"b": 2, "a": 1}}))
    assert train._start_digest(context) == digest_of("a=1", "b=2")
    for text in ("[]", "null", '{"checksums": [1]}', "{"):
        meta.write_text(text)
        with pytest.raises(UserError, match="checkpoints/0/meta/metadata"):
            train._start_digest(context)
    meta.unlink()
    meta.mkdir()
    with pytest.raises(UserError, match="meta/metadata cannot be read: Is a directory"):
        train._start_digest(context)


@pytest.mark.parametrize("plan", ["7", "7:hug", "x:term", "9:kill,3:term"])
def test_a_bad_plan_of_interruptions_is_told_when_arguments_are_read(plan):
    arguments = ["--recipe=laptop", "--run-root=r", "--stage=stage1"]
    with pytest.raises(UserError, match="interruption"):
        _parser(train.JOB).parse_args([*arguments, f"--interrupt={plan}"])
    read = _parser(train.JOB).parse_args([*arguments, "--interrupt=3:term,9:kill"])
    assert read.interrupt == "3:term,9:kill"


def test_a_relative_run_root_is_made_absolute_and_a_bucket_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for given, read in (("run/x", f"{tmp_path}/run/x"), (".", str(tmp_path)), ("gs://b/x",) * 2):
        arguments = ["--recipe=laptop", "--stage=stage1", f"--run-root={given}"]
        assert _parser(train.JOB).parse_args(arguments).run_root == read


@pytest.mark.parametrize("bad", ["--run-root=", "--run-root= ", "--interrupt=7:hug"])
def test_bad_arguments_are_one_line_and_nothing_is_written(tmp_path, bad):
    arguments = ["--recipe=laptop", f"--run-root={tmp_path / 'run'}", "--stage=stage1", bad]
    command = [sys.executable, "-m", "olmo_core_jax.jobs.train", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    (line,) = done.stdout.splitlines()
    assert done.returncode == USER_ERROR and "UserError: " in line and not done.stderr
    assert not list(tmp_path.iterdir())


def test_a_file_in_the_place_of_a_stages_folder_is_named(tmp_path):
    (tmp_path / "stage1_train").write_text("")
    with pytest.raises(UserError, match=r"result\.json cannot be read: Not a directory"):
        read_result(str(tmp_path), "stage1_train")
