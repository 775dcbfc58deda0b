"""A window of a reference run, replayed: every number against the reference's, and the limits. Numbers only, no JAX."""

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from olmo_core_jax.compare.curves import CE, GRAD_NORM, GRAD_NORM_FP64, LR, SKIPPED
from olmo_core_jax.experiments.replay.plan import Window
from olmo_core_jax.optim.schedules import learning_rate
from olmo_core_jax.recipes.schema import Stage

WEIGHTS = "params"
PARTS = (WEIGHTS, "mu", "nu")
"""What a state at a window's end is compared by: weights and both moments."""


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


class Reported(Protocol):
    """What a training step reports (train/step.py): scalars, or arrays of one."""

    ce_loss: Any
    grad_norm: Any
    skipped: Any


def compare_update(step: int, stage: Stage, metrics: Reported, row: dict[str, float]) -> UpdateGap:
    """What an update reported, beside the reference's log of it."""
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
            gap, limit = self.end.worst(part), limits.tensor if part == WEIGHTS else limits.moment
            if not gap.norm <= limit:
                found.append(
                    f"{part} at the end: {gap.tensor} differs by {gap.norm:.3g}, limit {limit:.3g}"
                )
        value = self.end.worst(WEIGHTS).value
        if not value <= limits.value:
            found.append(
                f"params at the end: a value differs by {value:.3g}, limit {limits.value:.3g}"
            )
        return found
