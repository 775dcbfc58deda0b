"""Every attention kernel against its definition: values, gradients, windows, precision, sharding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_model
from jax.experimental.pallas import tpu as pltpu

from olmo_core_jax.errors import UserError
from olmo_core_jax.model.attention import FULL, attend, cudnn, reference, resolve_kernel
from olmo_core_jax.model.blockwise import _reach, blockwise
from olmo_core_jax.model.masks import visible
from olmo_core_jax.model.olmo3 import ModelOptions, init_params, logits
from olmo_core_jax.model.splash import splash

GRADIENT_OF = (0, 1, 2)


def qkv(S, *, B=2, H=4, G=4, K=16, dtype=jnp.float32, seed=0):
    """Inputs whose softmax is far from uniform."""
    keys = jax.random.split(jax.random.key(seed), 4)
    shapes = [(B, S, H, K), (B, S, G, K), (B, S, G, K), (B, S, H, K)]
    *inputs, weight = (jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=True))
    return [inputs[0] * 2, *inputs[1:]], weight


def values_and_gradients(kernel, inputs, weight):
    """The output and d sum(output * weight) / d(q, k, v)."""

    def loss(*x):
        out = kernel(*x)
        return jnp.sum(out.astype(jnp.float32) * weight), out

    (_, out), gradients = jax.jit(jax.value_and_grad(loss, GRADIENT_OF, has_aux=True))(*inputs)
    return out, *gradients


def assert_equals_reference(kernel, window, S, *, tolerance=5e-6, **shape):
    inputs, weight = qkv(S, **shape)
    expected = values_and_gradients(lambda *x: reference(*x, window=window), inputs, weight)
    actual = values_and_gradients(kernel, inputs, weight)
    for name, a, e in zip(("out", "dq", "dk", "dv"), actual, expected, strict=True):
        assert a.dtype == e.dtype
        a, e = np.asarray(a, np.float32), np.asarray(e, np.float32)
        np.testing.assert_allclose(
            a, e, atol=tolerance * max(1, np.abs(e).max()), rtol=0, err_msg=name
        )


def test_a_window_of_4_sees_4_tokens_with_its_own():
    i = np.arange(8)
    assert visible(i[:, None], i[None], 4).sum(1).tolist() == [1, 2, 3, 4, 4, 4, 4, 4]
    assert visible(i[:, None], i[None], FULL).sum(1).tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("kernel", ["reference", "blockwise"])
def test_every_kernel_sees_exactly_the_window(kernel):
    """Values are one-hot, so an output's support is the set of keys that the query used."""
    S, W = 8, 4
    (q, k, _), _ = qkv(S, B=1, H=1, G=1, K=S)
    seen = attend(q, k, jnp.eye(S)[None, :, None], window=W, kernel=kernel)[0, :, 0] > 0
    expected = visible(np.arange(S)[:, None], np.arange(S)[None], W)
    np.testing.assert_array_equal(seen, expected)


def test_layers_with_other_windows_share_no_mask():
    (q, k, v), _ = qkv(32)
    narrow, wide, again = (attend(q, k, v, window=w, kernel="blockwise") for w in (4, FULL, 4))
    np.testing.assert_array_equal(narrow, again)
    assert jnp.abs(narrow - wide).max() > 0.1


@pytest.mark.parametrize("window", [1, 5, 17, FULL])
@pytest.mark.parametrize("block", [8, 16, 64])
def test_blockwise(window, block):
    assert_equals_reference(lambda *x: blockwise(*x, window, block), window, 64)


@pytest.mark.parametrize("heads", [(4, 2), (6, 1)])
def test_blockwise_with_grouped_queries_and_a_ragged_tail(heads):
    H, G = heads
    assert_equals_reference(lambda *x: blockwise(*x, 9, 16), 9, 50, H=H, G=G)


def test_blockwise_in_bfloat16():
    kernel = lambda *x: blockwise(*x, 24, 16)  # noqa: E731
    assert_equals_reference(kernel, 24, 64, dtype=jnp.bfloat16, tolerance=2e-2)


@pytest.mark.parametrize("window", [1, 2, 8, 9, 17, 100, FULL])
def test_blockwise_visits_the_visible_blocks_and_no_other(window):
    T, N = 8, 6
    i = np.arange(T * N)
    pairs = visible(i[:, None], i[None], window).reshape(N, T, N, T).any((1, 3))
    assert [int(_reach(n, window, T)) for n in range(N)] == pairs.sum(1).tolist()


