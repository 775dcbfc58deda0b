"""What a checkpoint says about the data, held against the data at hand."""

from olmo_core_jax.data.index import Index
from olmo_core_jax.data.order import Order
from olmo_core_jax.errors import UserError

NOT_REPRODUCIBLE = "data order not reproducible"


def data_state(index: Index, order: Order, next_step: int) -> dict:
    """The data section of a checkpoint after update next_step - 1. JSON types only.

    batches_processed counts within the epoch, as OLMo-core's does.
    """
    epoch, row = order.locate(next_step)
    return {
        "fingerprint": index.fingerprint,
        "olmo_core_fingerprint": index.olmo_core_fingerprint,
        "seed": order.shuffle.seed,
        "chunk": order.shuffle.chunk,
        "sequence_length": index.sequence_length,
        "batch_instances": order.batch_instances,
        "next_step": next_step,
        "epoch": epoch,
        "batches_processed": row,
    }


def check_state(
    state: dict, index: Index, order: Order, step: int, accept_other_data: bool = False
) -> list[str]:
    """Compares a checkpoint's data section with what a run that goes on after `step` would read.

    accept_other_data: goes on with other files or another cut all the same. The returned notes then
    belong into the run's record; they are empty where the order is exactly the one that was begun.
    Raises UserError otherwise.
    """
    expected = data_state(index, order, step + 1)
    position = {k: state.get(k) for k in ("next_step", "iterator")}
    if position["next_step"] != step + 1 or position["iterator"] not in (None, step):
        raise UserError(
            f"the checkpoint of step {step} holds a data position of update "
            f"{position['next_step']} (iterator {position['iterator']}): it is damaged"
        )
    fixed = ("fingerprint", "seed", "chunk", "sequence_length", "batch_instances")
    differs = [
        f"{k} {state.get(k)} in the checkpoint, {expected[k]} now"
        for k in fixed
        if state.get(k) != expected[k]
    ]
    if differs and not accept_other_data:
        raise UserError(
            f"the checkpoint of step {step} was trained on other data ({'; '.join(differs)}): "
            "restore the data, or give up AI2's order: train --accept-other-data"
        )
    return [f"{NOT_REPRODUCIBLE}: {d}" for d in differs]
