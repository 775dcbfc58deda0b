"""Every row of the decision table (decide.py), played on the loopback cluster by a controller that speaks HTTP."""

import time
from pathlib import Path

import pytest
from fake_kube.lab import Lab
from standin_state import chain, said

from olmo_core_jax.errors import CRASH, DIVERGED, LOCKED, USER_ERROR, UserError
from olmo_core_jax.launch.gke import names
from olmo_core_jax.launch.job import JobFailed

pytest.importorskip("kubernetes")


def test_completed_with_a_result_is_done(tmp_path):
    with Lab(tmp_path) as lab:
        result = lab.start().finish()
        assert result.outputs["state"] == chain(20)
        assert len(lab.leaders()) == 1
        assert not lab.cluster.counted


def test_completed_without_a_result_is_submitted_again_a_limited_number_of_times(tmp_path):
    with Lab(tmp_path, flags=["--steps=0", "--no-result=1"], hosts=1) as lab:
        with pytest.raises(JobFailed, match="stage has no result; this happened 3 times") as failed:
            lab.start().finish()
        assert failed.value.exit_code == CRASH
        assert len(lab.leaders()) == 3


def test_completed_early_with_progress_goes_on(tmp_path):
    """A trainer that turns a preemption into exit 0 costs a submission, and no wrong success."""
    with Lab(tmp_path, flags=["--steps=10", "--fail-at=7", "--code=0"], hosts=1) as lab:
        controller = lab.start()
        lab.until(lambda: said(lab, "it reached step 5, so it is submitted again"))
        with pytest.raises(JobFailed, match="3 times without a new checkpoint"):
            controller.finish()
        assert not Path(lab.root, "stage1_train", "result.json").exists()


@pytest.mark.parametrize("code", [USER_ERROR, LOCKED, DIVERGED])
def test_final_exit_codes_stop_at_once(tmp_path, code):
    with Lab(tmp_path, flags=["--fail-at=7", f"--code={code}"]) as lab:
        with pytest.raises(
            JobFailed, match=r"(?s)FailJobSetFailurePolicyAction.*ended with exit code.*step 7"
        ) as failed:
            lab.start().finish()
        assert failed.value.exit_code == code
        assert len(lab.leaders()) == 1
        logs = list(Path(lab.root, "stage1_train", "pod_logs").rglob("*.log"))
        assert any("step 7" in p.read_text() for p in logs)


def test_a_reported_failure_is_submitted_anew_and_an_unreported_one_reported(tmp_path):
    with Lab(tmp_path, flags=["--fail-at=7", f"--code={USER_ERROR}"]) as lab:
        lab.launcher().submit()
        lab.until(lambda: (lab.cluster.jobset() or {}).get("status", {}).get("terminalState"))
        # The first controller only finds the end; the second is asked to try again.
        for starts in (1, 2):
            with pytest.raises(JobFailed):
                lab.start().finish()
            assert len(lab.leaders()) == starts


def test_used_up_restarts_without_progress_stop(tmp_path):
    with Lab(tmp_path, flags=["--fail-at=3", "--code=1"], max_restarts=2) as lab:
        with pytest.raises(JobFailed, match=r"ReachedMaxRestarts.*no checkpoint since") as failed:
            lab.start().finish()
        assert failed.value.exit_code == CRASH
        assert len(lab.leaders()) == 3


def test_used_up_restarts_with_progress_go_on(tmp_path):
    with Lab(tmp_path, flags=["--steps=60", "--pause=0.02"], max_restarts=0) as lab:
        controller = lab.start()
        lab.until(lambda: len(lab.steps()) >= 2)
        lab.cluster.crash(lab.running()[0])
        assert controller.finish().outputs["state"] == chain(60)
        assert len(lab.leaders()) == 2
        assert said(lab, "ReachedMaxRestarts.*it reached step")


def test_queueing_is_waiting_and_never_a_retry(tmp_path):
    with Lab(tmp_path) as lab:
        lab.cluster.held = True
        controller = lab.start()
        lab.until(lambda: said(lab, "in the queue"))
        lab.cluster.pending("WaitingForQuota", "waiting for 64 more chips")
        lab.until(lambda: said(lab, "waiting for 64 more chips"))
        uid = lab.cluster.jobset()["metadata"]["uid"]
        time.sleep(0.5)
        assert not lab.leaders()
        lab.cluster.held = False
        controller.finish()
        assert lab.cluster.jobset()["metadata"]["uid"] == uid
        assert len(lab.api.seen("create", "jobsets")) == 1


def test_a_queue_timeout_leaves_the_job_in_its_place(tmp_path):
    with Lab(tmp_path, watching={"queue_timeout": 0.3}) as lab:
        lab.cluster.held = True
        with pytest.raises(JobFailed, match="not started within"):
            lab.start().finish()
        assert lab.cluster.jobset()["spec"]["suspend"] is True
        assert not lab.api.seen("delete")


