"""The product with an (out, in) matrix, and its gradients in the precision that they deserve."""

import jax
import jax.numpy as jnp


@jax.custom_vjp
def linear(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [..., I] times the transposed master weight [O, I], computed and returned in x's dtype.

    The weight's gradient leaves the product in fp32 even where x is bf16, so that sums over devices and micro-batches
    are fp32 sums, as the reference's are.
    """
    return jnp.einsum("...i,oi->...o", x, weight.astype(x.dtype))


def _forward(x, weight):
    return linear(x, weight), (x, weight)


def _backward(residuals, d_out):
    x, weight = residuals
    d_x = jnp.einsum("...o,oi->...i", d_out, weight.astype(d_out.dtype))
    # All leading axes are summed as they are: flattened, two that are split over devices could not stay so.
    leading = tuple(range(x.ndim - 1))
    if d_out.dtype == jnp.float32:
        # XLA's CPU products want it transposed: a plain copy is fast, but not one that computes d_out on the way.
        d_out = jax.lax.optimization_barrier(d_out)
    d_weight = jnp.tensordot(d_out, x, (leading, leading), preferred_element_type=jnp.float32)
    return d_x, d_weight.astype(weight.dtype)


linear.defvjp(_forward, _backward)
