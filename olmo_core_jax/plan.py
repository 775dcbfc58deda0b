"""What a recipe will take: updates, tokens, learning rates, days, chip-hours, money and disk. Arithmetic only, no JAX.

Time is FLOPs / (chips * peak * MFU): an estimate as good as the MFU that is put in. hardware/flops.py says what is counted.
"""

import math
from dataclasses import asdict, dataclass

from olmo_core_jax.errors import UserError
from olmo_core_jax.hardware import shapes
from olmo_core_jax.hardware.flops import training_flops
from olmo_core_jax.model.weights import n_params
from olmo_core_jax.optim.schedules import check_schedule, joins, learning_rate
from olmo_core_jax.recipes.schema import Recipe, Stage

BYTES = {"float32": 4, "bfloat16": 2}
GIB = 2**30


@dataclass(frozen=True)
class Assumptions:
    """What turns FLOPs into time and money. Raises UserError for what cannot be.

    shape: hardware, such as v5p-256 (None: time is not asked for); mfu: model FLOPs utilisation; price: of one
    chip-hour, in any currency.
    """

    shape: str | None = None
    mfu: float = 0.4
    price: float | None = None

    def __post_init__(self):
        if not 0 < self.mfu <= 1:
            raise UserError(f"--mfu {self.mfu}: a fraction between 0 and 1 is meant, such as 0.4")
        if self.price is not None and not 0 <= self.price < math.inf:
            raise UserError(f"--price {self.price}: what a chip-hour costs is meant, 0 or more")
        if self.shape is not None and shapes.shape(self.shape).chip is None:
            raise UserError(f"--hardware {self.shape} has no chip with a known peak rate")

    def cost_of(self, flops: float) -> "Cost":
        """Time on all chips of the shape, and what it costs."""
        chip = None if self.shape is None else shapes.shape(self.shape).chip
        if self.shape is None or chip is None:
            return Cost()
        chip_hours = flops / (chip.peak_bf16 * self.mfu) / 3600
        days = chip_hours / shapes.shape(self.shape).chips / 24
        return Cost(days, chip_hours, None if self.price is None else chip_hours * self.price)


@dataclass(frozen=True)
class Cost:
    """days and chip_hours are None without a hardware shape, cost without a price too."""

    days: float | None = None
    chip_hours: float | None = None
    cost: float | None = None


@dataclass(frozen=True, kw_only=True)
class StagePlan(Cost):
    """One stage."""

    stage: str
    updates: int
    schedule_updates: int
    tokens: int
    instances: int
    flops: float
    checkpoint_gib: float
    kept_checkpoints: int
    kept_gib: float
    learning_rates: dict[int, float]
    joins: list[dict]


def plan(recipe: Recipe, assumed: Assumptions = Assumptions()) -> list[StagePlan]:
    """A plan for each training stage. Raises UserError for a bad schedule."""
    return [_plan_stage(recipe, name, assumed) for name in recipe.stages()]


def flops_of(recipe: Recipe, stage: Stage, updates: int) -> float:
    """FLOPs of some updates of a stage, forward and backward."""
    a_token = training_flops(recipe.model, stage.data.sequence_length)
    return updates * stage.batch_tokens * a_token


def _plan_stage(recipe: Recipe, name: str, assumed: Assumptions) -> StagePlan:
    stage = recipe.stage(name)
    check_schedule(stage, name)
    flops = flops_of(recipe, stage, stage.last_step)
    size = checkpoint_bytes(recipe) / GIB
    kept = len({*stage.checkpoints.landmarks, stage.last_step}) + stage.checkpoints.keep
    return StagePlan(
        stage=name,
        updates=stage.last_step,
        schedule_updates=stage.total_steps,
        tokens=stage.last_step * stage.batch_tokens,
        instances=stage.last_step * stage.batch_instances,
        flops=flops,
        checkpoint_gib=size,
        kept_checkpoints=kept,
        kept_gib=kept * size,
        learning_rates={s: learning_rate(stage, s) for s in _telling_steps(stage)},
        joins=[asdict(j) | {"jump": j.jump} for j in joins(stage)],
        **asdict(assumed.cost_of(flops)),
    )


def checkpoint_bytes(recipe: Recipe) -> int:
    """Weights and both moments in their own dtypes."""
    p = recipe.precision
    return n_params(recipe.model) * (BYTES[p.params] + 2 * BYTES[p.moments])


def _telling_steps(stage: Stage) -> list[int]:
    """Updates whose learning rate says most: first, end of warm-up, quarters, both sides of joins, the last."""
    last = stage.last_step
    steps = {
        1,
        getattr(stage.schedule, "warmup", 1),
        last // 4,
        last // 2,
        3 * last // 4,
        last - 1,
        last,
    }
    for join in joins(stage):
        steps |= {join.step, join.step + 1}
    return sorted(s for s in steps if 1 <= s <= last)


def _early(p: StagePlan) -> str:
    if p.updates == p.schedule_updates:
        return ""
    return f" (stop_at; the schedule's length is {p.schedule_updates:,})"


def _size(gib: float) -> str:
    return f"{gib:,.2f} GiB" if gib >= 0.1 else f"{gib * 1024:,.1f} MiB"


def describe(recipe: Recipe, stages: list[StagePlan], assumed: Assumptions) -> str:
    """The plan as text."""
    lines = [f"{recipe.name}: {n_params(recipe.model):,} parameters"]
    for p in stages:
        lines += [
            "",
            f"{p.stage}: {p.updates:,} updates{_early(p)}, {p.tokens:,} tokens, "
            f"{p.instances:,} instances, {p.flops:.3e} FLOPs",
        ]
        if p.days is not None and p.chip_hours is not None:
            cost = f", cost {p.cost:,.0f}" if p.cost is not None else ""
            lines.append(
                f"  on {assumed.shape} at {assumed.mfu:.0%} MFU: {p.days:,.2f} days, {p.chip_hours:,.0f} chip-hours{cost}"
            )
        lines += [
            f"  a checkpoint {_size(p.checkpoint_gib)}, {p.kept_checkpoints} kept: {_size(p.kept_gib)}",
            "  learning rate: "
            + ", ".join(f"{s:,}: {lr:.9g}" for s, lr in p.learning_rates.items()),
        ]
        lines += [
            f"  join after {j['step']:,}: {j['before']:.9g} -> {j['after']:.9g} ({j['jump']:+.2e} relative)"
            for j in p.joins
        ]
        if 0.0 in p.learning_rates.values():
            lines.append("  the last update has a learning rate of exactly 0: it changes no weight")
    first, last = stages[0], stages[-1]
    if first is not last:
        before, after = (
            list(first.learning_rates.values())[-1],
            next(iter(last.learning_rates.values())),
        )
        lines += [
            "",
            f"{last.stage} starts at {after / before:.2f} times {first.stage}'s last learning rate",
        ]
    return "\n".join(lines)
