"""The update: the same numbers however it is computed, and nothing that drifts."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import slow_unless, tiny_model

from olmo_core_jax.data.batch import Batch
from olmo_core_jax.errors import UserError
from olmo_core_jax.hardware.topology import Topology
from olmo_core_jax.model.olmo3 import init_params
from olmo_core_jax.model.remat import POLICIES
from olmo_core_jax.optim.schedules import learning_rate
from olmo_core_jax.recipes.schema import (
    Checkpoints,
    Cosine,
    Data,
    Linear,
    Loss,
    Optimizer,
    Precision,
    Stage,
)
from olmo_core_jax.train.step import init_state, make_train_step

MODEL = tiny_model(d_model=32, n_heads=4, mlp_hidden=48, vocab_size=120, padded_vocab_size=128)
B, S = 4, 32


def stage(**changes) -> Stage:
    settings = {
        "data": Data(mix="mix.txt", base="data", sequence_length=S, seed=1),
        "batch_tokens": B * S,
        "max_tokens": 100 * B * S,
        "schedule": Linear(peak=3e-3),
        "checkpoints": Checkpoints(every=10),
    }
    return Stage(**(settings | changes))


def batch(n: int, mask=None) -> Batch:
    tokens = np.random.default_rng(n).integers(0, MODEL.vocab_size, (B, S)).astype(np.int32)
    return Batch(tokens, np.ones(B, bool) if mask is None else np.array(mask))


def train(updates=3, section=None, precision=None, mask=None, **topology):
    """(state, metrics of every update)."""
    section = section or stage()
    step_fn = make_train_step(MODEL, section, precision, Topology(**topology))
    state, seen = init_state(init_params(MODEL, 0), section, precision), []
    for n in range(1, updates + 1):
        rate = np.float32(learning_rate(section, n))
        state, metrics = step_fn(state, batch(n, mask), rate)
        seen.append(jax.device_get(metrics))
    return state, seen


@pytest.fixture(scope="module")
def plain():
    return train(attention="reference", mask=[True, True, False, True])


WAYS = {
    "accumulation 2": {"accumulation": 2},
    "accumulation 4": {"accumulation": 4},
    "unrolled": {"scan_layers": False},
    "loss in chunks": {"loss_chunks": 8},
    "blockwise": {"attention": "blockwise"},
    # offload needs another memory than the host's own, and is refused on a CPU
    **{f"remat {name}": {"remat": name} for name in POLICIES if name not in ("none", "offload")},
    "all together": {
        "accumulation": 2,
        "scan_layers": False,
        "loss_chunks": 4,
        "remat": "block",
        "attention": "blockwise",
    },
}


QUICK = ("accumulation 4", "unrolled", "all together")


@pytest.mark.parametrize("way", slow_unless(WAYS, QUICK))
def test_topology_does_not_change_the_numbers(plain, way):
    """With a masked instance, so that micro-batches hold different numbers of targets."""
    settings = {"attention": "reference"} | WAYS[way]
    state, metrics = train(mask=[True, True, False, True], **settings)
    for n, (ours, expected) in enumerate(zip(metrics, plain[1], strict=True)):
        assert ours.ce_loss == pytest.approx(expected.ce_loss, abs=1e-6)
        assert ours.z_loss == pytest.approx(expected.z_loss, abs=1e-6)
        # Later updates start from weights that differ by rounding already.
        assert ours.grad_norm == pytest.approx(expected.grad_norm, rel=1e-6 if n == 0 else 5e-6)
    assert int(state.step) == 3 and int(state.opt.count) == 4
    for a, e in zip(jax.tree.leaves(state.params), jax.tree.leaves(plain[0].params), strict=True):
        np.testing.assert_allclose(a, e, atol=2e-5)


def test_masked_instances_are_those_of_the_whole_batch(plain):
    """Whatever rows of it a process holds: the update itself counts them."""
    assert [float(m.masked) for m in plain[1]] == [0.25] * 3


def test_the_learning_rate_given_is_the_one_applied():
    """A constant gradient makes Adam's step the rate itself: update n moves by the logged rate n."""
    import optax

    from olmo_core_jax.optim.skip_step_adamw import skip_step_adamw

    section = stage(schedule=Cosine(peak=1e-2, warmup=4))
    optimizer = skip_step_adamw(
        Optimizer(adam_count_start=0, weight_decay=0.0, clip_norm=None, skip=None)
    )
    params = {"lm_head": {"weight": jnp.zeros((1, 1))}}
    state, ones = optimizer.init(params), {"lm_head": {"weight": jnp.ones((1, 1))}}
    for n in range(1, section.total_steps + 1):
        rate = learning_rate(section, n)
        updates, state = optimizer.update(ones, state, params, loss=1.0, learning_rate=rate)
        moved = optax.apply_updates(params, updates)["lm_head"]["weight"][0, 0]
        if n <= 5 or n == section.total_steps:
            assert -float(moved) == pytest.approx(rate, rel=1e-5), n


def test_a_zero_rate_moves_moments_and_not_parameters():
    section = stage()
    step_fn = make_train_step(MODEL, section)
    state = init_state(init_params(MODEL, 0), section)
    before = jax.device_get(state.params)
    state, _ = step_fn(state, batch(1), np.float32(0))
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state.params))
    assert all(np.any(m) for m in jax.tree.leaves(jax.device_get(state.opt.mu)))


