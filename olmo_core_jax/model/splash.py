"""JAX's Pallas splash attention for TPUs, over a mesh where there is one.

Batch and heads are split freely; a split sequence keeps its queries and gathers keys and values.
B batch, S sequence, H query heads, G key/value heads, K head width.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import NamedSharding, PartitionSpec

from olmo_core_jax.errors import UserError
from olmo_core_jax.model.masks import FULL
from olmo_core_jax.model.options import Shard, platform_of

BLOCK = 2048  # tokens; smaller blocks leave a TPU's matrix unit idle, larger ones leave its VMEM
LANES = 128


def splash(
    q_BSHK, k_BSGK, v_BSGK, *, window: int, shard: Shard | None = None, block=None, interpret=None
):
    """attention.attend's contract. Blocks outside the window are skipped, forward and backward.

    interpret: emulate the kernel; default, wherever the program is not for a TPU.
    Raises UserError when the sequence is no multiple of 128.
    """
    S, H, K = q_BSHK.shape[1:]
    if S % LANES:
        raise UserError(
            f"attention splash needs a sequence that is a multiple of {LANES}, not {S}: "
            "choose blockwise for this size"
        )
    if interpret is None:
        interpret = platform_of(shard) != "tpu"
    mesh = shard(()).mesh if shard else None
    queries = ("batch", "act_heads", "sequence", None)
    ways = _ways(shard(queries), mesh) if shard else (1, 1, 1, 1)
    kernel = _kernel(S, H, window, _block(S // ways[2], block), ways[1], ways[2], interpret)

    def heads_first(x):
        return x.swapaxes(1, 2)

    # The kernel has no scale of its own. In bf16 the factor itself would be off by 1e-4.
    scaled = (q_BSHK.astype(jnp.float32) * K**-0.5).astype(q_BSHK.dtype)
    q, k, v = heads_first(scaled), heads_first(k_BSGK), heads_first(v_BSGK)

    def over_batch(kernel, q, k, v):
        return jax.vmap(kernel)(q, k, v)

    if shard is None or mesh is None:
        return heads_first(over_batch(kernel, q, k, v))
    q_spec, kv_spec = shard(queries).spec, shard(("batch", "act_heads", None, None)).spec
    blocks = kernel.manual_sharding_spec(NamedSharding(mesh, PartitionSpec(*_pad(q_spec)[1:3])))
    specs = (blocks, q_spec, kv_spec, kv_spec)
    run = jax.shard_map(over_batch, mesh=mesh, in_specs=specs, out_specs=q_spec, check_vma=False)
    return heads_first(run(kernel, q, k, v))


def _kernel(length, heads, window, block, head_shards, sequence_shards, interpret):
    shape = (length, length)
    if window == FULL or window >= length:
        mask = masks.CausalMask(shape, shard_count=sequence_shards)
    else:
        mask = masks.LocalMask(shape, (window - 1, 0), 0, shard_count=sequence_shards)
    sizes = kernels.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        use_fused_bwd_kernel=True,
    )
    return kernels.make_splash_mha(
        masks.MultiHeadMask([mask] * heads),
        block_sizes=sizes,
        head_shards=head_shards,
        q_seq_shards=sequence_shards,
        residual_checkpoint_name="attention",
        interpret=interpret,
    )


def _block(length: int, wanted: int | None) -> int:
    """The largest multiple of 128 up to the wanted block that divides the length."""
    top = min(wanted or BLOCK, length)
    return next((b for b in range(top - top % LANES, 0, -LANES) if length % b == 0), length)


def _pad(spec: PartitionSpec) -> tuple:
    return (*spec, *[None] * (4 - len(spec)))


def _ways(sharding: NamedSharding, mesh) -> tuple[int, ...]:
    """How many pieces each of the four axes is cut into."""
    shape = sharding.shard_shape(tuple(mesh.size for _ in range(4)))
    return tuple(mesh.size // s for s in shape)
