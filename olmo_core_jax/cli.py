"""olmo-jax: every job by hand, and the tools around a run. A verb imports what it needs when it runs."""

import importlib
import json
import sys
from typing import Annotated

import typer

from olmo_core_jax.errors import JobError

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
data = typer.Typer(no_args_is_help=True, help="What a run reads: where, whether, and how often.")
app.add_typer(data, name="data")

RecipeName = Annotated[str, typer.Option(help="name of a shipped recipe, or a YAML file")]
StageName = Annotated[str, typer.Option(help="stage1 or stage2")]

JOBS = {
    "convert-weights": "HF weights into our checkpoint, with a parity check.",
    "build-index": "Mixes into an index and the exact data order.",
    "train": "One training stage.",
    "evaluate": "A landmark, or the final comparison.",
    "warm-adam": "Stage 2's start from stage 1's end.",
}


def _add_job(verb: str, text: str) -> None:
    """A job takes its own arguments (`olmo-jax train --help` shows them): the same as python -m."""

    def run(context: typer.Context) -> None:
        module = importlib.import_module(f"olmo_core_jax.jobs.{verb.replace('-', '_')}")
        from olmo_core_jax.jobs.common import main as run_job

        raise typer.Exit(run_job(module.JOB, context.args))

    settings = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    app.command(verb, help=text, context_settings=settings)(run)


for _verb, _text in JOBS.items():
    _add_job(_verb, _text)


@app.command()
def recipes() -> None:
    """The shipped recipes."""
    from olmo_core_jax.recipes import load_recipe, shipped_recipes

    for name in shipped_recipes():
        typer.echo(f"{name:16s} {load_recipe(name).description}")


def show(value, as_json: bool) -> None:
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
