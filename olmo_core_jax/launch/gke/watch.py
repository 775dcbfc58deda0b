"""A stage as a JobSet: submitted or found again, watched, submitted again where that helps, believed with a result.

The loop looks, decides (decide.py), acts, and waits for the next change. A look is a handful of GETs, so nothing hangs
on a watch being complete: a watch only says when to look again. The controller keeps no state that matters: killed, it
leaves the job running, and started again it finds it by its name and goes on.
"""

import contextlib
import random
import time
from collections.abc import Callable
from typing import Any

from olmo_core_jax import storage
from olmo_core_jax.errors import CRASH, JobError, UserError
from olmo_core_jax.launch import progress
from olmo_core_jax.launch.gke import api as k8s
from olmo_core_jax.launch.gke import names
from olmo_core_jax.launch.gke.check import check
from olmo_core_jax.launch.gke.ending import failure
from olmo_core_jax.launch.gke.explain import explain
from olmo_core_jax.launch.gke.logs import PodLogs
from olmo_core_jax.launch.gke.manifest import launch_digest, render
from olmo_core_jax.launch.gke.policy import Action, Memory, Seen, annotation, decide
from olmo_core_jax.launch.gke.profile import GKE
from olmo_core_jax.launch.gke.visible import for_pods
from olmo_core_jax.launch.job import Job, JobFailed, Tick
from olmo_core_jax.launch.profile import Profile
from olmo_core_jax.results import StageResult, require_result

Object = dict[str, Any]

CONFIRM_SECONDS = 2.0
"""Between the two looks that have to agree before an object counts as deleted."""

RESUBMIT_SECONDS = (10.0, 60.0)
"""Before a resubmission, so that a broken cluster is not hammered; a random time between the two."""


def run(job: Job, profile: Profile, tick: Tick = lambda: None) -> StageResult:
    """Runs a stage to its result, through whatever the cluster does to it. Raises JobError for every other ending."""
    return Launcher(job, profile).run(tick)


