"""`olmo-jax data`: what a run reads: where it is, whether it is all there, and how often it was seen."""

from dataclasses import asdict
from typing import Annotated

import typer

from olmo_core_jax import results
from olmo_core_jax.errors import UserError
from olmo_core_jax.terminal import text_table

app = typer.Typer(no_args_is_help=True, help=__doc__)

RunRoot = Annotated[
    str, typer.Argument(help="folder or gs:// URI of the run", callback=results.run_root)
]
Stage = Annotated[str, typer.Option(help="stage1 or stage2")]
Mix = Annotated[
    str, typer.Option(help="manifest: a file, a URI, or a name that ai2-olmo-core ships")
]
Base = Annotated[
    str, typer.Option(help="folder, gs:// or https:// that the manifest's paths are under")
]
TokenizerName = Annotated[str, typer.Option("--tokenizer-name", help="fills {TOKENIZER}")]


@app.command()
def where(
    run_root: RunRoot,
    step: Annotated[int, typer.Option(help="the update, from 1")],
    row: Annotated[int | None, typer.Option(help="one row of its batch")] = None,
    stage: Stage = "stage1",
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """File, label and offset of every instance that an update saw (or will see)."""
    from olmo_core_jax.cli import show
    from olmo_core_jax.data.where import where as find

    rows = find(run_root, step, row, stage)
    if as_json:
        return show([asdict(r) for r in rows], True)
    cells = [(r.row, str(r.instance), r.label, r.file, str(r.offset), r.tokens) for r in rows]
    show(text_table(cells, ["row", "instance", "label", "file", "from byte", "tokens"]))


@app.command()
def audit(run_root: RunRoot) -> None:
    """Proves from the run's log that every instance was seen at most once an epoch; exit code 1 where it was not."""
    from olmo_core_jax.data.audit import audit as check

    found = check(run_root)
    if not found:
        raise UserError(f"{run_root} has logged no updates yet: train a stage first")
    for stage in found:
        typer.echo("\n".join(stage.lines()))
    if not all(stage.ok for stage in found):
        raise typer.Exit(1)


@app.command()
def preflight(run_root: RunRoot, stage: Stage = "stage1") -> None:
    """Is the indexed data still there, unchanged, and enough for the stage's last update?"""
    from olmo_core_jax import recipes, storage
    from olmo_core_jax.data.preflight import preflight as check
    from olmo_core_jax.data.stage_data import open_stage_data

    section = recipes.recipe_of_run(run_root).stage(stage)
    index, order = open_stage_data(storage.join(run_root, "build_index", stage), section)
    for name, value in check(index, order, section, stage).items():
        typer.echo(f"{name}: {value:g}")


@app.command()
def mirror(
    mix: Mix,
    base: Base,
    target: Annotated[
        str, typer.Argument(help="folder or gs:// URI; with --list, the list file to write")
    ],
    tokenizer_name: TokenizerName = "allenai/dolma2-tokenizer",
    as_list: Annotated[
        bool, typer.Option("--list", help="only write a Storage Transfer Service list")
    ] = False,
) -> None:
    """Copy a mix's files, resumable and verified; or write the URL list for Google's Storage Transfer Service."""
    from olmo_core_jax.data import mirror as mirroring

    if as_list:
        total = mirroring.transfer_list(mix, tokenizer_name, base, target)
        typer.echo(f"{target}: {total / 1e12:.3f} TB to transfer")
    else:
        typer.echo(
            mirroring.summary(mirroring.mirror(mix, tokenizer_name, base, target, typer.echo))
        )


@app.command()
def tokenize(
    inputs: Annotated[list[str], typer.Argument(help=".jsonl, .jsonl.gz or text files")],
    tokenizer: Annotated[str, typer.Option(help="tokenizer.json, or the folder of one")],
    eos_id: Annotated[int, typer.Option(help="ends every document")],
    output: Annotated[str, typer.Option(help="a new folder")],
    label: Annotated[str, typer.Option(help="of the mix's lines")] = "text",
    text_field: Annotated[str, typer.Option(help="of a JSONL line")] = "text",
) -> None:
    """Text into headerless token shards and a mix, with the `tokenizers` library."""
    from olmo_core_jax.data.tokenize import tokenize as run

    done = run(inputs, tokenizer, eos_id, output, label=label, text_field=text_field)
    typer.echo(
        f"{done.mix}: {done.documents} documents, {done.tokens} tokens in {done.shards} shards"
    )
    if done.eos_inside:
        typer.echo(f"{done.eos_inside} documents hold the end-of-document token inside their text")
