"""Python in other processes: with other device counts, or to be killed."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def environment(devices: int = 1, flags: str = "") -> dict[str, str]:
    """What a child needs: the tests' helpers, CPU only, and so many pretended devices."""
    return os.environ | {
        "PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}",
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {flags}",
    }


def run_python(
    code: str, *args: str, devices: int = 1, timeout: float = 600, flags: str = ""
) -> str:
    """Runs code in a fresh interpreter and returns what it printed; a failure shows its stderr."""
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", code, *args],
        env=environment(devices, flags),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


def start_training(
    recipe: str, run_root: str | Path, *flags: str, devices: int = 1, stage: str = "stage1", **env
) -> subprocess.Popen:
    """The real job, as the flow starts it. Its output is merged and piped."""
    command = [sys.executable, "-m", "olmo_core_jax.jobs.train", "--stage", stage]
    return subprocess.Popen(
        [*command, "--recipe", recipe, "--run-root", str(run_root), *flags],
        env=environment(devices) | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen, timeout: float = 240) -> tuple[int, str]:
    """(exit code, output)."""
    output, _ = process.communicate(timeout=timeout)
    return process.returncode, output


def read_until(process: subprocess.Popen, text: str) -> str:
    """Reads the job's output up to a line with this text; fails where it ends before."""
    seen = ""
    assert process.stdout is not None
    for line in process.stdout:
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"{text!r} never came:\n{seen}")
