"""Each transport fault at each call that the launcher makes, the rare ones included."""

import socket
import threading

import pytest
from fake_kube.lab import Lab
from standin_state import chain, said

from olmo_core_jax.errors import USER_ERROR
from olmo_core_jax.launch.gke import api as k8s
from olmo_core_jax.launch.job import JobFailed

pytest.importorskip("kubernetes")

CALLS = [
    ("get", "jobsets"),
    ("get", "customresourcedefinitions"),
    ("create", "jobsets"),
    ("watch", "jobsets"),
    ("list", "workloads"),
    ("list", "pods"),
    ("log", "pods"),
    ("get", "pods"),
]
"""What every stage needs."""

ONLY_HELPFUL = [("get", "customresourcedefinitions"), ("log", "pods"), ("get", "pods")]
"""A stage ends well without these rights: the API server checks anyway, and logs are a service."""

PASSING = [429, 500, 502, 503, 504, "reset", "stall"]
LENGTH = ["--steps=30", "--pause=0.01"]
LONG = ["--steps=60", "--pause=0.02"]


@pytest.fixture(autouse=True)
def short_timeouts(monkeypatch):
    monkeypatch.setattr(k8s, "READ_SECONDS", 0.3)


def one_of_each(lab: Lab, verb: str, plural: str) -> list:
    """The call meets every passing fault, one after the other."""
    return [lab.api.fail(kind, verb, plural, seconds=0.5) for kind in PASSING]


def all_met(faults: list) -> bool:
    return all(fault.times == 0 for fault in faults)


@pytest.mark.parametrize("kind", [*PASSING, 401, 403])
def test_passing_faults_and_stale_credentials_at_each_call(tmp_path, kind):
    """All calls meet the fault in one run of the stage; credentials are loaded anew for each."""
    times = 1 if kind in (401, 403) else 2
    with Lab(tmp_path, flags=LENGTH) as lab:
        seconds = 0.5 if kind == "stall" else 0
        faults = [lab.api.fail(kind, *call, times=times, seconds=seconds) for call in CALLS]
        assert lab.start().finish().outputs["state"] == chain(30)
        assert all_met(faults), [f.times for f in faults]
        assert len(lab.leaders()) == 1 and not lab.api.seen("delete")
        created = {r.body["metadata"]["name"] for r in lab.api.seen("create", "jobsets")}
        assert len(created) == 1


@pytest.mark.parametrize("code", [401, 403])
@pytest.mark.parametrize("call", CALLS, ids=" ".join)
def test_a_right_that_is_missing_for_good(tmp_path, call, code):
    """The watch says which, and the job is left alone; where it was only helpful, the stage goes on."""
    with Lab(tmp_path, flags=LENGTH) as lab:
        lab.api.fail(code, *call, times=10**6)
        if call in ONLY_HELPFUL:
            assert lab.start().finish().outputs["state"] == chain(30)
        else:
            with pytest.raises(k8s.Denied, match=rf"{call[0]} {call[1]}.*{code}: .*Log in again"):
                lab.start().finish()
        assert not lab.api.seen("delete")


