"""Pods as the Job controller makes them from a JobSet."""

import copy

L = "jobset.sigs.k8s.io/"


def new_pod(jobset: dict, replicated: dict, slice_: int, host: int, attempt: int) -> dict:
    """The pod of a host of a slice; its name is given when it is created."""
    name = jobset["metadata"]["name"]
    template = copy.deepcopy(replicated["template"]["spec"]["template"])
    meta = template.get("metadata", {})
    labels = (meta.get("labels") or {}) | {
        L + "jobset-name": name,
        L + "jobset-uid": jobset["metadata"]["uid"],
        L + "restart-attempt": str(attempt),
        L + "job-index": str(slice_),
        L + "replicatedjob-name": replicated["name"],
        "batch.kubernetes.io/job-name": f"{name}-{replicated['name']}-{slice_}",
        "test/generation": generation(jobset),
    }
    index = {"batch.kubernetes.io/job-completion-index": str(host)}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "spec": template["spec"],
        "metadata": {"labels": labels, "annotations": (meta.get("annotations") or {}) | index},
        "status": {"phase": "Pending"},
    }


def born_as(pod: dict) -> tuple[str, str]:
    """(restart attempt, generation) that a pod was made for."""
    labels = pod["metadata"]["labels"]
    return labels[L + "restart-attempt"], labels["test/generation"]


def generation(jobset: dict) -> str:
    """Changes with every resume, as the child Jobs' pods do."""
    return str(jobset["metadata"]["generation"])
