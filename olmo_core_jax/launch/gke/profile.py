"""The `gke` section of a launch profile: where a JobSet runs, with what rights, and how patiently it is watched."""

import re
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    field_validator,
    model_validator,
)

from olmo_core_jax.errors import UserError
from olmo_core_jax.hardware.shapes import Shape, shape

HOUR = 3600.0
SECRET_NAME = re.compile(
    r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|PRIVATE_?KEY", re.IGNORECASE
)
SECRET_VALUE = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}|\bghp_\w{20,}|\bAIza[\w-]{30,}|-----BEGIN|\bya29\.|\bsk-\w{20,}"
)

Label = Annotated[
    str, StringConstraints(pattern=r"^[a-z0-9A-Z]([-a-z0-9A-Z_.]{0,61}[a-z0-9A-Z])?$")
]
Quantity = Annotated[str, StringConstraints(pattern=r"^\d+(\.\d+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?$")]
EnvName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
LabelKey = Annotated[
    str,
    StringConstraints(
        pattern=r"^([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
    ),
]
Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Bucket(Strict):
    """A bucket, or a prefix of it, mounted by the gcsfuse CSI driver. gs:// paths are read by range and need none."""

    bucket: Name
    path: str = Field(pattern=r"^/", description="where the pod sees it")
    only_dir: str | None = Field(default=None, description="mount this prefix alone")
    read_only: bool = True
    options: list[str] = Field(
        default=[], description="mount options instead of the defaults for few huge files"
    )


class Claim(Strict):
    """A PersistentVolumeClaim (Filestore, Lustre, Parallelstore ...) mounted into the pods."""

    claim: Name
    path: str = Field(pattern=r"^/")
    read_only: bool = False


class SecretRef(Strict):
    """An environment variable whose value stays in a Kubernetes Secret."""

    secret: Name
    key: str = Field(pattern=r"^[-._a-zA-Z0-9]+$")
    optional: bool = False


class Watching(Strict):
    """How long what is waited for, in seconds. None: without limit."""

    queue_timeout: float | None = Field(
        default=None, gt=0, description="time in the queue, preemptions included"
    )
    inadmissible_grace: float = Field(
        default=900.0, ge=0, description="a Workload that can never start is given up after this"
    )
    api_patience: float = Field(
        default=6 * HOUR,
        gt=0,
        description="an API that does not answer is asked again for this long",
    )
    pods_warning: float = Field(
        default=900.0, gt=0, description="pods that are not ready for this long are explained"
    )
    reactivate: bool = Field(
        default=False, description="activate a Workload again that Kueue gave up"
    )
    refresh: float = Field(default=10.0, gt=0, description="longest time between two looks")
    log_pods: Literal["all", "leader"] = "all"


class GKE(Strict):
    """One JobSet: `slices` times `shape`, started by Kueue where a queue is named."""

    # where
    context: str | None = Field(
        default=None,
        description="kubeconfig context; default: the pod's own cluster, else the current context",
    )
    namespace: Name = "default"
    # what
    shape: str = Field(description="hardware.py: tpu7x-4x4x4, v5p-256, h100, n2-standard-16 ...")
    hosts: int | None = Field(default=None, gt=0, description="machines of a GPU or CPU shape")
    slices: int = Field(default=1, gt=0)
    processes_per_host: Literal[1, 2] = Field(
        default=1, description="2: one container a NUMA node of a TPU7x host"
    )
    image: str = Field(min_length=1)
    python: str = "python"
    # scheduling
    queue: Name | None = Field(default=None, description="Kueue LocalQueue; None: started at once")
    workload_priority: Name | None = Field(default=None, description="Kueue WorkloadPriorityClass")
    pod_priority: Name | None = Field(default=None, description="PriorityClass of the pods")
    capacity: Literal["on-demand", "spot", "reservation", "flex-start"] = "on-demand"
    reservation: str | None = None
    placement_policy: str | None = Field(
        default=None, description="workload policy of a multi-host TPU7x node pool"
    )
    exclusive_topology: bool = Field(
        default=True, description="a slice has its node pool for itself (TPU only)"
    )
    auto_repair_in_place: bool = Field(
        default=False, description="asks GKE to repair a slice instead of replacing it"
    )
    node_selector: dict[LabelKey, Label] = {}
    # lifetime
    max_restarts: int = Field(default=10, ge=0, description="crashes; disruptions are not counted")
    grace_seconds: int = Field(
        default=300, ge=30, le=3600, description="time to save between SIGTERM and SIGKILL"
    )
    ttl_seconds: int = Field(default=43200, gt=0, description="a finished JobSet is kept this long")
    # rights
    service_account: Name | None = Field(
        default=None, description="bound to the buckets by Workload Identity"
    )
    image_pull_secrets: list[Name] = []
    privileged: bool = Field(
        default=True, description="TPU and GPU runtimes want it; off where yours do not"
    )
    host_network: bool = Field(
        default=False, description="several NICs; then the pod acts as its node's account"
    )
    # inside
    env: dict[EnvName, str] = {}
    secrets: dict[EnvName, SecretRef] = {}
    buckets: list[Bucket] = []
    claims: list[Claim] = []
    shared_paths: list[str] = Field(
        default=[], description="folders that pods and this controller see under the same path"
    )
    cpu: Quantity | None = Field(
        default=None, description="CPU request; the ClusterQueue has to cover cpu then"
    )
    memory: Quantity | None = None
    shm: Quantity | None = Field(
        default=None, description="limit of /dev/shm, such as 64Gi; None: the host's memory"
    )
    labels: dict[LabelKey, Label] = Field(default={}, description="cost reports: team, project ...")
    annotations: dict[LabelKey, str] = {}
    watching: Watching = Watching()

    @property
    def hardware(self) -> Shape:
        return shape(self.shape, self.hosts)

    @property
    def devices(self) -> int:
        """JAX devices of all slices together."""
        return self.hardware.devices * self.slices

    @property
    def processes(self) -> int:
        return self.hardware.hosts * self.processes_per_host * self.slices

    @field_validator("env")
    @classmethod
    def _no_plain_secrets(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            if SECRET_NAME.search(name) or SECRET_VALUE.search(value):
                raise ValueError(
                    f"{name} looks like a secret: put it into a Kubernetes Secret and name that under `secrets`"
                )
        return env

    @model_validator(mode="after")
    def _fits(self):
        try:
            found = self.hardware
        except UserError as e:
            raise ValueError(str(e)) from None
        if (self.capacity == "reservation") != (self.reservation is not None):
            raise ValueError("`capacity: reservation` and `reservation: NAME` go together")
        if self.processes_per_host == 2 and not found.name.startswith("tpu7x"):
            raise ValueError("processes_per_host 2 is for TPU7x hosts, which have two NUMA nodes")
        if self.placement_policy and not (found.name.startswith("tpu7x") and found.multi_host):
            raise ValueError("placement_policy is for multi-host TPU7x node pools")
        if self.slices > 1 and found.platform != "tpu":
            raise ValueError("slices is for TPUs; use `hosts` for more GPU or CPU machines")
        return self
