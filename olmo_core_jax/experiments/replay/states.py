"""A training state from the reference's native checkpoint, and its differences from another one.

The state (weights, moments, Adam count) is the reference's own; the skip rule's history, which no native checkpoint
holds, comes from the reference's log. So a stretch of any run can be checked without the updates before it, and
without the slow drift of two frameworks.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from olmo_core_jax.checkpoint.formats.olmo_core import MOMENTS, NativeCheckpoint
from olmo_core_jax.checkpoint.tensors import LazyArray
from olmo_core_jax.compare.curves import CE, GRAD_NORM, Rows
from olmo_core_jax.errors import UserError
from olmo_core_jax.experiments.replay.comparison import StateGap, TensorGap
from olmo_core_jax.model.tree import flatten, put
from olmo_core_jax.optim.skip_step_adamw import SkipStepAdamWState
from olmo_core_jax.recipes.schema import Precision, Stage
from olmo_core_jax.train.mesh import replicated, state_shardings
from olmo_core_jax.train.step import TrainState


def native_state(
    native: NativeCheckpoint,
    mesh: Mesh,
    stage: Stage,
    precision: Precision,
    history: tuple[np.ndarray, np.ndarray, int],
) -> TrainState:
    """A training state from a native checkpoint, born on its shardings, one piece in memory at a
    time.
    """
    at = state_shardings(mesh, native.cfg)
    whole = replicated(mesh)

    def number(value, dtype) -> jax.Array:
        return jax.device_put(jnp.asarray(value, dtype), whole)

    losses, norms, seen = history
    trees = {"params": native.params(precision.params)} | {
        part: native.moments(part, precision.moments) for part in MOMENTS
    }
    opt = SkipStepAdamWState(
        number(native.adam_step, jnp.int32),
        on_device(trees["mu"], at.opt.mu),
        on_device(trees["nu"], at.opt.nu),
        number(losses, jnp.float32),
        number(norms, jnp.float32),
        number(seen, jnp.int32),
    )
    params = on_device(trees["params"], at.params)
    return TrainState(params, opt, number(native.step, jnp.int32))


def on_device(tree: dict, shardings: dict) -> dict:
    """Arrays on these shardings from LazyArrays; a process reads only what its devices hold."""
    flat: dict = dict(flatten(shardings))
    out: dict = {}
    for path, lazy in flatten(tree):
        put(out, path, _array(lazy, flat[path]))
    return out


def _array(lazy: LazyArray, sharding) -> jax.Array:
    def read(index) -> np.ndarray:
        bounds = [slice(*s.indices(n)[:2]) for s, n in zip(index, lazy.shape, strict=True)]
        leading = tuple(bounds[:2])
        values = lazy.read(leading)
        return values[(*(slice(None) for _ in leading), *bounds[len(leading) :])]

    return jax.make_array_from_callback(lazy.shape, sharding, read)


def skip_history(
    curve: Rows, step: int, stage: Stage, partial: bool = False
) -> tuple[np.ndarray, np.ndarray, int]:
    """The skip rule's rings after update `step`, from the reference's log of a run that began at 1.

    Where the log lacks updates that the rule looks back on: empty rings, as after a restart, if
    `partial`; else UserError.
    """
    window = stage.optimizer.skip.window if stage.optimizer.skip else 2
    losses, norms = np.zeros(window, np.float32), np.zeros(window, np.float32)
    if stage.optimizer.skip is None:
        return losses, norms, 0
    for update in range(max(1, step - window + 1), step + 1):
        if update not in curve:
            if partial:
                return np.zeros_like(losses), np.zeros_like(norms), 0
            raise UserError(
                f"the reference's curve has no update {update}, on which skipping depends"
            )
        losses[(update - 1) % window] = curve[update][CE]
        norms[(update - 1) % window] = curve[update][GRAD_NORM]
    return losses, norms, step


def compare_state(
    state: TrainState, native: NativeCheckpoint, mesh: Mesh, precision: Precision
) -> StateGap:
    """Compares weights and moments tensor by tensor."""
    at = state_shardings(mesh, native.cfg)
    ours = {"params": state.params, "mu": state.opt.mu, "nu": state.opt.nu}
    places = {"params": at.params, "mu": at.opt.mu, "nu": at.opt.nu}
    gaps = []
    for part, tree in ours.items():
        dtype = precision.params if part == "params" else precision.moments
        theirs = native.params(dtype) if part == "params" else native.moments(part, dtype)
        shardings, mine = dict(flatten(places[part])), dict(flatten(tree))
        for path, lazy in flatten(theirs):
            found = np.asarray(_relative_gaps(mine[path], _array(lazy, shardings[path])))
            gaps.append(TensorGap(part, ".".join(path), *map(float, found)))
    return StateGap(int(state.opt.count), native.adam_step or 0, gaps)


@jax.jit
def _relative_gaps(a: jax.Array, b: jax.Array) -> jax.Array:
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    gaps = jnp.stack([jnp.linalg.norm((a - b).ravel()), jnp.max(jnp.abs(a - b))])
    sizes = jnp.stack([jnp.linalg.norm(b.ravel()), jnp.max(jnp.abs(b))])
    return jnp.where(sizes > 0, gaps / sizes, gaps)
