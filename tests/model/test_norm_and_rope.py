"""Order of operations in norm and rotary embedding, their layouts, and YaRN's numbers."""

import jax.numpy as jnp
import numpy as np
import pytest

from olmo_core_jax.model.norm import rms_norm
from olmo_core_jax.model.olmo3 import ModelOptions, init_params, trace
from olmo_core_jax.model.rope import apply_rope, inverse_frequencies, rope_tables, yarn
from olmo_core_jax.recipes.schema import Model, RopeScaling


def model(**changes) -> Model:
    shape = {
        "n_layers": 2,
        "d_model": 16,
        "n_heads": 2,
        "n_kv_heads": 1,
        "head_dim": 8,
        "mlp_hidden": 24,
        "vocab_size": 30,
        "padded_vocab_size": 32,
        "pattern": [8, -1],
    }
    return Model(**(shape | changes))


def test_the_gain_is_multiplied_before_rounding():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((1000, 64)), jnp.bfloat16)
    gain = jnp.asarray(rng.uniform(0.5, 1.5, 64), jnp.float32)
    x32 = x.astype(jnp.float32)
    unit = x32 / jnp.sqrt(jnp.mean(x32**2, -1, keepdims=True) + 1e-6)
    right = (unit * gain).astype(jnp.bfloat16)
    wrong = unit.astype(jnp.bfloat16) * gain.astype(jnp.bfloat16)
    ours = rms_norm(x, gain, 1e-6)
    assert ours.dtype == jnp.bfloat16
    # Division and rsqrt differ by an ulp of fp32, which can tip a rounding to bf16 here and there.
    assert jnp.mean(ours == right) > 0.999
    assert jnp.mean(wrong == right) < 0.9


def test_query_norm_is_over_all_heads_together():
    """[1,1,1,1,10,10,10,10] in two heads of four: 0.1407 and 1.4072; per head it would be 1 and 1."""
    q = jnp.array([[1.0] * 4 + [10.0] * 4])
    np.testing.assert_allclose(
        rms_norm(q, jnp.ones(8), 1e-6)[0, [0, 4]], [0.1407, 1.4072], atol=1e-4
    )
    attn = init_params(model(), 0)["cycles"]["layer_0"]["attn"]
    assert attn["q_norm"].shape == (1, 16) and attn["k_norm"].shape == (1, 8)


def test_one_heads_queries_change_what_another_attends_to():
    """Scaling head 0's rows of the query matrix reaches head 1 through the norm that they share."""
    cfg, tokens = model(), np.arange(12, dtype=np.int32)[None]

    def second_head(scale: float):
        params = init_params(cfg, 0)
        attn = params["cycles"]["layer_0"]["attn"]
        attn["q"] = attn["q"].at[:, :8].multiply(scale)
        attn["out"] = attn["out"].at[:, :, :8].set(0.0)  # head 0 itself is not heard
        return trace(params, tokens, cfg, ModelOptions())["layers.0.attn"]

    assert jnp.abs(second_head(1.0) - second_head(50.0)).max() > 1e-6


def test_rotation_pairs_the_two_halves_of_a_head():
    """e0 at position 1 stays in dims 0 and 4 of 8; interleaved layouts would use 0 and 1."""
    rope = rope_tables(model(), 2)[False]
    e0 = jnp.zeros((1, 2, 1, 8)).at[0, 1, 0, 0].set(1.0)
    turned = np.asarray(apply_rope(e0, rope)[0, 1, 0])
    assert np.flatnonzero(turned).tolist() == [0, 4]
    np.testing.assert_allclose(turned[[0, 4]], [np.cos(1), np.sin(1)], rtol=1e-6)


def test_rotation_is_float32_whatever_comes_in():
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal((1, 64, 2, 8)), jnp.bfloat16)
    rope = rope_tables(model(), 64)[True]
    exact = apply_rope(x.astype(jnp.float32), rope).astype(jnp.bfloat16)
    assert apply_rope(x, rope).dtype == jnp.bfloat16
    np.testing.assert_array_equal(apply_rope(x, rope), exact)


def test_yarn_of_the_7b_shape():
    inverse, factor = yarn(128, 500_000.0, RopeScaling())
    plain = inverse_frequencies(128, 500_000.0)
    assert factor == 1.2079441541679836
    np.testing.assert_array_equal(inverse[:19], plain[:19])
    np.testing.assert_allclose(inverse[35:], plain[35:] / 8, rtol=1e-7)
    assert np.all(inverse[19:35] < plain[19:35]) and np.all(inverse[19:35] > plain[19:35] / 8)


def test_without_scaling_both_kinds_of_layer_share_the_tables():
    plain, scaled = (rope_tables(model(rope_scaling=s), 16) for s in (None, RopeScaling()))
    np.testing.assert_array_equal(plain[True].cos, plain[False].cos)
    np.testing.assert_array_equal(scaled[False].cos, plain[False].cos)
    assert jnp.abs(scaled[True].cos - plain[True].cos).max() > 0.1


@pytest.mark.reference
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
@pytest.mark.parametrize("theta", [10_000, 500_000])
def test_frequencies_equal_olmo_core_to_the_bit(head_dim, theta):
    torch = pytest.importorskip("torch")
    rope = pytest.importorskip("olmo_core.nn.rope")
    theirs = rope.compute_inv_freqs(theta, head_dim, torch.device("cpu")).numpy()
    differing = np.flatnonzero(inverse_frequencies(head_dim, theta) != theirs)
    assert len(differing) <= (1 if (head_dim, theta) == (256, 10_000) else 0)
    config = rope.YaRNRoPEScalingConfig(factor=8, beta_fast=32, beta_slow=1, old_context_len=8192)
    theirs, factor = config.compute_scaled_inv_freq(theta, head_dim, torch.device("cpu"))
    inverse, ours = yarn(head_dim, theta, RopeScaling())
    assert ours == factor
    np.testing.assert_allclose(inverse, theirs.numpy(), rtol=1.2e-7, atol=0)
