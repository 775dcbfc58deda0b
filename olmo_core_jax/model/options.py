"""How a model is computed: choices that may change speed and memory, never the mathematics."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import jax
from jax.sharding import Mesh, NamedSharding

from olmo_core_jax.hardware.topology import Topology

AxisNames = tuple[str | None, ...]
Shard = Callable[[AxisNames], NamedSharding]


@dataclass(frozen=True)
class ModelOptions:
    """compute_dtype: of activations and the matrices' copies. attention: a kernel of attention.py. remat: a policy of
    remat.py. scan_layers False unrolls the cycles over the same parameters.

    shard maps logical axis names to a sharding; None leaves every array alone. The model says what its axes are called
    and nothing else about devices.
    """

    compute_dtype: str = "float32"
    attention: str = "auto"
    scan_layers: bool = True
    remat: str = "none"
    shard: Shard | None = None

    @property
    def platform(self) -> str:
        """Of the devices that the program is for: they need not be here when it is only compiled."""
        return platform_of(self.shard)

    def constrain(self, x: jax.Array, *names: str | None) -> jax.Array:
        """x with the sharding of its named axes, or x itself where no mesh is in use."""
        return x if self.shard is None else jax.lax.with_sharding_constraint(x, self.shard(names))

    def exact_matmuls(self):
        """A context in which fp32 products are fp32, also on chips that would round their inputs."""
        return jax.default_matmul_precision(
            "highest" if self.compute_dtype == "float32" else "default"
        )


def platform_of(shard: Shard | None) -> str:
    """cpu, tpu, gpu ...: of the mesh's devices, or the default backend's where there is no mesh."""
    if shard is None:
        return jax.default_backend()
    return cast(Mesh, shard(()).mesh).devices.flat[0].platform


def model_options(
    topology: Topology, compute_dtype: str = "float32", shard: Shard | None = None
) -> ModelOptions:
    """The options that a topology asks for."""
    return ModelOptions(
        compute_dtype, topology.attention, topology.scan_layers, topology.remat, shard
    )
