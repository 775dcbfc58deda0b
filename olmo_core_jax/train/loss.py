"""Cross-entropy and z-loss of the head, without ever holding all logits, and their divisor.

B batch, S sequence, D model width, V vocabulary (padded; padding takes part in the softmax),
T positions of a chunk.
"""

from functools import partial
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp

from olmo_core_jax.errors import UserError


class Targets(NamedTuple):
    """Position t's target is token t + 1; keep says which positions count."""

    labels_BS: jax.Array  # int32
    keep_BS: jax.Array  # bool


class HeadLoss(NamedTuple):
    """f32 scalars, each already divided. total = ce + z, and only total carries gradients."""

    total: jax.Array
    ce: jax.Array
    z: jax.Array


def shifted_targets(tokens_BS, instance_mask_B, ignored_id: int | None = None) -> Targets:
    """The targets of a batch: none at the last position, in a masked instance, or equal to
    ignored_id. End-of-document tokens, and the first token after one, are targets like any other.
    """
    labels = jnp.concatenate([tokens_BS[:, 1:], jnp.zeros_like(tokens_BS[:, :1])], axis=1)
    inside = jnp.arange(labels.shape[1]) < labels.shape[1] - 1
    keep = inside & jnp.asarray(instance_mask_B)[:, None]
    return Targets(labels, keep if ignored_id is None else keep & (labels != ignored_id))


def loss_divisor(targets: Targets, instance_mask_B) -> jax.Array:
    """OLMo-core's D: the targets that count, plus S (not S - 1) for every masked instance, whose
    tokens so enter the mean with loss 0 (train_module.py, batch_num_tokens_for_loss)."""
    masked = jnp.sum(~jnp.asarray(instance_mask_B)) * targets.labels_BS.shape[1]
    return (jnp.sum(targets.keep_BS) + masked).astype(jnp.float32)


def head_loss(
    h_BSD, head_VD, targets: Targets, divisor, z_multiplier: float, chunks: int = 1
) -> HeadLoss:
    """(sum CE + z_multiplier * sum logsumexp^2) / divisor over the kept targets.

    h_BSD is in the compute dtype, head_VD the master weight; logits and sums are fp32. When it is
    differentiated, loss and gradients come out of one pass over the chunks: no logits are kept or
    computed twice. Raises UserError when `chunks` does not divide S.
    """
    if h_BSD.shape[1] % chunks:
        raise UserError(
            f"topology: loss_chunks {chunks} does not divide the sequence of {h_BSD.shape[1]}"
        )
    sums = _head_loss(h_BSD, head_VD, *targets, 1 / divisor, z_multiplier, chunks)
    total, ce, z = cast(tuple, sums)  # custom_vjp hides the type
    return HeadLoss(total, jax.lax.stop_gradient(ce), jax.lax.stop_gradient(z))


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _head_loss(h_BSD, head_VD, labels_BS, keep_BS, scale, z_multiplier, chunks):
    head = head_VD.astype(h_BSD.dtype)
    small = _logits_are_small(h_BSD, head)

    def chunk(sums, inputs):
        h, labels, keep = inputs
        part = _chunk_sums(h, head, labels, keep, small)
        return (sums[0] + part.ce, sums[1] + part.z), None

    (ce, z), _ = jax.lax.scan(chunk, (0.0, 0.0), _chunked(chunks, h_BSD, labels_BS, keep_BS))
    return _scaled(ce, z, scale, z_multiplier)


def _forward(h_BSD, head_VD, labels_BS, keep_BS, scale, z_multiplier, chunks):
    head = head_VD.astype(h_BSD.dtype)
    gradients = _by_factors if h_BSD.dtype == jnp.float32 else _by_slope
    small = _logits_are_small(h_BSD, head)

    def chunk(carry, inputs):
        ce_sum, z_sum, d_head_DV = carry
        h, labels, keep = inputs
        part = _chunk_sums(h, head, labels, keep, small)
        weight_BT1 = (keep * scale)[..., None]
        softmax_BT1 = weight_BT1 * ((1 + 2 * z_multiplier * part.lse_BT) / part.sum_BT)[..., None]
        d_h, d_head = gradients(h, head, labels, part.exp_BTV, softmax_BT1, weight_BT1)
        return (ce_sum + part.ce, z_sum + part.z, d_head_DV + d_head), d_h

    start = (0.0, 0.0, jnp.zeros(head_VD.shape[::-1], jnp.float32))
    inputs = _chunked(chunks, h_BSD, labels_BS, keep_BS)
    (ce, z, d_head_DV), d_h = jax.lax.scan(chunk, start, inputs)
    # Barriers: the transposition is done once, here, neither again by every reader of the gradient
    # nor inside the product (of which XLA's CPU backend has no transposed bf16 version).
    d_head_DV = jax.lax.optimization_barrier(d_head_DV)
    d_head_VD = jax.lax.optimization_barrier(d_head_DV.T.astype(head_VD.dtype))
    if gradients is _by_factors:
        d_head_VD = d_head_VD.at[labels_BS].add(-h_BSD * (keep_BS * scale)[..., None])
    d_h_BSD = jnp.moveaxis(d_h, 0, 2).reshape(h_BSD.shape)
    return _scaled(ce, z, scale, z_multiplier), (d_h_BSD, d_head_VD)


