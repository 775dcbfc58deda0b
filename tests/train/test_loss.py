"""Loss, z-loss, divisor and the gradients of the chunked head."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from olmo_core_jax.errors import UserError
from olmo_core_jax.train.loss import Targets, head_loss, loss_divisor, shifted_targets

B, S, D, V = 3, 16, 8, 40


def inputs(dtype=jnp.float32, seed=0):
    """(h, head, tokens): logits of a few units, all of the vocabulary in use."""
    rng = np.random.default_rng(seed)
    h, head = rng.standard_normal((B, S, D)), rng.standard_normal((V, D))
    return jnp.asarray(h, dtype), jnp.asarray(head, jnp.float32), rng.integers(0, V, (B, S), "i4")


def plain(h, head, targets, divisor, z):
    """The definition, all logits at once, for autodiff."""
    logits = jnp.einsum("bsd,vd->bsv", h.astype(jnp.float32), head)
    lse = jax.nn.logsumexp(logits, -1)
    ce = lse - jnp.take_along_axis(logits, targets.labels_BS[..., None], -1)[..., 0]
    return jnp.sum(jnp.where(targets.keep_BS, ce + z * lse**2, 0)) / divisor


def test_reported_cross_entropy_excludes_the_z_loss():
    logits = np.log(np.array([[[0.7, 0.2, 0.1], [0.1, 0.3, 0.6]]], np.float32)) + 2
    targets = Targets(jnp.array([[0, 2]]), jnp.ones((1, 2), bool))
    head = jnp.eye(3)
    out = head_loss(jnp.asarray(logits), head, targets, 2.0, 1e-5)
    ce = -(np.log(0.7) + np.log(0.6)) / 2
    assert float(out.ce) == pytest.approx(ce, rel=1e-6)
    assert float(out.z) == pytest.approx(1e-5 * 2.0**2, rel=1e-5)
    assert float(out.total) == pytest.approx(ce + 1e-5 * 2.0**2, rel=1e-6)
    off = head_loss(jnp.asarray(logits), head, targets, 2.0, 0.0)
    assert float(off.total) == float(off.ce) == float(out.ce)


def test_targets_and_divisor():
    tokens = np.arange(B * S, dtype=np.int32).reshape(B, S) % V
    mask = np.array([True, False, True])
    targets = shifted_targets(tokens, mask)
    np.testing.assert_array_equal(targets.labels_BS[:, :-1], tokens[:, 1:])
    assert targets.keep_BS.sum(1).tolist() == [S - 1, 0, S - 1]
    assert float(loss_divisor(targets, mask)) == 2 * (S - 1) + S, "a masked instance adds S"
    assert float(loss_divisor(shifted_targets(tokens, ~mask | mask), ~mask | mask)) == B * (S - 1)


def test_ignored_targets_leave_sum_and_divisor():
    tokens = np.full((1, S), 5, np.int32)
    tokens[0, -4:] = 9
    targets = shifted_targets(tokens, np.array([True]), ignored_id=9)
    assert targets.keep_BS[0].tolist() == [True] * (S - 5) + [False] * 5
    assert float(loss_divisor(targets, np.array([True]))) == S - 5


def test_every_target_weighs_the_same_whatever_micro_batch_it_is_in():
    """Four targets of loss 1 and one of loss 5 make 1.8; a mean of means would make 3."""

    def part(ce: float, count: int):
        p = np.exp(-ce)
        h = jnp.log(jnp.full((1, 4, 2), jnp.array([p, 1 - p])))
        keep = (jnp.arange(4) < count)[None]
        return head_loss(h, jnp.eye(2), Targets(jnp.zeros((1, 4), int), keep), 5.0, 0.0).total

    assert float(part(1.0, 4) + part(5.0, 1)) == pytest.approx(1.8, rel=1e-6)


@pytest.mark.parametrize("chunks", [1, 2, 8, 16])
def test_values_and_gradients_equal_autodiff_of_the_definition(chunks):
    h, head, tokens = inputs()
    mask = np.array([True, True, False])
    targets, z = shifted_targets(tokens, mask, ignored_id=3), 1e-2
    divisor = loss_divisor(targets, mask)

    def ours(h, head):
        return 3 * head_loss(h, head, targets, divisor, z, chunks).total

    def definition(h, head):
        return 3 * plain(h, head, targets, divisor, z)

    value, gradients = jax.jit(jax.value_and_grad(ours, (0, 1)))(h, head)
    expected, expected_gradients = jax.value_and_grad(definition, (0, 1))(h, head)
    assert float(value) == pytest.approx(float(expected), rel=1e-6)
    assert float(ours(h, head)) == pytest.approx(float(expected), rel=1e-6), "undifferentiated"
    for a, e in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(a, e, atol=3e-7)
    assert not gradients[0][2].any(), "a masked instance moves nothing"


@pytest.mark.parametrize("logit", [-200, -65, -63.9, 0, 63.9, 65, 200])
def test_logits_of_any_size_neither_overflow_nor_vanish(logit):
    """Every token is as likely as every other: CE is log V, however large the logits are."""
    vocabulary = 100_352
    h = jnp.zeros((1, 8, 4)).at[..., 0].set(logit)
    head = jnp.zeros((vocabulary, 4)).at[:, 0].set(1)
    targets = Targets(jnp.arange(8)[None], jnp.ones((1, 8), bool))

    def ours(h, head):
        out = head_loss(h, head, targets, 8.0, 1e-3, 2)
        return out.total, out

    (_, out), (_, d_head) = jax.value_and_grad(ours, (0, 1), has_aux=True)(h, head)
    lse = logit + np.log(vocabulary)
    assert float(out.ce) == pytest.approx(np.log(vocabulary), rel=3e-6)
    assert float(out.z) == pytest.approx(1e-3 * lse**2, rel=3e-6)
    row = logit * (1 + 2e-3 * lse) / vocabulary  # of a token that is nobody's target
    np.testing.assert_allclose(d_head[8:, 0], row, rtol=1e-4)


@pytest.mark.parametrize("size", [1, 12, 100])
def test_large_and_small_logits_have_one_gradient(size):
    """One of them is found without the logits' maximum, the others with it."""
    h, head, tokens = inputs()
    targets = shifted_targets(tokens, np.ones(B, bool))

    def ours(h, head):
        return head_loss(h * size, head, targets, 45.0, 1e-3, 4).total

    def definition(h, head):
        return plain(h * size, head, targets, 45.0, 1e-3)

    value, gradients = jax.value_and_grad(ours, (0, 1))(h, head)
    expected, expected_gradients = jax.value_and_grad(definition, (0, 1))(h, head)
    assert float(value) == pytest.approx(float(expected), rel=1e-5)
    for a, e in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(a, e, atol=1e-4 * np.abs(e).max())


