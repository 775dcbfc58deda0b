"""Every transport fault at every call: the watch goes on, or ends with a clear message; the job is never touched."""

import re
import socket
import time

import pytest
from fake_kube.lab import Lab
from standin_state import chain

from olmo_core_jax.errors import UserError
from olmo_core_jax.launch.gke import api as k8s

pytest.importorskip("kubernetes")

LENGTH = ["--steps=30", "--pause=0.01"]


@pytest.fixture(autouse=True)
def short_timeouts(monkeypatch):
    monkeypatch.setattr(k8s, "READ_SECONDS", 0.3)


@pytest.mark.parametrize("call", [("create", "jobsets"), ("get", "jobsets"), ("list", "pods")])
def test_an_answer_that_is_lost_on_its_way(tmp_path, call):
    """The request was carried out, and the client cannot know: no second JobSet, no second trainer."""
    with Lab(tmp_path, flags=LENGTH) as lab:
        lab.api.fail("reset-after-headers", *call)
        assert lab.start().finish().outputs["state"] == chain(30)
        assert len(lab.leaders()) == 1
        assert len(lab.store.select("jobset.x-k8s.io", "jobsets", "")) == 1


@pytest.mark.parametrize("kind", ["gone", "end", "cut", 410])
def test_watches_that_break(tmp_path, kind):
    with Lab(tmp_path, flags=LENGTH) as lab:
        fault = lab.api.fail(kind, "watch", "jobsets", times=3)
        assert lab.start().finish().outputs["state"] == chain(30)
        assert fault.times < 3


def test_retry_after_is_honoured(tmp_path):
    with Lab(tmp_path, flags=["--steps=1"], hosts=1) as lab:
        waits = []
        launcher = lab.launcher()
        sleep = launcher.kube.sleep
        launcher.kube.sleep = lambda s: (waits.append(s), sleep(s))
        lab.api.fail(429, "create", "jobsets", retry_after="17")
        lab.start(launcher).finish()
        assert max(waits) >= 17


def test_a_token_that_expires_is_loaded_anew_once(tmp_path):
    with Lab(tmp_path, gate=True) as lab:
        loaded = []

        def connect(context):
            loaded.append(f"token-{len(loaded) + 1}")
            return lab.api.connect(loaded[-1])

        controller = lab.start(lab.launcher(connect=connect))
        for expiry in (2, 3):  # every hour of a long run
            lab.running()
            lab.api.tokens = {f"token-{expiry}"}
            wanted = f"token-{expiry}"
            lab.until(lambda w=wanted: sum(r.token == w for r in lab.api.requests) > 2)
        lab.open_gate()
        assert controller.finish().outputs["state"] == chain(20)
        assert loaded == ["token-1", "token-2", "token-3"]


@pytest.mark.parametrize("code", [401, 403])
def test_credentials_that_stay_bad_end_the_watch_and_not_the_job(tmp_path, code):
    with Lab(tmp_path, flags=["--steps=60", "--pause=0.02"]) as lab:
        controller = lab.start()
        lab.until(lambda: lab.steps())
        lab.api.fail(code, times=10**6)
        with pytest.raises(k8s.Denied, match=rf"{code}: .*Log in again"):
            controller.finish()
        lab.api.faults.clear()
        assert lab.running() and not lab.api.seen("delete")
        assert lab.start().finish().outputs["state"] == chain(60)
        assert len(lab.leaders()) == 1


def test_an_api_that_stays_away_ends_the_watch_and_not_the_job(tmp_path):
    with Lab(tmp_path, flags=["--steps=60", "--pause=0.02"], watching={"api_patience": 0.3}) as lab:
        controller = lab.start()
        lab.running()
        lab.api.down = True
        with pytest.raises(k8s.Unreachable, match="gave no answer for"):
            controller.finish()
        lab.api.down = False
        assert lab.running()