def test_names_that_do_not_resolve_at_each_call(tmp_path, monkeypatch):
    """The first request of each kind meets a name server that does not know the cluster."""
    real, current, failed = socket.getaddrinfo, threading.local(), set()

    def getaddrinfo(host, *args, **kwargs):
        if host != "kubernetes.test":
            return real(host, *args, **kwargs)
        kind = " ".join(current.what.split()[:2])
        if kind not in failed:
            failed.add(kind)
            raise socket.gaierror(-2, "Name or service not known")
        return real("127.0.0.1", *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with Lab(tmp_path, flags=LENGTH, hosts=1) as lab:
        lab.api.keep_alive = False

        def connect(context):
            client = lab.api.connect()
            client.configuration.host = lab.api.url.replace("127.0.0.1", "kubernetes.test")
            return client

        launcher = lab.launcher(connect=connect)
        persist = launcher.kube._persist

        def noting(what, once):
            current.what = what
            return persist(what, once)

        launcher.kube._persist = noting
        assert lab.start(launcher).finish().outputs["state"] == chain(30)
        told = "\n".join(t for t in lab.said if "Name or service not known" in t)
        for verb, plural in CALLS:
            assert ("log of" if verb == "log" else f"{verb} {plural}") in told, (verb, plural)


def test_passing_faults_while_a_jobset_is_deleted(tmp_path):
    with Lab(tmp_path, flags=LONG) as lab:
        lab.launcher().submit()
        lab.until(lambda: lab.steps())
        faults = one_of_each(lab, "delete", "jobsets")
        assert lab.launcher().cancel() is True
        assert all_met(faults) and lab.cluster.jobset() is None


def test_an_answer_to_a_deletion_that_is_lost(tmp_path):
    with Lab(tmp_path, flags=LONG) as lab:
        lab.launcher().submit()
        lab.until(lambda: lab.steps())
        lab.api.fail("reset-after-headers", "delete", "jobsets")
        assert lab.launcher().cancel() is True
        assert lab.cluster.jobset() is None


def test_a_deletion_that_meets_another_uid_deletes_nothing(tmp_path):
    with Lab(tmp_path, flags=LONG) as lab:
        lab.launcher().submit()
        lab.running()
        lab.api.fail(409, "delete", "jobsets")
        with pytest.raises(JobFailed, match="nothing was deleted"):
            lab.launcher().cancel()
        assert lab.running()


def test_passing_faults_while_a_failure_is_noted(tmp_path):
    with Lab(tmp_path, flags=["--fail-at=3", f"--code={USER_ERROR}"]) as lab:
        faults = one_of_each(lab, "patch", "jobsets")
        with pytest.raises(JobFailed, match="FailJobSetFailurePolicyAction") as failed:
            lab.start().finish()
        assert failed.value.exit_code == USER_ERROR and all_met(faults)


@pytest.mark.parametrize("kind", ["passing", 404, 409])
def test_faults_while_a_workload_is_activated_again(tmp_path, kind):
    with Lab(tmp_path, flags=LONG, watching={"reactivate": True}) as lab:
        controller = lab.start()
        lab.running()
        if kind == "passing":
            faults = one_of_each(lab, "patch", "workloads")
        else:
            faults = [lab.api.fail(kind, "patch", "workloads")]
        lab.cluster.deactivate()
        assert controller.finish().outputs["state"] == chain(60)
        assert all_met(faults)


def test_passing_faults_while_events_are_read(tmp_path):
    with Lab(tmp_path, watching={"pods_warning": 0.3}) as lab:
        lab.cluster.start_delay = 1e9
        faults = one_of_each(lab, "list", "events")
        lab.start()
        lab.until(lambda: said(lab, "2 of 2 pods are waiting"))
        assert all_met(faults)
        lab.kill.set()


def test_lists_that_expire_between_two_pages_begin_anew(tmp_path):
    with Lab(tmp_path) as lab:
        for i in range(3):
            key = ("", "pods", "default", f"p{i}")
            lab.store.create(key, {"metadata": {"name": key[3]}})
        api = k8s.Kube(lab.api.connect, "default", 5.0, lambda text: None, lab._sleep)
        send = api._send

        def small_pages(method, timeout, *args, **options):
            return send(method, timeout, *args, **options | {"limit": 1})

        api._send = small_pages
        fault = lab.api.fail(410, "list", "pods")
        fault.when = lambda r: r.query.get("continue") == "2"
        assert [p["metadata"]["name"] for p in api.select(k8s.PODS)] == ["p0", "p1", "p2"]
        assert fault.times == 0
        pages = [r.query.get("continue") for r in lab.api.seen("list", "pods")]
        assert pages == [None, "1", "2", None, "1", "2"]


@pytest.mark.parametrize("code", [400, 422])
def test_what_the_server_refuses_is_said_and_not_sent_again(tmp_path, code):
    with Lab(tmp_path) as lab:
        lab.api.fail(code, "create", "jobsets", times=10**6)
        with pytest.raises(k8s.Refused, match=rf"create jobsets: {code}: injected {code}"):
            lab.start().finish()
        assert len(lab.api.seen("create", "jobsets")) == 1


@pytest.mark.parametrize("code", [403, 409, 422])
def test_a_note_that_cannot_be_written_does_not_hide_the_failure(tmp_path, code):
    with Lab(tmp_path, flags=["--fail-at=3", f"--code={USER_ERROR}"]) as lab:
        fault = lab.api.fail(code, "patch", "jobsets", times=10**6)
        with pytest.raises(JobFailed, match="FailJobSetFailurePolicyAction") as failed:
            lab.start().finish()
        assert failed.value.exit_code == USER_ERROR and fault.times < 10**6
