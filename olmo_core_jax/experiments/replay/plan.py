"""Windows of a reference run that are replayed, and what replaying them costs. Arithmetic only,
no JAX.

A window is `[STAGE/]N:K`: from the reference's native checkpoint of update N, K updates, up to
its checkpoint of N + K. `380:20` is `stage1/380:20`.
"""

import re
from dataclasses import asdict, dataclass
from itertools import pairwise

from olmo_core_jax.errors import UserError
from olmo_core_jax.model.weights import n_params
from olmo_core_jax.plan import GIB, Assumptions, Cost, flops_of
from olmo_core_jax.recipes.schema import Recipe

STATE_BYTES = 12  # a native checkpoint: weights and both moments in fp32


@dataclass(frozen=True)
class Window:
    """Updates first + 1 to last of a stage."""

    stage: str
    first: int
    updates: int

    @property
    def last(self) -> int:
        return self.first + self.updates

    @property
    def name(self) -> str:
        """As a folder: stage1-380-20."""
        return f"{self.stage}-{self.first}-{self.updates}"

    def __str__(self) -> str:
        return f"{self.stage}/{self.first}:{self.updates}"


def parse_windows(text: str, recipe: Recipe) -> list[Window]:
    """The windows of a comma-separated list. Raises UserError that names the one that cannot be."""
    windows = [_parse(part.strip(), recipe) for part in text.split(",") if part.strip()]
    if not windows:
        raise UserError("no window to replay: write [STAGE/]N:K, such as stage1/380:20")
    return list(dict.fromkeys(windows))


def _parse(text: str, recipe: Recipe) -> Window:
    found = re.fullmatch(r"(?:(\w+)/)?(\d+):(\d+)", text)
    if found is None:
        raise UserError(f"window {text!r}: write [STAGE/]N:K, such as stage1/380:20")
    window = Window(found[1] or recipe.stages()[0], int(found[2]), int(found[3]))
    end = recipe.stage(window.stage).last_step
    if not window.updates or window.last > end:
        raise UserError(f"window {text}: {window.stage} has updates 1 to {end}")
    return window


def all_windows(recipe: Recipe) -> list[Window]:
    """Every stretch between two neighbouring native checkpoints that a recipe's reference names."""
    windows = []
    for name in recipe.stages():
        reference = recipe.stage(name).reference
        steps = sorted(reference.native) if reference else []
        windows += [Window(name, a, b - a) for a, b in pairwise(steps)]
    return windows


@dataclass(frozen=True, kw_only=True)
class WindowPlan(Cost):
    """What a window takes. share: of its stage's updates; read_gib: both native checkpoints."""

    window: str
    tokens: int
    flops: float
    share: float
    read_gib: float


def plan_windows(recipe: Recipe, windows: list[Window], assumed: Assumptions) -> list[WindowPlan]:
    """A plan for each window."""
    plans = []
    for window in windows:
        stage = recipe.stage(window.stage)
        flops = flops_of(recipe, stage, window.updates)
        plans.append(
            WindowPlan(
                window=str(window),
                tokens=window.updates * stage.batch_tokens,
                flops=flops,
                share=window.updates / stage.last_step,
                read_gib=2 * n_params(recipe.model) * STATE_BYTES / GIB,
                **asdict(assumed.cost_of(flops)),
            )
        )
    return plans


def describe_windows(recipe: Recipe, plans: list[WindowPlan]) -> str:
    """The plans as text."""
    lines = [f"{recipe.name}: {len(plans)} window(s) to replay"]
    for p in plans:
        chips = f", {p.chip_hours:,.2f} chip-hours" if p.chip_hours is not None else ""
        cost = f", cost {p.cost:,.2f}" if p.cost is not None else ""
        lines.append(
            f"  {p.window}: {p.tokens:,} tokens ({p.share:.3g} of the stage), {p.flops:.3e} FLOPs, "
            f"{p.read_gib:,.2f} GiB of native checkpoints to read{chips}{cost}"
        )
    return "\n".join(lines)