@pytest.mark.parametrize(
    "reason", ["ExceedsMaxQuota", "NoMatchingFlavor", "Misconfigured", "Inadmissible"]
)
def test_what_can_never_start_is_said_at_once_and_given_up_after_a_grace(tmp_path, reason):
    with Lab(tmp_path, watching={"inadmissible_grace": 0.4}) as lab:
        lab.cluster.held = True
        controller = lab.start()
        lab.until(lambda: lab.cluster.workload())
        began = time.monotonic()
        lab.cluster.pending(reason, "asks for more than the queue has")
        with pytest.raises(JobFailed, match=f"{reason}.*more than the queue has.*Change the queue"):
            controller.finish()
        assert time.monotonic() - began >= 0.4
        assert said(lab, f"cannot be admitted as it is .{reason}")


def test_preemption_keeps_the_place_in_the_queue(tmp_path):
    with Lab(tmp_path, flags=["--steps=60", "--pause=0.02"]) as lab:
        controller = lab.start()
        lab.until(lambda: lab.steps())
        lab.cluster.held = True
        lab.cluster.evict()
        lab.until(lambda: said(lab, "preempted, keeps its place"))
        lab.until(lambda: not lab.cluster.running_pods())
        lab.cluster.held = False
        assert controller.finish().outputs["state"] == chain(60)
        assert len(lab.api.seen("create", "jobsets")) == 1 and not lab.api.seen("delete")
        assert lab.cluster.jobset()["status"].get("restarts", 0) == 0
        assert lab.leaders()[0].poll() == 42


@pytest.mark.parametrize(
    "reason", ["PodsReadyTimeout", "NodeFailures", "ClusterQueueStopped", "AdmissionCheck"]
)
def test_other_evictions_are_waited_out(tmp_path, reason):
    with Lab(tmp_path, flags=["--steps=40", "--pause=0.02"]) as lab:
        controller = lab.start()
        lab.running()
        lab.cluster.held = True
        lab.cluster.evict(reason, "its nodes are gone")
        lab.until(lambda: said(lab, "its nodes (are gone|did not come)"))
        lab.cluster.held = False
        assert controller.finish().outputs["state"] == chain(40)
        assert len(lab.api.seen("create", "jobsets")) == 1


def test_a_deactivated_workload_stops_the_watch(tmp_path):
    with Lab(tmp_path, flags=["--steps=1000"]) as lab:
        controller = lab.start()
        lab.running()
        lab.cluster.deactivate()
        with pytest.raises(
            JobFailed, match="deactivated the Workload: exceeded the maximum number"
        ):
            controller.finish()


def test_a_deactivated_workload_is_activated_where_asked(tmp_path):
    with Lab(tmp_path, flags=["--steps=40", "--pause=0.02"], watching={"reactivate": True}) as lab:
        controller = lab.start()
        lab.running()
        lab.cluster.deactivate()
        assert controller.finish().outputs["state"] == chain(40)
        assert lab.api.seen("patch", "workloads")[0].body == {"spec": {"active": True}}


def test_restarts_of_the_jobset_are_followed(tmp_path):
    with Lab(tmp_path, gate=True, max_restarts=1) as lab:
        controller = lab.start()
        for _ in range(3):  # more disruptions than max_restarts
            pods = lab.running()
            before = len(lab.leaders())
            leader = pods[0]["metadata"]["name"]
            lab.until(lambda leader=leader: leader in {r.name for r in lab.api.seen("log")})
            lab.until(lambda: b"begins" in lab.leaders()[-1].log)
            lab.cluster.disrupt(pods[-1])
            lab.until(lambda before=before: len(lab.leaders()) == before + 1)
        lab.open_gate()
        assert controller.finish().outputs["state"] == chain(20)
        assert lab.cluster.jobset()["status"]["restarts"] == 3
        assert lab.cluster.jobset()["status"]["restartsCountTowardsMax"] == 0
        logs = Path(lab.root, "stage1_train", "pod_logs").iterdir()
        assert len([p for p in logs if "-slice-0-0-" in p.name]) == 4


def test_pods_that_do_not_start_are_explained(tmp_path):
    with Lab(tmp_path, watching={"pods_warning": 0.3}) as lab:
        lab.cluster.start_delay = 1e9
        lab.start()
        pod = lab.until(lambda: lab.store.select("", "pods", ""))[0]
        for name, reason, message in (
            ("e1", "FailedScheduling", "0/4 nodes are available: insufficient google.com/tpu"),
            ("e2", "FailedCreate", "follower pod node selector not set"),
        ):
            event = {"metadata": {"name": name}, "type": "Warning", "reason": reason, "message": message,
                     "involvedObject": {"kind": "Pod", "name": pod["metadata"]["name"]}}  # fmt: skip
            lab.store.create(("", "events", "default", name), event)
        lab.until(
            lambda: said(
                lab, "2 of 2 pods are waiting\n.*FailedScheduling: 0/4 nodes are available"
            )
        )
        assert not said(lab, "follower pod")
        lab.kill.set()


