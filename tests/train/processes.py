"""Python in other processes: with other device counts, or to be killed."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def environment(devices: int = 1) -> dict[str, str]:
    """What a child needs: this folder's helpers, CPU only, and so many pretended devices."""
    return os.environ | {
        "PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}",
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }


def run_python(code: str, *args: str, devices: int = 1, timeout: float = 180) -> str:
    """Runs code in a fresh interpreter and returns what it printed; a failure shows its stderr."""
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", code, *args],
        env=environment(devices),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr
