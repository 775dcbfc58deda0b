"""The frame of every job, with real processes: exit codes, locks, signals, results."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from olmo_core_jax import errors

JOB = textwrap.dedent(
    """
    import gc, hashlib, sys, time
    from olmo_core_jax.errors import UserError
    from olmo_core_jax.jobs.common import Job, Outcome, main

    def work(context):
        print("working", flush=True)
        what = context.args.what
        if what == "user":
            raise UserError("shard x.npy is truncated")
        if what == "crash":
            raise RuntimeError("unforeseen")
        if what == "sleep":
            time.sleep(60)
        if what == "poll":
            context.stop.poll()
            while not context.stop.requested:
                time.sleep(0.05)
            context.stop.check()
        if what == "collect":  # handlers run inside a callback whose exceptions Python ignores
            gc.callbacks.append(lambda phase, info: phase == "start" and time.sleep(1))
            while True:
                gc.collect()
                time.sleep(0.2)
        if what == "busy":  # one long C call, as a compile is: Python-level handlers never run
            hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
        return Outcome(outputs={"x": context.path("x")}, figures={"y": 1.5})

    JOB = Job(
        "stand_in",
        folder=lambda args: "stand_in",
        inputs=lambda context: {"what": context.args.tag},
        work=work,
        flags=lambda p: (p.add_argument("--what", default=""), p.add_argument("--tag", default="a")),
    )
    sys.exit(main(JOB))
    """
)


@pytest.fixture
def start(tmp_path):
    (tmp_path / "stand_in.py").write_text(JOB)
    started = []

    def begin(*flags, recipe="laptop", root=None, **env):
        root = root or tmp_path / "run"
        command = [sys.executable, str(tmp_path / "stand_in.py"), "--recipe", recipe]
        process = subprocess.Popen(
            [*command, "--run-root", str(root), *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | env,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()


def finish(process):
    out, _ = process.communicate(timeout=60)
    return process.returncode, out


def wait_for(process, text):
    while text not in process.stdout.readline():
        assert process.poll() is None


def test_a_result_is_written_last_and_a_second_run_does_nothing(start, tmp_path):
    code, out = finish(start())
    assert code == errors.OK, out
    path = tmp_path / "run/stand_in/result.json"
    before = path.read_bytes()
    result = json.loads(before)
    assert result["stage"] == "stand_in" and result["status"] == "ok"
    assert result["figures"] == {"y": 1.5}
    code, out = finish(start())
    assert code == errors.OK and "already done" in out and "working" not in out
    assert path.read_bytes() == before


def test_other_inputs_are_refused_and_nothing_is_overwritten(start, tmp_path):
    finish(start())
    before = (tmp_path / "run/stand_in/result.json").read_bytes()
    code, out = finish(start("--tag", "b"))
    assert code == errors.USER_ERROR and "what changed" in out and "Traceback" not in out
    assert (tmp_path / "run/stand_in/result.json").read_bytes() == before


def test_another_recipes_run_root_is_refused(start):
    finish(start())
    code, out = finish(start(recipe="olmo3_7b"))
    assert code == errors.USER_ERROR and "holds a run of recipe 'laptop'" in out


def test_a_damaged_result_is_named(start, tmp_path):
    finish(start())
    (tmp_path / "run/stand_in/result.json").write_text("{")
    code, out = finish(start())
    assert code == errors.USER_ERROR and "result.json is not valid JSON" in out


def test_user_errors_have_no_traceback_and_crashes_do(start):
    code, out = finish(start("--what", "user"))
    assert code == errors.USER_ERROR and "shard x.npy is truncated" in out
    assert "Traceback" not in out
    code, out = finish(start("--what", "crash"))
    assert code == errors.CRASH and "Traceback" in out and "unforeseen" in out


def test_an_output_folder_that_cannot_be_written(start, tmp_path):
    (tmp_path / "file").write_text("")  # root may write anywhere, so: below a file
    code, out = finish(start(root=tmp_path / "file" / "run"))
    assert code == errors.USER_ERROR and "choose a writable output folder" in out


@pytest.mark.parametrize("what", ["sleep", "poll", "collect"])
def test_sigterm_ends_as_preempted(start, what):
    process = start("--what", what)
    wait_for(process, "working")
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    told = time.monotonic()
    code, out = finish(process)
    assert code == errors.PREEMPTED, out
    assert "Traceback" not in out and "grace" not in out and time.monotonic() - told < 15


def test_sigterm_inside_one_long_c_call_ends_when_the_grace_is_over(start, tmp_path):
    process = start("--what", "busy", OLMO_GRACE_SECONDS="1")
    wait_for(process, "working")
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code, _ = finish(process)
    assert code == errors.PREEMPTED and time.monotonic() - began < 10
    assert not (tmp_path / "run/stand_in/result.json").exists()


def test_two_writers_never_and_a_killed_one_frees_the_lock(start):
    first = start("--what", "sleep")
    wait_for(first, "working")
    code, out = finish(start("--what", "sleep"))
    assert code == errors.LOCKED and f"process {first.pid}" in out
    first.kill()
    finish(first)
    code, out = finish(start())
    assert code == errors.OK, out


def test_a_maintenance_notice_is_treated_as_sigterm_is(start):
    """A metadata server on loopback: failing at first, then quiet, then it tells of maintenance."""
    answers = iter([503, "no HTTP", "NONE", "TERMINATE_ON_HOST_MAINTENANCE"])

    class Metadata(BaseHTTPRequestHandler):
        def do_GET(self):
            assert self.headers["Metadata-Flavor"] == "Google"
            answer = next(answers)
            if answer == 503:
                return self.send_error(503)
            if answer == "no HTTP":
                return self.wfile.write(b"?\r\n")
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer.encode())

        def log_message(self, *_): ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/maintenance-event"
    code, out = finish(
        start("--what", "poll", OLMO_MAINTENANCE_URL=url, OLMO_MAINTENANCE_SECONDS="0.2")
    )
    server.shutdown()
    assert code == errors.PREEMPTED, out
    assert "maintenance notice 'TERMINATE_ON_HOST_MAINTENANCE'" in out


def test_a_metadata_server_that_is_not_there_stops_nothing(start):
    code, out = finish(start(OLMO_MAINTENANCE_URL="http://127.0.0.1:9/x"))
    assert code == errors.OK, out