def test_a_deleted_jobset_is_confirmed_twice_and_submitted_again(tmp_path):
    with Lab(tmp_path, flags=["--steps=60", "--pause=0.02"]) as lab:
        controller = lab.start()
        lab.until(lambda: lab.steps())
        jobset = lab.cluster.jobset()
        lab.store.mark_deleted(
            ("jobset.x-k8s.io", "jobsets", "default", jobset["metadata"]["name"]),
            None,
            "Foreground",
        )
        assert controller.finish().outputs["state"] == chain(60)
        assert lab.cluster.jobset()["metadata"]["uid"] != jobset["metadata"]["uid"]
        assert said(lab, "deleted, not by this controller")


def test_one_wrong_404_is_not_a_deletion(tmp_path):
    with Lab(tmp_path, gate=True) as lab:
        controller = lab.start()
        lab.running()
        for _ in range(3):
            fault = lab.api.fail(404, "get", "jobsets")
            lab.until(lambda fault=fault: fault.times == 0)
            time.sleep(0.05)
        lab.open_gate()
        controller.finish()
        assert len(lab.api.seen("create", "jobsets")) == 1


def test_pods_without_a_jobset_are_waited_for(tmp_path):
    """Deleted so that its pods stayed: a second JobSet would be a second trainer."""
    with Lab(tmp_path, flags=["--steps=100", "--pause=0.02"]) as lab:
        controller = lab.start()
        pods = lab.running()
        with lab.cluster.guard:
            key = (
                "jobset.x-k8s.io",
                "jobsets",
                "default",
                lab.cluster.jobset()["metadata"]["name"],
            )
            lab.store.remove(key)
        lab.until(lambda: said(lab, "its pods are there; waiting"))

        def ended():
            lab.cluster._observe(
                [p for p in pods if lab.store.find(("", "pods", "default", p["metadata"]["name"]))]
            )
            return not controller.is_alive()

        lab.until(ended)
        assert controller.finish().outputs["state"] == chain(100)
        assert len(lab.leaders()) == 1 and len(lab.api.seen("create", "jobsets")) == 1


def test_deletion_after_the_result_is_success(tmp_path):
    with Lab(tmp_path) as lab:
        lab.launcher().submit()
        lab.until(
            lambda: (
                (lab.cluster.jobset() or {}).get("status", {}).get("terminalState") == "Completed"
            )
        )
        lab.store.remove(
            ("jobset.x-k8s.io", "jobsets", "default", lab.cluster.jobset()["metadata"]["name"])
        )
        assert lab.start().finish().outputs["state"] == chain(20)
        assert len(lab.leaders()) == 1


def test_a_jobset_of_that_name_with_another_uid_is_not_ours(tmp_path):
    with Lab(tmp_path, flags=["--steps=200", "--pause=0.02"]) as lab:
        controller = lab.start()
        lab.running()
        key = ("jobset.x-k8s.io", "jobsets", "default", lab.cluster.jobset()["metadata"]["name"])
        with lab.cluster.guard, lab.store.changed:
            body = lab.store.get(key)
            lab.store.remove(key)
            lab.store.create(
                key, {"metadata": {"name": key[3]}, "spec": body["spec"] | {"suspend": True}}
            )
        with pytest.raises(JobFailed, match="replaced by another one"):
            controller.finish()
        assert not lab.api.seen("delete")


def test_one_that_was_replaced_while_the_api_said_404_is_not_ours(tmp_path):
    with Lab(tmp_path, gate=True) as lab:
        controller = lab.start()
        lab.running()
        lab.api.fail(404, "get", "jobsets", times=2)
        key = ("jobset.x-k8s.io", "jobsets", "default", lab.cluster.jobset()["metadata"]["name"])
        with lab.cluster.guard, lab.store.changed:
            body = lab.store.get(key)
            lab.store.remove(key)
            lab.store.create(
                key, {"metadata": {"name": key[3]}, "spec": body["spec"] | {"suspend": True}}
            )
        with pytest.raises(JobFailed, match="replaced by another one"):
            controller.finish()
        assert not lab.api.seen("delete")


def test_a_name_that_somebody_else_has_is_refused(tmp_path):
    with Lab(tmp_path) as lab:
        name = names.jobset_name(lab.root, "stage1_train")
        spec = {"replicatedJobs": [], "suspend": True}
        lab.store.create(
            ("jobset.x-k8s.io", "jobsets", "default", name),
            {"metadata": {"name": name}, "spec": spec},
        )
        with pytest.raises(Exception, match=r"is not of this run"):
            lab.start().finish()


def test_a_cluster_without_jobset_or_kueue_is_said_so(tmp_path):
    with Lab(tmp_path) as lab:
        lab.api.fail(404, "create", "jobsets")
        with pytest.raises(UserError, match=r"no JobSet v1alpha2, or no namespace default"):
            lab.start().finish()
    with Lab(tmp_path) as lab:
        lab.api.fail(404, "list", "workloads", times=10)
        with pytest.raises(UserError, match=r"no Kueue v1beta2 .0\.17 or newer."):
            lab.start().finish()