def test_blockwise_memory_grows_with_the_sequence_not_its_square():
    def temporaries(S):
        inputs, weight = qkv(S, B=1, H=2, G=2)
        loss = lambda *x: jnp.sum(blockwise(*x, 64, 64) * weight)  # noqa: E731
        compiled = jax.jit(jax.grad(loss, GRADIENT_OF)).lower(*inputs).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(4096) < 2.2 * temporaries(2048)


@pytest.mark.parametrize("window", [FULL, 128, 130, 200, 600])
@pytest.mark.parametrize("block", [128, 256, 512])
def test_splash_interpreted(window, block):
    kernel = lambda *x: splash(*x, window=window, block=block, interpret=True)  # noqa: E731
    assert_equals_reference(kernel, window, 512, B=1, H=2, G=2, K=128)


@pytest.mark.parametrize("window", [FULL, 200])
def test_splash_interpreted_in_bfloat16(window):
    kernel = lambda *x: splash(*x, window=window, block=128, interpret=True)  # noqa: E731
    shape = {"B": 1, "H": 2, "G": 1, "K": 128, "dtype": jnp.bfloat16}
    assert_equals_reference(kernel, window, 384, tolerance=2e-2, **shape)


@pytest.mark.slow
@pytest.mark.parametrize("window", [FULL, 128, 200])
@pytest.mark.parametrize("block", [128, 256])
@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 5e-6), (jnp.bfloat16, 2e-2)])
def test_splash_on_an_emulated_tpu(window, block, dtype, tolerance):
    """Pallas's TPU interpreter: memory spaces, semaphores and copies as the chip has them."""
    emulated = pltpu.InterpretParams()
    kernel = lambda *x: splash(*x, window=window, block=block, interpret=emulated)  # noqa: E731
    shape = {"B": 1, "H": 2, "G": 1, "K": 128, "dtype": dtype}
    assert_equals_reference(kernel, window, 512, tolerance=tolerance, **shape)


def test_a_model_computes_the_same_with_every_kernel():
    cfg = tiny_model(
        n_layers=2,
        n_heads=4,
        head_dim=16,
        vocab_size=60,
        pattern=[40, -1],
        d_model=32,
        init_std=0.2,
    )
    params, tokens = init_params(cfg, 0), np.arange(256, dtype=np.int32).reshape(2, 128) % 60
    expected = logits(params, tokens, cfg, ModelOptions(attention="reference"))
    assert jnp.abs(expected).max() > 1
    for kernel in ("blockwise", "splash"):
        ours = logits(params, tokens, cfg, ModelOptions(attention=kernel))
        np.testing.assert_allclose(ours, expected, atol=2e-5)


def test_splash_refuses_ragged_sequences():
    (q, k, v), _ = qkv(100)
    with pytest.raises(UserError, match="multiple of 128, not 100"):
        splash(q, k, v, window=FULL)


def test_cudnn_refuses_float32():
    (q, k, v), _ = qkv(16)
    with pytest.raises(UserError, match="bfloat16"):
        cudnn(q, k, v, window=FULL)


@pytest.mark.parametrize("window", [FULL, 1, 7, 40])
def test_cudnn_is_asked_for_our_mask(monkeypatch, window):
    """The same call, carried out by JAX's own definition of it: there is no GPU here."""
    ask = jax.nn.dot_product_attention

    def by_definition(*inputs, implementation, **options):
        assert implementation == "cudnn"
        return ask(*inputs, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", by_definition)
    (q, k, v), _ = qkv(40, G=2, dtype=jnp.bfloat16)
    expected = reference(q, k, v, window=window).astype(jnp.float32)
    np.testing.assert_allclose(
        cudnn(q, k, v, window=window).astype(jnp.float32), expected, atol=2e-2
    )


def test_unknown_kernel_is_named():
    (q, k, v), _ = qkv(16)
    with pytest.raises(UserError, match=r"attention 'flash' is unknown.*blockwise"):
        attend(q, k, v, window=FULL, kernel="flash")


@pytest.mark.parametrize(
    ("platform", "dtype", "length", "kernel"),
    [
        ("cpu", jnp.float32, 128, "blockwise"),
        ("gpu", jnp.float32, 128, "blockwise"),
        ("gpu", jnp.bfloat16, 100, "cudnn"),
        ("tpu", jnp.bfloat16, 256, "splash"),
        ("tpu", jnp.float32, 100, "blockwise"),
    ],
)
def test_auto_picks_by_platform(platform, dtype, length, kernel):
    assert resolve_kernel("auto", dtype, length, platform) == kernel
    assert resolve_kernel("reference", dtype, length, platform) == "reference"
