"""Job: a landmark against the reference's checkpoint of the same step, or the final comparison.

--step N writes eval_landmarks/N/, --final writes final_eval/. The page with the charts is made from
what is under the run root, by the flow or by `olmo-jax report`.
"""

import argparse
import logging

from olmo_core_jax import stages, storage
from olmo_core_jax.compare import checks
from olmo_core_jax.compare.stage import read_stage
from olmo_core_jax.errors import UserError
from olmo_core_jax.jobs.common import Context, Job, Outcome, leave, main
from olmo_core_jax.recipes.schema import TRAINING_STAGES
from olmo_core_jax.results import (
    arrays_digest,
    digest_of,
    file_digest,
    read_result,
    require_result,
)

log = logging.getLogger("olmo")


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stage", choices=TRAINING_STAGES, default="stage1")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--step", type=int, help="a landmark: the update whose checkpoint it is")
    what.add_argument("--final", action="store_true", help="the whole comparison")


def folder(args: argparse.Namespace) -> str:
    if args.final:
        return stages.FINAL
    return stages.landmark_folder(args.step, args.stage)


def inputs(context: Context) -> dict[str, str]:
    """Checksums of checkpoints, digests of held-out files, tasks and the reference's figures."""
    recipe, args = context.recipe, context.args
    wanted = (
        [(s, recipe.stage(s).last_step) for s in recipe.stages()]
        if args.final
        else [(args.stage, args.step)]
    )
    found = {f"{s}/{step}": _checkpoint_digest(context, s, step) for s, step in wanted}
    evaluation = recipe.evaluation
    files = [*evaluation.heldout.values(), *filter(None, [evaluation.tasks_path])]
    for name in sorted({s for s, _ in wanted}):
        reference = recipe.stage(name).reference
        if reference is not None:
            kept = (reference.curve, reference.band, reference.heldout, reference.lm_eval)
            files += filter(None, kept)
    found["files"] = digest_of(*(file_digest(uri) for uri in files))
    return found


def work(context: Context) -> Outcome:
    from olmo_core_jax.evaluate import tasks

    tasks.prepare(context.recipe.evaluation)  # before anything imports what it silences
    from olmo_core_jax.evaluate.checkpoint import make_evaluator
    from olmo_core_jax.train import distributed
    from olmo_core_jax.train.mesh import make_mesh

    distributed.initialize(context.topology)
    log.info(distributed.describe())
    mesh = make_mesh(context.topology.mesh)
    evaluator = make_evaluator(context.recipe, context.topology, mesh)
    if context.args.final:
        return _final(context, evaluator)
    stage, step = context.args.stage, context.args.step
    found = evaluator.measure(_checkpoints(context, stage), stage, step)
    return Outcome({"checkpoint": _checkpoint(context, stage, step)}, found.figures, found.notes)


def _final(context: Context, evaluator) -> Outcome:
    """Curves and end weights of every stage, the landmarks' worst, and the last model at length."""
    from olmo_core_jax.evaluate.weights import weight_figures

    recipe, outcome = context.recipe, Outcome()
    last = recipe.stages()[-1]
    for stage in recipe.stages():
        comparison = read_stage(recipe, context.run_root, stage)
        if comparison is not None:
            outcome.figures |= comparison.figures()
        step = recipe.stage(stage).last_step
        outcome.outputs[f"{stage}_checkpoint"] = _checkpoint(context, stage, step)
        if stage == last:
            found = evaluator.measure(_checkpoints(context, stage), stage, step)
            outcome.figures |= found.figures
            outcome.notes |= found.notes
            ours, reference = found.params, found.reference
        else:
            ours, reference = evaluator.pair(_checkpoints(context, stage), stage, step)
        if reference is not None:
            gaps = weight_figures(ours, reference, recipe.model)
            outcome.figures |= {f"{stage}/{name}": value for name, value in gaps.items()}
    outcome.figures |= checks.worst_of(_landmark_figures(context))
    verdicts = checks.verdicts(outcome.figures, checks.checks_of(recipe))
    for v in verdicts:
        measured = "nothing" if v.measured is None else f"{v.measured:.3g}"
        log.info("%-12s %s: %s (limit %.3g)", v.word, v.check.title, measured, v.check.limit)
    outcome.figures |= {"checks": len(verdicts), "checks passed": sum(v.passed for v in verdicts)}
    return outcome


def _landmark_figures(context: Context) -> list[dict[str, float]]:
    folders = (stages.landmark_folder(step) for step in context.recipe.landmarks())
    results = (read_result(context.run_root, folder) for folder in folders)
    return [r.figures for r in results if r is not None]


def _checkpoints(context: Context, stage: str) -> str:
    return context.upstream(stages.train_folder(stage), "checkpoints")


def _checkpoint(context: Context, stage: str, step: int) -> str:
    return storage.join(_checkpoints(context, stage), str(step))


def _checkpoint_digest(context: Context, stage: str, step: int) -> str:
    """The checkpoint's arrays, as the checksums that were saved with them name them."""
    where = storage.join(_checkpoint(context, stage, step), "meta", "metadata")
    try:
        return arrays_digest(where)
    except FileNotFoundError:
        require_result(context.run_root, stages.train_folder(stage))  # it has to run first
        raise UserError(f"there is no checkpoint {_checkpoint(context, stage, step)}") from None


JOB = Job("evaluate", folder, inputs, work, flags)

if __name__ == "__main__":
    leave(main(JOB))
