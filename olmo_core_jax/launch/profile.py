"""Where and on what jobs run: the launch profile, read when a stage starts, so that a resumed run may use other hardware.

The file that OLMO_LAUNCH names; without it, local processes on this machine's CPU.
"""

import os
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from olmo_core_jax.errors import UserError
from olmo_core_jax.hardware.topology import Topology
from olmo_core_jax.launch.gke.profile import GKE
from olmo_core_jax.yaml_text import parse_yaml

ENVIRONMENT = "OLMO_LAUNCH"


class Profile(BaseModel):
    """topology: for every stage; topologies: for single stages instead, by folder name (`stage1_train`).

    gke: the same for the gke backend; gke_stages: fields of it that differ for single stages, such as a CPU shape for
    `build_index`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = "this machine"
    backend: Literal["local", "gke"] = "local"
    topology: Topology = Topology(platform="cpu")
    topologies: dict[str, Topology] = {}
    max_restarts: int = Field(
        default=2, ge=0, description="new starts after crashes; preemptions are not counted"
    )
    gke: GKE | None = Field(default=None, description="the section of the gke backend")
    gke_stages: dict[str, dict] = {}

    @model_validator(mode="after")
    def _backend_is_described(self):
        if self.backend == "gke" and self.gke is None:
            raise ValueError("backend gke needs a `gke` section")
        for folder in self.gke_stages:
            self.gke_of(folder)
        return self

    def topology_of(self, folder: str) -> Topology:
        """The topology of a stage folder (`eval_landmarks/100` is looked up as `eval_landmarks`)."""
        return self.topologies.get(folder.partition("/")[0], self.topology)

    def gke_of(self, folder: str) -> GKE:
        """The gke section of a stage folder, validated as a whole."""
        if self.gke is None:
            raise UserError(
                f"launch profile {self.name!r} has no gke section: name one that has, with --profile or in {ENVIRONMENT}"
            )
        changes = self.gke_stages.get(folder.partition("/")[0], {})
        return GKE.model_validate(self.gke.model_dump(exclude_unset=True) | changes)


def load_profile(path: str | None = None) -> Profile:
    """The profile of a file, else of OLMO_LAUNCH, else the default. Raises UserError that names the field."""
    path = path or os.environ.get(ENVIRONMENT)
    if not path:
        return Profile()
    try:
        content = parse_yaml(Path(path).read_text(), f"launch profile {path}")
        raw = {"name": Path(path).stem} | (content or {})
        # On GKE the platform follows from the shape, not from this machine.
        if raw.get("backend") == "gke":
            raw = {"topology": {}} | raw
        return Profile.model_validate(raw)
    except (OSError, UnicodeDecodeError, TypeError) as e:
        raise UserError(f"launch profile {path} cannot be read: {e}") from None
    except ValidationError as e:
        raise UserError(f"launch profile {path}: {'; '.join(_faults(e))}") from None


def _faults(error: ValidationError) -> list[str]:
    """Every field and what is wrong with it; never its value, which might be a secret."""
    faults = []
    for e in error.errors():
        field, text = ".".join(map(str, e["loc"])), e["msg"].removeprefix("Value error, ")
        if e["type"] == "extra_forbidden":
            faults.append(f"unknown key {field}")
        else:
            faults.append(f"{field}: {text}" if field else text)
    return faults
