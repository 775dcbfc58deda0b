"""The node shapes that jobs run on, as data: TPU slices by topology or core count, GPU and CPU machines.

A TPU slice is named `FAMILY-TOPOLOGY` (tpu7x-4x4x4) or, where a core count has a customary topology, `FAMILY-CORES`
(v5p-256: cores are TensorCores, two a chip on v5p and TPU7x, one on v6e). Machine types, labels and topologies follow
Google's GKE documentation ("TPU configurations", "About GPUs in GKE") and its accelerated-processing-kit's table.
"""

import math
import re
from dataclasses import dataclass

from olmo_core_jax.errors import UserError
from olmo_core_jax.hardware.chips import Chip, chip_named

ACCELERATOR_LABEL = "cloud.google.com/gke-tpu-accelerator"
TOPOLOGY_LABEL = "cloud.google.com/gke-tpu-topology"
GPU_LABEL = "cloud.google.com/gke-accelerator"
MACHINE_LABEL = "node.kubernetes.io/instance-type"


@dataclass(frozen=True)
class Shape:
    """What one slice (TPU) or one group of equal nodes (GPU, CPU) consists of.

    chips_per_host chips of `chip` on each of `hosts` machines; resource is what a pod asks for (None: CPU only).
    """

    name: str
    platform: str
    hosts: int
    chips_per_host: int
    machine: str
    host_ram_gb: int | None
    host_vcpu: int | None
    chip: Chip | None
    resource: str | None
    node_selector: tuple[tuple[str, str], ...]
    topology: str | None = None

    @property
    def chips(self) -> int:
        return self.hosts * self.chips_per_host

    @property
    def devices(self) -> int:
        """JAX devices: two a chip on TPU7x, else one a chip; one a process on CPU."""
        return self.chips * self.chip.devices if self.chip else self.hosts

    @property
    def multi_host(self) -> bool:
        return self.hosts > 1

    def described(self, devices: int | None = None) -> tuple[Chip, str]:
        """The chip, and where JAX's compilers are to imagine it: `v5p:4x4x8`, or GPUs as slices x nodes x GPUs a node.

        devices: so many GPUs of one node. Raises UserError for a shape that has no accelerator or not so many.
        """
        if self.chip is None:
            raise UserError(
                f"{self.name} has no accelerator to compile for; name a TPU or GPU shape"
            )
        if self.topology:
            if devices not in (None, self.devices):
                raise UserError(
                    f"{self.name} is a slice of {self.devices} devices, not {devices}: name another topology"
                )
            return self.chip, f"{self.name.partition('-')[0]}:{self.topology}"
        if devices is not None and not 0 < devices <= self.chips_per_host:
            raise UserError(
                f"a node of {self.name} has 1 to {self.chips_per_host} GPUs, not {devices}"
            )
        hosts, gpus = (self.hosts, self.chips_per_host) if devices is None else (1, devices)
        return self.chip, f"1x{hosts}x{gpus}"


@dataclass(frozen=True)
class _Family:
    """A TPU generation: cores a chip, its customary topologies, and its machines by chips a host."""

    prefix: str
    chip: str
    cores_per_chip: int
    label: str
    max_cubes: int
    topologies: tuple[str, ...]
    machines: tuple[tuple[int, str, int | None, int | None], ...]


# The first topology of a core count is what `FAMILY-CORES` means.
_SMALL_3D = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")
_V5P: tuple[str, ...] = (
    *_SMALL_3D,
    "4x4x4",
    "4x4x8",
    "4x4x12",
    "4x8x8",
    "4x4x20",
    "4x8x12",
    "8x8x8",
    "8x8x16",
    "8x16x16",
)
_V5P += ("12x16x16", "16x16x16", "16x16x24")
_V6E = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_7X = ("1x1x1", *_SMALL_3D, "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16", "16x16x16")

FAMILIES = (
    _Family("v5p", "TPU v5p", 2, "tpu-v5p-slice", 140, _V5P, ((4, "ct5p-hightpu-4t", 448, 208),)),
    _Family("v6e", "TPU v6e", 1, "tpu-v6e-slice", 0, _V6E,
            ((1, "ct6e-standard-1t", None, None), (4, "ct6e-standard-4t", 720, 180))),
    _Family("tpu7x", "TPU7x", 2, "tpu7x", 144, _7X,
            ((1, "tpu7x-standard-1t", None, None), (4, "tpu7x-standard-4t", 960, 224))),
)  # fmt: skip