def test_only_the_total_is_differentiated():
    h, head, tokens = inputs()
    targets = shifted_targets(tokens, np.ones(B, bool))
    for part in ("ce", "z"):
        slope = jax.grad(lambda h, p=part: getattr(head_loss(h, head, targets, 9.0, 1e-2), p))(h)
        assert not slope.any()


def test_bfloat16_states_give_float32_losses_and_head_gradients():
    h, head, tokens = inputs(jnp.bfloat16)
    targets = shifted_targets(tokens, np.ones(B, bool))

    def ours(h, head):
        return head_loss(h, head, targets, 45.0, 1e-5, 4).total

    value, (d_h, d_head) = jax.value_and_grad(ours, (0, 1))(h, head)
    assert (value.dtype, d_h.dtype, d_head.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    rounded = head.astype(jnp.bfloat16).astype(jnp.float32)
    assert float(value) == pytest.approx(float(plain(h, rounded, targets, 45.0, 1e-5)), rel=1e-5)
    expected = jax.grad(lambda w: plain(h, w, targets, 45.0, 1e-5))(rounded)
    np.testing.assert_allclose(d_head, expected, atol=1e-2 * np.abs(expected).max())


@pytest.mark.parametrize("dtype, rounding", [(jnp.float32, 1e-2), (jnp.bfloat16, 2e-2)])
def test_the_gradient_of_a_sure_token_keeps_its_digits(dtype, rounding):
    """The label's softmax is 1 - 1e-4: a difference of two numbers near 1, against the same in float64."""
    sure = float(np.log(1e4 * (V - 1)))
    tokens = np.full((1, S), 7, np.int32)
    h = jnp.zeros((1, S, V), dtype).at[..., 7].set(jnp.asarray(sure, dtype))
    targets = shifted_targets(tokens, np.ones(1, bool))
    d_h = jax.grad(lambda h: head_loss(h, jnp.eye(V), targets, S - 1.0, 0.0, 4).total)(h)
    logits = np.asarray(h[0, 0], np.float64)
    softmax = np.exp(logits) / np.exp(logits).sum()
    expected = (softmax - np.eye(V)[7]) / (S - 1)
    assert 5e-5 < 1 - softmax[7] < 2e-4
    np.testing.assert_allclose(np.asarray(d_h[0, 0], np.float64), expected, rtol=rounding)


def test_no_array_holds_all_logits():
    h, head, tokens = inputs()
    targets = shifted_targets(tokens, np.ones(B, bool))
    grad = jax.jit(jax.grad(lambda h, w: head_loss(h, w, targets, 9.0, 1e-5, 4).total, (0, 1)))
    program = grad.lower(h, head).compile().as_text()
    assert f"[{B},{S // 4},{V}]" in program.replace(f"[{B * S // 4},{V}]", f"[{B},{S // 4},{V}]")
    assert f"[{B},{S},{V}]" not in program and f"[{B * S},{V}]" not in program


def test_chunks_must_divide_the_sequence():
    h, head, tokens = inputs()
    with pytest.raises(UserError, match="loss_chunks 5 does not divide the sequence of 16"):
        head_loss(h, head, shifted_targets(tokens, np.ones(B, bool)), 9.0, 0.0, 5)


@pytest.mark.reference
def test_labels_and_sums_equal_olmo_core():
    torch = pytest.importorskip("torch")
    utils = pytest.importorskip("olmo_core.data.utils")
    from olmo_core.nn.functional import cross_entropy_loss

    h, head, tokens = inputs()
    mask = np.array([True, False, True])
    batch = {"input_ids": torch.tensor(tokens).long(), "instance_mask": torch.tensor(mask)}
    labels = utils.get_labels(batch)
    logits = torch.tensor(np.einsum("bsd,vd->bsv", h, head))
    ce, z = cross_entropy_loss(
        logits.reshape(-1, V),
        labels.reshape(-1),
        reduction="sum",
        compute_z_loss=True,
        z_loss_multiplier=1e-5,
    )
    divisor = (labels != -100).sum() + (~batch["instance_mask"]).sum() * S
    targets = shifted_targets(tokens, mask)
    np.testing.assert_array_equal(targets.keep_BS, labels != -100)
    ours = head_loss(h, head, targets, loss_divisor(targets, mask), 1e-5, 4)
    assert float(ours.ce) == pytest.approx(float(ce / divisor), rel=2e-6)
    assert float(ours.z) == pytest.approx(float(z / divisor), rel=2e-6)
