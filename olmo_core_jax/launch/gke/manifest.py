"""The manifest of a stage: one JobSet that restarts on disruption, counts crashes, and stops on a user's mistake.

Who decides what: a pod's end is classified by the Job's podFailurePolicy (exit codes of errors.py, the DisruptionTarget
condition); the Job then fails with reason PodFailurePolicy and a message, and the JobSet's failurePolicy reads that
message: disruption and preemption restart without being counted, documented final codes fail the JobSet, all else
restarts up to max_restarts times. Needs JobSet 0.10 (message patterns) and, where a queue is named, Kueue 0.17.
"""

import json
from typing import Any

import yaml

from olmo_core_jax.errors import FINAL, PREEMPTED, UserError
from olmo_core_jax.hardware.topology import Topology
from olmo_core_jax.hardware.tuning import default_topology
from olmo_core_jax.launch.gke import names
from olmo_core_jax.launch.gke.pod import pod_template
from olmo_core_jax.launch.gke.profile import GKE
from olmo_core_jax.launch.job import Job
from olmo_core_jax.launch.profile import Profile
from olmo_core_jax.results import digest_of

GROUP, VERSION = "jobset.x-k8s.io", "v1alpha2"
EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"

SIGTERM_EXIT = 143
"""A process that SIGTERM met before its handler stood: a preemption too."""

COORDINATOR_PORT = 8482
PATIENCE: dict[str, Any] = {"wait_seconds": 900, "heartbeat_seconds": 300}
"""Of processes for each other: images are pulled and nodes repaired at different speeds; a profile may say otherwise."""

PREEMPTED_CODES = (PREEMPTED, SIGTERM_EXIT)

Manifest = dict[str, Any]


def render(
    job: Job, profile: Profile, *, submission: int = 1, start_step: int | None = None
) -> Manifest:
    """The JobSet of a stage on a launch profile. Raises UserError where the two do not fit together.

    submission and start_step are recorded as annotations: how often in a row this stage was submitted without
    progress, and which checkpoint it starts from.
    """
    gke = profile.gke_of(job.folder)
    if gke.processes > 1 and not job.distributed:  # several would write over each other
        raise UserError(
            f"{job.folder} runs in one process, and {gke.shape} has {gke.processes}: "
            f"give it a shape of one host in the launch profile, under gke_stages.{job.folder.partition('/')[0]}"
        )
    name = names.jobset_name(job.run_root, job.folder)
    command = [gke.python, *job.arguments(pod_topology(profile.topology_of(job.folder), gke, name))]
    spec: Manifest = {
        "ttlSecondsAfterFinished": gke.ttl_seconds,
        "failurePolicy": _failure_policy(gke),
        "replicatedJobs": [
            {
                "name": names.JOB,
                "replicas": gke.slices,
                "template": {"spec": _job_spec(gke, command)},
            }
        ],
    }
    if gke.queue:
        spec["suspend"] = True
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "JobSet",
        "metadata": {
            "name": name,
            "namespace": gke.namespace,
            "labels": _labels(job, gke),
            "annotations": _annotations(job, profile, gke, submission, start_step),
        },
        "spec": spec,
    }


def to_yaml(manifest: Manifest) -> str:
    """YAML for `kubectl apply -f -`, without anchors."""

    class Plain(yaml.SafeDumper):
        def ignore_aliases(self, data):
            return True

    return yaml.dump(manifest, Dumper=Plain, sort_keys=False, width=120)


def launch_digest(job: Job, profile: Profile) -> str:
    """What a running JobSet is compared with: the job and every launch choice that its pods can feel."""
    gke = profile.gke_of(job.folder).model_dump(exclude={"watching", "context"})
    return digest_of(
        *job.arguments(profile.topology_of(job.folder)), json.dumps(gke, sort_keys=True)
    )[:16]


