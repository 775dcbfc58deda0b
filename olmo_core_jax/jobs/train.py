"""Job: trains one stage, or goes on with it. Writes <stage>_train/."""

import argparse
import contextlib
import logging
import os
import sys
import time
from contextlib import closing

from olmo_core_jax import storage
from olmo_core_jax.jobs.common import Context, Job, Outcome, main
from olmo_core_jax.recipes.schema import TRAINING_STAGES
from olmo_core_jax.results import digest_of

log = logging.getLogger("olmo")

UPSTREAM = {"stage1": "convert_weights", "stage2": "warm_adam"}
"""The stage whose checkpoint 0 a training stage begins with."""


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stage", required=True, choices=TRAINING_STAGES)


def folder(args: argparse.Namespace) -> str:
    return f"{args.stage}_train"


def inputs(context: Context) -> dict[str, str]:
    """The data's fingerprint, and the checksums of the arrays that the stage begins with."""
    from olmo_core_jax.data.stage_data import open_stage_data

    stage = context.args.stage
    index, _ = open_stage_data(context.upstream("build_index", stage), context.recipe.stage(stage))
    return {"data": index.fingerprint, "start": _start_digest(context)}


def work(context: Context) -> Outcome:
    from olmo_core_jax.train import distributed

    began = time.monotonic()
    distributed.initialize(context.topology)
    log.info(distributed.describe())
    with contextlib.ExitStack() as open_things:
        trainer = _trainer(context, open_things)
        trainer.run()
        return _outcome(context, trainer, time.monotonic() - began)


def _trainer(context: Context, open_things: contextlib.ExitStack):
    """Everything that the loop needs, from the recipe, the topology and what is on disk."""
    import jax

    from olmo_core_jax.data.loader import Loader
    from olmo_core_jax.data.stage_data import open_stage_data, repetition_filter
    from olmo_core_jax.optim.schedules import check_schedule
    from olmo_core_jax.train import mesh as meshes
    from olmo_core_jax.train.checkpoint import CheckpointStore
    from olmo_core_jax.train.loop import Trainer
    from olmo_core_jax.train.metrics import LineLog, Meter, MetricsWriter
    from olmo_core_jax.train.resume import run_identity, starting_state
    from olmo_core_jax.train.step import make_train_step

    recipe, stage, topology = context.recipe, context.args.stage, context.topology
    section = recipe.stage(stage)
    check_schedule(section, stage)
    mesh = meshes.make_mesh(topology.mesh)
    plan = meshes.plan_batch(section, topology, mesh)
    log.info(
        "mesh %s; %d instances an update = %d data-parallel x %d accumulated x %d a device",
        *(dict(mesh.shape), plan.instances, plan.ways, plan.accumulation, plan.per_device),
    )
    index, order = open_stage_data(context.upstream("build_index", stage), section)
    checkpoints = section.checkpoints
    store = open_things.enter_context(
        closing(
            CheckpointStore(
                context.path("checkpoints"),
                keep=checkpoints.keep,
                landmarks=checkpoints.landmarks,
            )
        )
    )
    upstream = context.upstream(UPSTREAM[stage], "checkpoints")
    start = starting_state(recipe, stage, index, mesh, store, upstream)
    done = int(start.state.step)
    loader = open_things.enter_context(
        Loader(
            index,
            order,
            first_step=done + 1,
            last_step=section.last_step,
            rows=meshes.local_rows(mesh, section.batch_instances),
            workers=topology.data_workers,
            repetition=repetition_filter(section.data),
        )
    )
    step_fn = make_train_step(
        recipe.model,
        section,
        recipe.precision,
        topology,
        mesh,
        pad_id=recipe.tokenizer.pad_id,
        accumulation=plan.accumulation,
    )
    meter = Meter(
        recipe.model,
        section,
        jax.device_count(),
        jax.devices()[0].device_kind,
        filtered=section.data.repetition_filter is not None,
    )
    trainer = Trainer(
        section,
        mesh,
        step_fn,
        start.state,
        loader,
        store,
        context.stop,
        meter,
        run_identity(recipe, stage, index),
        skipped=start.skipped,
    )
    if jax.process_index() == 0 and done < section.last_step:
        trainer.metrics = open_things.enter_context(
            closing(MetricsWriter(context.path("metrics"), done + 1))
        )
        trainer.instances = LineLog(context.path("instances.jsonl"))
        open_things.callback(trainer.instances.flush)
    return trainer


def _outcome(context: Context, trainer, seconds: float) -> Outcome:
    section, last = trainer.stage, trainer.stage.last_step
    figures = {
        "updates": last,
        "tokens": last * section.batch_tokens,
        "skipped": trainer.skipped,
        "adam_count": int(trainer.state.opt.count),
        "seconds_of_this_process": round(seconds, 3),
    }
    if trainer.last is not None:
        figures |= {"ce_loss": trainer.last.ce_loss, "grad_norm": trainer.last.grad_norm}
        figures["learning_rate"] = trainer.last.learning_rate
    if trainer.meter.tokens_per_second:
        figures["tokens_per_second"] = trainer.meter.tokens_per_second
    return Outcome(
        outputs={
            "checkpoint": storage.join(trainer.store.directory, str(last)),
            "checkpoints": trainer.store.directory,
            "metrics": context.path("metrics", "metrics.jsonl"),
            "instances": context.path("instances.jsonl"),
        },
        figures=figures,
        notes={
            "mesh": ", ".join(f"{axis} {n}" for axis, n in trainer.mesh.shape.items()),
            "devices": f"{trainer.meter.devices} x {trainer.meter.kind}",
            "mfu_percent": trainer.meter.mfu,
        },
    )


def _start_digest(context: Context) -> str:
    """The checksums of the arrays that the stage begins with; else the seed of our own initialisation."""
    meta = context.upstream(UPSTREAM[context.args.stage], "checkpoints", "0", "meta", "metadata")
    try:
        sums = storage.read_json(meta).get("checksums", {})
    except FileNotFoundError:
        return digest_of(f"init_seed={context.recipe.weights.init_seed}")
    return digest_of(*(f"{name}={sums[name]}" for name in sorted(sums)))


JOB = Job("train", folder, inputs, work, flags)

if __name__ == "__main__":
    code = main(JOB)
    logging.shutdown()
    sys.stdout.flush()
    # After a failed save, threads of Orbax wait for minutes for what will not come.
    os._exit(code)
