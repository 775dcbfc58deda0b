"""Some updates of a reference run, made again from its own state, and every number compared.

The state (weights, moments, Adam step) is the reference's native checkpoint of update N; batches
and learning rates are derived as in training; the skip rule's history, which no native checkpoint
holds, is the reference's log. So a stretch of any run can be checked without the run before it, and
without the slow drift of two frameworks.
"""

import logging
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from olmo_core_jax.checkpoint.formats.olmo_core import MOMENTS, NativeCheckpoint
from olmo_core_jax.checkpoint.tensors import LazyArray
from olmo_core_jax.compare.curves import CE, GRAD_NORM, GRAD_NORM_FP64, LR, SKIPPED, Rows
from olmo_core_jax.errors import UserError
from olmo_core_jax.experiments.replay.plan import Window
from olmo_core_jax.model.tree import flatten, put
from olmo_core_jax.optim.schedules import learning_rate
from olmo_core_jax.optim.skip_step_adamw import SkipStepAdamWState
from olmo_core_jax.recipes.schema import Precision, Stage
from olmo_core_jax.train.mesh import replicated, state_shardings
from olmo_core_jax.train.step import StepMetrics, TrainState

log = logging.getLogger("olmo")

PARTS = ("params", *MOMENTS)


@dataclass(frozen=True)
class Limits:
    """What a replay may differ by. ce: absolute; the others relative.

    tensor: of weights, 2-norm of the difference over the tensor's; moment: the same of mu and nu;
    value: of weights, the largest single difference over the tensor's largest value. The last is
    looser, for Adam turns a gradient that is nothing but rounding (below its epsilon) into a step
    of the size of the learning rate.
    """

    ce: float
    grad_norm: float
    learning_rate: float
    tensor: float
    moment: float
    value: float


LIMITS = {
    "float32": Limits(1e-5, 1e-3, 1e-12, tensor=1e-5, moment=1e-4, value=1e-4),
    # One rounding of bfloat16 is 2^-8: this is its noise, not a check of every convention.
    "bfloat16": Limits(5e-3, 5e-2, 1e-12, tensor=1e-2, moment=1e-1, value=1e-1),
}


def native_state(
    native: NativeCheckpoint,
    mesh: Mesh,
    stage: Stage,
    precision: Precision,
    history: tuple[np.ndarray, np.ndarray, int],
) -> TrainState:
    """A training state from a native checkpoint, born on its shardings, one piece in memory at a
    time.
    """
    at = state_shardings(mesh, native.cfg)
    whole = replicated(mesh)

    def number(value, dtype) -> jax.Array:
        return jax.device_put(jnp.asarray(value, dtype), whole)

    losses, norms, seen = history
    trees = {"params": native.params(precision.params)} | {
        part: native.moments(part, precision.moments) for part in MOMENTS
    }
    opt = SkipStepAdamWState(
        number(native.adam_step, jnp.int32),
        on_device(trees["mu"], at.opt.mu),
        on_device(trees["nu"], at.opt.nu),
        number(losses, jnp.float32),
        number(norms, jnp.float32),
        number(seen, jnp.int32),
    )
    params = on_device(trees["params"], at.params)
    return TrainState(params, opt, number(native.step, jnp.int32))


def on_device(tree: dict, shardings: dict) -> dict:
    """Arrays on these shardings from LazyArrays; a process reads only what its devices hold."""
    flat: dict = dict(flatten(shardings))
    out: dict = {}
    for path, lazy in flatten(tree):
        put(out, path, _array(lazy, flat[path]))
    return out


def _array(lazy: LazyArray, sharding) -> jax.Array:
    def read(index) -> np.ndarray:
        bounds = [slice(*s.indices(n)[:2]) for s, n in zip(index, lazy.shape, strict=True)]
        leading = tuple(bounds[:2])
        values = lazy.read(leading)
        return values[(*(slice(None) for _ in leading), *bounds[len(leading) :])]

    return jax.make_array_from_callback(lazy.shape, sharding, read)


def skip_history(
    curve: Rows, step: int, stage: Stage, partial: bool = False
) -> tuple[np.ndarray, np.ndarray, int]:
    """The skip rule's rings after update `step`, from the reference's log of a run that began at 1.

    Where the log lacks updates that the rule looks back on: empty rings, as after a restart, if
    `partial`; else UserError.
    """
    window = stage.optimizer.skip.window if stage.optimizer.skip else 2
    losses, norms = np.zeros(window, np.float32), np.zeros(window, np.float32)
    if stage.optimizer.skip is None:
        return losses, norms, 0
    for update in range(max(1, step - window + 1), step + 1):
        if update not in curve:
            if partial:
                return np.zeros_like(losses), np.zeros_like(norms), 0
            raise UserError(
                f"the reference's curve has no update {update}, on which skipping depends"
            )
        losses[(update - 1) % window] = curve[update][CE]
        norms[(update - 1) % window] = curve[update][GRAD_NORM]
    return losses, norms, step


@dataclass(frozen=True)
class UpdateGap:
    """One update, ours against the log. grad_norm_fp64: ours against the exact norm, where
    logged.
    """

    step: int
    ce: float
    reference_ce: float
    grad_norm: float
    reference_grad_norm: float
    rate_gap: float
    skipped: bool
    reference_skipped: bool
    grad_norm_fp64: float | None

    @property
    def ce_gap(self) -> float:
        return abs(self.ce - self.reference_ce)

    @property
    def grad_norm_gap(self) -> float:
        return abs(self.grad_norm - self.reference_grad_norm) / self.reference_grad_norm


