"""Job: index and order of every training stage's data. Writes build_index/<stage>/."""

import logging

from olmo_core_jax import storage
from olmo_core_jax.data.mix import read_mix
from olmo_core_jax.data.stage_data import build_stage_data
from olmo_core_jax.hardware.topology import process_id
from olmo_core_jax.jobs.common import Context, Job, Outcome, leave, main
from olmo_core_jax.results import digest_of

log = logging.getLogger("olmo")

FOLDER = "build_index"


def inputs(context: Context) -> dict[str, str]:
    mixes = {name: context.recipe.stage(name).data.mix for name in context.recipe.stages()}
    return {f"{name}_mix": digest_of(read_mix(mix)) for name, mix in mixes.items()}


def work(context: Context) -> Outcome:
    outcome = Outcome()
    if process_id(context.topology) != 0:
        return outcome
    for name in context.recipe.stages():
        folder = context.path(name)
        index, order = build_stage_data(folder, context.recipe, name)
        epochs, _ = order.locate(context.recipe.stage(name).last_step)
        log.info(
            "%s: %d files, %d instances, %d tokens, %d updates an epoch, %d epoch(s) needed",
            name,
            len(index.shards),
            index.instances,
            index.tokens,
            order.steps_per_epoch,
            epochs,
        )
        outcome.outputs[f"{name}_index"] = storage.join(folder, "index.json")
        outcome.figures |= {
            f"{name}_files": len(index.shards),
            f"{name}_instances": index.instances,
            f"{name}_tokens": index.tokens,
            f"{name}_updates_an_epoch": order.steps_per_epoch,
            f"{name}_epochs": epochs,
        }
        outcome.notes |= {
            f"{name}_fingerprint": index.fingerprint,
            f"{name}_olmo_core_fingerprint": index.olmo_core_fingerprint,
        }
    return outcome


JOB = Job("build_index", lambda args: FOLDER, inputs, work)

if __name__ == "__main__":
    leave(main(JOB))
