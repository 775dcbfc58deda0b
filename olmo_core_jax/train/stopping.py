"""All processes of a job stop after the same update, whichever of them was told to."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


class StopVote:
    """One vote a device and update, added on the devices beside the update itself.

    The sum of update n is looked at when n's metrics are, one update later, on every process: all
    see the same number at the same place, so no process needs to ask another.
    """

    def __init__(self, mesh: Mesh):
        self._sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._size = mesh.devices.size
        self._sum = jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def cast(self, stop: bool) -> jax.Array:
        """Everybody's vote on this update; above 0 where somebody wants to stop. A collective."""

        def mine(index) -> np.ndarray:
            return np.full(len(range(*index[0].indices(self._size))), int(stop), np.int32)

        return self._sum(jax.make_array_from_callback((self._size,), self._sharding, mine))
