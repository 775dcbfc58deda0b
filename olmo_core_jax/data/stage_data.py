"""A stage's data as a recipe describes it: built once by a job, opened by whoever reads it."""

from olmo_core_jax.data.build import build_index
from olmo_core_jax.data.index import Index, load_index, save_index
from olmo_core_jax.data.order import Order, Shuffle, build_order
from olmo_core_jax.data.repetition import RepetitionFilter
from olmo_core_jax.errors import UserError
from olmo_core_jax.recipes import schema


def build_stage_data(folder: str, recipe: schema.Recipe, stage: str) -> tuple[Index, Order]:
    """Writes index.json and every epoch's order that the stage needs under `folder`.

    Idempotent. Raises UserError on bad data, or where the stage needs more epochs than the recipe
    allows.
    """
    section = recipe.stage(stage)
    index = build_index(section.data, recipe.tokenizer, recipe.model.vocab_size)
    order = Order(folder, _shuffle(index, section), section.batch_instances)
    epochs = epochs_needed(order, section, stage)
    save_index(folder, index)
    for epoch in range(1, epochs + 1):
        build_order(folder, order.shuffle, epoch)
    return index, order


def open_stage_data(folder: str, section: schema.Stage) -> tuple[Index, Order]:
    """What build_stage_data wrote, with the shards under the recipe's own `base`.

    Raises UserError where it is missing, damaged, or of another sequence length.
    """
    index = load_index(folder, section.data.base, section.data.sequence_length)
    return index, Order(folder, _shuffle(index, section), section.batch_instances)


def repetition_filter(data: schema.Data) -> RepetitionFilter | None:
    """The filter that a recipe asks for."""
    return (
        RepetitionFilter(**data.repetition_filter.model_dump()) if data.repetition_filter else None
    )


def epochs_needed(order: Order, section: schema.Stage, stage: str) -> int:
    """Epochs up to the stage's last update. Raises UserError where the recipe allows fewer."""
    epochs, _ = order.locate(section.last_step)
    if epochs > section.epochs:
        raise UserError(
            f"{stage}: the data holds {order.shuffle.instances} instances, enough for "
            f"{order.steps_per_epoch * section.epochs} updates of {section.batch_instances} in "
            f"{section.epochs} epoch(s); the last update is "
            f"{section.last_step}, which takes {epochs} epochs: "
            f"add data, or set {stage}.epochs to {epochs} to repeat it"
        )
    return epochs


def _shuffle(index: Index, section: schema.Stage) -> Shuffle:
    return Shuffle(index.instances, section.data.seed, index.chunk)