class Launcher:
    """One stage on one cluster."""

    def __init__(
        self,
        job: Job,
        profile: Profile,
        connect: Callable[[str | None], Any] = k8s.connect,
        say: Callable[[str], None] = print,
        sleep: Callable[[float], None] = time.sleep,
        patience: float | None = None,
    ):
        """patience: seconds for which an API or a bucket that does not answer is asked again; default: the profile's."""
        self.gke: GKE = profile.gke_of(job.folder)
        self.job, self.profile = for_pods(job, self.gke), profile
        self.name = names.jobset_name(job.run_root, job.folder)
        self.say = lambda text: say(f"{job.folder}: {text}")
        self.sleep = sleep
        self.patience = patience or self.gke.watching.api_patience
        context = self.gke.context
        self.kube = k8s.Kube(
            lambda: connect(context),
            self.gke.namespace,
            self.patience,
            self.say,
            sleep,
        )
        self._told = ""

    # what a person or the flow asks for

    def run(self, tick: Tick = lambda: None) -> StageResult:
        """Submits or attaches, then watches to the end."""
        jobset = self.submit()
        logs = PodLogs(self.kube, storage.join(self.job.run_root, self.job.folder))
        memory = Memory()
        try:
            while jobset is not None:
                jobset = self._turn(jobset, memory, logs, tick)
        except BaseException as e:
            if isinstance(e, KeyboardInterrupt):
                again = "The same command attaches again"
                self.say(f"detached; JobSet {self.name} goes on by itself. {again}")
            logs.close(patience=0.0)
            raise
        logs.close()
        return require_result(self.job.run_root, self.job.folder)

    def submit(self) -> Object | None:
        """Creates the JobSet, or finds the one that is there. None: a launch of ours had already finished the stage."""
        jobset = self._find() or self._await_orphans()
        if jobset is None:
            if self._finished() and progress.launches(self.job.run_root, self.job.folder):
                self.say("finished before; its result is there")
                return None
            return self._create(1)
        if annotation(jobset, names.RUN_ROOT) != names.canonical(self.job.run_root):
            raise UserError(
                f"JobSet {self.name} in namespace {self.gke.namespace} is not of this run: choose another namespace"
            )
        if jobset["metadata"].get("deletionTimestamp"):
            self.say("an earlier JobSet is being deleted; waiting for its end")
            self._wait_until_gone(jobset)
            return self._create(1)
        ended = (jobset.get("status") or {}).get("terminalState")
        if ended and self._finished():
            self.say(f"finished before, by JobSet {self.name}; its result is there")
            return jobset
        if ended and annotation(jobset, names.REPORTED):
            return self._replace(jobset, 1)
        if annotation(jobset, names.DIGEST) != launch_digest(self.job, self.profile):
            self.say(
                f"the launch profile has changed: going on from the last checkpoint on {self._shape()}"
            )
            return self._replace(jobset, 1)
        self.say(f"attached to JobSet {self.name}")
        self._record(jobset)
        return jobset

    def status(self) -> str:
        """One look, in words."""
        jobset = self._find()
        if jobset is None:
            done = progress.is_finished(self.job)
            return (
                "no JobSet; the stage's result is there" if done else "no JobSet, and no result yet"
            )
        seen = self._look(jobset)
        decision = decide(seen, self.gke.watching, Memory(), 0.0)
        at = "no checkpoint yet" if seen.step is None else f"newest checkpoint {seen.step}"
        return f"{decision.reason}: {decision.text}; {at}"

    def cancel(self) -> bool:
        """Deletes the JobSet and waits until it and its pods are gone. False: there was none."""
        jobset = self._find()
        if jobset is None:
            return False
        progress.note_cancelled(self.job, jobset["metadata"]["uid"])
        self._delete(jobset)
        self._wait_until_gone(jobset)
        return True

    # one turn of the loop

    def _turn(self, jobset: Object, memory: Memory, logs: PodLogs, tick: Tick) -> Object | None:
        """Looks, decides, acts, waits. The JobSet to go on with; None once the stage is done."""
        fresh = self._find()
        if fresh is None:
            return self._deleted(jobset)
        self._must_be(jobset, fresh)
        seen = self._look(fresh)
        logs.follow(seen.pods, self.gke.watching.log_pods == "leader")
        decision = decide(seen, self.gke.watching, memory, time.monotonic())
        self._tell(decision.text)
        tick()
        if decision.action is Action.DONE:
            return None
        if decision.action is Action.STOP:
            logs.close()
            raise self._failure(seen, decision.reason, decision.text)
        if decision.action is Action.RESUBMIT:
            logs.close()
            return self._replace(fresh, decision.submission, random.uniform(*RESUBMIT_SECONDS))
        if decision.action is Action.REACTIVATE and seen.workload:
            with contextlib.suppress(k8s.NotFound, k8s.Conflict):  # the next look decides anew
                self.kube.patch(
                    k8s.WORKLOADS, seen.workload["metadata"]["name"], {"spec": {"active": True}}
                )
        if decision.action is Action.EXPLAIN:
            self.say(explain(self.kube, seen.pods))
        self._wait(fresh)
        return fresh

    def _look(self, jobset: Object) -> Seen:
        uid = jobset["metadata"]["uid"]
        workload = None
        if self.gke.queue:
            workload = self._workload(uid)
        return Seen(
            jobset=jobset,
            workload=workload,
            finished=self._finished(),
            step=self._patiently(lambda: progress.newest_step(self.job)),
            pods=self.kube.select(k8s.PODS, labels=f"jobset.sigs.k8s.io/jobset-name={self.name}"),
        )

    def _workload(self, uid: str) -> Object | None:
        try:
            found = self.kube.select(k8s.WORKLOADS, labels=f"kueue.x-k8s.io/job-uid={uid}")
        except k8s.NotFound:
            raise UserError(
                f"the cluster has no Kueue {k8s.WORKLOADS.version} (0.17 or newer), but the profile names "
                f"queue {self.gke.queue}: see infra/README.md. JobSet {self.name} was left as it is"
            ) from None
        return found[0] if found else None

    def _finished(self) -> bool:
        return self._patiently(lambda: progress.is_finished(self.job))

    def _patiently(self, read: Callable[[], Any]) -> Any:
        """A read of the run root; storage that fails is asked again and never taken for an empty one."""
        began = time.monotonic()
        while True:
            try:
                return read()
            except UserError:
                raise
            except Exception as e:
                if time.monotonic() - began > self.patience:
                    raise
                self._tell(
                    f"{self.job.run_root} cannot be read ({type(e).__name__}: {e}); trying again"
                )
                self.sleep(random.uniform(5.0, 10.0))

    def _wait(self, jobset: Object) -> None:
        """Returns at the next change of the JobSet, or after `refresh` seconds."""
        began = time.monotonic()
        try:
            version = jobset["metadata"]["resourceVersion"]
            for _ in self.kube.watch(k8s.JOBSETS, self.name, version, self.gke.watching.refresh):
                return
        except k8s.Expired:
            pass
        if time.monotonic() - began < 0.5:  # a watch that ends at once must not become a busy loop
            self.sleep(min(1.0, self.gke.watching.refresh))

    # changes

    def _create(self, submission: int) -> Object:
        step = self._patiently(lambda: progress.newest_step(self.job))
        manifest = render(self.job, self.profile, submission=submission, start_step=step)
        check(manifest, self._crd())
        try:
            jobset = self.kube.create(k8s.JOBSETS, manifest)
        except k8s.NotFound:
            raise UserError(
                f"the cluster has no JobSet {k8s.JOBSETS.version}, or no namespace {self.gke.namespace}: see infra/README.md"
            ) from None
        except k8s.Conflict:
            # A request that seemed to fail had arrived, or another controller was faster.
            found = self._find()
            if found is None or annotation(found, names.DIGEST) != annotation(
                manifest, names.DIGEST
            ):
                raise JobFailed(
                    f"JobSet {self.name} was created by somebody else at the same moment", CRASH
                ) from None
            jobset = found
        at = "from the beginning" if step is None else f"from step {step}"
        self.say(f"submitted JobSet {self.name} on {self._shape()}, {at}")
        self._record(jobset)
        return jobset

    def _crd(self) -> Object | None:
        """The cluster's own JobSet definition; None where it may not be read."""
        try:
            return self.kube.get(k8s.CRDS, "jobsets.jobset.x-k8s.io")
        except (k8s.NotFound, k8s.Denied):
            return None

    def _replace(self, jobset: Object, submission: int, pause: float = 0.0) -> Object:
        """Never two at a time: the old one and its pods are gone before the new one is made."""
        self._delete(jobset)
        self._wait_until_gone(jobset)
        if pause:
            self.sleep(pause)
        return self._create(submission)

    def _delete(self, jobset: Object) -> None:
        try:
            self.kube.delete(k8s.JOBSETS, self.name, jobset["metadata"]["uid"])
        except k8s.NotFound:
            pass
        except k8s.Conflict:
            raise JobFailed(
                f"JobSet {self.name} was replaced by another one: nothing was deleted", CRASH
            ) from None

    def _wait_until_gone(self, jobset: Object) -> None:
        began = time.monotonic()
        while True:
            there = self._find()
            if there is not None and there["metadata"]["uid"] != jobset["metadata"]["uid"]:
                raise JobFailed(f"JobSet {self.name} was created anew by somebody else", CRASH)
            if there is None and not self._pods_alive():
                return
            if time.monotonic() - began > self.gke.grace_seconds + self.gke.watching.pods_warning:
                raise JobFailed(
                    f"JobSet {self.name} does not go away: look at its pods and finalizers", CRASH
                )
            self.sleep(CONFIRM_SECONDS)

    def _pods_alive(self) -> bool:
        pods = self.kube.select(k8s.PODS, labels=f"jobset.sigs.k8s.io/jobset-name={self.name}")
        return any(
            (p.get("status") or {}).get("phase") not in ("Succeeded", "Failed") for p in pods
        )

    def _deleted(self, jobset: Object) -> Object | None:
        """Somebody deleted it, or its time to live was over."""
        if (there := self._await_orphans() or self._find()) is not None:
            self._must_be(jobset, there)
            return there  # the API server was wrong
        if self._finished():
            self._tell("the JobSet is gone; the stage's result is there")
            return None
        if self._patiently(lambda: progress.was_cancelled(self.job, jobset["metadata"]["uid"])):
            raise JobFailed(
                f"{self.job.folder} was cancelled by hand; what it saved is kept", CRASH
            )
        self.say("the JobSet was deleted, not by this controller; submitting it again")
        return self._create(1)

    def _must_be(self, jobset: Object, there: Object) -> None:
        if there["metadata"]["uid"] != jobset["metadata"]["uid"]:
            raise JobFailed(
                f"JobSet {self.name} was replaced by another one that is not of this launch: nothing was done",
                CRASH,
            )

    def _await_orphans(self) -> Object | None:
        """Whatever the API says of the JobSet, pods that run are a job that runs. The JobSet, if it is there after all."""
        while not self._finished() and self._pods_alive():
            self._tell("the API shows no JobSet, but its pods are there; waiting")
            self.sleep(CONFIRM_SECONDS)
            if (there := self._find()) is not None:
                return there
        return None

    def _find(self) -> Object | None:
        """The JobSet; None only when the API server has said twice that there is none."""
        for attempt in (1, 2):
            try:
                return self.kube.get(k8s.JOBSETS, self.name)
            except k8s.NotFound:
                if attempt == 1:
                    self.sleep(CONFIRM_SECONDS)
        return None

    # words and records

    def _failure(self, seen: Seen, reason: str, text: str) -> JobFailed:
        if seen.jobset.get("status", {}).get("terminalState"):
            # Starting again after a repair submits anew, while a restarted controller reports the same.
            note = {"metadata": {"annotations": {names.REPORTED: reason}}}
            # A note that cannot be written must not hide why the stage failed.
            with contextlib.suppress(k8s.NotFound, k8s.Conflict, JobError):
                self.kube.patch(k8s.JOBSETS, self.name, note)
        return failure(self.job, seen.pods, reason, text)

    def _tell(self, text: str) -> None:
        if text != self._told:
            self.say(text)
            self._told = text

    def _shape(self) -> str:
        times = f"{self.gke.slices} x " if self.gke.slices > 1 else ""
        return f"{times}{self.gke.shape} ({self.gke.devices} devices)"

    def _record(self, jobset: Object) -> None:
        step = annotation(jobset, names.START_STEP)
        facts = {
            "shape": self.gke.shape,
            "slices": self.gke.slices,
            "hosts": self.gke.hardware.hosts * self.gke.slices,
            "devices": self.gke.devices,
            "image": self.gke.image,
            "start_step": None if step in (None, "none") else int(step),
        }
        self._patiently(lambda: progress.record_launch(self.job, jobset, facts))