def compare_update(
    step: int, stage: Stage, metrics: StepMetrics, row: dict[str, float]
) -> UpdateGap:
    """Sets what an update reported beside the reference's log of it."""
    ce, norm, skipped = (float(x) for x in (metrics.ce_loss, metrics.grad_norm, metrics.skipped))
    rate = learning_rate(stage, step)
    gap = abs(rate - row[LR]) / row[LR] if row[LR] else abs(rate)
    exact = row.get(GRAD_NORM_FP64)
    return UpdateGap(
        step,
        ce,
        row[CE],
        norm,
        row[GRAD_NORM],
        gap,
        skipped > 0,
        row.get(SKIPPED, 0.0) > 0,
        abs(norm - exact) / exact if exact else None,
    )


@dataclass(frozen=True)
class TensorGap:
    """One tensor at the end of a window: 2-norm of the difference over the tensor's, and the
    largest difference of a value over the largest value.
    """

    part: str
    tensor: str
    norm: float
    value: float


@dataclass(frozen=True)
class StateGap:
    """The end of a window against the reference's checkpoint."""

    adam_count: int
    reference_adam_count: int
    tensors: list[TensorGap]

    def worst(self, part: str) -> TensorGap:
        """The farthest tensor of a part by 2-norm, with the farthest value of any."""
        of_part = [gap for gap in self.tensors if gap.part == part]
        farthest = max(of_part, key=lambda gap: np.nan_to_num(gap.norm, nan=np.inf))
        return replace(farthest, value=float(np.max([gap.value for gap in of_part])))


def compare_state(
    state: TrainState, native: NativeCheckpoint, mesh: Mesh, precision: Precision
) -> StateGap:
    """Compares weights and moments tensor by tensor."""
    at = state_shardings(mesh, native.cfg)
    ours = {"params": state.params, "mu": state.opt.mu, "nu": state.opt.nu}
    places = {"params": at.params, "mu": at.opt.mu, "nu": at.opt.nu}
    gaps = []
    for part, tree in ours.items():
        dtype = precision.params if part == "params" else precision.moments
        theirs = native.params(dtype) if part == "params" else native.moments(part, dtype)
        shardings, mine = dict(flatten(places[part])), dict(flatten(tree))
        for path, lazy in flatten(theirs):
            found = np.asarray(_relative_gaps(mine[path], _array(lazy, shardings[path])))
            gaps.append(TensorGap(part, ".".join(path), *map(float, found)))
    return StateGap(int(state.opt.count), native.adam_step or 0, gaps)


@jax.jit
def _relative_gaps(a: jax.Array, b: jax.Array) -> jax.Array:
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    gaps = jnp.stack([jnp.linalg.norm((a - b).ravel()), jnp.max(jnp.abs(a - b))])
    sizes = jnp.stack([jnp.linalg.norm(b.ravel()), jnp.max(jnp.abs(b))])
    return jnp.where(sizes > 0, gaps / sizes, gaps)


@dataclass(frozen=True)
class Replayed:
    """A window's outcome, judged by the limits of the compute dtype. end: None where the reference
    has no checkpoint of it.
    """

    window: Window
    updates: list[UpdateGap]
    end: StateGap | None
    dtype: str

    def figures(self) -> dict[str, float]:
        """The numbers of the window's row, by name."""
        exact = [u.grad_norm_fp64 for u in self.updates if u.grad_norm_fp64 is not None]
        found = {
            "updates": self.window.updates,
            "updates compared": len(self.updates),
            "CE difference, largest": max(u.ce_gap for u in self.updates),
            "gradient norm, largest relative difference": max(
                u.grad_norm_gap for u in self.updates
            ),
            "LR, largest relative difference": max(u.rate_gap for u in self.updates),
            "skipped here": sum(u.skipped for u in self.updates),
            "skipped there": sum(u.reference_skipped for u in self.updates),
        }
        if exact:
            found["gradient norm against fp64, largest relative difference"] = max(exact)
        if self.end is not None:
            found["Adam count"] = self.end.adam_count
            found["Adam count (reference)"] = self.end.reference_adam_count
            for part in PARTS:
                gap = self.end.worst(part)
                found[f"{part} at the end, relative difference"] = gap.norm
                found[f"{part} at the end, largest value's relative difference"] = gap.value
        return found | {"passed": float(not self.failures())}

    def failures(self) -> list[str]:
        """What is above the limits, in words."""
        limits, found = LIMITS[self.dtype], []
        for u in self.updates:
            for what, gap, limit in (
                ("CE differs by", u.ce_gap, limits.ce),
                ("gradient norm differs by (relative)", u.grad_norm_gap, limits.grad_norm),
                ("LR differs by (relative)", u.rate_gap, limits.learning_rate),
            ):
                if not gap <= limit:
                    found.append(f"update {u.step}: {what} {gap:.3g}, limit {limit:.3g}")
            if u.skipped != u.reference_skipped:
                found.append(f"update {u.step}: skipped {'here' if u.skipped else 'there'} only")
        if self.end is None:
            return found
        if self.end.adam_count != self.end.reference_adam_count:
            found.append(
                f"Adam count {self.end.adam_count}, the reference's {self.end.reference_adam_count}"
            )
        for part in PARTS:
            gap, limit = self.end.worst(part), limits.moment if part in MOMENTS else limits.tensor
            if not gap.norm <= limit:
                found.append(
                    f"{part} at the end: {gap.tensor} differs by {gap.norm:.3g}, limit {limit:.3g}"
                )
        value = self.end.worst("params").value
        if not value <= limits.value:
            found.append(
                f"params at the end: a value differs by {value:.3g}, limit {limits.value:.3g}"
            )
        return found
