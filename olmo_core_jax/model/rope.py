"""Rotary position embeddings, half-split layout, with YaRN for full-attention layers.

B batch, S sequence, N heads (of any kind), K head width.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from olmo_core_jax.recipes.schema import Model, RopeScaling


class Rope(NamedTuple):
    """Tables for positions 0..S-1: fp32 [S, K/2]; the two halves of a head turn by the same angles."""

    cos: jax.Array
    sin: jax.Array


def rope_tables(cfg: Model, length: int) -> dict[bool, Rope]:
    """Tables by kind of layer: True for full attention (scaled if the recipe scales), False for windows."""
    plain = _tables(inverse_frequencies(cfg.head_dim, cfg.rope_theta), 1.0, length)
    if cfg.rope_scaling is None:
        return {True: plain, False: plain}
    inverse, factor = yarn(cfg.head_dim, cfg.rope_theta, cfg.rope_scaling)
    return {True: _tables(inverse, factor, length), False: plain}


def apply_rope(x_BSNK: jax.Array, rope: Rope) -> jax.Array:
    """Turns the pairs (i, i + K/2) of every head by their position's angles, in fp32; returns x's dtype."""
    low, high = jnp.split(x_BSNK.astype(jnp.float32), 2, axis=-1)
    cos, sin = rope.cos[:, None, :], rope.sin[:, None, :]
    turned = jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
    return turned.astype(x_BSNK.dtype)


def inverse_frequencies(head_dim: int, theta: float) -> np.ndarray:
    """theta^(-2i/K) for i in 0..K/2-1 as fp32, to the bit what PyTorch computes: exponents in fp32, the power rounded
    once, its reciprocal in fp32. (One ulp of the first frequency is 5e-4 rad at position 8192.)"""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return np.float32(1) / (theta ** exponents.astype(np.float64)).astype(np.float32)


def yarn(head_dim: int, theta: float, scaling: RopeScaling) -> tuple[np.ndarray, float]:
    """YaRN's inverse frequencies and the factor on cos and sin (arXiv 2309.00071, sections 3.2 and 3.4).

    Dimensions that turn more than beta_fast times within the original length keep their frequency, those that turn
    less than beta_slow times are slowed by the factor, and a ramp lies between.
    """

    def dimension(turns: float) -> float:
        return (
            head_dim
            * math.log(scaling.original_length / (turns * 2 * math.pi))
            / (2 * math.log(theta))
        )

    last = head_dim // 2 - 1
    low = max(math.floor(dimension(scaling.beta_fast)), 0)
    high = min(math.ceil(dimension(scaling.beta_slow)), last)
    index = np.arange(last + 1, dtype=np.float32)
    ramp = np.clip((index - np.float32(low)) / np.float32(max(high - low, 1e-3)), 0, 1)
    plain = inverse_frequencies(head_dim, theta)
    blended = plain / np.float32(scaling.factor) * ramp + plain * (1 - ramp)
    return blended, 0.1 * math.log(scaling.factor) + 1.0


def _tables(inverse: np.ndarray, factor: float, length: int) -> Rope:
    angles = jnp.outer(jnp.arange(length, dtype=jnp.float32), jnp.asarray(inverse))
    return Rope(jnp.cos(angles) * factor, jnp.sin(angles) * factor)