def test_an_outage_longer_than_a_preemption(tmp_path):
    with Lab(tmp_path, flags=["--steps=60", "--pause=0.02"]) as lab:
        controller = lab.start()
        lab.until(lambda: lab.steps())
        lab.api.down = True
        lab.cluster.evict()
        time.sleep(0.3)
        lab.api.down = False
        assert controller.finish().outputs["state"] == chain(60)
        assert len(lab.api.seen("create", "jobsets")) == 1 and not lab.api.seen("delete")


def test_a_name_that_does_not_resolve_for_a_while(tmp_path, monkeypatch):
    with Lab(tmp_path, flags=LENGTH) as lab:
        real, missing = socket.getaddrinfo, iter(range(4))

        def getaddrinfo(host, *args, **kwargs):
            if host == "kubernetes.test":
                if next(missing, None) is not None:
                    raise socket.gaierror(-2, "Name or service not known")
                host = "127.0.0.1"
            return real(host, *args, **kwargs)

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)

        def connect(context):
            client = lab.api.connect()
            client.configuration.host = lab.api.url.replace("127.0.0.1", "kubernetes.test")
            return client

        assert lab.start(lab.launcher(connect=connect)).finish().outputs["state"] == chain(30)
        assert next(missing, None) is None
        assert any("Name or service not known" in text for text in lab.said)


def test_a_refused_manifest_names_its_fields(tmp_path):
    with Lab(tmp_path) as lab:

        def validate(key, body):
            from fake_kube.store import Status

            causes = [
                ("spec.replicatedJobs[0].name", "must be shorter"),
                ("spec.ttlSecondsAfterFinished", "must be positive"),
            ]
            raise Status(422, "Invalid", "JobSet is invalid", causes)

        lab.store.validate = validate
        with pytest.raises(
            UserError, match=r"replicatedJobs\[0\]\.name: must be shorter; spec\.ttlSeconds"
        ):
            lab.start().finish()


def test_every_create_and_patch_is_strict_and_every_request_has_a_time_limit(tmp_path):
    with Lab(tmp_path, flags=["--fail-at=1", "--code=2"]) as lab:
        launcher = lab.launcher()
        limits = []
        send = launcher.kube._send
        launcher.kube._send = lambda method, timeout, *a, **o: (
            limits.append(timeout),
            send(method, timeout, *a, **o),
        )[1]
        with pytest.raises(Exception, match="FailJobSet"):
            lab.start(launcher).finish()
        for request in [*lab.api.seen("create"), *lab.api.seen("patch")]:
            assert request.query["fieldValidation"] == "Strict"
        assert len(limits) == len(lab.api.requests) and all(c > 0 and r > 0 for c, r in limits)


def test_logs_survive_cuts_and_restarted_controllers_without_gaps_or_repeats(tmp_path):
    from pathlib import Path

    with Lab(tmp_path, flags=["--steps=80", "--pause=0.01"], hosts=1) as lab:
        lab.api.fail("cut", "log", "pods", times=3)
        first = lab.start()
        lab.until(lambda: len(lab.steps()) >= 4)
        lab.kill.set()
        first.join(60)
        lab.kill.clear()
        lab.start().finish()
        (folder,) = Path(lab.root, "stage1_train", "pod_logs").iterdir()
        text = "".join(p.read_text() for p in sorted(folder.glob("*.log")))
        assert re.findall(r"Z step (\d+)", text) == [str(n) for n in range(1, 81)]


def test_a_log_that_is_cut_after_its_container_ended_is_read_to_its_end(tmp_path):
    from pathlib import Path

    with Lab(tmp_path, hosts=1) as lab:
        lab.launcher().submit()
        lab.until(lambda: (lab.cluster.jobset() or {}).get("status", {}).get("terminalState"))
        fault = lab.api.fail("cut", "log", "pods", times=3)
        lab.start().finish()
        assert fault.times == 0
        (folder,) = Path(lab.root, "stage1_train", "pod_logs").iterdir()
        text = "".join(p.read_text() for p in sorted(folder.glob("*.log")))
        assert re.findall(r"Z step (\d+)", text) == [str(n) for n in range(1, 21)]
