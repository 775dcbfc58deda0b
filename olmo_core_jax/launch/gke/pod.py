"""The pods of a JobSet: nodes, rights, mounts, environment."""

from typing import Any

from olmo_core_jax.hardware.shapes import TOPOLOGY_LABEL
from olmo_core_jax.launch.gke.profile import GKE, Bucket

Manifest = dict[str, Any]

# libtpu's peers, the multislice coordinator, runtime metrics, jax.distributed.
TPU_PORTS = (8471, 8080, 8431, 8482)

LEAVE_SECONDS = 10
"""Between the job's own hard exit and Kubernetes' SIGKILL."""

# A few huge read-only files, read at random offsets by every host: names and sizes never change, and one read of a
# window must not fetch the file. So metadata is kept for ever and the file cache stays off.
GCSFUSE_OPTIONS = (
    "implicit-dirs",
    "metadata-cache:ttl-secs:-1",
    "metadata-cache:stat-cache-max-size-mb:-1",
    "metadata-cache:type-cache-max-size-mb:-1",
    "file-system:kernel-list-cache-ttl-secs:-1",
)
GCSFUSE_WRITE_OPTIONS = ("implicit-dirs",)


def pod_template(gke: GKE, containers: list[str], command: list[str]) -> Manifest:
    """metadata and spec of every pod."""
    spec: Manifest = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": gke.grace_seconds,
        "nodeSelector": node_selector(gke),
        "containers": [_container(gke, name, i, command) for i, name in enumerate(containers)],
        "volumes": [{"name": "shm", "emptyDir": _shm(gke)}, *_volumes(gke)],
    }
    if gke.host_network:
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    if gke.pod_priority:
        spec["priorityClassName"] = gke.pod_priority
    if gke.service_account:
        spec["serviceAccountName"] = gke.service_account
    if gke.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": n} for n in gke.image_pull_secrets]
    if tolerations := _tolerations(gke):
        spec["tolerations"] = tolerations
    metadata: Manifest = {}
    labels = dict(gke.labels)
    if gke.auto_repair_in_place:
        labels["cloud.google.com/gke-tpu-auto-restart"] = "true"
    if labels:
        metadata["labels"] = labels
    if gke.buckets:  # "0": the sidecar's use is not limited
        limits = {
            f"gke-gcsfuse/{what}-limit": "0" for what in ("cpu", "memory", "ephemeral-storage")
        }
        metadata["annotations"] = {"gke-gcsfuse/volumes": "true"} | limits
    return {"metadata": metadata, "spec": spec} if metadata else {"spec": spec}


def node_selector(gke: GKE) -> dict[str, str]:
    """The labels that a node has to have."""
    found = dict(gke.hardware.node_selector)
    if gke.hardware.name.startswith("tpu7x") and not gke.hardware.multi_host:
        found.pop(TOPOLOGY_LABEL)  # single-host TPU7x pools are made without a topology
    if gke.placement_policy:
        found["cloud.google.com/placement-policy-name"] = gke.placement_policy
    if gke.capacity == "spot":
        found["cloud.google.com/gke-spot"] = "true"
    if gke.capacity == "flex-start":
        found["cloud.google.com/gke-flex-start"] = "true"
    if gke.reservation:
        found["cloud.google.com/reservation-name"] = gke.reservation
    return found | gke.node_selector


def _tolerations(gke: GKE) -> list[Manifest]:
    found: list[Manifest] = []
    if gke.hardware.resource:
        found.append({"key": gke.hardware.resource, "operator": "Exists"})
    if gke.capacity == "spot":
        found.append(
            {
                "key": "cloud.google.com/gke-spot",
                "operator": "Equal",
                "value": "true",
                "effect": "NoSchedule",
            }
        )
    return found


