"""The optimizer against OLMo-core's, and what a skipped update must leave alone."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from olmo_core_jax.optim.skip_step_adamw import global_norm, skip_step_adamw
from olmo_core_jax.recipes.schema import Optimizer, SkipRule

PLAIN = Optimizer(adam_count_start=0, clip_norm=None, skip=None)


def small_params(seed: int = 0) -> dict:
    draw = np.random.default_rng(seed).standard_normal
    shapes = {"embed": (11, 6), "lm_head": (11, 6), "final_norm": (6,)}
    return {name: {"weight": draw(s).astype(np.float32)} for name, s in shapes.items()}


def random_grads(rng, scale: float = 1.0) -> dict:
    return jax.tree.map(
        lambda p: (scale * rng.standard_normal(p.shape)).astype(np.float32), small_params()
    )


class Run:
    """A jitted optimizer on small parameters; loss and gradients are given for every update."""

    def __init__(self, opt: Optimizer = Optimizer(), params=None):  # noqa: B008
        transform = skip_step_adamw(opt)
        self.params = jax.tree.map(jnp.asarray, params or small_params())
        self.state = transform.init(self.params)

        @jax.jit
        def update(grads, state, params, loss, lr):
            updates, state = transform.update(grads, state, params, loss=loss, learning_rate=lr)
            return optax.apply_updates(params, updates), state

        self._update = update

    def step(self, grads, loss=1.0, lr=1e-3) -> bool:
        """One update; True when it was skipped."""
        before = int(self.state.count)
        self.params, self.state = self._update(
            grads, self.state, self.params, jnp.float32(loss), jnp.float32(lr)
        )
        return int(self.state.count) == before

    def calm(self, updates: int, rng) -> None:
        for _ in range(updates):
            assert not self.step(random_grads(rng, 0.1), loss=2 + 0.01 * rng.standard_normal())

    def bits(self) -> list[bytes]:
        """Parameters, moments and Adam's count, byte for byte."""
        kept = (self.params, self.state.mu, self.state.nu, self.state.count)
        return [np.asarray(x).tobytes() for x in jax.tree.leaves(kept)]


def test_bias_correction_is_counted():
    """A constant gradient moves by the learning rate at every update; a frozen count gives 2.2x."""
    params = {"lm_head": {"weight": np.zeros((1, 1), np.float32)}}
    run = Run(PLAIN.model_copy(update={"weight_decay": 0.0}), params)
    grads = {"lm_head": {"weight": np.full((1, 1), 0.37, np.float32)}}
    for n in range(1, 501):
        before = float(run.params["lm_head"]["weight"][0, 0])
        run.step(grads, lr=1e-3)
        moved = before - float(run.params["lm_head"]["weight"][0, 0])
        if n in (1, 10, 500):
            assert moved / 1e-3 == pytest.approx(1, abs=1e-3), n


def test_count_starting_at_one_damps_the_first_updates():
    """As runs that saved a step-0 checkpoint with OLMo-core: 0.735, 0.848, 0.898 of the rate."""
    params = {"lm_head": {"weight": np.zeros((1, 1), np.float32)}}
    opt = PLAIN.model_copy(update={"weight_decay": 0.0, "adam_count_start": 1})
    run, moved = Run(opt, params), []
    for _ in range(3):
        before = float(run.params["lm_head"]["weight"][0, 0])
        run.step({"lm_head": {"weight": np.ones((1, 1), np.float32)}}, lr=1.0)
        moved.append(before - float(run.params["lm_head"]["weight"][0, 0]))
    assert moved == pytest.approx([0.735, 0.848, 0.898], abs=1e-3)
    assert int(run.state.count) == 4


def test_only_the_embedding_does_not_decay():
    run = Run(PLAIN)
    zeros = jax.tree.map(np.zeros_like, small_params())
    run.step(zeros, lr=0.5)
    for name, old in small_params().items():
        factor = 1.0 if name == "embed" else 1 - 0.5 * 0.1
        np.testing.assert_allclose(run.params[name]["weight"], old["weight"] * factor, rtol=2e-7)


