"""Which bytes of which files an update saw: answered from the run root alone, without the data."""

from dataclasses import dataclass

from olmo_core_jax import recipes, storage
from olmo_core_jax.data.stage_data import open_stage_data
from olmo_core_jax.errors import UserError


@dataclass(frozen=True)
class Seen:
    """One row of a global batch: `tokens` tokens from byte `offset` of `file`."""

    step: int
    epoch: int
    row: int
    instance: int
    label: str
    file: str
    offset: int
    tokens: int


def where(run_root: str, step: int, row: int | None = None, stage: str = "stage1") -> list[Seen]:
    """File, label and offset of every instance (or one row) of update `step` of a run.

    Needs recipe.yaml and build_index/ of the run root; the update need not have been trained yet.
    Raises UserError for a step or row that the run does not have.
    """
    recipe = recipes.recipe_of_run(run_root)
    section = recipe.stage(stage)
    if not 1 <= step <= section.last_step:
        raise UserError(f"{stage} has updates 1 to {section.last_step}, not {step}")
    if row is not None and not 0 <= row < section.batch_instances:
        raise UserError(
            f"a batch of {stage} has rows 0 to {section.batch_instances - 1}, not {row}"
        )
    index, order = open_stage_data(storage.join(run_root, "build_index", stage), section)
    epoch, _ = order.locate(step)
    seen = []
    for number, instance in enumerate(order.batch(step).tolist()):
        if row in (None, number):
            p = index.place(instance)
            length = index.sequence_length
            seen.append(Seen(step, epoch, number, instance, p.label, p.uri, p.offset, length))
    return seen