def test_ten_updates_compile_once_reuse_buffers_and_keep_dtypes():
    section, precision = stage(), Precision(compute="bfloat16")
    step_fn = make_train_step(MODEL, section, precision, Topology(accumulation=2))
    state = init_state(init_params(MODEL, 0), section, precision)
    kinds = jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "Some donated buffers were not usable"
        for n in range(1, 11):
            old = state
            state, _ = step_fn(state, batch(n), np.float32(learning_rate(section, n)))
            assert all(x.is_deleted() for x in jax.tree.leaves(old))
    assert step_fn._cache_size() == 1
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), state) == kinds


def test_bfloat16_compute_keeps_float32_masters_and_moments():
    state, metrics = train(precision=Precision(compute="bfloat16"))
    exact, expected = train()
    kept = (state.params, state.opt.mu, state.opt.nu)
    assert {x.dtype for x in jax.tree.leaves(kept)} == {np.dtype("float32")}
    for ours, theirs in zip(metrics, expected, strict=True):
        assert ours.ce_loss.dtype == np.float32
        assert ours.ce_loss == pytest.approx(theirs.ce_loss, abs=5e-3)
        assert ours.ce_loss != theirs.ce_loss
    del exact


def test_low_precision_state_only_when_insisted_on():
    with pytest.raises(ValueError, match="i_accept_low_precision_state"):
        Precision(moments="bfloat16")
    insisted = Precision(moments="bfloat16", i_accept_low_precision_state=True)
    state, _ = train(updates=1, precision=insisted)
    assert {x.dtype for x in jax.tree.leaves((state.opt.mu, state.opt.nu))} == {
        jnp.dtype(jnp.bfloat16)
    }
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {np.dtype("float32")}


def test_a_skipped_update_advances_the_step_and_nothing_else():
    section = stage()
    step_fn = make_train_step(MODEL, section)
    state = init_state(init_params(MODEL, 0), section)
    calm = state.opt._replace(seen=jnp.int32(128), losses=jnp.linspace(0.1, 0.2, 128))
    state = state._replace(opt=calm)
    kept = lambda s: jax.device_get((s.params, s.opt.mu, s.opt.nu, s.opt.count))  # noqa: E731
    before = kept(state)
    state, metrics = step_fn(state, batch(1), np.float32(1e-3))
    assert float(metrics.skipped) == 1.0
    assert int(state.step) == 1 and int(state.opt.seen) == 129
    jax.tree.map(np.testing.assert_array_equal, before, kept(state))


def test_one_nan_in_a_weight_does_not_reach_the_moments():
    section, params = stage(), init_params(MODEL, 0)
    params["cycles"]["layer_0"]["mlp"]["up"] = (
        params["cycles"]["layer_0"]["mlp"]["up"].at[0, 0, 0].set(jnp.nan)
    )
    state = init_state(params, section)
    state, metrics = make_train_step(MODEL, section)(state, batch(1), np.float32(1e-3))
    assert float(metrics.skipped) == 1.0 and np.isnan(float(metrics.ce_loss))
    assert not any(np.any(x) for x in jax.tree.leaves(jax.device_get((state.opt.mu, state.opt.nu))))
    assert int(state.opt.seen) == 0


def test_a_masked_instance_enters_the_mean_with_loss_zero():
    _, (whole,) = train(updates=1)
    _, (none,) = train(updates=1, mask=[False] * B)
    assert none.ce_loss == none.z_loss == none.grad_norm == 0
    _, parts = zip(*(train(updates=1, mask=np.arange(B) == i) for i in range(B)), strict=True)
    sums = [p[0].ce_loss * (S - 1 + (B - 1) * S) for p in parts]
    assert sum(sums) / (B * (S - 1)) == pytest.approx(whole.ce_loss, rel=1e-6)


def test_pad_targets_are_left_out_when_the_recipe_says_so():
    section = stage(loss=Loss(mask_pad_targets=True))
    with pytest.raises(UserError, match="pad_id"):
        make_train_step(MODEL, section)
    tokens = np.maximum(batch(1).tokens, 10)
    first = batch(1)._replace(tokens=tokens)
    losses = []
    for filler in (7, 8):
        tokens[:, S // 2 :] = filler
        step_fn = make_train_step(MODEL, section, pad_id=filler)
        state = init_state(init_params(MODEL, 0), section)
        losses.append(float(step_fn(state, first, np.float32(0))[1].ce_loss))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6), (
        "what follows is neither target nor seen"
    )


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(UserError, match="accumulation 3 does not divide the 4 instances"):
        make_train_step(MODEL, stage(), topology=Topology(accumulation=3))
    with pytest.raises(UserError, match=r"remat 'everything' is unknown.*selective"):
        train(updates=1, remat="everything")
    with pytest.raises(UserError, match="warmup 101 is longer"):
        make_train_step(MODEL, stage(schedule=Cosine(peak=1e-3, warmup=101)))


def test_offload_is_refused_on_a_cpu():
    with pytest.raises(UserError, match="remat offload needs a TPU or GPU"):
        train(updates=1, remat="offload")
