"""Job: trains one stage, or goes on with it. Writes <stage>_train/."""

import argparse
import contextlib
import logging
import os
import time
from contextlib import closing

from olmo_core_jax import stages, storage
from olmo_core_jax.errors import Preempted
from olmo_core_jax.experiments.resume import plan as interruptions
from olmo_core_jax.jobs.common import Context, Job, Outcome, leave, main
from olmo_core_jax.recipes.schema import TRAINING_STAGES, Stage
from olmo_core_jax.results import arrays_digest, digest_of

log = logging.getLogger("olmo")


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stage", required=True, choices=TRAINING_STAGES)
    parser.add_argument(
        "--interrupt",
        default="",
        type=_plan_of_interruptions,
        metavar="N:term|kill|save,...",
        help="end attempt after attempt at these updates, to prove that a resume is exact",
    )
    parser.add_argument(
        "--accept-other-data",
        action="store_true",
        help="go on from a checkpoint that was trained on other data: its order is given up, and the record says so",
    )


def _plan_of_interruptions(text: str) -> str:
    """The text as it is. Raises UserError where it is no plan: now, and not once everything is read and restored."""
    interruptions.parse_plan(text)
    return text


def folder(args: argparse.Namespace) -> str:
    return stages.train_folder(args.stage)


def inputs(context: Context) -> dict[str, str]:
    """The data's fingerprint, and the checksums of the arrays that the stage begins with."""
    from olmo_core_jax.data.stage_data import open_stage_data

    stage = context.args.stage
    index, _ = open_stage_data(context.upstream(stages.INDEX, stage), context.recipe.stage(stage))
    return {"data": index.fingerprint, "start": _start_digest(context)}


def work(context: Context) -> Outcome:
    from olmo_core_jax.train import distributed

    began = time.monotonic()
    distributed.initialize(context.topology)
    log.info(distributed.describe())
    try:
        with contextlib.ExitStack() as open_things:
            trainer = _trainer(context, open_things)
            trainer.run()
            outcome = _outcome(context, trainer, time.monotonic() - began)
    except Preempted:  # by agreement: every process stops after the same update
        distributed.leave()
        raise
    distributed.leave()
    return outcome


def _trainer(context: Context, open_things: contextlib.ExitStack):
    """Everything that the loop needs, from the recipe, the topology and what is on disk."""
    import jax

    from olmo_core_jax.data.preflight import preflight
    from olmo_core_jax.data.stage_data import open_stage_data
    from olmo_core_jax.optim.schedules import check_schedule
    from olmo_core_jax.train import loop, mesh, metrics, resume, run_log, step

    recipe, stage, topology = context.recipe, context.args.stage, context.topology
    section = recipe.stage(stage)
    check_schedule(section, stage)
    grid = mesh.make_mesh(topology.mesh)
    plan = mesh.plan_batch(section, topology, grid)
    log.info("mesh %s; %s", dict(grid.shape), plan)
    index, order = open_stage_data(context.upstream(stages.INDEX, stage), section)
    store = open_things.enter_context(closing(_store(context, section)))
    upstream = context.upstream(_first_state(stage), "checkpoints")
    start = resume.starting_state(
        recipe, stage, (index, order), grid, store, upstream, context.args.accept_other_data
    )
    first_step = int(start.state.step) + 1
    if jax.process_index() == 0 and first_step <= section.last_step:
        preflight(index, order, section, stage)  # before anything is trained on changed data
    rows = mesh.local_rows(grid, section.batch_instances)
    trainer = loop.Trainer(
        stage=section,
        mesh=grid,
        step_fn=step.make_train_step(
            recipe.model,
            section,
            recipe.precision,
            topology,
            grid,
            pad_id=recipe.tokenizer.pad_id,
            accumulation=plan.accumulation,
        ),
        state=start.state,
        loader=open_things.enter_context(
            _loader(index, order, section, first_step, rows, topology.data_workers)
        ),
        store=store,
        stop=context.stop,
        meter=metrics.Meter(
            recipe.model, section, jax.device_count(), jax.devices()[0].device_kind
        ),
        identity=resume.run_identity(recipe, stage) | _noted(start.data_notes),
        skipped=start.skipped,
    )
    if jax.process_index() == 0 and first_step <= section.last_step:  # the one writer
        trainer.metrics = writer = run_log.MetricsWriter(context.path("metrics"), first_step)
        trainer.instances = lines = run_log.LineLog(context.path("instances.jsonl"))
        open_things.callback(writer.flush)
        open_things.callback(lines.flush)
        attempt = max(writer.attempt, lines.attempt, 1 + _begun(context))
        writer.attempt = lines.attempt = attempt
        trainer.interruption = interruptions.of_attempt(context.args.interrupt, attempt)
        _note_attempt(context, trainer, attempt, first_step, _noted(start.data_notes))
    return trainer


def _noted(data_notes: tuple[str, ...]) -> dict[str, list[str]]:
    return {"data_notes": list(data_notes)} if data_notes else {}


def _begun(context: Context) -> int:
    """The newest attempt that left its note. Lines alone would miss one that was killed before it logged any."""
    names = (entry.name for entry in storage.list_dir(context.path("attempts")))
    numbers = (name.removesuffix(".json") for name in names if name.endswith(".json"))
    return max((int(number) for number in numbers if number.isdigit()), default=0)


def _note_attempt(
    context: Context, trainer, attempt: int, first_step: int, notes: dict[str, list[str]]
) -> None:
    """attempts/<n>.json: what this attempt runs on. A stage may move between shapes; the report shows its segments."""
    import jax

    facts = {
        "attempt": attempt,
        "first_step": first_step,
        "shape": os.environ.get("OLMO_SHAPE", "this machine"),
        "devices": trainer.meter.devices,
        "kind": trainer.meter.kind,
        "processes": jax.process_count(),
        "restart": os.environ.get("JOBSET_RESTART", ""),
    } | notes
    storage.write_json(context.path("attempts", f"{attempt:05d}.json"), facts)


def _store(context: Context, section: Stage):
    from olmo_core_jax.checkpoint.store import CheckpointStore

    rule = section.checkpoints
    return CheckpointStore(context.path("checkpoints"), keep=rule.keep, landmarks=rule.landmarks)


def _loader(index, order, section: Stage, first_step: int, rows, workers: int):
    from olmo_core_jax.data.loader import Loader
    from olmo_core_jax.data.stage_data import repetition_filter

    return Loader(
        index,
        order,
        first_step=first_step,
        last_step=section.last_step,
        rows=rows,
        workers=workers,
        repetition=repetition_filter(section.data),
    )


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


def _first_state(stage: str) -> str:
    """The folder of the stage whose checkpoint 0 a training stage begins with."""
    return stages.stage_of(stages.train_folder(stage)).upstream[0]


def _start_digest(context: Context) -> str:
    """Checksums of the arrays that the stage begins with, or the seed of our own initialisation."""
    start = _first_state(context.args.stage)
    meta = context.upstream(start, "checkpoints", "0", "meta", "metadata")
    try:
        return arrays_digest(meta)
    except FileNotFoundError:
        return digest_of(f"init_seed={context.recipe.weights.init_seed}")


JOB = Job("train", folder, inputs, work, flags)

if __name__ == "__main__":
    leave(main(JOB))
