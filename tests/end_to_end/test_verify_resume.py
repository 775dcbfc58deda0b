"""flows/verify_resume.py as a person runs it, on a model that trains in seconds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
    sys.path.insert(0, str(ROOT / "tests" / "train"))
    try:
        import tiny
    finally:
        sys.path.pop(0)
    return tiny.write_recipe(tmp_path / "recipe", 40)


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
    assert code != 0 and "update 7 comes after --updates 5" in output, output
