"""Job: replays one window of the recipe's reference. Writes replay/<window>/.

python -m olmo_core_jax.experiments.replay.job --recipe laptop --run-root U --window stage1/380:20
"""

import argparse
import csv
import dataclasses
import io
import logging
from collections.abc import Callable
from contextlib import closing

from olmo_core_jax import stages, storage
from olmo_core_jax.errors import UserError
from olmo_core_jax.experiments.replay.plan import Window, parse_windows
from olmo_core_jax.jobs.common import Context, Job, Outcome, leave, main
from olmo_core_jax.recipes.schema import Stage
from olmo_core_jax.results import file_digest
from olmo_core_jax.storage import ranges

log = logging.getLogger("olmo")


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--window", required=True, help="[STAGE/]N:K")
    parser.add_argument(
        "--checkpoints",
        metavar="URI",
        help="where the reference's step{N} folders are; {stage} in it stands for the stage "
        "(default: those that the recipe names)",
    )
    parser.add_argument(
        "--partial",
        action="store_true",
        help="compare what the reference has: only the updates that it logged, no state at the end, "
        "an empty skip history where its log lacks it",
    )


def folder(args: argparse.Namespace) -> str:
    return stages.replay_folder(args.window)


def inputs(context: Context) -> dict[str, str]:
    """Digests of the reference's curve and of the metadata of its two checkpoints."""
    window, stage = _window(context)
    found = {"curve": file_digest(_reference(stage, window).curve)}
    for step in _steps(context, window):
        path = _native(context, window, step)
        found[f"step{step}"] = ranges.digest(storage.join(path, "model_and_optim", ".metadata"))
    return found


def work(context: Context) -> Outcome:
    import jax

    from olmo_core_jax.checkpoint.formats.olmo_core import open_native
    from olmo_core_jax.compare.curves import read_csv
    from olmo_core_jax.experiments.replay import comparison
    from olmo_core_jax.train import distributed, mesh

    distributed.initialize(context.topology)
    window, stage = _window(context)
    recipe = context.recipe
    curve = read_csv(_reference(stage, window).curve)
    _require_logged(window, curve, context.args.partial)
    states = {
        n: open_native(_native(context, window, n), recipe.model) for n in _steps(context, window)
    }
    for n, native in states.items():
        if native.step != n:
            raise UserError(f"{native.path} is the checkpoint of update {native.step}, not {n}")
    start, end = states[window.first], states.get(window.last)
    grid = mesh.make_mesh(context.topology.mesh)
    history = comparison.skip_history(curve, window.first, stage, context.args.partial)
    state = comparison.native_state(start, grid, stage, recipe.precision, history)
    log.info("window %s: Adam count %d, %d updates", window, start.adam_step, window.updates)
    state, gaps = _updates(context, window, stage, grid, state, curve)
    done = comparison.Replayed(
        window,
        gaps,
        comparison.compare_state(state, end, grid, recipe.precision) if end else None,
        recipe.precision.compute,
    )
    if jax.process_index() == 0:
        storage.write_bytes(context.path("updates.csv"), _csv(gaps))
        if done.end:
            storage.write_bytes(context.path("tensors.csv"), _csv(done.end.tensors))
    for failure in done.failures():
        log.warning("%s", failure)
    verdict = "the same run" if not done.failures() else "; ".join(done.failures()[:5])
    log.info("window %s: %s", window, verdict)
    last = done.end
    notes = {f"farthest of {p}": last.worst(p).tensor for p in comparison.PARTS} if last else {}
    outputs = {"updates": context.path("updates.csv"), "start": start.path}
    return Outcome(
        outputs=outputs
        | ({"end": end.path, "tensors": context.path("tensors.csv")} if end else {}),
        figures=done.figures(),
        notes={"verdict": verdict, **notes},
    )


def _updates(context: Context, window: Window, stage: Stage, grid, state, curve):
    """Takes the window's updates with the trainer's own step, loader and schedule."""
    import numpy as np

    from olmo_core_jax.data.loader import Loader
    from olmo_core_jax.data.stage_data import build_stage_data, open_stage_data, repetition_filter
    from olmo_core_jax.experiments.replay import comparison
    from olmo_core_jax.hardware.topology import process_id
    from olmo_core_jax.optim.schedules import learning_rate
    from olmo_core_jax.train import mesh, step

    recipe = context.recipe
    where = context.upstream(stages.INDEX, window.stage)
    if process_id(context.topology) == 0 and not storage.exists(storage.join(where, "index.json")):
        build_stage_data(where, recipe, window.stage)
    index, order = open_stage_data(where, stage)
    plan = mesh.plan_batch(stage, context.topology, grid)
    update: Callable = step.make_train_step(
        recipe.model,
        stage,
        recipe.precision,
        context.topology,
        grid,
        pad_id=recipe.tokenizer.pad_id,
        accumulation=plan.accumulation,
    )
    rows = mesh.local_rows(grid, stage.batch_instances)
    gaps = []
    loader = Loader(
        index,
        order,
        first_step=window.first + 1,
        last_step=window.last,
        rows=rows,
        workers=context.topology.data_workers,
        repetition=repetition_filter(stage.data),
    )
    with closing(loader):
        for number, _, batch in loader:
            whole = mesh.global_batch(grid, stage.batch_instances, rows, batch)
            rate = np.float32(learning_rate(stage, number))
            state, metrics = update(state, whole, rate)
            if number in curve:
                gaps.append(comparison.compare_update(number, stage, metrics, curve[number]))
                log.info("update %d: CE differs by %.2g", number, gaps[-1].ce_gap)
    return state, gaps


def _steps(context: Context, window: Window) -> list[int]:
    """The updates whose checkpoints are read."""
    return [window.first] if context.args.partial else [window.first, window.last]


def _require_logged(window: Window, curve, partial: bool) -> None:
    updates = range(window.first + 1, window.last + 1)
    missing = [n for n in updates if n not in curve]
    if len(missing) == len(updates) or (missing and not partial):
        raise UserError(
            f"window {window}: the reference's curve has no update {missing[0]}"
            + ("" if partial else " (--partial compares the ones that it has)")
        )


def _window(context: Context) -> tuple[Window, Stage]:
    window = parse_windows(context.args.window, context.recipe)[0]
    return window, context.recipe.stage(window.stage)


def _reference(stage: Stage, window: Window):
    if stage.reference is None:
        raise UserError(f"window {window}: the recipe names no reference of {window.stage}")
    return stage.reference


def _native(context: Context, window: Window, step: int) -> str:
    """The reference's checkpoint of an update. Raises UserError where the recipe names none."""
    base = context.args.checkpoints
    if base:
        return storage.join(base.replace("{stage}", window.stage), f"step{step}")
    native = _reference(context.recipe.stage(window.stage), window).native
    if step not in native:
        known = ", ".join(map(str, sorted(native))) or "none"
        raise UserError(
            f"window {window}: the recipe names no native checkpoint of update {step} (it has {known}); "
            "make them with `make reference`, or say where they are with --checkpoints"
        )
    return native[step]


def _csv(gaps: list) -> bytes:
    out = io.StringIO()
    rows = [dataclasses.asdict(gap) for gap in gaps]
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().encode()


JOB = Job("replay", folder, inputs, work, flags)

if __name__ == "__main__":
    leave(main(JOB))
