"""JobSet, Job and Kueue as far as a launcher can see them, played from their controllers' rules.

A thread reconciles every few milliseconds; tests cause events by its methods. Facts: JobSet 0.10 (failure policy,
restarts, terminalState, Foreground deletion, suspension), batch/v1 Job (podFailurePolicy, backoffLimit 0), Kueue 0.17
(Workload, eviction by suspending, requeue, deactivation).
"""

import random
import socket
import string
import threading
import time

from .kubelet import Kubelet
from .pods import born_as, generation, new_pod
from .policy import job_failure, jobset_action
from .store import Key, Store, set_condition

JOBSET_GROUP, KUEUE_GROUP = "jobset.x-k8s.io", "kueue.x-k8s.io"
L = "jobset.sigs.k8s.io/"


class Cluster(threading.Thread):
    """quota: pods that Kueue admits at once in all (None: any number)."""

    def __init__(
        self,
        store: Store,
        kubelet: Kubelet,
        quota: int | None = None,
        seed: int = 0,
        period: float = 0.005,
    ):
        super().__init__(daemon=True)
        self.store, self.kubelet, self.quota = store, kubelet, quota
        self.held = False  # Kueue admits nothing
        self.start_delay = 0.0
        self.period = period
        self.random = random.Random(seed)
        self.guard = threading.RLock()
        self.closing = threading.Event()
        self.errors: list[BaseException] = []
        self.counted: list[str] = []  # messages of failures that counted towards maxRestarts
        self._born: dict[str, float] = {}

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.closing.set()
        self.join(5)
        for process in list(self.kubelet.processes.values()):
            process.kill()
            process.poll()
        if self.errors:
            raise self.errors[0]

    def run(self):
        while not self.closing.wait(self.period):
            try:
                with self.guard:
                    for jobset in self.store.select(JOBSET_GROUP, "jobsets", ""):
                        self._reconcile(jobset)
            except BaseException as e:
                self.errors.append(e)
                return

    # what tests do

    def jobset(self) -> dict | None:
        found = self.store.select(JOBSET_GROUP, "jobsets", "")
        return found[0] if found else None

    def workload(self) -> dict | None:
        found = self.store.select(KUEUE_GROUP, "workloads", "")
        return found[0] if found else None

    def running_pods(self) -> list[dict]:
        pods = [
            p for p in self.store.select("", "pods", "") if p["status"].get("phase") == "Running"
        ]
        return [p for p in pods if self.kubelet.processes[p["metadata"]["uid"]].poll() is None]

    def disrupt(self, pod: dict, grace: float = 5.0) -> None:
        """Drains the pod's node: DisruptionTarget, SIGTERM, SIGKILL after the grace."""
        with self.guard:
            self._mark_disrupted(pod)
            self.kubelet.processes[pod["metadata"]["uid"]].terminate(grace)

    def lose_node(self, pod: dict) -> None:
        """The host dies: no SIGTERM; the taint manager marks the pod."""
        with self.guard:
            self._mark_disrupted(pod)
            self.kubelet.processes[pod["metadata"]["uid"]].kill()

    def crash(self, pod: dict) -> None:
        """The container is killed by its own kernel (out of memory): nothing marks the pod."""
        self.kubelet.processes[pod["metadata"]["uid"]].kill()

    def evict(
        self,
        reason: str = "Preempted",
        message: str = "Preempted to accommodate a higher-priority Workload",
    ) -> None:
        """Kueue takes the quota back: conditions, then spec.suspend."""
        with self.guard:
            jobset, workload = self.jobset(), self.workload()
            if (
                jobset is None
                or workload is None
                or jobset["status"].get("terminalState")
                or jobset["spec"].get("suspend")
            ):
                return

            def change(body):
                set_condition(body, "Evicted", "True", reason, message)
                if reason == "Preempted":
                    set_condition(body, "Preempted", "True", "InClusterQueue", message)
                set_condition(body, "QuotaReserved", "False", "Pending", message)
                set_condition(body, "Admitted", "False", "NoReservation", message)

            self.store.update(self._key(workload, KUEUE_GROUP, "workloads"), change)
            self._suspend(jobset, True)

    def deactivate(
        self, message: str = "exceeded the maximum number of re-queuing retries"
    ) -> None:
        with self.guard:
            self.evict("DeactivatedDueToRequeuingLimitExceeded", message)
            key = self._key(self.workload(), KUEUE_GROUP, "workloads")
            self.store.update(key, lambda o: o["spec"].update(active=False))

    def pending(self, reason: str, message: str) -> None:
        """Kueue says why a queued Workload is not admitted."""
        workload = self.workload()
        self.store.update(
            self._key(workload, KUEUE_GROUP, "workloads"),
            lambda o: set_condition(o, "QuotaReserved", "False", reason, message),
        )

    # reconciliation

    def _reconcile(self, jobset: dict) -> None:
        key = self._key(jobset, JOBSET_GROUP, "jobsets")
        pods = self._pods(jobset)
        self._observe(pods)
        pods = self._pods(jobset)
        if jobset["metadata"].get("deletionTimestamp"):
            if self._gone(pods):
                self.store.remove(key)
                if workload := self._workload_of(jobset):
                    self.store.remove(self._key(workload, KUEUE_GROUP, "workloads"))
            return
        if jobset["status"].get("terminalState"):
            return
        if "kueue.x-k8s.io/queue-name" in (jobset["metadata"].get("labels") or {}):
            self._kueue(jobset)
            jobset = self.store.find(key) or jobset
        if jobset["spec"].get("suspend"):
            self._gone(pods)
            self._set_replicated(key, jobset, ready=0, suspended=1)
            return
        attempt = jobset["status"].get("restarts", 0)
        wanted = (str(attempt), generation(jobset))
        current = [p for p in pods if born_as(p) == wanted]
        if not self._gone([p for p in pods if p not in current]):
            return
        if not current:
            self._make_pods(jobset, attempt)
            return
        self._start(current)
        self._judge(key, jobset, current)

    def _judge(self, key: Key, jobset: dict, pods: list[dict]) -> None:
        """A failed pod fails its Job; the JobSet's policy says what follows."""
        failed = [p for p in pods if p["status"].get("phase") == "Failed"]
        if failed:
            reason, message = job_failure(jobset, failed)
            self._apply_policy(key, jobset, reason, message, failed[0])
        elif all(p["status"].get("phase") == "Succeeded" for p in pods):
            self._set_replicated(key, jobset, ready=0, succeeded=1)
            self._finish(
                key, "Completed", "Completed", "AllJobsCompleted", "jobset completed successfully"
            )
        else:
            running = all(p["status"].get("phase") in ("Running", "Succeeded") for p in pods)
            self._set_replicated(key, jobset, ready=1 if running else 0, active=1)

    def _apply_policy(self, key: Key, jobset: dict, reason: str, message: str, pod: dict) -> None:
        policy = jobset["spec"].get("failurePolicy") or {}
        action = jobset_action(policy, reason, message)
        counted = jobset["status"].get("restartsCountTowardsMax", 0)
        first = f"first failed job: {pod['metadata']['labels']['batch.kubernetes.io/job-name']}"
        if action == "FailJobSet":
            text = f"failed due to FailJobSet failure policy action ({first})"
            return self._finish(key, "Failed", "Failed", "FailJobSetFailurePolicyAction", text)
        if action == "RestartJobSet":
            self.counted.append(message)
            if counted >= policy.get("maxRestarts", 0):
                text = f"jobset failed due to reaching max number of restarts ({first})"
                return self._finish(key, "Failed", "Failed", "ReachedMaxRestarts", text)
            counted += 1

        def change(body):
            body["status"]["restarts"] = body["status"].get("restarts", 0) + 1
            body["status"]["restartsCountTowardsMax"] = counted

        self.store.update(key, change)

    def _finish(self, key: Key, state: str, condition: str, reason: str, message: str) -> None:
        def change(body):
            body["status"]["terminalState"] = state
            set_condition(body, condition, "True", reason, message)

        jobset = self.store.update(key, change)
        if jobset and (workload := self._workload_of(jobset)):
            end = "Succeeded" if state == "Completed" else "Failed"
            self.store.update(
                self._key(workload, KUEUE_GROUP, "workloads"),
                lambda o: set_condition(o, "Finished", "True", end, message),
            )
        for pod in self._pods(jobset) if jobset else []:
            if pod["status"].get("phase") not in ("Failed", "Succeeded"):
                self._gone([pod], wait=True)

    def _kueue(self, jobset: dict) -> None:
        workload = self._workload_of(jobset)
        if workload is None:
            workload = self._make_workload(jobset)
        suspended = jobset["spec"].get("suspend")
        if not suspended or workload["spec"].get("active") is False or self.held:
            return
        reserved = next(
            (c for c in workload["status"].get("conditions", []) if c["type"] == "QuotaReserved"),
            {},
        )
        if reserved.get("reason") in (
            "ExceedsMaxQuota",
            "NoMatchingFlavor",
            "Misconfigured",
            "Inadmissible",
        ):
            return
        if self.quota is not None and self._size(jobset) > self.quota:
            return self.pending(
                "WaitingForQuota",
                f"couldn't assign flavors: insufficient unused quota, {self.quota} left",
            )

        def change(body):
            set_condition(
                body,
                "QuotaReserved",
                "True",
                "QuotaReserved",
                "Quota reserved in ClusterQueue tpus",
            )
            set_condition(body, "Admitted", "True", "Admitted", "The workload is admitted")
            for kind in ("Evicted", "Preempted"):
                if any(c["type"] == kind for c in body["status"]["conditions"]):
                    set_condition(body, kind, "False", "QuotaReserved", "Previously: evicted")

        self.store.update(self._key(workload, KUEUE_GROUP, "workloads"), change)
        self._suspend(jobset, False)

    def _suspend(self, jobset: dict, value: bool) -> None:
        def change(body):
            body["spec"]["suspend"] = value
            set_condition(body, "Suspended", str(value), "SuspendedJobs" if value else "ResumeJobs")

        self.store.update(self._key(jobset, JOBSET_GROUP, "jobsets"), change, bump_generation=True)

    # pods

    def _observe(self, pods: list[dict]) -> None:
        for pod in pods:
            process = self.kubelet.processes.get(pod["metadata"]["uid"])
            if (
                process
                and pod["status"].get("phase") == "Running"
                and (code := process.poll()) is not None
            ):
                self.kubelet.report(pod, code)

    def _gone(self, pods: list[dict], wait: bool = False) -> bool:
        """Ends pods as their deletion would. True once none is left."""
        for pod in pods:
            process = self.kubelet.processes.get(pod["metadata"]["uid"])
            if process and process.poll() is None:
                process.terminate(
                    pod["spec"].get("terminationGracePeriodSeconds", 30) * self.kubelet.grace_scale
                )
                while wait and process.poll() is None:
                    time.sleep(0.005)
            if process is None or process.poll() is not None:
                self.store.remove(
                    ("", "pods", pod["metadata"]["namespace"], pod["metadata"]["name"])
                )
        return not [
            p
            for p in pods
            if self.store.find(("", "pods", p["metadata"]["namespace"], p["metadata"]["name"]))
        ]

    def _make_pods(self, jobset: dict, attempt: int) -> None:
        name, namespace = jobset["metadata"]["name"], jobset["metadata"]["namespace"]
        for replicated in jobset["spec"]["replicatedJobs"]:
            for slice_ in range(replicated["replicas"]):
                job = f"{name}-{replicated['name']}-{slice_}"
                self.kubelet.addresses[f"{job}-0.{name}"] = f"127.0.0.1:{free_port()}"
                for host in range(replicated["template"]["spec"]["parallelism"]):
                    suffix = "".join(
                        self.random.choices(string.ascii_lowercase + string.digits, k=5)
                    )
                    pod = new_pod(jobset, replicated, slice_, host, attempt)
                    made = self.store.create(("", "pods", namespace, f"{job}-{host}-{suffix}"), pod)
                    self._born[made["metadata"]["uid"]] = time.monotonic()

    def _start(self, pods: list[dict]) -> None:
        for pod in pods:
            born = self._born[pod["metadata"]["uid"]]
            if (
                pod["status"].get("phase") == "Pending"
                and time.monotonic() - born >= self.start_delay
            ):
                self.kubelet.start(pod)

                def change(body):
                    body["status"]["phase"] = "Running"
                    set_condition(body, "Ready", "True", "Ready")

                self.store.update(
                    ("", "pods", pod["metadata"]["namespace"], pod["metadata"]["name"]), change
                )

    def _mark_disrupted(self, pod: dict) -> None:
        key = ("", "pods", pod["metadata"]["namespace"], pod["metadata"]["name"])
        self.store.update(
            key, lambda o: set_condition(o, "DisruptionTarget", "True", "EvictionByEvictionAPI")
        )

    # small things

    def _pods(self, jobset: dict) -> list[dict]:
        return self.store.select(
            "", "pods", "", labels=f"{L}jobset-uid={jobset['metadata']['uid']}"
        )

    def _workload_of(self, jobset: dict) -> dict | None:
        label = f"kueue.x-k8s.io/job-uid={jobset['metadata']['uid']}"
        found = self.store.select(KUEUE_GROUP, "workloads", "", labels=label)
        return found[0] if found else None

    def _make_workload(self, jobset: dict) -> dict:
        meta = jobset["metadata"]
        body = {
            "apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "Workload",
            "metadata": {"labels": {"kueue.x-k8s.io/job-uid": meta["uid"]}},
            "spec": {"active": True, "queueName": meta["labels"]["kueue.x-k8s.io/queue-name"]},
        }  # fmt: skip
        return self.store.create(
            (
                KUEUE_GROUP,
                "workloads",
                meta["namespace"],
                f"jobset-{meta['name']}-{meta['uid'][:5]}",
            ),
            body,
        )

    def _set_replicated(self, key: Key, jobset: dict, **each: int) -> None:
        """Counts of child Jobs, the same for every slice."""

        def change(body):
            zero = dict.fromkeys(("ready", "succeeded", "failed", "active", "suspended"), 0)
            body["status"]["replicatedJobsStatus"] = [
                {"name": r["name"], **zero, **{k: v * r["replicas"] for k, v in each.items()}}
                for r in body["spec"]["replicatedJobs"]
            ]

        self.store.update(key, change)

    @staticmethod
    def _size(jobset: dict) -> int:
        return sum(
            r["replicas"] * r["template"]["spec"]["parallelism"]
            for r in jobset["spec"]["replicatedJobs"]
        )

    @staticmethod
    def _key(body: dict, group: str, plural: str) -> Key:
        return (group, plural, body["metadata"]["namespace"], body["metadata"]["name"])


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
