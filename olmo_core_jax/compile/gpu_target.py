"""NVIDIA GPUs described to XLA, so that it compiles for one that is not there.

The chips' figures are the ones that XLA keeps for its own tests (openxla/xla, xla/backends/gpu/target_config/specs).
"""

from dataclasses import dataclass

from olmo_core_jax.errors import UserError
from olmo_core_jax.hardware.chips import Chip

# The oldest cuDNN and CUDA that programs are compiled for.
_CUDNN, _CUDA = (9, 10), (13, 0)


@dataclass(frozen=True)
class Target:
    """What the compiler decides by. Memory, caches and shared memory in bytes, bandwidth in bytes/s, clock in GHz."""

    kind: str
    capability: int
    cores: int
    lanes: int
    clock: float
    memory: int
    bandwidth: int
    l2: int
    shared_per_core: int

    def text(self) -> str:
        """XLA's GpuTargetConfigProto as text. Hopper and later also have instructions of their own (sm_90a)."""
        accelerated = "feature_extension: ACCELERATED_FEATURES" if self.capability >= 9 else ""
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024
              threads_per_warp: 32
              threads_per_core_limit: 2048
              block_dim_limit_x: 2147483647
              block_dim_limit_y: 65535
              block_dim_limit_z: 65535
              registers_per_core_limit: 65536
              registers_per_block_limit: 65536
              shared_memory_per_block: 49152
              shared_memory_per_core: {self.shared_per_core}
              shared_memory_per_block_optin: {self.shared_per_core - 1024}
              core_count: {self.cores}
              fpus_per_core: {self.lanes}
              clock_rate_ghz: {self.clock}
              device_memory_size: {self.memory}
              memory_bandwidth: {self.bandwidth}
              l2_cache_size: {self.l2}
              cuda_compute_capability {{ major: {self.capability} {accelerated} }}
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: {_CUDNN[0]} minor: {_CUDNN[1]} }}
            runtime_version {{ major: {_CUDA[0]} minor: {_CUDA[1]} }}
            device_description_str: "{self.kind}"
        """


_A100 = {"capability": 8, "cores": 108, "lanes": 64, "clock": 1.41, "l2": 40 << 20}
_A100 |= {"shared_per_core": 164 << 10}
_H = {"capability": 9, "cores": 132, "lanes": 128, "clock": 1.98, "l2": 50 << 20}
_H |= {"shared_per_core": 228 << 10}

TARGETS: dict[str, Target] = {
    "A100 40GB": Target("NVIDIA A100-SXM4-40GB", memory=42331013120, bandwidth=1555200000000, **_A100),
    "A100 80GB": Target("NVIDIA A100-SXM4-80GB", memory=85100068864, bandwidth=2039040000000, **_A100),
    "H100 SXM": Target("NVIDIA H100 80GB HBM3", memory=84942979072, bandwidth=3352320000000, **_H),
    "H200": Target("NVIDIA H200", memory=151397597184, bandwidth=4800000000000, **_H),
    "B200": Target("NVIDIA B200", 10, 148, 128, 1.965, 191514411008, 7672320000000, 132644864, 228 << 10),
}  # fmt: skip


def target_of(chip: Chip) -> Target:
    """The description of a chip. Raises UserError for one that has none."""
    if chip.name not in TARGETS:
        raise UserError(
            f"compile: no description of {chip.name} for XLA; there are {', '.join(TARGETS)}"
        )
    return TARGETS[chip.name]
