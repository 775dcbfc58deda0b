"""`olmo-jax checkpoint` and `olmo-jax parity`: what is in a checkpoint, and do two of them compute the same?"""

from typing import Annotated

import typer

app = typer.Typer(
    no_args_is_help=True, help="What is in a checkpoint: ours (Orbax), HF, or native OLMo-core."
)

Path = Annotated[
    str, typer.Argument(help="one checkpoint: an Orbax step, an HF folder, or a native step folder")
]


@app.command()
def ls(
    folder: Annotated[
        str, typer.Argument(help="a run root, a stage folder, or a folder of checkpoints")
    ],
) -> None:
    """The checkpoints under a folder, with their counters."""
    from olmo_core_jax.checkpoint.inspection import list_checkpoints

    typer.echo(str(list_checkpoints(folder)))


@app.command()
def show(path: Path) -> None:
    """Every tensor's shape and dtype, the counters, the digests."""
    from olmo_core_jax.checkpoint.inspection import show as describe

    typer.echo(str(describe(path)))


@app.command()
def diff(a: Path, b: Path) -> None:
    """Two checkpoints tensor by tensor. Exit code 1 where they differ."""
    from olmo_core_jax.checkpoint.inspection import diff as compare

    found = compare(a, b)
    typer.echo(str(found))
    if not found.same:
        raise typer.Exit(1)


@app.command()
def verify(path: Path) -> None:
    """Reads every array and compares it with its recorded checksum. Exit code 1 where one is damaged."""
    from olmo_core_jax.checkpoint.inspection import verify as check

    found = check(path)
    typer.echo(str(found))
    if found.problems:
        raise typer.Exit(1)


@app.command()
def export(
    path: Annotated[str, typer.Argument(help="an Orbax step of ours")],
    output: Annotated[
        str, typer.Argument(help="a new folder; name it step{N} for --format native")
    ],
    recipe: Annotated[str, typer.Option(help="name of a shipped recipe, or a YAML file")],
    format: Annotated[str, typer.Option(help="hf, or native (needs the extra `reference`)")] = "hf",
    stage: Annotated[
        str, typer.Option(help="native: whose optimizer settings are written")
    ] = "stage1",
    dtype: Annotated[
        str | None, typer.Option(help="hf: round to this dtype; default: the checkpoint's")
    ] = None,
    released: Annotated[
        bool, typer.Option(help="hf: leave out the rows that pad the vocabulary")
    ] = False,
) -> None:
    """Our checkpoint as an HF folder that transformers loads, or as a native one that OLMo-core goes on from."""
    from olmo_core_jax.checkpoint.formats.hf import export_hf
    from olmo_core_jax.checkpoint.formats.olmo_core_write import write_native
    from olmo_core_jax.checkpoint.formats.orbax_read import OrbaxStep
    from olmo_core_jax.errors import UserError
    from olmo_core_jax.recipes import load_recipe

    loaded = load_recipe(recipe)
    if format == "native":
        typer.echo(write_native(OrbaxStep(path), loaded, stage, output))
    elif format == "hf":
        rows = loaded.model.vocab_size if released else None
        context = loaded.stage(stage).data.sequence_length
        done = export_hf(
            OrbaxStep(path),
            loaded.model,
            loaded.tokenizer,
            output,
            context=context,
            dtype=dtype,
            rows=rows,
        )
        rounded = f", {done.changed} values changed by rounding" if done.changed else ""
        typer.echo(
            f"{done.folder}: {len(done.files)} files, {done.bytes:,} bytes, {done.dtype}{rounded}"
        )
    else:
        raise UserError(f"--format {format}: hf or native")


def parity(
    a: Path,
    b: Path,
    tokens: Annotated[
        str | None, typer.Option(help="npz with `tokens` [B, S], or npy; default: random ids")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16")] = "float32",
) -> None:
    """The same tokens through both: KL, top-1, top-10, logits, and the first layer and module that depart."""
    from olmo_core_jax.parity.checks import compare_checkpoints

    verdict = compare_checkpoints(a, b, dtype=dtype, tokens=tokens)
    typer.echo(verdict.table())
    if not verdict.ok:
        raise typer.Exit(1)
