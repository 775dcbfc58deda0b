"""Peak arithmetic rates of accelerators: the one table that MFU and hardware listings are computed from.

Figures are dense bf16 multiply-adds counted as two operations, per chip, as the makers publish them. Data sheets
that lead with a figure "with sparsity" are halved here once, never in the code that uses them. A chip that is not
listed has no peak: its utilisation is unknown, never guessed.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """One accelerator chip. peak_bf16 in FLOP/s and memory_gib in GiB are per chip; a device is what JAX shows."""

    name: str
    peak_bf16: float
    memory_gib: float
    devices: int
    kinds: tuple[str, ...]
    source: str

    @property
    def peak_per_device(self) -> float:
        return self.peak_bf16 / self.devices

    @property
    def memory_per_device_gib(self) -> float:
        return self.memory_gib / self.devices


# The share of a GPU's memory that JAX takes when it starts; JAX's own default is 0.75. CUDA and its libraries need a part.
GPU_MEMORY_SHARE = 0.95

_TPU = "cloud.google.com/tpu/docs/"
_NVIDIA = "NVIDIA data sheet"

CHIPS = (
    Chip("TPU v4", 275e12, 32, 1, ("TPU v4",), _TPU + "v4"),
    Chip("TPU v5e", 197e12, 16, 1, ("TPU v5 lite", "TPU v5e"), _TPU + "v5e"),
    Chip("TPU v5p", 459e12, 95, 1, ("TPU v5", "TPU v5p"), _TPU + "v5p"),
    Chip("TPU v6e", 918e12, 32, 1, ("TPU v6 lite", "TPU v6e"), _TPU + "v6e"),
    Chip("TPU7x", 2307e12, 192, 2, ("TPU7x",), _TPU + "tpu7x"),
    Chip(
        "A100 40GB",
        312e12,
        40,
        1,
        ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"),
        _NVIDIA + " A100",
    ),
    Chip(
        "A100 80GB",
        312e12,
        80,
        1,
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"),
        _NVIDIA + " A100",
    ),
    Chip("H100 SXM", 989.4e12, 80, 1, ("NVIDIA H100 80GB HBM3",), _NVIDIA + " H100 (1979 sparse)"),
    Chip("H100 PCIe", 756e12, 80, 1, ("NVIDIA H100 PCIe",), _NVIDIA + " H100 (1513 sparse)"),
    Chip("H200", 989.4e12, 141, 1, ("NVIDIA H200",), _NVIDIA + " H200 (1979 sparse)"),
    Chip("B200", 2250e12, 180, 1, ("NVIDIA B200",), _NVIDIA + " DGX B200 (36000 sparse for 8)"),
    Chip("L4", 121e12, 24, 1, ("NVIDIA L4",), _NVIDIA + " L4 (242 sparse)"),
)

_BY_KIND = {kind: chip for chip in CHIPS for kind in chip.kinds}


def chip_named(name: str) -> Chip:
    """The chip of this table name. Raises KeyError."""
    return {chip.name: chip for chip in CHIPS}[name]


def peak_flops(device_kind: str) -> float | None:
    """Dense bf16 FLOP/s of one JAX device of this `device_kind`; None where it is not known."""
    chip = _BY_KIND.get(device_kind)
    return chip.peak_per_device if chip else None
