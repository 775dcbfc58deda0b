"""Everything that a submission needs, looked at before it: one table, and a clear word for each row that fails.

Nothing is changed in the cluster; the bucket gets one probe object that is deleted again. Bucket rights are those of
whoever runs this: the pods' own account is only shown to exist.
"""

import functools
import re
import urllib.error
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from olmo_core_jax import recipes, stages, storage
from olmo_core_jax.errors import JobError, UserError
from olmo_core_jax.launch.gke import api as k8s
from olmo_core_jax.launch.gke import image as images
from olmo_core_jax.launch.gke.api import Kind, Kube
from olmo_core_jax.launch.gke.check import check
from olmo_core_jax.launch.gke.manifest import render
from olmo_core_jax.launch.gke.pod import node_selector
from olmo_core_jax.launch.gke.profile import GKE, SecretRef
from olmo_core_jax.launch.gke.quota import free_of, needs
from olmo_core_jax.launch.gke.visible import as_pods_see
from olmo_core_jax.launch.job import Job
from olmo_core_jax.launch.profile import Profile
from olmo_core_jax.recipes.schema import TRAINING_STAGES
from olmo_core_jax.results import read_result
from olmo_core_jax.terminal import text_table

OLDEST = {"kubernetes": (1, 29), "tpu7x": (1, 34), "jobset": (0, 10), "kueue": (0, 17)}
"""Oldest versions that were read for this launcher: message patterns in JobSet, v1beta2 in Kueue, TPU7x in GKE."""

KUEUE = "kueue.x-k8s.io"
LOCAL_QUEUES = Kind(KUEUE, "v1beta2", "localqueues")
CLUSTER_QUEUES = Kind(KUEUE, "v1beta2", "clusterqueues", namespaced=False)
FLAVORS = Kind(KUEUE, "v1beta2", "resourceflavors", namespaced=False)
NODES = Kind("", "v1", "nodes", "node", namespaced=False)
SECRETS = Kind("", "v1", "secrets", "secret")
ACCOUNTS = Kind("", "v1", "serviceaccounts", "service_account")
JOBSET_CONTROLLER = Kind("apps", "v1", "deployments", namespace="jobset-system")
KUEUE_CONTROLLER = Kind("apps", "v1", "deployments", namespace="kueue-system")


class Wrong(Exception):
    """A row's fault, in words."""


@dataclass(frozen=True)
class Row:
    what: str
    passed: bool
    text: str
    cause: Exception | None = None


def preflight(job: Job, profile: Profile, kube: Kube | JobError) -> list[Row]:
    """All rows; nothing is raised for what fails. kube: the cluster, or why there is none to ask."""
    gke = profile.gke_of(job.folder)
    rows = [cluster := _row("cluster", lambda: _cluster(kube, gke))]
    away = isinstance(cluster.cause, k8s.Unreachable | UserError)
    for name, look in _of_cluster(job, profile, gke):
        if away or isinstance(kube, JobError):
            rows.append(Row(name, False, "not looked at, as there is no cluster that answers"))
        else:
            rows.append(_row(name, functools.partial(look, kube)))
    rows.append(_row("image", lambda: _image(gke)))
    rows.append(_row("run root", lambda: _run_root(job, gke)))
    rows.append(_row("recipe", lambda: _recipe(job)))
    rows.append(_row("stages before", lambda: _upstream(job)))
    return rows


def _of_cluster(
    job: Job, profile: Profile, gke: GKE
) -> Iterator[tuple[str, Callable[[Kube], str]]]:
    """What the cluster is asked, by the row's name."""
    yield (
        "JobSet",
        lambda k: _controller(k, JOBSET_CONTROLLER, "jobset-controller-manager", "jobset"),
    )
    if gke.queue:
        yield (
            "Kueue",
            lambda k: _controller(k, KUEUE_CONTROLLER, "kueue-controller-manager", "kueue"),
        )
        yield "queue", lambda k: _queue(k, gke)
    yield "manifest", lambda k: _manifest(k, job, profile, gke)
    yield "nodes", lambda k: _nodes(k, gke)
    yield "account", lambda k: _account(k, gke)
    for name, ref in gke.secrets.items():
        yield f"secret {name}", functools.partial(_secret, ref=ref)


def table(rows: list[Row]) -> str:
    """The rows for people."""
    shown = text_table([("ok" if r.passed else "FAIL", r.what, r.text) for r in rows])
    failed = sum(not r.passed for r in rows)
    return f"{shown}\n{f'{failed} of {len(rows)} fail' if failed else 'all pass'}"


def _row(name: str, look: Callable[[], str]) -> Row:
    try:
        return Row(name, True, look())
    except (Wrong, JobError, k8s.NotFound, k8s.Conflict, OSError) as e:
        text = f"not found: {e}" if isinstance(e, k8s.NotFound) else str(e)
        return Row(name, False, text, e)


def version_of(text: str) -> tuple[int, int]:
    """(1, 34) of v1.34.1-gke.3084001."""
    found = re.search(r"(\d+)\.(\d+)", text)
    if not found:
        raise Wrong(f"{text!r} has no version")
    return int(found[1]), int(found[2])


def _cluster(kube: Kube | JobError, gke: GKE) -> str:
    if isinstance(kube, JobError):
        raise kube
    version = kube.version()
    oldest = OLDEST["tpu7x" if gke.hardware.name.startswith("tpu7x") else "kubernetes"]
    if version_of(version) < oldest:
        raise Wrong(f"{version}; {gke.shape} needs {oldest[0]}.{oldest[1]}")
    return f"reachable, {version}"


