"""Attention with one signature and several kernels.

A window counts the tokens that a query sees, its own included; FULL is causal attention without a
window. B batch, S sequence, H query heads, G key/value heads, R = H/G, K head width.
"""

import jax
import jax.numpy as jnp

from olmo_core_jax.errors import UserError
from olmo_core_jax.model.blockwise import blockwise
from olmo_core_jax.model.masks import FULL, visible
from olmo_core_jax.model.options import Shard, platform_of
from olmo_core_jax.model.remat import save
from olmo_core_jax.model.splash import LANES, splash

KERNELS = ("reference", "blockwise", "cudnn", "splash")


def attend(
    q_BSHK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGK: jax.Array,
    *,
    window: int,
    kernel: str = "auto",
    shard: Shard | None = None,
) -> jax.Array:
    """softmax(q k^T / sqrt(K)) v under the causal mask and the window: [B, S, H, K] in q's dtype.

    Query head h reads key head h // R. Scores and softmax are fp32 whatever the inputs are. Every
    kernel names what its backward pass needs beyond q, k and v "attention" (remat.py). Raises
    UserError for a kernel that is unknown or cannot take these inputs.
    """
    match resolve_kernel(kernel, q_BSHK.dtype, q_BSHK.shape[1], platform_of(shard)):
        case "reference":
            return save(reference(q_BSHK, k_BSGK, v_BSGK, window=window), "attention")
        case "blockwise":
            return blockwise(q_BSHK, k_BSGK, v_BSGK, window)
        case "cudnn":
            return cudnn(q_BSHK, k_BSGK, v_BSGK, window=window)
        case "splash":
            return splash(q_BSHK, k_BSGK, v_BSGK, window=window, shard=shard)
    names = ", ".join(("auto", *KERNELS))
    raise UserError(f"topology: attention {kernel!r} is unknown: choose one of {names}")


def resolve_kernel(kernel: str, dtype, length: int, platform: str) -> str:
    """What `auto` stands for; any other name stands for itself.

    cuDNN computes in bf16 only and splash wants whole lanes of 128 tokens; blockwise takes anything anywhere.
    """
    if kernel != "auto":
        return kernel
    if platform in ("gpu", "cuda") and dtype == jnp.bfloat16:
        return "cudnn"
    return "splash" if platform == "tpu" and length % LANES == 0 else "blockwise"


def reference(q_BSHK, k_BSGK, v_BSGK, *, window: int) -> jax.Array:
    """The definition, S x S scores and all. Every other kernel is tested against it."""
    B, S, H, K = q_BSHK.shape
    G = k_BSGK.shape[2]
    q_BSGRK = q_BSHK.reshape(B, S, G, H // G, K)
    scores = jnp.einsum("bsgrk,btgk->bgrst", q_BSGRK, k_BSGK, preferred_element_type=jnp.float32)
    i = jnp.arange(S)
    scores = jnp.where(visible(i[:, None], i[None, :], window), scores * K**-0.5, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BSGK.dtype)
    return jnp.einsum("bgrst,btgk->bsgrk", weights, v_BSGK).reshape(B, S, H, K)


def cudnn(q_BSHK, k_BSGK, v_BSGK, *, window: int) -> jax.Array:
    """NVIDIA's fused kernel, bf16 only; a sliding layer costs what its window costs."""
    if q_BSHK.dtype != jnp.bfloat16:
        raise UserError(
            f"topology: attention cudnn computes in bfloat16, not {q_BSHK.dtype}: "
            "choose blockwise, or precision.compute bfloat16"
        )
    return jax.nn.dot_product_attention(
        q_BSHK,
        k_BSGK,
        v_BSGK,
        is_causal=True,
        local_window_size=None if window == FULL else (window - 1, 0),
        implementation="cudnn",
    )
