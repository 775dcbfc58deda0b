"""Attention with one signature and several kernels.

A window counts the tokens that a query sees, its own included; -1 is full causal attention.
B batch, S sequence, H query heads, G key/value heads, R = H/G query heads a key head, K head width.
"""

import jax
import jax.numpy as jnp

from olmo_core_jax.errors import UserError

FULL = -1


def attend(q_BSHK, k_BSGK, v_BSGK, *, window: int, kernel: str = "auto") -> jax.Array:
    """softmax(q k^T / sqrt(K)) v under the causal mask and the window, as [B, S, H, K] in q's dtype.

    Query head h reads key head h // R. Scores and softmax are fp32 whatever the inputs are.
    """
    kernel = resolve_kernel(kernel)
    if kernel == "reference":
        return reference(q_BSHK, k_BSGK, v_BSGK, window=window)
    raise UserError(f"attention {kernel!r} is unknown: choose auto or reference")


def resolve_kernel(kernel: str) -> str:
    """The kernel that `auto` stands for on this backend; any other name stands for itself."""
    return "reference" if kernel == "auto" else kernel


def causal_window_mask(length: int, window: int) -> jax.Array:
    """bool [S, S]: query i sees key j when j <= i and, with a window, j > i - window."""
    i, j = jnp.arange(length)[:, None], jnp.arange(length)[None, :]
    return (j <= i) if window == FULL else (j <= i) & (j > i - window)


def reference(q_BSHK, k_BSGK, v_BSGK, *, window: int) -> jax.Array:
    """The definition, S x S scores and all. Every other kernel is tested against it."""
    B, S, H, K = q_BSHK.shape
    G = k_BSGK.shape[2]
    q_BSGRK = q_BSHK.reshape(B, S, G, H // G, K)
    scores = (
        jnp.einsum("bsgrk,btgk->bgrst", q_BSGRK, k_BSGK, preferred_element_type=jnp.float32)
        * K**-0.5
    )
    scores = jnp.where(causal_window_mask(S, window), scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BSGK.dtype)
    return jnp.einsum("bgrst,btgk->bsgrk", weights, v_BSGK).reshape(B, S, H, K)
