"""AdamW that skips an update whose loss or gradient norm is out of line with the last ones.

Arithmetic and rule are OLMo-core's SkipStepAdamW (olmo_core/optim/adamw.py and
skip_step_optimizer.py). Two things differ on purpose: the window is part of the state, hence of the
checkpoint; and a non-finite loss or gradient is skipped without entering the window, where it would
make every later comparison false and so switch the guard into skipping for ever.
"""

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from olmo_core_jax.recipes.schema import Optimizer, SkipRule


class SkipStepAdamWState(NamedTuple):
    """count: updates that Adam has taken, skipped ones excepted. The rings hold losses and gradient
    norms of the updates before this one, skipped ones included; `seen` of them were put in, the next
    goes to seen % window. Leaves are arrays, or what stands for them: shardings, descriptions."""

    count: Any  # int32 []
    mu: dict  # as the parameters, in the moments' dtype
    nu: dict
    losses: Any  # f32 [window]
    grad_norms: Any  # f32 [window]
    seen: Any  # int32 []


def skip_step_adamw(
    opt: Optimizer, moment_dtype=jnp.float32
) -> optax.GradientTransformationExtraArgs:
    """The transformation of a recipe's optimizer section.

    update(grads, state, params, *, loss, learning_rate, grad_norm=None): loss is the cross-entropy
    without z-loss, learning_rate an f32 scalar of this very update, grad_norm the norm before
    clipping (computed when absent). A skipped update leaves parameters, moments and count bit for
    bit as they were.
    """
    window = opt.skip.window if opt.skip else 2

    def init(params) -> SkipStepAdamWState:
        return SkipStepAdamWState(
            count=jnp.full((), opt.adam_count_start, jnp.int32),
            mu=optax.tree.zeros_like(params, dtype=moment_dtype),
            nu=optax.tree.zeros_like(params, dtype=moment_dtype),
            losses=jnp.zeros(window, jnp.float32),
            grad_norms=jnp.zeros(window, jnp.float32),
            seen=jnp.zeros((), jnp.int32),
        )

    def update(grads, state, params, *, loss, learning_rate, grad_norm=None):
        norm = global_norm(grads) if grad_norm is None else grad_norm
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        go = finite & _in_line(state, loss, norm, opt.skip)
        mu, nu = _moments(grads, state, _clip(norm, opt), go, opt)
        # Without the barrier XLA would compute both moments a second time for the parameters'
        # update, from the old values, which it then has to copy before it reuses their buffers.
        mu, nu = jax.lax.optimization_barrier((mu, nu))
        updates = _changes(params, mu, nu, state.count + 1, learning_rate, go, opt)
        slot = jnp.where(finite, state.seen % window, window)  # `window` is outside: not written
        return updates, SkipStepAdamWState(
            count=state.count + go,
            mu=mu,
            nu=nu,
            losses=state.losses.at[slot].set(loss, mode="drop"),
            grad_norms=state.grad_norms.at[slot].set(norm, mode="drop"),
            seen=state.seen + finite,
        )

    # optax's type knows no extra argument that has to be given.
    return optax.GradientTransformationExtraArgs(init, cast(Any, update))


def weight_decay(path, opt: Optimizer) -> float:
    """The decay of the parameter at a tree path: the embedding's own, or everyone else's, norm
    gains and the head included."""
    return opt.embedding_weight_decay if path[0].key == "embed" else opt.weight_decay


def global_norm(grads) -> jax.Array:
    """The 2-norm of all gradients together, f32."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads)))


def _clip(norm, opt: Optimizer):
    """What gradients are multiplied with, always: at most 1, and never quite 1 at the clip norm."""
    return 1.0 if opt.clip_norm is None else jnp.minimum(1.0, opt.clip_norm / (norm + 1e-6))


def _moments(grads, state: SkipStepAdamWState, clip, go, opt: Optimizer):
    """Both moments after the update, or as they were."""

    def leaf(g, m, v):
        g = g.astype(jnp.float32) * clip
        new_m = m.astype(jnp.float32) * opt.beta1 + g * (1 - opt.beta1)
        new_v = v.astype(jnp.float32) * opt.beta2 + g * g * (1 - opt.beta2)
        return jnp.where(go, new_m.astype(m.dtype), m), jnp.where(go, new_v.astype(v.dtype), v)

    pairs = jax.tree.map(leaf, grads, state.mu, state.nu)
    return jax.tree.transpose(jax.tree.structure(grads), jax.tree.structure((0, 0)), pairs)


def _changes(params, mu, nu, count, learning_rate, go, opt: Optimizer):
    """What to add to the parameters: decoupled decay of the old value, and Adam's step."""
    steps = count.astype(jnp.float32)
    step_size = learning_rate / (1 - jnp.float32(opt.beta1) ** steps)
    root = jnp.sqrt(1 - jnp.float32(opt.beta2) ** steps)

    def leaf(path, p, m, v):
        adam = m.astype(jnp.float32) / (jnp.sqrt(v.astype(jnp.float32)) / root + opt.eps)
        decay = learning_rate * weight_decay(path, opt)
        delta = -p.astype(jnp.float32) * decay - step_size * adam
        return jnp.where(go, delta, -0.0)  # x + (-0.0) is x for every x, 0.0 included

    return jax.tree_util.tree_map_with_path(leaf, params, mu, nu)


def _in_line(state: SkipStepAdamWState, loss, norm, rule: SkipRule | None) -> jax.Array:
    """False when a value exceeds its ring's mean by more than sigma deviations. One-sided, and True
    while the ring, the current value included, has fewer than window // 2 entries."""
    if rule is None:
        return jnp.array(True)
    n = jnp.minimum(state.seen, rule.window)
    too_few = n + 1 < max(2, rule.window // 2)

    def fits(value, ring):
        mean, deviation = _mean_and_deviation(ring, n)
        return value - mean <= rule.sigma * deviation

    return too_few | (fits(loss, state.losses) & fits(norm, state.grad_norms))


def _mean_and_deviation(ring, n):
    """Of the ring's first n entries, with Bessel's correction; NaN for n < 2, as torch has it."""
    valid = jnp.arange(ring.size) < n
    mean = jnp.sum(jnp.where(valid, ring, 0.0)) / n
    squares = jnp.where(valid, jnp.square(ring - mean), 0.0)
    return mean, jnp.sqrt(jnp.sum(squares) / (n - 1))
