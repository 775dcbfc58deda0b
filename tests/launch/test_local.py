"""The local launcher with real child processes."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from olmo_core_jax import errors
from olmo_core_jax.hardware.topology import Topology
from olmo_core_jax.launch import local
from olmo_core_jax.launch.job import Job, JobFailed
from olmo_core_jax.launch.profile import Profile, load_profile

# Stands in for a job: `--plan 42,1,0` ends its first start with 42, the second with 1, the third well.
STAND_IN = textwrap.dedent(
    """
    import argparse, os, signal, sys, time
    from pathlib import Path
    from olmo_core_jax.results import StageResult, write_result
    p = argparse.ArgumentParser()
    for flag in ("recipe", "run-root", "topology", "plan"):
        p.add_argument("--" + flag)
    a = p.parse_args()
    starts = Path(a.run_root, "starts")
    n = len(starts.read_text()) if starts.exists() else 0
    starts.write_text("x" * (n + 1))
    code = a.plan.split(",")[n]
    print("start", n, flush=True)
    if code == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if code == "sleep":
        time.sleep(60)
    if code == "0":
        write_result(a.run_root, "f", StageResult(stage="f", inputs={}, outputs={}, figures={"n": n}))
    sys.exit(0 if code == "lie" else int(code))
    """
)


@pytest.fixture
def job(tmp_path, monkeypatch):
    (tmp_path / "stand_in.py").write_text(STAND_IN)

    def make(plan):
        made = Job("x", "f", "laptop", str(tmp_path), (f"--plan={plan}",))
        command = [str(tmp_path / "stand_in.py"), *made.arguments(Topology())[2:]]
        monkeypatch.setattr(Job, "arguments", lambda self, topology: command)
        return made

    return make


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(local, "TICK_SECONDS", 0.05)


def test_a_result_is_returned_and_the_card_ticks(job):
    ticks = []
    result = local.run(job("0"), Profile(), lambda: ticks.append(1))
    assert result.figures == {"n": 0} and ticks


def test_preemptions_are_not_counted_and_crashes_are(job, tmp_path):
    result = local.run(job("42,42,42,kill,1,42,0"), Profile(max_restarts=2), lambda: None)
    assert result.figures == {"n": 6}


def test_too_many_crashes_end_with_the_logs_tail(job):
    with pytest.raises(JobFailed, match=r"signal SIGKILL(.|\n)*start 1"):
        local.run(job("1,kill,0"), Profile(max_restarts=1), lambda: None)


@pytest.mark.parametrize("code", [errors.USER_ERROR, errors.LOCKED, errors.DIVERGED])
def test_endings_that_no_restart_can_help(job, code, tmp_path):
    with pytest.raises(JobFailed) as e:
        local.run(job(f"{code},0"), Profile(), lambda: None)
    assert e.value.exit_code == code
    assert (tmp_path / "starts").read_text() == "x"


def test_exit_code_0_without_a_result_is_no_success(job):
    with pytest.raises(errors.UserError, match="not finished"):
        local.run(job("lie"), Profile(), lambda: None)


def test_an_exception_in_the_step_ends_its_job(job, tmp_path):
    def tick():
        if (tmp_path / "starts").exists():
            raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        local.run(job("sleep"), Profile(), tick)
    assert time.monotonic() - began < 20


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_a_killed_launcher_takes_its_job_along(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import subprocess, sys, time\n"
        "from olmo_core_jax.launch.local import die_with_parent\n"
        "child = subprocess.Popen(['sleep', '60'], preexec_fn=die_with_parent)\n"
        "print(child.pid, flush=True)\ntime.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 10
    while _alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(pid)


def _alive(pid):
    try:
        return open(f"/proc/{pid}/stat").read().split(") ")[1][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_profiles_are_read_from_the_environment_and_validated(tmp_path, monkeypatch):
    assert load_profile().backend == "local"
    path = tmp_path / "two.yaml"
    path.write_text(
        "topology: {platform: cpu, host_devices: 2}\ntopologies: {eval_landmarks: {}}\n"
    )
    monkeypatch.setenv("OLMO_LAUNCH", str(path))
    profile = load_profile()
    assert profile.name == "two" and profile.topology_of("stage1_train").host_devices == 2
    assert profile.topology_of("eval_landmarks/100").host_devices is None
    path.write_text("topology: {host_device: 2}\n")
    with pytest.raises(errors.UserError, match=r"two\.yaml: unknown key topology\.host_device"):
        load_profile()
    monkeypatch.setenv("OLMO_LAUNCH", str(tmp_path / "absent.yaml"))
    with pytest.raises(errors.UserError, match=r"absent\.yaml cannot be read"):
        load_profile()
    assert os.environ["OLMO_LAUNCH"]
