"""Rematerialisation policies by name: what a layer keeps for the backward pass."""

from collections.abc import Callable

import jax
from jax.ad_checkpoint import checkpoint_name

from olmo_core_jax.errors import UserError

# Each layer names these values once; a policy is a choice among them.
NAMES = ("q", "k", "v", "attention", "attention_out", "gate", "up", "down")

POLICIES: dict[str, tuple[str, ...] | None] = {
    "none": None,
    "block": (),
    "selective": ("q", "k", "v", "attention_out", "gate", "down"),
    "attention_context": ("attention",),
}


def save(x: jax.Array, name: str) -> jax.Array:
    """Gives a value the name by which policies know it."""
    return checkpoint_name(x, name)


def rematerialise(layer: Callable, policy: str) -> Callable:
    """The layer function under a policy. `none` keeps whatever autodiff wants; the others keep the layer's inputs and the
    listed values, and compute the rest again. Raises UserError for an unknown name."""
    if policy not in POLICIES:
        raise UserError(
            f"topology: remat {policy!r} is unknown: choose one of {', '.join(POLICIES)}"
        )
    names = POLICIES[policy]
    if names is None:
        return layer
    return jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names(*names))
