"""Which instances an update was made from, told by the devices that it was made on.

Each process knows only the ids that its own loader gave. They take the way of the batch itself: onto
the devices that hold the batch's rows, and from there, by one small collective, to every process.
What is logged is thus what was delivered, not what should have been.
"""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from olmo_core_jax.train.mesh import named_sharding


class Delivered:
    """rows: which rows of the global batch of `instances` this process's loader gives."""

    def __init__(self, mesh: Mesh, instances: int, rows: np.ndarray):
        self._shape, self._sharding = (instances,), named_sharding(mesh, ("batch",))
        self._place = np.full(instances, -1)
        self._place[rows] = np.arange(len(rows))
        everywhere = NamedSharding(mesh, PartitionSpec())
        self._gather = jax.jit(lambda ids: ids, out_shardings=everywhere)

    def gather(self, ids: np.ndarray) -> jax.Array:
        """uint32[B] on every process from each one's own uint32[b]. A collective; returns at once."""

        def mine(index) -> np.ndarray:
            return ids[self._place[index[0]]]

        return self._gather(jax.make_array_from_callback(self._shape, self._sharding, mine))
