"""`olmo-jax` verbs for one stage on a cluster by hand: the same code as the flow's."""

from typing import Annotated

import typer

from olmo_core_jax import results
from olmo_core_jax.errors import UserError

HAND_SECONDS = 60.0
"""How long a person waits for an API that does not answer; a watch waits as long as the profile says."""

Recipe = Annotated[str, typer.Option(help="name of a shipped recipe, or a YAML file")]
RunRoot = Annotated[
    str, typer.Option(help="folder or gs:// URI of the whole run", callback=results.run_root)
]
Stage = Annotated[str, typer.Option(help="stage1_train, eval_landmarks/100, ...")]
ProfileFile = Annotated[
    str | None,
    typer.Option("--profile", help="launch profile; default: the file that OLMO_LAUNCH names"),
]


def register(app: typer.Typer) -> None:
    """Adds the verbs to the command line."""
    for verb in (render, submit, status, logs, cancel, preflight):
        app.command()(verb)
    app.command(name="resume-until-done")(resume_until_done)


def _launcher(
    recipe: str, run_root: str, stage: str, profile: str | None, patience: float | None = None
):
    from olmo_core_jax.launch.gke.watch import Launcher
    from olmo_core_jax.launch.job import job_of
    from olmo_core_jax.launch.profile import load_profile

    return Launcher(job_of(stage, recipe, run_root), load_profile(profile), patience=patience)


def render(recipe: Recipe, run_root: RunRoot, stage: Stage, profile: ProfileFile = None) -> None:
    """Print a stage's JobSet; nothing is sent."""
    from olmo_core_jax.launch.gke.check import check
    from olmo_core_jax.launch.gke.manifest import render as manifest_of
    from olmo_core_jax.launch.gke.manifest import to_yaml
    from olmo_core_jax.launch.gke.visible import as_pods_see
    from olmo_core_jax.launch.job import job_of
    from olmo_core_jax.launch.profile import load_profile

    chosen, job = load_profile(profile), job_of(stage, recipe, run_root)
    manifest = manifest_of(as_pods_see(job, chosen.gke_of(job.folder)), chosen)
    check(manifest)
    typer.echo(to_yaml(manifest), nl=False)


def submit(recipe: Recipe, run_root: RunRoot, stage: Stage, profile: ProfileFile = None) -> None:
    """Create a stage's JobSet, or find the one that is there, and return at once."""
    _launcher(recipe, run_root, stage, profile, HAND_SECONDS).submit()


def status(recipe: Recipe, run_root: RunRoot, stage: Stage, profile: ProfileFile = None) -> None:
    """Say in one line what a stage is doing."""
    typer.echo(_launcher(recipe, run_root, stage, profile, HAND_SECONDS).status())


def logs(
    run_root: RunRoot, stage: Stage, all_hosts: Annotated[bool, typer.Option("--all")] = False
) -> None:
    """Print the saved logs of every attempt (of the first host; --all: of every host)."""
    from olmo_core_jax import storage
    from olmo_core_jax.launch.gke.logs import saved_logs

    empty = True
    for name, text in saved_logs(run_root, stage, all_hosts):
        typer.echo(f"==> {name}\n{text}", nl=False)
        empty = False
    own = storage.join(run_root, stage, "log.txt")  # a local run's
    if empty and storage.exists(own):
        typer.echo(storage.read_text(own), nl=False)
    elif empty:
        raise UserError(f"there are no logs under {storage.join(run_root, stage)}")


def cancel(recipe: Recipe, run_root: RunRoot, stage: Stage, profile: ProfileFile = None) -> None:
    """Delete a stage's JobSet and wait until its pods are gone; what it saved stays."""
    there = _launcher(recipe, run_root, stage, profile, HAND_SECONDS).cancel()
    typer.echo("deleted" if there else "there was no JobSet")


def resume_until_done(
    recipe: Recipe, run_root: RunRoot, stage: Stage, profile: ProfileFile = None
) -> None:
    """Submit or attach, and watch until the stage's result is there."""
    result = _launcher(recipe, run_root, stage, profile).run()
    typer.echo(f"{result.stage}: finished; {len(result.figures)} figures in result.json")


def preflight(recipe: Recipe, run_root: RunRoot, stage: Stage, profile: ProfileFile = None) -> None:
    """Look at everything that a submission needs; exit code 0 only if all of it is there."""
    from olmo_core_jax.launch.gke import preflight as rows
    from olmo_core_jax.launch.job import job_of
    from olmo_core_jax.launch.profile import load_profile

    chosen, job = load_profile(profile), job_of(stage, recipe, run_root)
    found = rows.preflight(job, chosen, _impatient(chosen, stage))
    typer.echo(rows.table(found))
    raise typer.Exit(0 if all(r.passed for r in found) else 1)


def _impatient(profile, stage: str):
    """Requests without patience: a preflight should say at once what is not there."""
    from olmo_core_jax.launch.gke import api

    gke = profile.gke_of(stage)
    try:
        return api.Kube(lambda: api.connect(gke.context), gke.namespace, patience=15.0)
    except UserError as e:  # one row of the table
        return e