def _by_slope(h_BTD, head_VD, labels_BT, exp_BTV, softmax_BT1, weight_BT1):
    """(d_h, d_head) of a chunk from the logits' gradient: for accelerators, which compute in bf16, make it
    on the way into the products, and would pay for rows that lie on other devices."""
    hit_BTV = labels_BT[..., None] == jnp.arange(exp_BTV.shape[-1])
    slope_BTV = (exp_BTV * softmax_BT1 - hit_BTV * weight_BT1).astype(h_BTD.dtype)
    d_h = jnp.einsum("btv,vd->btd", slope_BTV, head_VD)
    # D x V, not V x D: so the slope is read as it lies, and only the small h is transposed.
    return d_h, jnp.einsum("btd,btv->dv", h_BTD, slope_BTV, preferred_element_type=jnp.float32)


def _by_factors(h_BTD, head_VD, labels_BT, exp_BTV, softmax_BT1, weight_BT1):
    """The same without a pass over the logits, a twelfth of an update on a CPU: what is constant along the
    vocabulary scales the small operand, and the labels' rows are subtracted by themselves (from d_head
    after the last chunk)."""
    d_h = softmax_BT1 * jnp.einsum("btv,vd->btd", exp_BTV, head_VD)
    d_head = jnp.einsum("btd,btv->dv", h_BTD * softmax_BT1, exp_BTV)
    return d_h - weight_BT1 * head_VD[labels_BT], d_head


def _backward(z_multiplier, chunks, residuals, cotangents):
    d_h, d_head = residuals
    ct = cotangents[0]  # of the total; ce and z are reported, not differentiated
    return d_h * ct.astype(d_h.dtype), d_head * ct.astype(d_head.dtype), None, None, None


_head_loss.defvjp(_forward, _backward)


def _scaled(ce, z, scale, z_multiplier):
    ce, z = ce * scale, z * (z_multiplier * scale)
    return ce + z, ce, z


def _chunked(chunks: int, *arrays):
    """Chunks along a new first axis. Position s goes to chunk s % chunks, so that a sequence that is
    split over devices stays split in every chunk."""
    return tuple(
        jnp.moveaxis(a.reshape(a.shape[0], -1, chunks, *a.shape[2:]), 2, 0) for a in arrays
    )


class _ChunkSums(NamedTuple):
    """ce, z: sums over kept positions of CE and of logsumexp^2; exp_BTV: exp(logits - a constant of each
    position), f32, computed once for the loss and its gradient; sum_BT: its sum; lse_BT: logsumexp."""

    ce: jax.Array
    z: jax.Array
    exp_BTV: jax.Array
    sum_BT: jax.Array
    lse_BT: jax.Array


def _logits_are_small(h_BSD, head_VD) -> jax.Array | None:
    """Is every |logit| under 64, by Cauchy and Schwarz? Then neither exp(logit) nor its sum over the vocabulary
    leaves fp32's normal numbers. None (not asked) in bf16: accelerators find the maximum on the way."""
    if h_BSD.dtype != jnp.float32:
        return None
    longest = [jnp.max(jnp.sum(a * a, axis=-1)) for a in (h_BSD, head_VD)]
    return longest[0] * longest[1] < 64.0**2


def _subtrahend(logits_BTV, small) -> jax.Array:
    """[B, T], subtracted before exp: the maximum; 0 where nothing can overflow, which saves a CPU a pass over the
    logits. NaN is not small."""

    def maximum():
        return jnp.max(logits_BTV, axis=-1)

    def zero():
        return jnp.zeros_like(logits_BTV[..., 0])

    return maximum() if small is None else jax.lax.cond(small, zero, maximum)


def _chunk_sums(h_BTD, head_VD, labels_BT, keep_BT, small) -> _ChunkSums:
    logits = jnp.einsum("btd,vd->btv", h_BTD, head_VD, preferred_element_type=jnp.float32)
    at_label = jnp.take_along_axis(logits, labels_BT[..., None], axis=-1)[..., 0]
    top_BT = _subtrahend(logits, small)
    exp_BTV = jnp.exp(logits - top_BT[..., None])
    sum_BT = jnp.sum(exp_BTV, axis=-1)
    lse_BT = top_BT + jnp.log(sum_BT)
    ce = jnp.sum(jnp.where(keep_BT, lse_BT - at_label, 0.0))
    z = jnp.sum(jnp.where(keep_BT, lse_BT * lse_BT, 0.0))
    return _ChunkSums(ce, z, exp_BTV, sum_BT, lse_BT)
