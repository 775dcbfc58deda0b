"""How a job runs: mesh, kernels, rematerialisation, workers. Changing any of it may not change the recipe's numbers.

A topology is one section of a launch profile; the launcher hands it to the job as a YAML or JSON file (`--topology`).
This module knows nothing of recipes and imports no JAX.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from olmo_core_jax.errors import UserError
from olmo_core_jax.yaml_text import one_line, parse_yaml


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Mesh(Strict):
    """Devices along each axis; one of them may be -1, "all that are left"."""

    replica: int = 1
    fsdp: int = -1
    tensor: int = 1
    context: int = 1

    @model_validator(mode="after")
    def _one_free_axis(self):
        sizes = [self.replica, self.fsdp, self.tensor, self.context]
        if sizes.count(-1) > 1 or any(s == 0 or s < -1 for s in sizes):
            raise ValueError(f"mesh {sizes}: sizes are positive, and at most one is -1")
        return self


class Distributed(Strict):
    """Multi-process start. auto: what GKE's environment says, else one process."""

    mode: Literal["auto", "off", "explicit"] = "auto"
    coordinator: str | None = None
    num_processes: int | None = Field(default=None, gt=0)
    process_id: int | None = Field(default=None, ge=0)
    wait_seconds: int = Field(default=300, gt=0, description="for the others, when it starts")
    heartbeat_seconds: int = Field(
        default=100, gt=0, description="a process that is silent for so long is taken for dead"
    )

    @field_validator("coordinator")
    @classmethod
    def _has_a_port(cls, address: str | None):
        host, _, port = (address or "").rpartition(":")
        if address is None or (host.strip() and re.fullmatch(r"[0-9]{1,5}", port)):
            return address
        raise ValueError(f"{address!r} is not HOST:PORT, such as node-0:8476")

    @field_validator("process_id")
    @classmethod
    def _is_one_of_all(cls, number: int | None, others: ValidationInfo):
        processes = others.data.get("num_processes")
        if number is not None and processes is not None and number >= processes:
            raise ValueError(f"{number} is not one of num_processes {processes}, counted from 0")
        return number


class Topology(Strict):
    mesh: Mesh = Mesh()
    platform: Literal["cpu", "tpu", "cuda"] | None = None
    host_devices: int | None = Field(
        default=None, gt=0, description="CPU only: devices that one process pretends to have"
    )
    attention: Literal["auto", "reference", "blockwise", "cudnn", "splash"] = "auto"
    remat: str = "none"
    scan_layers: bool = True
    accumulation: int | None = Field(
        default=None,
        gt=0,
        description="micro-batches an update; default: fitted to per_device_batch, else 1",
    )
    per_device_batch: int | None = Field(
        default=None, gt=0, description="instances a device and micro-batch"
    )
    max_per_device_batch: int | None = Field(
        default=None,
        gt=0,
        description="most instances that a device has memory for at once; read where neither of the two above is set",
    )
    loss_chunks: int = Field(default=1, gt=0)
    data_workers: int = Field(default=0, ge=0)
    xla_flags: list[str] = []
    libtpu_flags: list[str] = []
    distributed: Distributed = Distributed()


def load_topology(path: str | None) -> Topology:
    """Reads a topology file, or inline JSON; None gives the defaults. Raises UserError that names the field."""
    if path is None:
        return Topology()
    what = f"topology {one_line(path)}"
    try:
        text = path if path.lstrip().startswith("{") else Path(path).read_text()
    except (OSError, ValueError) as e:
        raise UserError(f"{what} cannot be read: {one_line(e)}") from None
    raw = parse_yaml(text, what)
    try:
        return Topology.model_validate({} if raw is None else raw)
    except ValidationError as e:
        first = e.errors()[0]
        field = ".".join(map(str, ("topology", *first["loc"])))
        raise UserError(f"{what}: {field}: {first['msg'].removeprefix('Value error, ')}") from None


def process_id(topology: Topology, env: Mapping[str, str] = os.environ) -> int:
    """This process's number among all of the job's, known before JAX starts. 0 is the one writer."""
    d = topology.distributed
    if d.mode == "off":
        return 0
    if d.process_id is not None:
        return d.process_id
    # Two processes a host are listed by address, and JAX reads that list first.
    listed = env.get("TPU_PROCESS_ADDRESSES") or env.get("TPU_WORKER_HOSTNAMES")
    if d.mode == "explicit" or not listed:
        return int(env.get("OLMO_PROCESS_ID", env.get("JOB_COMPLETION_INDEX", "0")))
    processes = len(listed.split(","))
    return int(env.get("MEGASCALE_SLICE_ID", "0")) * processes + int(env.get("TPU_WORKER_ID", "0"))
