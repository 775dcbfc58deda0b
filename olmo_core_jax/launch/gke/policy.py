"""What the state of a JobSet and its Workload means, and what to do about it: one table, no requests.

| seen                                         | action                                                              |
|----------------------------------------------|---------------------------------------------------------------------|
| finished, and the stage's result is there    | DONE                                                                |
| Completed without a result                   | RESUBMIT (counted: pods that stop early exit 0 by mistake)           |
| Failed by the failure policy                 | STOP: a documented final exit code; no retry can help                |
| Failed otherwise (restarts used up)          | RESUBMIT if the checkpoint moved since the submission, else STOP     |
| suspended, in the queue                      | WAIT, for ever unless queue_timeout says otherwise; not a retry      |
| suspended, can never be admitted             | WAIT with a warning, STOP after inadmissible_grace                   |
| suspended, preempted or otherwise evicted    | WAIT: Kueue resumes it in its old place                              |
| Workload deactivated                         | STOP, or REACTIVATE where the profile asks for that                  |
| running, some slices not ready for long      | EXPLAIN: the pods' events say why                                    |
| running                                      | WAIT                                                                |

Conditions stay in lists with status False after they are over, so type and status are read together. `active` and
`ready` counts say nothing about failure: they are 0 between restarts and in the queue. Facts follow the controllers of
JobSet 0.10 and Kueue 0.17.
"""

import enum
from dataclasses import dataclass, field
from typing import Any

from olmo_core_jax.launch.gke import names
from olmo_core_jax.launch.gke.profile import Watching

Object = dict[str, Any]

HOPELESS = ("ExceedsMaxQuota", "NoMatchingFlavor", "Misconfigured", "Inadmissible")
RESUBMISSIONS = 3
"""Submissions in a row that may end early without moving the checkpoint."""


class Action(enum.Enum):
    WAIT = "wait"
    DONE = "done"
    RESUBMIT = "resubmit"
    STOP = "stop"
    REACTIVATE = "reactivate"
    EXPLAIN = "explain"


@dataclass(frozen=True)
class Seen:
    """One look: the JobSet, its Workload, the newest checkpoint's step, and whether the stage's result is there."""

    jobset: Object
    workload: Object | None = None
    finished: bool = False
    step: int | None = None
    pods: list[Object] = field(default_factory=list)


@dataclass(frozen=True)
class Decision:
    """reason: one word for tests and logs; text: for people. submission: number of the next one, on RESUBMIT."""

    action: Action
    reason: str
    text: str
    submission: int = 0


@dataclass
class Memory:
    """Since when (seconds of any clock) a state has lasted. Kept by the watcher between two looks."""

    since: dict[str, float] = field(default_factory=dict)

    def lasted(self, state: str, now: float, holds: bool) -> float:
        """Seconds that `state` has held without a break; 0 where it does not hold."""
        if not holds:
            self.since.pop(state, None)
            return 0.0
        return now - self.since.setdefault(state, now)


def decide(seen: Seen, watching: Watching, memory: Memory, now: float) -> Decision:
    """The table above. now: seconds of a monotonic clock; memory is brought up to date."""
    if seen.jobset.get("status", {}).get("terminalState"):
        return _ended(seen)
    if seen.jobset["spec"].get("suspend"):
        return _suspended(seen, watching, memory, now)
    for state in ("queued", "hopeless"):
        memory.lasted(state, now, False)
    return _running(seen, watching, memory, now)


def condition(thing: Object | None, kind: str, status: str = "True") -> Object | None:
    """The condition of this type that holds (or, with status "False", expressly does not)."""
    found = ((thing or {}).get("status") or {}).get("conditions") or []
    return next((c for c in found if c.get("type") == kind and c.get("status") == status), None)


def annotation(jobset: Object, name: str) -> str | None:
    return (jobset["metadata"].get("annotations") or {}).get(name)


def _ended(seen: Seen) -> Decision:
    state = seen.jobset["status"]["terminalState"]
    if seen.finished:
        return Decision(Action.DONE, "finished", f"{state}; the stage's result is there")
    if state == "Completed":
        return _again(seen, "stopped-early", "every pod exited with 0, but the stage has no result")
    failed = condition(seen.jobset, "Failed") or {}
    why = f"{failed.get('reason', 'unknown reason')}: {failed.get('message', '')}"
    if failed.get("reason") == "FailJobSetFailurePolicyAction":
        return Decision(Action.STOP, "final-exit", why)
    return _again(seen, "restarts-used-up", why, only_with_progress=True)


