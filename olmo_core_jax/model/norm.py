"""Root-mean-square normalisation with a gain."""

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, gain: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * gain over the last axis, in x's dtype.

    Everything up to and including the gain is fp32 and only the product is rounded; rounding before it is a different
    function in bf16.
    """
    x32 = x.astype(jnp.float32)
    inverse_rms = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * inverse_rms * gain.astype(jnp.float32)).astype(x.dtype)
