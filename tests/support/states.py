"""A small state that differs at every step, for tests of checkpoints."""

import jax
import jax.numpy as jnp
import numpy as np


def state(step: int = 0, layers: int = 3):
    rng = np.random.default_rng(step)
    params = {f"layer_{i}": rng.normal(size=(40, 50)).astype(np.float32) for i in range(layers)}
    params["gain"] = np.ones(64, np.float32)
    return jax.tree.map(jnp.asarray, {"params": params, "step": np.int32(step)})
