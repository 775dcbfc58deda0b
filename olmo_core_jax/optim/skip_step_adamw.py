"""AdamW that skips an update whose loss or gradient norm is out of line with the last ones.

The arithmetic and the rule are OLMo-core's SkipStepAdamW (olmo_core/optim/adamw.py, skip_step_optimizer.py). Two
things differ on purpose: the window is part of the state, hence of the checkpoint; and a non-finite loss or gradient
is skipped without entering the window, where it would make every later comparison false.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from olmo_core_jax.recipes.schema import Optimizer, SkipRule


class SkipStepAdamWState(NamedTuple):
    """count: updates that Adam has taken, skipped ones excepted. The rings hold what came before the current update;
    entry `seen % window` is the oldest once `seen` >= window."""

    count: jax.Array  # int32 []
    mu: dict  # as the parameters
    nu: dict
    losses: jax.Array  # f32 [window]
    grad_norms: jax.Array  # f32 [window]
    seen: jax.Array  # int32 []


def skip_step_adamw(
    opt: Optimizer, moment_dtype=jnp.float32
) -> optax.GradientTransformationExtraArgs:
    """The transformation of a recipe's optimizer section.

    update(grads, state, params, *, loss, learning_rate, grad_norm=None): loss is the cross-entropy without z-loss,
    learning_rate an f32 scalar of this very update, grad_norm the norm before clipping (computed when absent).
    A skipped update leaves parameters, moments and count bit for bit as they were.
    """
    window = opt.skip.window if opt.skip else 2

    def init(params) -> SkipStepAdamWState:
        def zeros():
            return optax.tree.zeros_like(params, dtype=moment_dtype)

        ring = jnp.zeros(window, jnp.float32)
        count = jnp.full((), opt.adam_count_start, jnp.int32)
        return SkipStepAdamWState(
            count, zeros(), zeros(), ring, ring.copy(), jnp.zeros((), jnp.int32)
        )

    def update(grads, state, params, *, loss, learning_rate, grad_norm=None):
        norm = global_norm(grads) if grad_norm is None else grad_norm
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        go = finite & _in_line(state, loss, norm, opt.skip)
        clip = 1.0 if opt.clip_norm is None else jnp.minimum(1.0, opt.clip_norm / (norm + 1e-6))
        steps = (state.count + 1).astype(jnp.float32)
        bias1, bias2 = 1 - jnp.float32(opt.beta1) ** steps, 1 - jnp.float32(opt.beta2) ** steps

        def leaf(path, g, p, m, v):
            g, p32 = g.astype(jnp.float32) * clip, p.astype(jnp.float32)
            new_m = m.astype(jnp.float32) * opt.beta1 + g * (1 - opt.beta1)
            new_v = v.astype(jnp.float32) * opt.beta2 + g * g * (1 - opt.beta2)
            adam = new_m / (jnp.sqrt(new_v) / jnp.sqrt(bias2) + opt.eps)
            delta = (
                -p32 * (learning_rate * weight_decay(path, opt)) - (learning_rate / bias1) * adam
            )
            # x + (-0.0) is x for every x, the negative zero included.
            return (
                jnp.where(go, delta, -0.0),
                jnp.where(go, new_m.astype(m.dtype), m),
                jnp.where(go, new_v.astype(v.dtype), v),
            )

        leaves = jax.tree_util.tree_map_with_path(leaf, grads, params, state.mu, state.nu)
        updates, mu, nu = jax.tree.transpose(
            jax.tree.structure(grads), jax.tree.structure((0, 0, 0)), leaves
        )
        slot = jnp.where(
            finite, state.seen % window, window
        )  # `window` is out of bounds: nothing is written
        return updates, SkipStepAdamWState(
            count=state.count + go,
            mu=mu,
            nu=nu,
            losses=state.losses.at[slot].set(loss, mode="drop"),
            grad_norms=state.grad_norms.at[slot].set(norm, mode="drop"),
            seen=state.seen + finite,
        )

    return optax.GradientTransformationExtraArgs(init, update)


def weight_decay(path, opt: Optimizer) -> float:
    """The decay of the parameter at a tree path: the embedding's own, and one for all the rest, gains included."""
    return opt.embedding_weight_decay if path[0].key == "embed" else opt.weight_decay


def global_norm(grads) -> jax.Array:
    """The 2-norm of all gradients together, f32."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads)))


def _in_line(state: SkipStepAdamWState, loss, norm, rule: SkipRule | None) -> jax.Array:
    """Neither value exceeds the ring's mean by more than sigma deviations, or the ring is still too short to tell."""
    if rule is None:
        return jnp.array(True)
    n = jnp.minimum(state.seen, rule.window)
    too_few = n + 1 < max(2, rule.window // 2)

    def fits(value, ring):
        mean, std = _mean_std(ring, n)
        return value - mean <= rule.sigma * std

    return too_few | (fits(loss, state.losses) & fits(norm, state.grad_norms))


def _mean_std(ring, n):
    """Mean and Bessel-corrected deviation of the ring's first n entries (n >= 1)."""
    valid = jnp.arange(ring.size) < n
    mean = jnp.sum(jnp.where(valid, ring, 0.0)) / n
    squares = jnp.where(valid, jnp.square(ring - mean), 0.0)
    return mean, jnp.sqrt(jnp.sum(squares) / (n - 1))
