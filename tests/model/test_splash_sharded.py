"""Splash attention over a mesh: batch, heads and sequence split, in a process of eight devices."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from functools import partial
from jax.sharding import NamedSharding
from olmo_core_jax.model.attention import FULL, reference
from olmo_core_jax.model.splash import splash
from olmo_core_jax.hardware.topology import Mesh
from olmo_core_jax.train.mesh import make_mesh, named_sharding

mesh = make_mesh(Mesh(fsdp=2, tensor=2, context=2))
shard = partial(named_sharding, mesh)
B, S, H, G, K = 2, 512, 4, 2, 16
names = ("batch", "sequence", "act_heads", None)
keys = jax.random.split(jax.random.key(0), 4)
shapes = [(B, S, H, K), (B, S, G, K), (B, S, G, K), (B, S, H, K)]
q, k, v, w = (jax.device_put(jax.random.normal(i, s), shard(names)) for i, s in zip(keys, shapes))


def both(kernel):
    def loss(q, k, v):
        out = kernel(q, k, v)
        return jnp.sum(out * w), out
    (_, out), grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
    return out, *grads


for window in (FULL, 200):
    expected = both(partial(reference, window=window))
    actual = both(partial(splash, window=window, shard=shard, block=128))
    for a, e in zip(actual, expected):
        np.testing.assert_allclose(a, e, atol=5e-6 * max(1, np.abs(e).max()), rtol=0)
    assert actual[0].sharding.is_equivalent_to(shard(names), 4), actual[0].sharding
print("equal on", mesh.size)
"""


@pytest.mark.slow
def test_splash_over_a_mesh_equals_the_reference():
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | flags,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "equal on 8"