def _again(seen: Seen, reason: str, why: str, only_with_progress: bool = False) -> Decision:
    start = annotation(seen.jobset, names.START_STEP)
    moved = seen.step is not None and (start in (None, "none") or seen.step > int(start))
    before = int(annotation(seen.jobset, names.SUBMISSION) or 1)
    if moved:
        return Decision(
            Action.RESUBMIT,
            reason,
            f"{why}; it reached step {seen.step}, so it is submitted again",
            1,
        )
    if only_with_progress:
        return Decision(
            Action.STOP,
            reason,
            f"{why}; no checkpoint since it was submitted, so it is not submitted again",
        )
    if before >= RESUBMISSIONS:
        return Decision(
            Action.STOP, reason, f"{why}; this happened {before} times without a new checkpoint"
        )
    return Decision(
        Action.RESUBMIT, reason, f"{why}; submitted again ({before} of {RESUBMISSIONS})", before + 1
    )


def _suspended(seen: Seen, watching: Watching, memory: Memory, now: float) -> Decision:
    memory.lasted("unready", now, False)
    queued = memory.lasted("queued", now, True)
    reserved = condition(seen.workload, "QuotaReserved", "False") or {}
    evicted = condition(seen.workload, "Evicted")
    hopeless = reserved.get("reason") in HOPELESS
    unlikely = memory.lasted("hopeless", now, hopeless)
    if seen.workload is None:
        decision = Decision(Action.WAIT, "unseen", "suspended; Kueue has made no Workload yet")
    elif seen.workload["spec"].get("active") is False:
        return _deactivated(evicted, watching)
    elif hopeless:
        text = f"cannot be admitted as it is ({reserved['reason']}): {reserved.get('message', '')}"
        if unlikely > watching.inadmissible_grace:
            return Decision(
                Action.STOP,
                "inadmissible",
                f"{text}. Change the queue or the shape and start again",
            )
        decision = Decision(Action.WAIT, "inadmissible", text)
    elif evicted:
        decision = _evicted(seen, evicted)
    else:
        decision = Decision(
            Action.WAIT, "queued", f"in the queue: {reserved.get('message', 'waiting for quota')}"
        )
    if watching.queue_timeout is not None and queued > watching.queue_timeout:
        return Decision(
            Action.STOP,
            "queue-timeout",
            f"not started within {watching.queue_timeout:.0f} s: {decision.text}",
        )
    return decision


def _deactivated(evicted: Object | None, watching: Watching) -> Decision:
    text = f"Kueue has deactivated the Workload: {(evicted or {}).get('message', 'spec.active is false')}"
    if watching.reactivate:
        return Decision(
            Action.REACTIVATE, "deactivated", f"{text}; it is activated again, as the profile asks"
        )
    return Decision(
        Action.STOP,
        "deactivated",
        f"{text}. It will not run again by itself; `olmo-jax cancel` and start again",
    )


def _evicted(seen: Seen, evicted: Object) -> Decision:
    why = evicted.get("message", "")
    if evicted.get("reason") == "Preempted":
        return Decision(Action.WAIT, "preempted", f"preempted, keeps its place in the queue: {why}")
    if evicted.get("reason") == "PodsReadyTimeout":
        at = (((seen.workload or {}).get("status") or {}).get("requeueState") or {}).get(
            "requeueAt", "soon"
        )
        return Decision(
            Action.WAIT,
            "pods-ready-timeout",
            f"its nodes did not come in time; queued again at {at}: {why}",
        )
    return Decision(
        Action.WAIT, "evicted", f"evicted ({evicted.get('reason')}), back in the queue: {why}"
    )


def _running(seen: Seen, watching: Watching, memory: Memory, now: float) -> Decision:
    status = seen.jobset.get("status") or {}
    wanted = sum(r.get("replicas", 1) for r in seen.jobset["spec"]["replicatedJobs"])
    ready = sum(
        r.get("ready", 0) + r.get("succeeded", 0) for r in status.get("replicatedJobsStatus") or []
    )
    unready = memory.lasted("unready", now, ready < wanted)
    restarts, counted = status.get("restarts", 0), status.get("restartsCountTowardsMax", 0)
    if restarts:
        text = f"started, {ready} of {wanted} slices ready, restarted {restarts} times ({counted} of them counted)"
    else:
        text = f"started, {ready} of {wanted} slices ready"
    if unready > watching.pods_warning:
        memory.lasted("unready", now, False)
        return Decision(Action.EXPLAIN, "not-ready", f"{text}; not ready for {unready:.0f} s")
    return Decision(Action.WAIT, "running" if ready >= wanted else "starting", text)
