"""Job: the start of stage 2 from stage 1's end, every counter accounted for. Writes
warm_adam/checkpoints/0.

By hand, with --from-native, the start of stage 2 from the state that OLMo-core itself left
behind.
"""

import argparse
import logging

from olmo_core_jax import recipes, storage
from olmo_core_jax.errors import UserError
from olmo_core_jax.hardware.topology import process_id
from olmo_core_jax.jobs.common import Context, Job, Outcome, leave, main
from olmo_core_jax.storage import ranges

log = logging.getLogger("olmo")

FOLDER = "warm_adam"
STAGE, BEFORE = "stage2", "stage1"


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--from-native",
        metavar="URI",
        help="a native OLMo-core checkpoint (folder, gs://, https://) instead of stage 1's end",
    )


def inputs(context: Context) -> dict[str, str]:
    """What the start is made of: either format's metadata names every tensor, ours their
    checksums too.
    """
    uri = context.args.from_native
    if uri is None:
        return {"source": ranges.digest(storage.join(_stage1_end(context), "meta", "metadata"))}
    return {"source": ranges.digest(storage.join(uri, "model_and_optim", ".metadata"))}


def work(context: Context) -> Outcome:
    from olmo_core_jax.checkpoint import warm_adam
    from olmo_core_jax.checkpoint.formats import orbax_write
    from olmo_core_jax.checkpoint.store import CheckpointStore

    outcome = Outcome()
    if process_id(context.topology) != 0:
        return outcome
    recipe = context.recipe
    if recipe.stage2 is None:
        raise UserError(f"recipe {recipe.name} has no stage2 to start")
    native = context.args.from_native
    source = native or _stage1_end(context)
    found = warm_adam.from_native(source, recipe) if native else warm_adam.from_ours(source, recipe)
    rows = warm_adam.surgery_table(found, recipe.stage2)
    log.info("what %s takes from %s:\n%s", STAGE, source, warm_adam.format_table(rows))
    folder = context.path("checkpoints")
    meta = {
        "recipe": recipes.digest(recipe),
        "stage": FOLDER,
        "model": recipe.model.model_dump(mode="json"),
        "precision": recipe.precision.model_dump(mode="json"),
        "tokens_seen": 0,
        "adam_count": found.adam_count,
        "schedule_count": 0,
        "source": inputs(context)["source"],
        "surgery": warm_adam.table_json(rows),
    }
    store = CheckpointStore(folder)
    if store.problem(0) is None:
        if store.meta(0).get("source") != meta["source"]:
            raise UserError(
                f"{folder}/0 was made from another checkpoint; choose another output folder"
            )
        log.info("checkpoint %s/0 is whole already", folder)
    else:
        orbax_write.write_step(
            folder, 0, warm_adam.warm_state(found, recipe.stage2), meta, found.checksums
        )
    storage.write_json(context.path("surgery.json"), warm_adam.table_json(rows))
    outcome.outputs |= {
        "checkpoint": storage.join(folder, "0"),
        "source": source,
        "table": context.path("surgery.json"),
    }
    outcome.figures |= {
        "Adam count": found.adam_count,
        "run step": 0,
        "schedule count": 0,
        "tokens seen": 0,
    }
    if found.run_step is not None:
        outcome.figures["run step before"] = found.run_step
    outcome.notes |= {row.what: f"{row.rule}: {row.before} -> {row.after}" for row in rows}
    return outcome


def _stage1_end(context: Context) -> str:
    from olmo_core_jax.checkpoint.warm_adam import last_checkpoint

    return last_checkpoint(context.run_root, BEFORE, context.recipe.stage(BEFORE).last_step)


JOB = Job("warm_adam", lambda args: FOLDER, inputs, work, flags)

if __name__ == "__main__":
    leave(main(JOB))
