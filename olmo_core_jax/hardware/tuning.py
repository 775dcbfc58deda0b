"""What each TPU generation and GPU is started with: topology defaults, and compiler flags with a reason each.

A launch profile may override any of it. None of it may change the recipe's numbers beyond rounding.
"""

from dataclasses import dataclass

from olmo_core_jax.hardware import shapes
from olmo_core_jax.hardware.topology import Topology


@dataclass(frozen=True)
class Flag:
    """One entry of LIBTPU_INIT_ARGS."""

    name: str
    value: str
    reason: str

    def __str__(self) -> str:
        return f"--{self.name}={self.value}"


VMEM = Flag(
    "xla_tpu_scoped_vmem_limit_kib",
    "65536",
    "2048-token attention blocks do not fit the default scoped VMEM",
)
CLOCK = Flag(
    "xla_tpu_dvfs_p_state",
    "7",
    "the highest clock state; without it long matrix products are throttled early",
)
SPARSE_CORE = (
    Flag(
        "xla_tpu_enable_sparse_core_collective_offload_all_gather",
        "true",
        "FSDP gathers run beside the matrix units",
    ),
    Flag(
        "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather",
        "true",
        "the same over two torus axes at once",
    ),
    Flag(
        "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter",
        "true",
        "gradient scatters likewise",
    ),
    Flag(
        "xla_tpu_enable_sparse_core_collective_offload_all_reduce",
        "true",
        "norms and losses likewise",
    ),
    Flag(
        "xla_tpu_enable_all_gather_offload_tracing", "true", "shows offloaded gathers in profiles"
    ),
    Flag(
        "xla_sc_disable_megacore_partitioning",
        "true",
        "needed by the offload: its kernels are not split over cores",
    ),
    Flag(
        "xla_tpu_use_tc_device_shape_on_sc",
        "true",
        "the offload keeps the tensor core's layouts, so nothing is copied",
    ),
    Flag(
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather",
        "false",
        "a fused gather would go back to the tensor core",
    ),
)

FLAGS: dict[str, tuple[Flag, ...]] = {
    "TPU v5p": (VMEM,),
    "TPU v6e": (Flag("xla_tpu_scoped_vmem_limit_kib", "98304", VMEM.reason),),
    "TPU7x": (VMEM, CLOCK, *SPARSE_CORE),
}

# Instances a device at once, the policy and the head's chunks: what docs/compile.md found for the 7B at 8192 tokens.
_CHOICES: dict[str, dict] = {
    "TPU v5p": {"max_per_device_batch": 2, "remat": "mlp", "loss_chunks": 8},
    "TPU v6e": {"max_per_device_batch": 1, "remat": "mlp", "loss_chunks": 8},
    "TPU7x": {"max_per_device_batch": 4, "remat": "mlp", "loss_chunks": 8},
    "A100 40GB": {"max_per_device_batch": 1, "remat": "attention_context", "loss_chunks": 8},
    "A100 80GB": {"max_per_device_batch": 1, "remat": "none", "loss_chunks": 8},
    "H100 SXM": {"max_per_device_batch": 1, "remat": "none", "loss_chunks": 8},
    "H200": {"max_per_device_batch": 2, "remat": "none", "loss_chunks": 8},
    "B200": {"max_per_device_batch": 4, "remat": "none", "loss_chunks": 8},
    # Too small for the 7B on one node.
    "L4": {"max_per_device_batch": 1, "remat": "block", "loss_chunks": 8},
}


def default_topology(shape_name: str) -> Topology:
    """The topology that a shape is used with unless a profile says otherwise. Raises UserError for unknown shapes."""
    shape = shapes.shape(shape_name)
    if shape.chip is None:
        return Topology.model_validate({"platform": shape.platform})
    chosen = {"platform": shape.platform} | _CHOICES[shape.chip.name]
    if shape.platform == "tpu":
        flags = [str(f) for f in FLAGS[shape.chip.name]]
        chosen |= {"attention": "splash", "libtpu_flags": flags}
    return Topology.model_validate(chosen)
