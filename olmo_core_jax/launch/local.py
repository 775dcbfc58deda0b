"""Jobs as processes of this machine: started, watched, ended with their parent, started again when preempted."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from olmo_core_jax import errors, storage
from olmo_core_jax.launch.job import Job, JobFailed, Tick
from olmo_core_jax.launch.profile import Profile
from olmo_core_jax.results import StageResult, require_result

TICK_SECONDS = 2.0
STOP_SECONDS = 30.0
"""How long a job may take to save and leave after SIGTERM."""

PR_SET_PDEATHSIG = 1


def run(job: Job, profile: Profile, tick: Tick) -> StageResult:
    """Runs the job, again after preemptions and (max_restarts times) crashes, until its result is there."""
    crashes = preemptions = 0
    print(f"{job.folder}: log in {_log_file(job)}", flush=True)
    while True:
        log = _log_file(job)
        began = log.stat().st_size if log.exists() else 0
        code = _run_once(job, profile, log, tick)
        if code == errors.OK:
            return require_result(job.run_root, job.folder)
        tail = _tail(log, began)
        if code == errors.PREEMPTED and preemptions < 100:
            preemptions += 1
            print(f"{job.folder}: preempted; starting again from its last checkpoint")
        elif code not in errors.FINAL and crashes < profile.max_restarts:
            crashes += 1
            print(
                f"{job.folder}: {describe(code)}; starting again ({crashes} of {profile.max_restarts})"
            )
        else:
            raise JobFailed(f"{job.folder} ended with {describe(code)}; log: {log}\n{tail}", code)


def describe(code: int) -> str:
    """An exit code in words. Negative codes are signals, as subprocess gives them."""
    if code < 0:
        return f"signal {signal.Signals(-code).name}"
    names = {
        errors.CRASH: "a crash",
        errors.USER_ERROR: "bad input",
        errors.PREEMPTED: "preempted",
        errors.LOCKED: "another process at work there",
        errors.DIVERGED: "diverged training",
    }
    return f"exit code {code} ({names.get(code, 'unknown')})"


def die_with_parent() -> None:
    """Asks the kernel for SIGTERM when this process's parent dies (Linux; elsewhere nothing)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _run_once(job: Job, profile: Profile, log: Path, tick: Tick) -> int:
    command = [sys.executable, *job.arguments(profile.topology_of(job.folder))]
    with open(log, "ab") as out:
        child = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"OLMO_LOG_CAPTURED": "1", "PYTHONUNBUFFERED": "1"},
            preexec_fn=die_with_parent,
        )
    try:
        while True:
            try:
                code = child.wait(timeout=TICK_SECONDS)
                tick()
                return code
            except subprocess.TimeoutExpired:
                tick()
    except BaseException:  # whatever ends the step also ends its job
        _stop(child)
        raise


def _stop(child: subprocess.Popen) -> None:
    child.terminate()
    deadline = time.monotonic() + STOP_SECONDS
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    if child.poll() is None:
        child.kill()
        child.wait()


def _log_file(job: Job) -> Path:
    """The job's log: in its folder, or (run root in a bucket) in a local folder of the same name."""
    if storage.is_remote(job.run_root):
        folder = Path(
            "runs", "logs", job.run_root.removeprefix("gs://").replace("/", "_"), job.folder
        )
    else:
        folder = Path(job.run_root, job.folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "log.txt", "ab"):
            pass
    except OSError as e:
        raise errors.UserError(
            f"{folder} cannot be written ({e.strerror}): choose a writable output folder"
        ) from None
    return folder / "log.txt"


def _tail(log: Path, start: int, lines: int = 12) -> str:
    with open(log, "rb") as f:
        f.seek(start)
        text = f.read().decode(errors="replace")
    return "\n".join("    " + line for line in text.splitlines()[-lines:])
