"""Blockwise attention for CPUs: an online softmax over the blocks that a query block can see.

Blocks above the diagonal or outside the window are never visited, so a sliding layer costs S x window,
and nothing of size S x S exists, in either direction. The backward pass computes the scores again.

B batch, G key/value heads, R query heads a key head, K head width, N blocks, T tokens of a block (queries),
U the same for keys. Blocks lead, so that taking one is a contiguous copy.
"""

from functools import partial

import jax
import jax.numpy as jnp

from olmo_core_jax.model.masks import FULL, visible
from olmo_core_jax.model.remat import save

BLOCK = 128


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def blockwise(q_BSHK, k_BSGK, v_BSGK, window: int, block: int = BLOCK) -> jax.Array:
    """attention.attend's contract. block: tokens; a sequence that it does not divide is padded."""
    return _forward(q_BSHK, k_BSGK, v_BSGK, window, block)[0]


def _forward(q_BSHK, k_BSGK, v_BSGK, window, block):
    length, G = q_BSHK.shape[1], k_BSGK.shape[2]
    q, k, v = (_blocks(x, G, min(block, length)) for x in (q_BSHK, k_BSGK, v_BSGK))
    k, v = k[:, :, :, 0], v[:, :, :, 0]
    N, B, G, R, T, K = q.shape
    scale = K**-0.5

    def query_block(_, i):
        q_i = q[i]

        def key_block(step, carry):
            top, total, out = carry
            # From the diagonal, where every query sees itself: `top` is finite at once.
            j = i - step
            s = _scores(q_i, k[j], i, j, window, scale)
            new_top = jnp.maximum(top, s.max(-1))
            p, shrink = jnp.exp(s - new_top[..., None]), jnp.exp(top - new_top)
            out = out * shrink[..., None] + _dot("bgrtu,bguk->bgrtk", p.astype(v.dtype), v[j])
            return new_top, total * shrink + p.sum(-1), out

        shape = (B, G, R, T)
        start = (jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros((*shape, K)))
        top, total, out = jax.lax.fori_loop(0, _reach(i, window, T), key_block, start)
        return None, ((out / total[..., None]).astype(q.dtype), top + jnp.log(total))

    _, (out, lse) = jax.lax.scan(query_block, None, jnp.arange(N))
    o_BSHK = save(_from_blocks(out, length), "attention")
    return o_BSHK, (q_BSHK, k_BSGK, v_BSGK, o_BSHK, save(lse, "attention"))


def _backward(window, block, residuals, do_BSHK):
    q_BSHK, k_BSGK, v_BSGK, o_BSHK, lse = residuals
    length, G = q_BSHK.shape[1], k_BSGK.shape[2]
    arrays = (q_BSHK, k_BSGK, v_BSGK, do_BSHK, o_BSHK)
    q, k, v, do, o = (_blocks(x, G, min(block, length)) for x in arrays)
    k, v = k[:, :, :, 0], v[:, :, :, 0]
    N, T, K = q.shape[0], q.shape[4], q.shape[5]
    delta = jnp.sum(do.astype(jnp.float32) * o.astype(jnp.float32), -1)

    def query_block(carry, i):
        q_i, do_i, lse_i, delta_i = q[i], do[i], lse[i], delta[i]

        def key_block(step, carry):
            dq_i, dk, dv = carry
            j = i - step
            s = _scores(q_i, k[j], i, j, window, K**-0.5)
            p = jnp.exp(s - lse_i[..., None])
            dp = _dot("bgrtk,bguk->bgrtu", do_i, v[j])
            ds = (p * (dp - delta_i[..., None]) * K**-0.5).astype(q.dtype)
            dq_i += _dot("bgrtu,bguk->bgrtk", ds, k[j])
            dk = dk.at[j].add(_dot("bgrtu,bgrtk->bguk", ds, q_i))
            dv = dv.at[j].add(_dot("bgrtu,bgrtk->bguk", p.astype(v.dtype), do_i))
            return dq_i, dk, dv

        dq_i = jnp.zeros(q_i.shape, jnp.float32)
        dq_i, *carry = jax.lax.fori_loop(0, _reach(i, window, T), key_block, (dq_i, *carry))
        return tuple(carry), dq_i.astype(q.dtype)

    zeros = jnp.zeros(k.shape, jnp.float32)
    (dk, dv), dq = jax.lax.scan(query_block, (zeros, zeros), jnp.arange(N))
    dk, dv = (_from_blocks(x[:, :, :, None], length) for x in (dk, dv))
    return _from_blocks(dq, length), dk.astype(k.dtype), dv.astype(v.dtype)


blockwise.defvjp(_forward, _backward)


def _reach(i, window: int, T: int):
    """How many key blocks query block i sees, its own included."""
    return i + 1 if window == FULL else i + 1 - jnp.maximum(i * T - (window - 1), 0) // T


def _scores(q_i, k_j, i, j, window: int, scale: float):
    """Masked fp32 scores of a query block against a key block."""
    s = _dot("bgrtk,bguk->bgrtu", q_i, k_j) * scale
    position = jnp.arange(q_i.shape[-2])
    seen = visible(i * position.size + position[:, None], j * position.size + position, window)
    return jnp.where(seen, s, -jnp.inf)


_dot = partial(jnp.einsum, preferred_element_type=jnp.float32)


def _blocks(x_BSNK, G: int, block: int):
    """[B,S,N,K] to [N,B,G,R,T,K]; the tail is padded with zeros, which come after every real query and so
    are seen by none."""
    B, S, heads, K = x_BSNK.shape
    x = jnp.pad(x_BSNK, ((0, 0), (0, -S % block), (0, 0), (0, 0)))
    return jnp.transpose(x.reshape(B, -1, block, G, heads // G, K), (1, 0, 3, 4, 2, 5))


def _from_blocks(x, length: int):
    """[N,B,G,R,T,K] back to [B,S,G*R,K]."""
    N, B, G, R, T, K = x.shape
    return jnp.transpose(x, (1, 0, 4, 2, 3, 5)).reshape(B, N * T, G * R, K)[:, :length]
