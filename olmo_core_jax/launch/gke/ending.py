"""How a failed stage is told: the cluster's reason, the exit code in words, and the last lines of the log behind it."""

from typing import Any

from olmo_core_jax import storage
from olmo_core_jax.errors import CRASH, FINAL
from olmo_core_jax.launch.gke.logs import saved_logs
from olmo_core_jax.launch.job import Job, JobFailed
from olmo_core_jax.launch.local import describe

Object = dict[str, Any]

TAIL_LINES = 12


def failure(job: Job, pods: list[Object], reason: str, text: str) -> JobFailed:
    """The error that ends the watch; its exit code is the job's own where that is a final one."""
    lines = [f"{job.folder}: {text}"]
    ended = sorted(ends(pods), key=lambda end: end[2] not in FINAL)
    code = CRASH
    if ended:
        pod, container, found = ended[0]
        code = found if reason == "final-exit" and found in FINAL else CRASH
        lines.append(f"{pod} ended with {describe(found)}")
        lines += _tail(job, pod, container)
    lines.append(f"logs of every attempt: {storage.join(job.run_root, job.folder, 'pod_logs')}")
    return JobFailed("\n".join(lines), code)


def ends(pods: list[Object]) -> list[tuple[str, str, int]]:
    """(pod, container, exit code) of every container that ended with a code other than 0."""
    found = []
    for pod in pods:
        for status in (pod.get("status") or {}).get("containerStatuses") or []:
            code = ((status.get("state") or {}).get("terminated") or {}).get("exitCode")
            if code:
                found.append((pod["metadata"]["name"], status["name"], code))
    return found


def _tail(job: Job, pod: str, container: str) -> list[str]:
    for name, text in saved_logs(job.run_root, job.folder, all_hosts=True):
        if name.endswith(f".{pod}.{container}"):
            return ["    " + line.partition(" ")[2] for line in text.splitlines()[-TAIL_LINES:]]
    return []
