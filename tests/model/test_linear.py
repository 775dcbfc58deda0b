"""The matrix product's own gradient rule."""

import jax
import jax.numpy as jnp
import numpy as np

from olmo_core_jax.model.linear import linear


def inputs():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(2, 64, 7), (3, 7), (2, 64, 3)]
    return [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]


def test_gradients_equal_autodiff():
    x, weight, d_out = inputs()
    value, ours = jax.vjp(linear, x, weight)
    expected, autodiff = jax.vjp(lambda x, w: x @ w.T, x, weight)
    np.testing.assert_allclose(value, expected, atol=1e-6)
    for a, e in zip(ours(d_out), autodiff(d_out), strict=True):
        np.testing.assert_allclose(a, e, atol=2e-5)


def test_a_weights_gradient_of_bfloat16_products_is_not_rounded():
    x, weight, d_out = inputs()
    x, d_out = x.astype(jnp.bfloat16), d_out.astype(jnp.bfloat16)
    d_x, d_weight = jax.vjp(linear, x, weight)[1](d_out)
    assert (d_x.dtype, d_weight.dtype) == (jnp.bfloat16, jnp.float32)
    exact = np.einsum("bso,bsi->oi", np.asarray(d_out, "f8"), np.asarray(x, "f8"))
    assert np.abs(d_weight - exact).max() < 1e-4 * np.abs(exact).max()
    rounded = np.asarray(d_weight.astype(jnp.bfloat16), "f8")
    assert np.abs(rounded - exact).max() > 1e-4 * np.abs(exact).max(), "bf16 would show"
