"""Logits, per-layer outputs and gradients against transformers and OLMo-core, from the same weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import slow_unless

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("olmo_core")

from torch_olmo3 import (  # noqa: E402
    OLMO_CORE,
    TRANSFORMERS,
    in_bfloat16,
    olmo_core_model,
    our_params,
    small_model,
    tokens_for,
    transformers_model,
)

from olmo_core_jax.model.olmo3 import ModelOptions, abstract_params, logits, trace  # noqa: E402
from olmo_core_jax.recipes.schema import RopeScaling  # noqa: E402

pytestmark = pytest.mark.reference
YARN = RopeScaling(factor=8.0, original_length=64)
SHAPES = {
    "plain": {},
    "grouped queries": {"n_kv_heads": 2},
    "one key head": {"n_kv_heads": 1},
    "yarn": {"rope_scaling": YARN},
    "head wider than model share": {"head_dim": 32, "n_heads": 4},
}
OFTEN = ("grouped queries", "yarn")


@pytest.mark.parametrize("shape", slow_unless(SHAPES, OFTEN))
@pytest.mark.parametrize("source", ["transformers", "olmo_core"])
def test_logits_equal_the_reference(shape, source):
    cfg = small_model(**SHAPES[shape])
    make, names = {
        "transformers": (transformers_model, TRANSFORMERS),
        "olmo_core": (olmo_core_model, OLMO_CORE),
    }[source]
    model, tokens = make(cfg), tokens_for(cfg)
    with torch.no_grad():
        theirs = model(torch.tensor(tokens).long())
    theirs = (theirs.logits if source == "transformers" else theirs).numpy()
    params = our_params(model.state_dict(), cfg, names)
    assert jax.tree.map(np.shape, params) == jax.tree.map(lambda a: a.shape, abstract_params(cfg))
    for options in (ModelOptions(attention="reference"), ModelOptions(scan_layers=False)):
        ours = np.asarray(logits(params, tokens, cfg, options))
        assert np.abs(theirs).max() > 1
        np.testing.assert_allclose(ours, theirs, atol=3e-5, rtol=0)


def test_every_layer_equals_transformers():
    cfg = small_model()
    model, tokens = transformers_model(cfg), tokens_for(cfg)
    with torch.no_grad():
        theirs = model(torch.tensor(tokens).long(), output_hidden_states=True).hidden_states
    ours = trace(our_params(model.state_dict(), cfg, TRANSFORMERS), tokens, cfg, ModelOptions())
    names = ["embed", *(f"layers.{i}.out" for i in range(cfg.n_layers - 1)), "final_norm"]
    for name, expected in zip(names, theirs, strict=True):
        np.testing.assert_allclose(ours[name], expected, atol=2e-5, rtol=0, err_msg=name)


def test_a_window_off_by_one_would_show():
    cfg = small_model()
    model, tokens = transformers_model(cfg), tokens_for(cfg)
    params = our_params(model.state_dict(), cfg, TRANSFORMERS)
    right = logits(params, tokens, cfg, ModelOptions())
    for wrong in (7, 9):
        other = small_model(pattern=[wrong, wrong, wrong, -1])
        difference = jnp.abs(logits(params, tokens, other, ModelOptions()) - right).max(axis=(0, 2))
        first = int(jnp.argmax(difference > 1e-3))
        assert first == min(wrong, 8), "the first query that has more keys in one of the two"


def test_yarn_touches_full_attention_layers_only():
    """The widely reported leak: all-sliding models may not notice the scaling at all."""

    def effect(pattern):
        base = small_model(n_layers=4, pattern=pattern)
        model, tokens = transformers_model(base), tokens_for(base, length=64)
        params = our_params(model.state_dict(), base, TRANSFORMERS)
        scaled = base.model_copy(update={"rope_scaling": YARN})
        plain, yarn = (logits(params, tokens, c, ModelOptions()) for c in (base, scaled))
        return float(jnp.abs(plain - yarn).max())

    assert effect([8, 8, 8, 8]) == 0
    assert effect([-1, -1, -1, -1]) > 0.05
    assert effect([8, 8, 8, -1]) > 0


def test_gradients_equal_torch_autograd():
    """Cross-entropy plus z-loss of OLMo-core's own function, differentiated by torch."""
    from olmo_core.nn.functional import cross_entropy_loss

    from olmo_core_jax.model.olmo3 import hidden_states
    from olmo_core_jax.train.loss import head_loss, loss_divisor, shifted_targets

    cfg = small_model(n_kv_heads=2)
    model, tokens = olmo_core_model(cfg), tokens_for(cfg)
    t = torch.tensor(tokens).long()
    ce, z = cross_entropy_loss(
        model(t)[:, :-1].reshape(-1, cfg.padded_vocab_size),
        t[:, 1:].reshape(-1),
        reduction="sum",
        compute_z_loss=True,
        z_loss_multiplier=1e-3,
    )
    count = t[:, 1:].numel()
    ((ce + z) / count).backward()
    theirs = our_params({n: p.grad for n, p in model.named_parameters()}, cfg, OLMO_CORE)

    def loss(params):
        mask = np.ones(len(tokens), bool)
        targets = shifted_targets(tokens, mask)
        h = hidden_states(params, tokens, cfg, ModelOptions())
        out = head_loss(
            h, params["lm_head"]["weight"], targets, loss_divisor(targets, mask), 1e-3, 4
        )
        return out.total, out

    params = our_params(model.state_dict(), cfg, OLMO_CORE)
    (_, out), ours = jax.value_and_grad(loss, has_aux=True)(jax.tree.map(jnp.asarray, params))
    assert float(out.ce) == pytest.approx(ce.item() / count, rel=1e-6)
    assert float(out.z) == pytest.approx(z.item() / count, rel=1e-6)

    def close(a, e):
        np.testing.assert_allclose(a, e, atol=1e-5 * np.abs(e).max(), rtol=0)

    jax.tree.map(close, ours, theirs)


def test_bfloat16_logits_against_transformers():
    """Both round at other places, so the yardstick is transformers' own distance from its fp32 self."""
    cfg = small_model()
    model, tokens = transformers_model(cfg), tokens_for(cfg, batch=4, length=128)
    params = our_params(model.state_dict(), cfg, TRANSFORMERS)
    inputs = torch.tensor(tokens).long()
    with torch.no_grad():
        exact = model(inputs).logits.numpy()
        theirs = in_bfloat16(model)(inputs).logits.float().numpy()
    ours = logits(params, tokens, cfg, ModelOptions(compute_dtype="bfloat16"))
    assert ours.dtype == jnp.float32

    def divergence(a, b):
        p, q = jax.nn.log_softmax(a), jax.nn.log_softmax(b)
        return float(jnp.mean(jnp.sum(jnp.exp(p) * (p - q), -1)))

    def agreement(a, b):
        return float(np.mean(np.argmax(a, -1) == np.argmax(b, -1)))

    assert divergence(exact, ours) < 1.2 * divergence(exact, theirs)
    assert divergence(theirs, ours) < 2 * divergence(exact, theirs)
    assert agreement(exact, ours) > agreement(exact, theirs) - 0.02
