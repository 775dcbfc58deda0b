"""Learning rates as functions of the update, in float64 Python. No JAX here: plan and reports use it too.

Updates count from 1: the first update of a stage is made with learning_rate(stage, 1), and the last of a full
schedule is T. The formulas are OLMo-core's (olmo_core/optim/scheduler.py); past T the rate stays at its floor.
"""

import itertools
import math
from dataclasses import dataclass

from olmo_core_jax.errors import UserError
from olmo_core_jax.recipes.schema import WSD, Cosine, HalfCosine, Linear, Stage, Stitched

Simple = Cosine | HalfCosine | Linear | WSD


@dataclass(frozen=True)
class Join:
    """Where one schedule takes over from another: both rates at the last update of the earlier one."""

    step: int
    before: float
    after: float

    @property
    def jump(self) -> float:
        """after's relative distance from before; infinite when before is 0 and after is not."""
        if self.before == self.after:
            return 0.0
        return math.inf if self.before == 0 else self.after / self.before - 1


def learning_rate(stage: Stage, step: int) -> float:
    """The rate of update `step` (from 1) of a stage."""
    schedule = stage.schedule
    if isinstance(schedule, Stitched):
        segments = schedule.segments
        schedule = next((s for s in segments if step <= s.until), segments[-1]).schedule
    return rate(schedule, step, schedule_length(schedule, stage))


def rate(schedule: Simple, step: int, total: int) -> float:
    """The rate of update `step` under one schedule that ends at update `total`."""
    peak, floor = schedule.peak, schedule.alpha_f * schedule.peak
    warm, rest = schedule.warmup, total - schedule.warmup
    if isinstance(schedule, HalfCosine) and step < warm:
        return (floor + (peak - floor) / 2) * step / warm
    if step < warm:
        return peak * step / warm
    if step >= total:
        return floor
    match schedule:
        case Cosine():
            return floor + (peak - floor) * (1 + math.cos(math.pi * (step - warm) / rest)) / 2
        case HalfCosine():
            return (
                floor
                + (peak - floor) * (1 + math.cos(math.pi * (step - warm + rest) / (2 * rest))) / 2
            )
        case Linear():
            return peak - (peak - floor) * ((step - warm) / rest)
        case WSD():
            return floor + (peak - floor) * min(total - step, schedule.decay) / schedule.decay


def schedule_length(schedule: Simple, stage: Stage) -> int:
    """T: the update at which a schedule reaches its floor."""
    return math.ceil((schedule.max_tokens or stage.max_tokens) / stage.batch_tokens)


def joins(stage: Stage) -> list[Join]:
    """Every seam of a stitched schedule; an empty list for any other."""
    if not isinstance(stage.schedule, Stitched):
        return []
    segments = stage.schedule.segments

    def at(segment, step):
        return rate(segment.schedule, step, schedule_length(segment.schedule, stage))

    pairs = itertools.pairwise(segments)
    return [Join(a.until, at(a, a.until), at(b, a.until)) for a, b in pairs]


def check_schedule(stage: Stage, name: str = "stage") -> None:
    """Raises UserError for a schedule that cannot be what was meant: phases longer than the schedule, segments out of
    order, a run that goes on after its schedule ended, or a jump at a join above allow_jump."""
    schedule = stage.schedule
    parts: list[Simple]
    if isinstance(schedule, Stitched):
        ends = [s.until for s in schedule.segments]
        if ends != sorted(set(ends)):
            raise UserError(
                f"{name}.schedule.segments: `until` must grow from segment to segment, not {ends}"
            )
        if ends[-1] < stage.last_step:
            raise UserError(
                f"{name}.schedule.segments end at {ends[-1]}, the stage at {stage.last_step}"
            )
        parts, allow_jump = [s.schedule for s in schedule.segments], schedule.allow_jump
    else:
        parts, allow_jump = [schedule], 0.0  # and no joins
    for part in parts:
        _check_phases(part, schedule_length(part, stage), name)
    over = schedule_length(parts[-1], stage)
    if over < stage.last_step:
        raise UserError(
            f"{name}: the schedule is over at update {over}, the run at {stage.last_step}; "
            "raise schedule.max_tokens or set stop_at"
        )
    for join in joins(stage):
        if abs(join.jump) > allow_jump:
            raise UserError(
                f"{name}.schedule: at the join after update {join.step} the learning rate goes from "
                f"{join.before:.8g} to {join.after:.8g} ({join.jump:+.2%}), "
                f"more than allow_jump {allow_jump:.2%}"
            )


def _check_phases(schedule: Simple, total: int, name: str) -> None:
    decay = schedule.decay if isinstance(schedule, WSD) else 0
    if schedule.warmup + decay > total:
        phases = f"warmup {schedule.warmup}" + (f" + decay {decay}" if decay else "")
        raise UserError(f"{name}.schedule: {phases} is longer than the schedule's {total} updates")