# name: machine type, GPUs, chip, accelerator label, host RAM in GB, vCPUs
_GPUS = {
    "l4": ("g2-standard-96", 8, "L4", "nvidia-l4", 384, 96),
    "a100-40": ("a2-highgpu-8g", 8, "A100 40GB", "nvidia-tesla-a100", 680, 96),
    "a100-80": ("a2-ultragpu-8g", 8, "A100 80GB", "nvidia-a100-80gb", 1360, 96),
    "h100": ("a3-highgpu-8g", 8, "H100 SXM", "nvidia-h100-80gb", 1872, 208),
    "h100-mega": ("a3-megagpu-8g", 8, "H100 SXM", "nvidia-h100-mega-80gb", 1872, 208),
    "h200": ("a3-ultragpu-8g", 8, "H200", "nvidia-h200-141gb", 2952, 224),
    "b200": ("a4-highgpu-8g", 8, "B200", "nvidia-b200", 3968, 224),
}
_CPUS = {
    "e2-standard-4": (16, 4),
    "n2-standard-16": (64, 16),
    "c3-standard-44": (176, 44),
    "c4-standard-96": (360, 96),
}


def shape(name: str, hosts: int | None = None) -> Shape:
    """The shape of this name; `hosts` sets the number of machines of a GPU or CPU shape (default 1).

    Raises UserError that lists what would have been understood.
    """
    prefix, _, rest = name.partition("-")
    family = next((f for f in FAMILIES if f.prefix == prefix), None)
    if family:
        found = _slice(family, rest)
        if hosts not in (None, found.hosts):
            raise UserError(f"shape {name} has {found.hosts} hosts, not {hosts}: leave `hosts` out")
        return found
    if name in _GPUS:
        machine, gpus, chip, label, ram, vcpu = _GPUS[name]
        select = ((GPU_LABEL, label),)
        return Shape(
            name,
            "cuda",
            hosts or 1,
            gpus,
            machine,
            ram,
            vcpu,
            chip_named(chip),
            "nvidia.com/gpu",
            select,
        )
    if name in _CPUS:
        ram, vcpu = _CPUS[name]
        return Shape(
            name, "cpu", hosts or 1, 0, name, ram, vcpu, None, None, ((MACHINE_LABEL, name),)
        )
    known = ", ".join([f"{f.prefix}-TOPOLOGY" for f in FAMILIES] + list(_GPUS) + list(_CPUS))
    raise UserError(f"hardware {name!r} is not known; choose one of: {known}")


def all_shapes() -> list[Shape]:
    """Every customary TPU slice by topology, then one node of every GPU and CPU shape."""
    slices = [_slice(f, t) for f in FAMILIES for t in f.topologies]
    return slices + [shape(name) for name in (*_GPUS, *_CPUS)]


def _slice(family: _Family, size: str) -> Shape:
    topology = _topology(family, size)
    chips = math.prod(int(n) for n in topology.split("x"))
    per_host = 1 if chips == 1 else 4
    machine, ram, vcpu = next((m, r, v) for n, m, r, v in family.machines if n == per_host)
    select = ((ACCELERATOR_LABEL, family.label), (TOPOLOGY_LABEL, topology))
    name = f"{family.prefix}-{topology}"
    chip = chip_named(family.chip)
    return Shape(
        name,
        "tpu",
        chips // per_host,
        per_host,
        machine,
        ram,
        vcpu,
        chip,
        "google.com/tpu",
        select,
        topology,
    )


def _topology(family: _Family, size: str) -> str:
    if re.fullmatch(r"[1-9][0-9]*", size):
        cores: dict[int, str] = {}
        for t in family.topologies:
            cores.setdefault(math.prod(map(int, t.split("x"))) * family.cores_per_chip, t)
        if int(size) in cores:
            return cores[int(size)]
        raise UserError(
            f"{family.prefix}-{size}: no slice has {size} cores; sizes are {', '.join(map(str, sorted(cores)))}"
        )
    if size in family.topologies or _is_large_torus(family, size):
        return size
    shown = ", ".join(family.topologies)
    raise UserError(
        f"{family.prefix}-{size}: not a topology of this TPU; customary ones are {shown}"
        + (
            "; larger ones have dimensions that are multiples of 4 and do not decrease"
            if family.max_cubes
            else ""
        )
    )


def _is_large_torus(family: _Family, size: str) -> bool:
    """From one 4x4x4 cube up: multiples of 4, in non-decreasing order, within the largest pod."""
    if not re.fullmatch(r"[1-9][0-9]*(x[1-9][0-9]*){2}", size):  # one spelling a shape: no 04
        return False
    dims = [int(n) for n in size.split("x")]
    whole = all(n % 4 == 0 for n in dims) and dims == sorted(dims)
    return whole and math.prod(dims) // 64 <= family.max_cubes
