"""The hardware table against published figures that are written here a second time, by hand."""

import pytest

from olmo_core_jax.errors import UserError
from olmo_core_jax.hardware.chips import CHIPS, peak_flops
from olmo_core_jax.hardware.shapes import all_shapes, shape

# name: topology, hosts, chips, JAX devices, machine, GiB and TFLOP/s a device (Google's pages on each TPU)
SLICES = {
    "v5p-8": ("2x2x1", 1, 4, 4, "ct5p-hightpu-4t", 95, 459),
    "v5p-128": ("4x4x4", 16, 64, 64, "ct5p-hightpu-4t", 95, 459),
    "v5p-256": ("4x4x8", 32, 128, 128, "ct5p-hightpu-4t", 95, 459),
    "v5p-512": ("4x8x8", 64, 256, 256, "ct5p-hightpu-4t", 95, 459),
    "v5p-12288": ("16x16x24", 1536, 6144, 6144, "ct5p-hightpu-4t", 95, 459),
    "v6e-1": ("1x1", 1, 1, 1, "ct6e-standard-1t", 32, 918),
    "v6e-8": ("2x4", 2, 8, 8, "ct6e-standard-4t", 32, 918),
    "v6e-256": ("16x16", 64, 256, 256, "ct6e-standard-4t", 32, 918),
    "tpu7x-2": ("1x1x1", 1, 1, 2, "tpu7x-standard-1t", 96, 1153.5),
    "tpu7x-128": ("4x4x4", 16, 64, 128, "tpu7x-standard-4t", 96, 1153.5),
    "tpu7x-512": ("4x8x8", 64, 256, 512, "tpu7x-standard-4t", 96, 1153.5),
}


@pytest.mark.parametrize("name", SLICES)
def test_slice(name):
    topology, hosts, chips, devices, machine, gib, tflops = SLICES[name]
    found = shape(name)
    assert (found.topology, found.hosts, found.chips, found.devices, found.machine) == (
        topology,
        hosts,
        chips,
        devices,
        machine,
    )
    assert found.chip.memory_per_device_gib == gib
    assert found.chip.peak_per_device == tflops * 1e12
    assert shape(f"{name.split('-')[0]}-{topology}") == found


def test_every_shape_is_consistent():
    for found in all_shapes():
        assert shape(found.name) == found
        assert found.chips == found.hosts * found.chips_per_host
        assert (found.resource is None) == (found.chip is None)


@pytest.mark.parametrize("name", ["v5p-4x4x16", "tpu7x-8x8x12", "v5p-4x4x560"])
def test_other_tori_are_accepted(name):
    assert shape(name).chips == shape(name).hosts * 4


@pytest.mark.parametrize(
    "name",
    [
        "v5p-8x4x4",
        "v5p-3x4x4",
        "v5p-4x4x564",
        "tpu7x-2x2x3",
        "v6e-32x32",
        "v5p-7",
        "v4-8",
        "tpu7x",
        "v5p-0x4x4",
        "v5p-04x4x4",
        "v5p-٤x4x4",
        "",
    ],
)
def test_impossible_shapes_are_refused(name):
    with pytest.raises(UserError, match=r"choose|customary|sizes are"):
        shape(name)


def test_hosts_of_gpu_and_cpu_shapes():
    assert shape("h100", hosts=4).devices == 32
    assert shape("n2-standard-16", hosts=2).devices == 2
    with pytest.raises(UserError, match="has 16 hosts"):
        shape("tpu7x-4x4x4", hosts=3)


def test_where_compilers_imagine_a_shape():
    assert shape("v5p-256").described()[1] == "v5p:4x4x8"
    assert shape("h200").described()[1] == "1x1x8"
    assert shape("h200").described(1)[1] == "1x1x1"
    assert shape("h100", hosts=4).described()[1] == "1x4x8"


@pytest.mark.parametrize(
    ("name", "devices", "said"),
    [
        ("e2-standard-4", None, "no accelerator"),
        ("h200", 9, "1 to 8 GPUs, not 9"),
        ("h200", 0, "1 to 8 GPUs, not 0"),
        ("v5p-256", 3, "128 devices, not 3"),
    ],
)
def test_what_cannot_be_compiled_for_is_refused(name, devices, said):
    with pytest.raises(UserError, match=said):
        shape(name).described(devices)


# Dense bf16 TFLOP/s of one JAX device by jax's own device_kind.
PEAKS = {
    "TPU v4": 275, "TPU v5 lite": 197, "TPU v5": 459, "TPU v5p": 459, "TPU v6 lite": 918, "TPU7x": 1153.5,
    "NVIDIA A100-SXM4-40GB": 312, "NVIDIA A100-SXM4-80GB": 312, "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 PCIe": 756, "NVIDIA H200": 989.4, "NVIDIA B200": 2250, "NVIDIA L4": 121,
}  # fmt: skip


def test_peaks_are_the_published_dense_figures():
    assert {kind: peak_flops(kind) for kind in PEAKS} == {
        kind: t * 1e12 for kind, t in PEAKS.items()
    }
    assert len({chip.name for chip in CHIPS}) == len(CHIPS)


@pytest.mark.parametrize("kind", ["cpu", "TPU v9", "NVIDIA H100 NVL", ""])
def test_an_unknown_device_has_no_peak(kind):
    assert peak_flops(kind) is None