def _controller(kube: Kube, kind: Kind, name: str, what: str) -> str:
    deployment = kube.get(kind, name)
    containers = deployment["spec"]["template"]["spec"]["containers"]
    tags = [c["image"].rpartition(":")[2] for c in containers if what in c["image"]]
    if not tags:
        raise Wrong(f"deployment {name} has no image of {what}")
    oldest = OLDEST[what]
    if version_of(tags[0]) < oldest:
        raise Wrong(f"{tags[0]}; {oldest[0]}.{oldest[1]} or newer is needed")
    if not deployment.get("status", {}).get("readyReplicas"):
        raise Wrong(f"{tags[0]} is installed, but its controller is not ready")
    return f"{tags[0]}, ready"


def _queue(kube: Kube, gke: GKE) -> str:
    local = kube.get(LOCAL_QUEUES, gke.queue or "")
    cluster = kube.get(CLUSTER_QUEUES, local["spec"]["clusterQueue"])
    flavors = {f["metadata"]["name"]: f for f in kube.select(FLAVORS)}
    wanted = needs(gke)
    quota = free_of(cluster, flavors, gke)
    for resource, amount in wanted.items():
        if resource not in quota:
            raise Wrong(
                f"ClusterQueue {cluster['metadata']['name']} does not cover {resource} for {gke.shape}"
            )
        if amount > quota[resource]:
            raise Wrong(
                f"{gke.shape} asks for {amount:g} {resource}; the quota is {quota[resource]:g}"
            )
    if cluster.get("spec", {}).get("stopPolicy", "None") != "None":
        raise Wrong(f"ClusterQueue {cluster['metadata']['name']} is stopped")
    shown = (
        ", ".join(f"{amount:g} of {quota[r]:g} {r}" for r, amount in wanted.items())
        or "no quota needed"
    )
    return f"{gke.queue}: {shown}"


def _manifest(kube: Kube, job: Job, profile: Profile, gke: GKE) -> str:
    manifest = render(as_pods_see(job, gke), profile)
    check(manifest, kube.get(k8s.CRDS, "jobsets.jobset.x-k8s.io"))
    try:
        kube.create(k8s.JOBSETS, manifest, dry_run=True)
    except k8s.Conflict:
        return f"{manifest['metadata']['name']} is there already: a submission attaches to it"
    return f"{manifest['metadata']['name']}: accepted by a dry run"


def _nodes(kube: Kube, gke: GKE) -> str:
    selector = ",".join(f"{k}={v}" for k, v in node_selector(gke).items())
    found, wanted = len(kube.select(NODES, labels=selector)), gke.hardware.hosts * gke.slices
    if found >= wanted:
        return f"{found} nodes fit, {wanted} are needed"
    if gke.capacity in ("spot", "flex-start"):
        return f"{found} of {wanted} nodes are there; {gke.capacity} capacity may bring the others"
    raise Wrong(f"{found} of {wanted} nodes have the labels {selector}")


def _account(kube: Kube, gke: GKE) -> str:
    name = gke.service_account or "default"
    kube.get(ACCOUNTS, name)
    return f"{gke.namespace}/{name}"


def _secret(kube: Kube, ref: SecretRef) -> str:
    try:
        found = kube.get(SECRETS, ref.secret)
    except k8s.NotFound:
        if ref.optional:
            return f"{ref.secret} is not there; it is optional"
        raise
    if ref.key not in (found.get("data") or {}) and not ref.optional:
        raise Wrong(f"{ref.secret} has no key {ref.key}")
    return f"{ref.secret}, key {ref.key}"


def _image(gke: GKE) -> str:
    try:
        if not images.exists(gke.image):
            raise Wrong(f"{gke.image} does not exist")
    except urllib.error.HTTPError as e:
        raise Wrong(
            f"{gke.image}: the registry answers {e.code}; is it readable for you?"
        ) from None
    return gke.image


def _run_root(job: Job, gke: GKE) -> str:
    as_pods_see(job, gke)
    uri = storage.join(job.run_root, f"probe-{uuid.uuid4().hex[:8]}")
    try:
        storage.write_bytes(uri, b"probe")
        read = storage.read_bytes(uri)
        storage.delete(uri)
    except JobError:
        raise
    except Exception as e:  # the storage client has errors of its own
        raise Wrong(f"{uri}: {type(e).__name__}: {e}") from None
    if read != b"probe":
        raise Wrong(f"{uri} reads back differently")
    return f"{job.run_root}: written, read, deleted"


def _recipe(job: Job) -> str:
    recipe = recipes.load_recipe(job.recipe)
    there = storage.join(job.run_root, "recipe.yaml")
    if storage.exists(there) and recipes.digest(recipes.load_recipe(there)) != recipes.digest(
        recipe
    ):
        raise Wrong(f"{job.run_root} holds a run of another recipe: choose another folder")
    return f"{recipe.name}, digest {recipes.digest(recipe)[:12]}"


def _upstream(job: Job) -> str:
    recipe = recipes.load_recipe(job.recipe)
    trained = {stages.train_folder(name) for name in recipe.stages()}
    unused = {stages.train_folder(name) for name in TRAINING_STAGES} - trained
    if recipe.weights.hf is None:  # its own initialisation
        unused.add("convert_weights")
    before = [stage for stage in stages.stage_of(job.folder).upstream if stage not in unused]
    missing = [stage for stage in before if read_result(job.run_root, stage) is None]
    if missing:
        raise Wrong(f"{', '.join(missing)} not finished under {job.run_root}")
    return "all finished" if before else "none"
