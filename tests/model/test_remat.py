"""What each policy computes again, counted in the program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_model

from olmo_core_jax.errors import UserError
from olmo_core_jax.model.attention import cudnn
from olmo_core_jax.model.olmo3 import ModelOptions, abstract_params, bind
from olmo_core_jax.model.remat import POLICIES, rematerialise

MODEL = tiny_model(n_layers=2, pattern=[-1])


def count(jaxpr, name: str) -> int:
    """Operations of that name in a program, each loop body and branch counted once."""
    found = 0
    for equation in jaxpr.eqns:
        found += equation.primitive.name.startswith(name)
        for inner in jax.core.jaxprs_in_params(equation.params):
            found += count(inner, name)
    return found


def matrix_products(remat: str) -> int:
    """In one layer's forward and backward pass, the blockwise attention kernel included."""
    opts = ModelOptions(remat=remat, attention="blockwise")

    def loss(params):
        return jnp.sum(bind(params, MODEL, opts).hidden_states(np.zeros((1, 8), np.int32)))

    return count(jax.make_jaxpr(jax.grad(loss))(abstract_params(MODEL)).jaxpr, "dot_general")


FORWARD, BACKWARD = 7 + 2, 2 * 7 + 5  # seven matrices; attention: two products, then five


@pytest.mark.parametrize(
    ("policy", "again"),
    [
        ("none", 0),
        ("mlp", 2),
        ("selective", 2 + 1),
        ("attention_context", 7),
        ("block", 7 + 2),
    ],
)
def test_policies_compute_again_what_they_say(policy, again):
    assert matrix_products(policy) == FORWARD + BACKWARD + again


@pytest.mark.parametrize(("policy", "forwards"), [("none", 1), ("selective", 2), ("block", 2)])
def test_cudnn_is_run_again_only_where_the_policy_says_so(policy, forwards, monkeypatch):
    """Traced without a GPU: its version checks are for the machine that runs it."""
    fused = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(fused, "check_compute_capability", lambda *_: True)
    q = jnp.ones((1, 128, 2, 64), jnp.bfloat16)
    layer = rematerialise(
        lambda q: cudnn(q, q, q, window=100), policy, scanned=True, platform="gpu"
    )
    program = jax.make_jaxpr(jax.grad(lambda q: jnp.sum(layer(q).astype(jnp.float32))))(q)
    assert count(program.jaxpr, "dot_product_attention_fwd") == forwards
    assert count(program.jaxpr, "dot_product_attention_bwd") == 1


def test_offload_moves_layer_inputs_to_the_host_and_needs_one():
    layer = rematerialise(
        lambda x: jnp.sin(jax.ad_checkpoint.checkpoint_name(x, "layer_input") ** 2),
        "offload",
        scanned=True,
        platform="tpu",
    )
    text = str(jax.make_jaxpr(jax.grad(lambda x: jnp.sum(layer(x * 2))))(jnp.ones(3)))
    assert "device_put" in text and "host" in text.lower()
    with pytest.raises(UserError, match="needs a TPU or GPU: choose block"):
        rematerialise(lambda x: x, "offload", scanned=True, platform="cpu")


def test_every_policy_has_a_meaning_written_down():
    from olmo_core_jax.model import remat

    for policy in POLICIES:
        assert f"\n    {policy} " in remat.__doc__
