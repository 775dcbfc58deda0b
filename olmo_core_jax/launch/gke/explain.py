"""Why pods are not running: what their statuses and events say, in a few lines."""

from collections import Counter
from typing import Any

from olmo_core_jax.launch.gke.api import EVENTS, Kube

Object = dict[str, Any]

MOST_LINES = 8
FOLLOWER = "follower pod node selector not set"
"""A JobSet webhook's word for "the slice's first pod has no node yet": it says nothing about the follower."""


def explain(kube: Kube, pods: list[Object]) -> str:
    """One line a cause, with the number of pods that it holds."""
    waiting = [
        p for p in pods if (p.get("status") or {}).get("phase") in (None, "Pending", "Unknown")
    ]
    if not pods:
        return "there are no pods: the JobSet controller has not made them (is it running?)"
    if not waiting:
        return f"{len(pods)} pods are running, but not all are ready yet"
    causes: Counter[str] = Counter()
    for pod in waiting:
        causes.update({_container_reason(pod)} - {""})
    names = {p["metadata"]["name"] for p in waiting}
    for event in kube.select(EVENTS, fields="type=Warning"):
        if (event.get("involvedObject") or {}).get("name") in names and FOLLOWER not in event.get(
            "message", ""
        ):
            causes[f"{event.get('reason', '?')}: {event.get('message', '')}"] += 1
    lines = [f"  {count} x {cause}" for cause, count in causes.most_common(MOST_LINES)]
    return "\n".join([f"{len(waiting)} of {len(pods)} pods are waiting", *lines])


def _container_reason(pod: Object) -> str:
    for status in (pod.get("status") or {}).get("containerStatuses") or []:
        waiting = (status.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            return f"{waiting['reason']}: {waiting.get('message', '')}"
    return ""
