"""What a launch asks of Kueue, and what a ClusterQueue grants to nodes of that shape."""

from typing import Any

from olmo_core_jax.launch.gke.pod import node_selector
from olmo_core_jax.launch.gke.profile import GKE

Object = dict[str, Any]

SUFFIXES = {
    "m": 1e-3, "": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40,
}  # fmt: skip


def quantity(text: str | int | float) -> float:
    """A Kubernetes quantity as a number: 128Gi, 500m, 64."""
    digits = str(text).rstrip("mkMGTi")
    return float(digits) * SUFFIXES[str(text)[len(digits) :]]


def needs(gke: GKE) -> dict[str, float]:
    """All that the pods of a launch request together, by resource."""
    pods = gke.hardware.hosts * gke.slices
    found: dict[str, float] = {}
    if gke.hardware.resource:
        found[gke.hardware.resource] = gke.hardware.chips * gke.slices
    for name, each in (("cpu", gke.cpu), ("memory", gke.memory)):
        if each:
            found[name] = quantity(each) * pods * gke.processes_per_host
    return found


def free_of(cluster_queue: Object, flavors: dict[str, Object], gke: GKE) -> dict[str, float]:
    """Nominal quota plus what may be borrowed, by resource, of the flavors whose labels do not contradict the shape."""
    selector = node_selector(gke)
    found: dict[str, float] = {}
    for group in cluster_queue["spec"].get("resourceGroups") or []:
        for entry in group["flavors"]:
            labels = (flavors.get(entry["name"]) or {}).get("spec", {}).get("nodeLabels") or {}
            if (
                any(selector.get(k, v) != v for k, v in labels.items())
                or entry["name"] not in flavors
            ):
                continue
            for r in entry["resources"]:
                granted = quantity(r["nominalQuota"]) + quantity(r.get("borrowingLimit") or 0)
                found[r["name"]] = max(found.get(r["name"], 0.0), granted)
    return found