def test_clipping_multiplies_always():
    """OLMo-core's coefficient is min(1, clip / (norm + 1e-6)), per-tensor norms taken together."""
    for scale in (0.1, 7.0):
        grads = random_grads(np.random.default_rng(1), scale)
        norm = np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in jax.tree.leaves(grads)))
        run = Run(Optimizer(adam_count_start=0))
        run.step(grads)
        coefficient = min(1, 1 / (norm + 1e-6))
        assert float(global_norm(grads)) == pytest.approx(norm, rel=1e-6)
        for m, g in zip(jax.tree.leaves(run.state.mu), jax.tree.leaves(grads), strict=True):
            np.testing.assert_allclose(m, 0.1 * coefficient * g, rtol=2e-6)


def test_a_skipped_update_changes_no_bit():
    rng = np.random.default_rng(2)
    params = small_params()
    params["final_norm"]["weight"][:2] = (0.0, -0.0)
    run = Run(params=params)
    run.calm(70, rng)
    run.params["final_norm"]["weight"] = run.params["final_norm"]["weight"].at[1].set(-0.0)
    before, seen = run.bits(), int(run.state.seen)
    assert run.step(random_grads(rng, 0.1), loss=50.0)
    assert run.bits() == before
    assert int(run.state.seen) == seen + 1, "the spike is in the window"
    assert not run.step(random_grads(rng, 0.1), loss=2.0)
    assert run.bits() != before


def test_the_first_possible_skip_is_the_64th_update():
    for calm, skips in ((62, False), (63, True)):
        rng, run = np.random.default_rng(3), Run()
        run.calm(calm, rng)
        assert run.step(random_grads(rng, 0.1), loss=50.0) is skips, f"update {calm + 1}"


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_spikes_of_either_kind_are_skipped_and_drops_are_not(what):
    rng, run = np.random.default_rng(4), Run()
    run.calm(100, rng)
    assert not run.step(random_grads(rng, 0.1), loss=0.0), "one-sided"
    run.calm(128, rng)
    if what == "loss":
        assert run.step(random_grads(rng, 0.1), loss=10.0)
    else:
        assert run.step(random_grads(rng, 10.0), loss=2.0)


def test_skipped_values_stay_in_the_window_so_the_fourth_equal_spike_passes():
    """k spikes among 100 + k values have (1 - k/n) <= 6 sqrt(k/n (1 - k/n)) from k = 3 on."""
    rng, run = np.random.default_rng(5), Run()
    run.calm(100, rng)
    assert [run.step(random_grads(rng, 0.1), loss=1e4) for _ in range(4)] == [True] * 3 + [False]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_non_finite_updates_are_skipped_and_poison_nothing(bad, where):
    """Also before the guard has 64 values, and it goes on guarding afterwards."""
    rng, run = np.random.default_rng(6), Run()
    for calm in (3, 80):
        run.calm(calm, rng)
        before, window = run.bits(), np.asarray(run.state.losses).copy()
        grads = random_grads(rng, 0.1)
        if where == "gradient":
            grads["embed"]["weight"][3, 2] = bad
        assert run.step(grads, loss=bad if where == "loss" else 2.0)
        assert run.bits() == before
        np.testing.assert_array_equal(run.state.losses, window)
    assert not run.step(random_grads(rng, 0.1), loss=2.0)
    assert run.step(random_grads(rng, 0.1), loss=10.0), "the guard still works"


def test_non_finite_updates_are_skipped_without_a_guard_too():
    run = Run(Optimizer(skip=None))
    before = run.bits()
    assert run.step(random_grads(np.random.default_rng(0)), loss=np.nan)
    assert run.bits() == before
    assert not run.step(random_grads(np.random.default_rng(0)), loss=1e6)


