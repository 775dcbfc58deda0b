"""Rematerialisation policies by name: what a layer keeps for its backward pass.

Every layer gives these values a name, once each:

    layer_input     what the layer reads, [B, S, D]
    q, k, v         the projections, before QK-norm and rotary embedding
    attention       the kernel's output, and its row sums where the kernel keeps them
    attention_out   the output projection
    gate, up, down  the MLP's matrix products

Norms, rotary embedding and SwiGLU are computed again under every policy: they cost less than reading back what they
would keep. Policies, with what each adds to a step of the 7B shape beyond that:

    none               nothing: every matrix product and the attention kernel's output are kept
    mlp                the MLP's gate and up projections: 43 % of what `none` keeps, 15 % of the layer's arithmetic
    selective          the attention kernel, and the MLP's up projection
    attention_context  all matrix products, but not the attention kernel
    block              all matrix products and the attention kernel; only layer inputs are kept
    offload            as block, with the layer inputs in host memory (TPU and GPU)
"""

from collections.abc import Callable

import jax
from jax.ad_checkpoint import checkpoint_name

from olmo_core_jax.errors import UserError

MATRICES = ("q", "k", "v", "attention_out", "gate", "up", "down")

POLICIES: dict[str, tuple[str, ...]] = {
    "none": (*MATRICES, "attention"),
    "mlp": ("q", "k", "v", "attention", "attention_out", "down"),
    "selective": ("q", "k", "v", "attention_out", "gate", "down"),
    "attention_context": ("attention",),
    "block": (),
    "offload": (),
}


def save(x: jax.Array, name: str) -> jax.Array:
    """Gives a value the name by which policies know it."""
    return checkpoint_name(x, name)


def rematerialise(layer: Callable, policy: str, *, scanned: bool, platform: str) -> Callable:
    """The layer function under a policy; its arguments are always kept, in host memory with `offload`.

    scanned: the layer is the body of a scan, whose two loops the compiler cannot merge anyway, so that it need not be
    kept from doing so. Raises UserError for a name that is unknown or that the platform does not have.
    """
    if policy not in POLICIES:
        raise UserError(
            f"topology: remat {policy!r} is unknown: choose one of {', '.join(POLICIES)}"
        )
    names, policies = POLICIES[policy], jax.checkpoint_policies
    rule = policies.save_only_these_names(*names)
    if "attention" in names:
        rule = policies.save_from_both_policies(rule, _is_cudnn_forward)
    if policy == "offload":
        if platform == "cpu":
            raise UserError("topology: remat offload needs a TPU or GPU: choose block")
        rule = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=list(names),
            names_which_can_be_offloaded=["layer_input"],
            offload_src="device",
            offload_dst="pinned_host",
        )
    return jax.checkpoint(layer, policy=rule, prevent_cse=not scanned)


def _is_cudnn_forward(primitive, *_, **__) -> bool:
    """cuDNN's results, row sums included, have no names: they are known by the operation that makes them."""
    return primitive.name.startswith("dot_product_attention_fwd")
