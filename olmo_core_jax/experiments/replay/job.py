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
from olmo_core_jax.hardware.topology import process_id
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
    from olmo_core_jax.compare.curves import read_csv
    from olmo_core_jax.experiments.replay import comparison, states
    from olmo_core_jax.train import distributed
    from olmo_core_jax.train.mesh import make_mesh

    distributed.initialize(context.topology)
    window, stage = _window(context)
    precision = context.recipe.precision
    curve = read_csv(_reference(stage, window).curve)
    _require_logged(window, curve, context.args.partial)
    native = _open_checkpoints(context, window)
    start, end = native[window.first], native.get(window.last)
    mesh = make_mesh(context.topology.mesh)
    history = states.skip_history(curve, window.first, stage, context.args.partial)
    state = states.native_state(start, mesh, stage, precision, history)
    log.info("window %s: Adam count %d, %d updates", window, start.adam_step, window.updates)
    state, gaps = _updates(context, window, mesh, state, curve)
    at_end = states.compare_state(state, end, mesh, precision) if end else None
    done = comparison.Replayed(window, gaps, at_end, precision.compute)
    return _outcome(context, done, {n: found.path for n, found in native.items()})


def _outcome(context: Context, done, checkpoints: dict[int, str]) -> Outcome:
    """The window's tables, written by the first process, and its result."""
    from olmo_core_jax.experiments.replay.comparison import PARTS

    window, end = done.window, done.end
    failures = done.failures()
    for failure in failures:
        log.warning("%s", failure)
    verdict = "; ".join(failures[:5]) or "the same run"
    log.info("window %s: %s", window, verdict)
    outputs = {"updates": context.path("updates.csv"), "start": checkpoints[window.first]}
    tables = {outputs["updates"]: done.updates}
    notes = {"verdict": verdict}
    if end is not None:
        outputs |= {"end": checkpoints[window.last], "tensors": context.path("tensors.csv")}
        tables[outputs["tensors"]] = end.tensors
        notes |= {f"farthest of {part}": end.worst(part).tensor for part in PARTS}
    if process_id(context.topology) == 0:
        for uri, rows in tables.items():
            storage.write_bytes(uri, _csv(rows))
    return Outcome(outputs, done.figures(), notes)


def _updates(context: Context, window: Window, mesh, state, curve):
    """Takes the window's updates with the trainer's own step, loader and schedule."""
    import numpy as np

    from olmo_core_jax.data.loader import Loader
    from olmo_core_jax.data.stage_data import build_stage_data, open_stage_data, repetition_filter
    from olmo_core_jax.experiments.replay.comparison import compare_update
    from olmo_core_jax.optim.schedules import learning_rate
    from olmo_core_jax.train.mesh import global_batch, local_rows, plan_batch
    from olmo_core_jax.train.step import make_train_step

    recipe, stage = context.recipe, context.recipe.stage(window.stage)
    where = context.upstream(stages.INDEX, window.stage)
    if process_id(context.topology) == 0 and not storage.exists(storage.join(where, "index.json")):
        build_stage_data(where, recipe, window.stage)
    index, order = open_stage_data(where, stage)
    plan = plan_batch(stage, context.topology, mesh)
    update: Callable = make_train_step(
        recipe.model,
        stage,
        recipe.precision,
        context.topology,
        mesh,
        pad_id=recipe.tokenizer.pad_id,
        accumulation=plan.accumulation,
    )
    rows = local_rows(mesh, stage.batch_instances)
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
            whole = global_batch(mesh, stage.batch_instances, rows, batch)
            rate = np.float32(learning_rate(stage, number))
            state, metrics = update(state, whole, rate)
            if number in curve:
                gaps.append(compare_update(number, stage, metrics, curve[number]))
                log.info("update %d: CE differs by %.2g", number, gaps[-1].ce_gap)
    return state, gaps


def _open_checkpoints(context: Context, window: Window) -> dict:
    """The reference's native checkpoints by update. Raises UserError for one of another update."""
    from olmo_core_jax.checkpoint.formats.olmo_core import open_native

    found = {}
    for step in _steps(context, window):
        native = open_native(_native(context, window, step), context.recipe.model)
        if native.step != step:
            raise UserError(f"{native.path} is the checkpoint of update {native.step}, not {step}")
        found[step] = native
    return found


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