def _container(gke: GKE, name: str, index: int, command: list[str]) -> Manifest:
    found: Manifest = {
        "name": name,
        "image": gke.image,
        "command": command,
        "env": _env(gke, index),
        "resources": _resources(gke),
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}, *_mounts(gke)],
    }
    if gke.hardware.platform == "tpu" and index == 0:
        found["ports"] = [{"containerPort": port} for port in TPU_PORTS]
    if gke.privileged and gke.hardware.platform != "cpu":
        found["securityContext"] = {"privileged": True}
    return found


def _resources(gke: GKE) -> Manifest:
    """Accelerators as limits (the request follows); cpu and memory as requests, only where asked for."""
    found: Manifest = {}
    if gke.hardware.resource:
        found["limits"] = {
            gke.hardware.resource: str(gke.hardware.chips_per_host // gke.processes_per_host)
        }
    if requests := {k: v for k, v in (("cpu", gke.cpu), ("memory", gke.memory)) if v}:
        found["requests"] = requests
    return found


def _env(gke: GKE, index: int) -> list[Manifest]:
    def label(name: str) -> Manifest:
        return {"fieldRef": {"fieldPath": f"metadata.labels['jobset.sigs.k8s.io/{name}']"}}

    found: list[Manifest] = [
        {"name": "JOBSET_NAME", "valueFrom": label("jobset-name")},
        {"name": "JOBSET_RESTART", "valueFrom": label("restart-attempt")},
        {"name": "SLICE_INDEX", "valueFrom": label("job-index")},
        {
            "name": "OLMO_SHAPE",
            "value": f"{gke.slices} x {gke.shape}" if gke.slices > 1 else gke.shape,
        },
        {"name": "OLMO_GRACE_SECONDS", "value": str(gke.grace_seconds - LEAVE_SECONDS)},
        {"name": "PYTHONUNBUFFERED", "value": "1"},
    ]
    if gke.processes_per_host > 1:
        found.append({"name": "CONTAINER_INDEX", "value": str(index)})
    found += [{"name": k, "value": v} for k, v in gke.env.items()]
    for name, ref in gke.secrets.items():
        key = {"name": ref.secret, "key": ref.key, "optional": ref.optional}
        found.append({"name": name, "valueFrom": {"secretKeyRef": key}})
    return found


def _shm(gke: GKE) -> Manifest:
    return {"medium": "Memory"} | ({"sizeLimit": gke.shm} if gke.shm else {})


def _volumes(gke: GKE) -> list[Manifest]:
    buckets = [
        {"name": f"bucket-{i}", "csi": _gcsfuse(gke, bucket)}
        for i, bucket in enumerate(gke.buckets)
    ]
    claims = [
        {
            "name": f"claim-{i}",
            "persistentVolumeClaim": {"claimName": c.claim, "readOnly": c.read_only},
        }
        for i, c in enumerate(gke.claims)
    ]
    return buckets + claims


def _gcsfuse(gke: GKE, bucket: Bucket) -> Manifest:
    options = bucket.options or list(GCSFUSE_OPTIONS if bucket.read_only else GCSFUSE_WRITE_OPTIONS)
    if bucket.only_dir:
        options = [*options, f"only-dir={bucket.only_dir}"]
    attributes = {
        "bucketName": bucket.bucket,
        "mountOptions": ",".join(options),
        "skipCSIBucketAccessCheck": "true",
    }
    # Without it a pod on the host's network cannot use its own service account.
    if gke.host_network:
        attributes["hostNetworkPodKSA"] = "true"
    return {
        "driver": "gcsfuse.csi.storage.gke.io",
        "readOnly": bucket.read_only,
        "volumeAttributes": attributes,
    }


def _mounts(gke: GKE) -> list[Manifest]:
    buckets = [
        {"name": f"bucket-{i}", "mountPath": b.path, "readOnly": b.read_only}
        for i, b in enumerate(gke.buckets)
    ]
    claims = [
        {"name": f"claim-{i}", "mountPath": c.path, "readOnly": c.read_only}
        for i, c in enumerate(gke.claims)
    ]
    return buckets + claims