def test_the_window_is_in_the_state():
    """A copy of the state at update 100 skips the spike at 101 as the unbroken run does."""
    rng, run = np.random.default_rng(7), Run()
    run.calm(100, rng)
    resumed = Run()
    resumed.params, resumed.state = jax.tree.map(
        lambda x: jnp.asarray(np.asarray(x)), (run.params, run.state)
    )
    grads = [random_grads(np.random.default_rng(100 + n), 0.1) for n in range(10)]
    for r in (run, resumed):
        assert r.step(grads[0], loss=9.0)
        assert not any(r.step(g, loss=2.0) for g in grads[1:])
    assert run.bits() == resumed.bits()


def test_state_stays_float32_and_small_updates_are_not_lost():
    params = {"lm_head": {"weight": np.ones((2, 2), np.float32)}}
    run = Run(PLAIN.model_copy(update={"weight_decay": 0.0}), params)
    for _ in range(3):
        run.step({"lm_head": {"weight": jnp.ones((2, 2), jnp.bfloat16)}}, lr=3e-4)
    kept = (run.params, run.state.mu, run.state.nu)
    assert {x.dtype for x in jax.tree.leaves(kept)} == {np.dtype("float32")}
    assert float(run.params["lm_head"]["weight"][0, 0]) == pytest.approx(1 - 9e-4, abs=1e-6)


def test_smaller_windows_scale_the_rule():
    rng = np.random.default_rng(8)
    run = Run(Optimizer(skip=SkipRule(window=8, sigma=3.0)))
    run.calm(2, rng)
    for _ in range(12):  # the ring wraps around
        run.step(random_grads(rng, 0.1), loss=2 + 0.01 * rng.standard_normal())
    assert run.step(random_grads(rng, 0.1), loss=2.2)


@pytest.mark.reference
@pytest.mark.parametrize("foreach", [False, True])
def test_220_updates_with_spikes_equal_olmo_core(foreach):
    """Same decisions at every update; parameters, moments and count stay within rounding."""
    torch = pytest.importorskip("torch")
    optim = pytest.importorskip("olmo_core.optim")
    rng, run = np.random.default_rng(9), Run(Optimizer(adam_count_start=0))
    theirs = {n: torch.nn.Parameter(torch.tensor(p["weight"])) for n, p in small_params().items()}
    groups = [
        {"params": [theirs["embed"]], "weight_decay": 0.0},
        {"params": [p for n, p in theirs.items() if n != "embed"]},
    ]
    reference = optim.SkipStepAdamW(
        groups, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, foreach=foreach
    )
    spikes = {64: 9.0, 65: 9.0, 66: 9.0, 67: 9.0, 90: 3.0, 150: 30.0, 160: 2.1, 205: 8.0, 206: 8.0}
    skipped = []
    for n in range(1, 221):
        loss = np.float32(spikes.get(n, 2 + 0.02 * rng.standard_normal()))
        grads = random_grads(rng, 20.0 if n in (110, 180) else rng.uniform(0.05, 0.3))
        lr = 1e-3 * (1 - n / 300)
        for name, p in theirs.items():
            p.grad = torch.tensor(grads[name]["weight"])
        total = torch.stack([p.grad.norm() for p in theirs.values()]).norm()
        for p in theirs.values():
            p.grad *= torch.clamp(1.0 / (total + 1e-6), max=1.0)
        reference.latest_loss, reference.latest_grad_norm = torch.tensor(loss), total
        for group in reference.param_groups:
            group["lr"] = lr
        reference.step()
        skip = run.step(grads, loss, lr)
        assert skip == bool(reference.step_skipped), f"update {n}"
        skipped += [n] * skip
    assert {64, 65, 110, 150, 180} <= set(skipped) and not {67, 90, 160} & set(skipped)
    for name, p in theirs.items():
        state = reference.state[p]
        assert int(state["step"]) == int(run.state.count) == 220 - len(skipped)
        for ours, their in (
            (run.params[name]["weight"], p.detach()),
            (run.state.mu[name]["weight"], state["exp_avg"]),
            (run.state.nu[name]["weight"], state["exp_avg_sq"]),
        ):
            np.testing.assert_allclose(ours, their, atol=2.4e-7, rtol=3e-6, err_msg=name)