def pod_topology(topology: Topology, gke: GKE, name: str) -> Topology:
    """The topology as the pods get it: the shape's defaults under the profile's choices, the platform from the shape,
    more patience, and the coordinator's name where GKE does not inject it."""
    platform = gke.hardware.platform
    if topology.platform not in (None, "cpu", platform):
        raise UserError(
            f"topology.platform {topology.platform} does not fit shape {gke.shape}, which has {platform}"
        )
    on_cpu = topology.platform == "cpu"
    base = Topology() if on_cpu else default_topology(gke.shape)
    changes: dict[str, Any] = {k: getattr(topology, k) for k in topology.model_fields_set}
    changes["platform"] = "cpu" if on_cpu else platform
    if gke.processes > 1:
        start = {
            k: v for k, v in PATIENCE.items() if k not in topology.distributed.model_fields_set
        }
        if platform != "tpu" and topology.distributed.mode == "auto":
            start["mode"] = "explicit"
            start["coordinator"] = f"{name}-{names.JOB}-0-0.{name}:{COORDINATOR_PORT}"
            start["num_processes"] = gke.processes
        changes["distributed"] = topology.distributed.model_copy(update=start)
    return base.model_copy(update=changes)


def containers(gke: GKE) -> list[str]:
    """Names of the main containers: one, or one a NUMA node."""
    return (
        ["train"]
        if gke.processes_per_host == 1
        else [f"train-{i}" for i in range(gke.processes_per_host)]
    )


def _labels(job: Job, gke: GKE) -> dict[str, str]:
    labels = {
        "app.kubernetes.io/name": "olmo-core-jax",
        "app.kubernetes.io/component": job.folder.replace("/", "."),
        names.RUN_LABEL: names.run_hash(job.run_root),
    }
    if gke.queue:
        labels[QUEUE_LABEL] = gke.queue
    if gke.workload_priority:
        labels[PRIORITY_LABEL] = gke.workload_priority
    return gke.labels | labels


def _annotations(
    job: Job, profile: Profile, gke: GKE, submission: int, start_step: int | None
) -> dict[str, str]:
    found = {
        names.RUN_ROOT: names.canonical(job.run_root),
        names.STAGE: job.folder,
        names.DIGEST: launch_digest(job, profile),
        names.SUBMISSION: str(submission),
        names.START_STEP: "none" if start_step is None else str(start_step),
    }
    if gke.hardware.platform == "tpu" and gke.exclusive_topology:
        found[EXCLUSIVE] = "cloud.google.com/gke-nodepool"
    return gke.annotations | found


def _failure_policy(gke: GKE) -> Manifest:
    codes = "|".join(map(str, PREEMPTED_CODES))
    on_policy = {"onJobFailureReasons": ["PodFailurePolicy"]}
    uncounted = {"action": "RestartJobSetAndIgnoreMaxRestarts", **on_policy}
    return {
        "maxRestarts": gke.max_restarts,
        "rules": [
            {
                "name": "disruption",
                **uncounted,
                "onJobFailureMessagePatterns": [".*has condition DisruptionTarget.*"],
            },
            {
                "name": "preempted",
                **uncounted,
                "onJobFailureMessagePatterns": [f".*exit code ({codes}) .*"],
            },
            {"name": "final", "action": "FailJobSet", **on_policy},
        ],
    }


def _pod_failure_policy(gke: GKE) -> Manifest:
    """A disruption first: a pod that was evicted is not judged by the code that it died with."""
    rules: list[Manifest] = [
        {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    ]
    for codes in (PREEMPTED_CODES, FINAL):
        for container in containers(gke):
            on = {"containerName": container, "operator": "In", "values": sorted(codes)}
            rules.append({"action": "FailJob", "onExitCodes": on})
    return {"rules": rules}


def _job_spec(gke: GKE, command: list[str]) -> Manifest:
    return {
        "parallelism": gke.hardware.hosts,
        "completions": gke.hardware.hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": _pod_failure_policy(gke),
        "template": pod_template(gke, containers(gke), command),
    }
