"""Parameter trees to compare: our checkpoint's and the reference's, both on the job's mesh."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from olmo_core_jax.checkpoint.formats import hf
from olmo_core_jax.checkpoint.store import CheckpointStore
from olmo_core_jax.model.olmo3 import abstract_params
from olmo_core_jax.model.weights import logical_axes
from olmo_core_jax.recipes.schema import Model, Recipe
from olmo_core_jax.train.mesh import param_shardings


def our_params(checkpoints: str, step: int, recipe: Recipe, mesh: Mesh) -> dict:
    """The parameters of one of our checkpoints. Raises UserError that names it where it is not
    good.
    """

    def on_mesh(leaf, sharding):
        return jax.ShapeDtypeStruct(
            leaf.shape, jnp.dtype(recipe.precision.params), sharding=sharding
        )

    like = jax.tree.map(on_mesh, abstract_params(recipe.model), param_shardings(mesh, recipe.model))
    store = CheckpointStore(checkpoints)
    try:
        params, _ = store.restore_params(step, like)
    finally:
        store.close()
    return params


def reference_params(folder: str, recipe: Recipe, mesh: Mesh) -> dict:
    """The reference's HF checkpoint as our tree, in fp32 or the recipe's own parameter dtype."""
    found = hf.open_hf(folder, recipe.model)
    lazy = hf.params_from_hf(found, recipe.precision.params, allow_lossy=True)

    def load(array, sharding):
        host = np.asarray(array)  # one array at a time is whole in memory
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(load, lazy, param_shardings(mesh, recipe.model))


def weight_figures(ours: dict, reference: dict, cfg: Model) -> dict[str, float]:
    """max |ours - reference| over all weights, alone and relative to the largest weight.

    Padding rows of the vocabulary are left out: a published checkpoint may come without them.
    """

    def sizes(axes, a, b):
        real = slice(cfg.vocab_size if axes[0] == "vocab" else None)
        return _sizes(a[real], b[real])

    pairs = jax.tree.map(
        sizes, logical_axes(cfg), ours, reference, is_leaf=lambda x: isinstance(x, tuple)
    )
    difference, largest = np.max([np.asarray(p) for p in jax.tree.leaves(pairs)], axis=0)
    return {
        "end weights, max |difference|": float(difference),
        "end weights, largest": float(largest),
        "end weights, max |difference| / largest weight": float(difference / largest),
    }


@jax.jit
def _sizes(a: jax.Array, b: jax.Array) -> jax.Array:
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.stack([jnp.max(jnp.abs(a - b)), jnp.max(jnp.abs(b))])
