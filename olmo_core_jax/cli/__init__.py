"""olmo-jax: every job by hand, and the tools around a run. A verb imports what it needs when it runs."""

import importlib
import json
import sys
from typing import Annotated

import typer

from olmo_core_jax import results
from olmo_core_jax.cli import checkpoints, data
from olmo_core_jax.errors import JobError
from olmo_core_jax.launch import commands
from olmo_core_jax.stages import STAGES, Stage
from olmo_core_jax.terminal import text_table

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__
)
RecipeName = Annotated[str, typer.Option(help="name of a shipped recipe, or a YAML file")]
StageName = Annotated[str, typer.Option(help="stage1 or stage2")]


def _add_job(stage: Stage, text: str) -> None:
    """A job takes its own arguments (`olmo-jax train --help` shows them): the same as python -m."""

    def run(context: typer.Context) -> None:
        module = importlib.import_module(f"olmo_core_jax.{stage.module}")
        from olmo_core_jax.jobs import common

        common.leave(common.main(module.JOB, context.args))

    settings = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    app.command(stage.verb, help=text, context_settings=settings)(run)


_JOBS = {stage.verb: stage for stage in STAGES.values()}
for _verb, _stage in _JOBS.items():
    _add_job(_stage, " ".join(dict.fromkeys(s.text for s in STAGES.values() if s.verb == _verb)))

commands.register(app)
app.add_typer(data.app, name="data")
app.add_typer(checkpoints.app, name="checkpoint")
app.command()(checkpoints.parity)


@app.command()
def recipes() -> None:
    """The shipped recipes."""
    from olmo_core_jax.recipes import load_recipe, shipped_recipes

    show(text_table([(name, load_recipe(name).description) for name in shipped_recipes()]))


@app.command()
def plan(
    recipe: RecipeName,
    hardware: Annotated[str | None, typer.Option(help="a shape, such as v5p-256")] = None,
    mfu: Annotated[float, typer.Option(help="model FLOPs utilisation to assume")] = 0.4,
    price: Annotated[float | None, typer.Option(help="of one chip-hour")] = None,
    replay: Annotated[
        str | None,
        typer.Option(help="price a replay of [STAGE/]N:K,... (flows/replay.py), not the run"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """What a recipe will take: updates, learning rates, days, chip-hours, cost, disk."""
    from dataclasses import asdict

    from olmo_core_jax import plan as planning
    from olmo_core_jax.recipes import load_recipe, missing_files

    loaded, assumed = load_recipe(recipe), planning.Assumptions(hardware, mfu, price)
    if replay is not None:
        from olmo_core_jax.experiments.replay import plan

        chosen = plan.parse_windows(replay, loaded)
        windows = plan.plan_windows(loaded, chosen, assumed)
        text = plan.describe_windows(loaded, windows)
        show([asdict(w) for w in windows] if as_json else text, as_json)
        return
    stages = planning.plan(loaded, assumed)
    if as_json:
        show([asdict(s) for s in stages], True)
    else:
        absent = [f"not there: {name}" for name in missing_files(loaded)]
        show("\n".join([planning.describe(loaded, stages, assumed), *absent]), False)


@app.command(name="compile")
def compile_ahead(
    recipe: RecipeName,
    hardware: Annotated[str, typer.Option(help="a TPU or GPU shape, such as tpu7x-4x4x4 or h200")],
    stage: StageName = "stage1",
    topology: Annotated[
        str | None, typer.Option(help="YAML file or inline JSON over the shape's defaults")
    ] = None,
    batch_instances: Annotated[
        int | None,
        typer.Option(
            "--batch-instances",
            min=1,
            max=2**31 - 1,  # the most that the program's loops count
            help="instances an update, instead of the recipe's",
        ),
    ] = None,
    devices: Annotated[
        int | None, typer.Option(help="so many GPUs of the shape, instead of all of one node")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Compile the real step for TPUs or GPUs on any machine: memory, FLOPs, collectives, does it fit."""
    from dataclasses import asdict

    from olmo_core_jax.compile import ahead
    from olmo_core_jax.hardware import shapes
    from olmo_core_jax.hardware.topology import load_topology
    from olmo_core_jax.hardware.tuning import default_topology
    from olmo_core_jax.recipes import load_recipe

    shape = shapes.shape(hardware)
    chosen = default_topology(hardware)
    if topology is not None:
        changes = load_topology(topology).model_dump(exclude_unset=True)
        chosen = chosen.model_copy(update={k: getattr(load_topology(topology), k) for k in changes})
    loaded = load_recipe(recipe)
    loaded.stage(stage)  # before devices are described, which takes a while: does it have one?
    if batch_instances is not None:
        loaded = ahead.with_batch(loaded, stage, batch_instances)
    chosen = chosen.model_copy(update={"platform": shape.platform})
    report = ahead.compile_for(loaded, stage, chosen, *shape.described(devices))
    show(asdict(report), True) if as_json else show(ahead.describe(report), False)


@app.command()
def report(
    run_root: Annotated[
        str,
        typer.Argument(
            help="folder or gs:// URI of a run, finished or not", callback=results.run_root
        ),
    ],
    output: Annotated[str | None, typer.Option(help="default: final_eval/report.html")] = None,
) -> None:
    """The report page of a run, made from its files, and a line for every check."""
    from olmo_core_jax.report import html, tables
    from olmo_core_jax.report.run import read_run

    where = html.write(run_root, output)
    typer.echo(tables.verdict_text(read_run(run_root).verdicts))
    typer.echo(f"report: {where}")


@app.command(name="hardware")
def list_hardware() -> None:
    """Every node shape that jobs can run on."""
    from olmo_core_jax.hardware.shapes import all_shapes

    columns = ["shape", "hosts", "chips", "devices", "GiB/device", "PFLOP/s", "vCPUs", "RAM GB"]
    rows = [
        (
            s.name,
            s.hosts,
            s.chips,
            s.devices,
            s.chip and round(s.chip.memory_per_device_gib),
            s.chip and round(s.chips * s.chip.peak_bf16 / 1e15, 1),
            s.host_vcpu or None,
            s.host_ram_gb or None,
            s.machine,
        )
        for s in all_shapes()
    ]
    show(text_table(rows, [*columns, "machine (of one host)"]))


def show(value, as_json: bool = False) -> None:
    """Prints a result for people (its own text) or for programs."""
    typer.echo(json.dumps(value, indent=1, default=str) if as_json else str(value))


def main() -> None:
    """Entry point: foreseen errors are one line, with the exit codes of errors.py."""
    try:
        app()
    except JobError as e:
        typer.echo(f"{type(e).__name__}: {e}", err=True)
        sys.exit(e.exit_code)


if __name__ == "__main__":
    main()
