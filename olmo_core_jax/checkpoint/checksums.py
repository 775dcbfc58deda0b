"""A 32-bit fingerprint of every array of a state: the same for any sharding, changed by a flipped or moved bit.

The array files under a checkpoint reveal a missing file but not a changed byte, so what is restored is compared with
what was saved. Every element is mixed with its position, and the sum is modulo 2^32, so that neither the order of
additions nor the topology matters.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

CHUNK = 1 << 15
_UINTS = {1: np.uint8, 2: np.uint16, 4: np.uint32}
_PLACES = np.arange(CHUNK, dtype=np.uint32) * np.uint32(0x9E3779B1)


def checksums(tree) -> dict[str, int]:
    """Path -> sum over i of mix(bits(x_i), i) modulo 2^32, i the row-major position, for arrays on any mesh.

    A collective: every process calls it with the same global arrays.
    """
    paths = [key_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    return dict(zip(paths, (int(v) for v in np.asarray(_device_sums(tree))), strict=True))


def nonfinite(tree) -> list[str]:
    """Paths of the floating-point arrays that hold a NaN or an infinity. A collective, as checksums is."""
    leaves = {
        key_name(path): x
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
        if jnp.issubdtype(x.dtype, jnp.floating)
    }
    if not leaves:
        return []
    found = np.asarray(_any_nonfinite(list(leaves.values())))
    return [name for name, bad in zip(leaves, found, strict=True) if bad]


def array_checksum(x: np.ndarray, start: int = 0) -> int:
    """The same sum of one host array, in little memory and at the speed of a disk.

    start: where its first element lies in a larger array, of which this is a piece; pieces add up modulo 2^32.
    """
    bits = np.ascontiguousarray(x).reshape(-1).view(_UINTS[x.dtype.itemsize])
    h, t = np.empty(CHUNK, np.uint32), np.empty(CHUNK, np.uint32)
    total = 0
    for low in range(0, bits.size, CHUNK):
        part = bits[low : low + CHUNK]
        total += _chunk_sum(part, start + low, h[: part.size], t[: part.size])
    return total % 2**32


def _chunk_sum(bits: np.ndarray, start: int, h: np.ndarray, t: np.ndarray) -> int:
    """_mix of a few elements and its sum, in place so that everything stays in the processor's cache."""
    np.add(_PLACES[: bits.size], np.uint32(start * 0x9E3779B1 % 2**32), out=h)
    np.bitwise_xor(h, bits, out=h)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        np.bitwise_xor(h, np.right_shift(h, np.uint32(shift), out=t), out=h)
        np.multiply(h, np.uint32(factor), out=h)
    return int(h.sum(dtype=np.uint32))


def _mix(bits, place):
    """uint32 hash of a value and its position: a multiplication for the position, then MurmurHash3's finaliser."""
    h = bits ^ (place * np.uint32(0x9E3779B1))
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return h ^ (h >> np.uint32(16))


def key_name(path) -> str:
    """A leaf's place in its tree as `params/embed/weight`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


@jax.jit
def _any_nonfinite(leaves) -> jax.Array:
    return jnp.stack([~jnp.isfinite(x).all() for x in leaves])


@jax.jit
def _device_sums(tree) -> jax.Array:
    return jnp.stack([_device_sum(x) for x in jax.tree.leaves(tree)])


def _device_sum(x: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(x, _UINTS[x.dtype.itemsize]).astype(jnp.uint32)
    place = jnp.zeros(x.shape, jnp.uint32)
    for axis in range(x.ndim):
        stride = np.uint32(math.prod(x.shape[axis + 1 :]) % 2**32)
        place += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * stride
    return jnp.sum(_mix(bits, place), dtype=jnp.uint32)
