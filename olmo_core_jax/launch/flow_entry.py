"""Between the flow file and the jobs: the plan, one stage with its card, and a safer command line.

Kept out of the flow file so that the story stays readable, and out of launch/job.py so that nothing there knows Metaflow.
"""

import getpass
import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from metaflow.exception import MetaflowException

from olmo_core_jax.errors import JobError, UserError

ARTIFACT_BYTES = 3500
"""The Metaflow UI shows artifacts up to 4 KB."""


class StageError(MetaflowException):
    """A foreseen ending of a stage: Metaflow prints its message without a traceback."""

    headline = "Stage not finished"


@contextmanager
def foreseen():
    """Turns the endings that errors.py foresees into StageError; a decorator, too."""
    try:
        yield
    except JobError as e:
        raise StageError(str(e)) from None


@dataclass(frozen=True)
class Plan:
    name: str
    recipe: str
    run_root: str
    landmarks: list[int]
    stages: list[str]


@foreseen()
def plan(recipe_name: str, output: str, run_id: str) -> Plan:
    """Validates the recipe and fixes the run root, both as absolute places. Raises StageError."""
    from olmo_core_jax import storage
    from olmo_core_jax.recipes import load_recipe
    from olmo_core_jax.recipes.load import recipe_location

    recipe = load_recipe(recipe_name)
    where = recipe_location(recipe_name)
    if output and not output.strip():
        raise UserError("--output is blank: name a folder, or leave it out for one under runs/")
    root = output or str(Path("runs", f"{recipe.name}-{run_id}"))
    if not storage.is_remote(root):
        root = str(Path(root).resolve())
    # A shipped recipe is kept by its name, so that a resumed run finds it in whatever checkout it runs from.
    kept = recipe_name if not os.path.exists(recipe_name) else str(Path(where).resolve())
    return Plan(recipe.name, kept, root, recipe.landmarks(), recipe.stages())


@foreseen()
def require_inputs(found: Plan) -> None:
    """Raises StageError that names what a recipe names and is not there, where stages run on this machine: a reference's
    curve is not to be missed after the training."""
    from olmo_core_jax.launch.profile import load_profile
    from olmo_core_jax.recipes import load_recipe, missing_files

    missing = missing_files(load_recipe(found.recipe)) if load_profile().backend == "local" else []
    if missing:
        raise UserError(f"recipe {found.name} names what is not there: {'; '.join(missing)}")


@foreseen()
def replay_windows(recipe_name: str, windows: str) -> list[str]:
    """The windows to replay, in full (`stage1/380:20`). Raises StageError for one that cannot be."""
    from olmo_core_jax.experiments.replay import plan
    from olmo_core_jax.recipes import load_recipe

    recipe = load_recipe(recipe_name)
    chosen = plan.parse_windows(windows, recipe) if windows else plan.all_windows(recipe)
    if not chosen:
        raise UserError(f"recipe {recipe.name} names no two native checkpoints: say --windows N:K")
    return [str(window) for window in chosen]


def require_all_passed(figures: dict[str, dict]) -> None:
    """Raises StageError that names the windows whose replay is not the reference's run."""
    failed = [window for window, found in figures.items() if not found.get("passed")]
    require(not failed, f"not the same run: {', '.join(failed)}")


def run_stage(folder: str, recipe: str, run_root: str, card, *flags: str) -> dict:
    """Runs a stage's job on the profile that OLMO_LAUNCH names *now*; keeps its card live. Raises StageError.

    flags: of the job, beside those of its stage.
    """
    from olmo_core_jax.launch import local
    from olmo_core_jax.launch.job import job_of
    from olmo_core_jax.launch.profile import load_profile
    from olmo_core_jax.launch.run import run
    from olmo_core_jax.report import cards

    local.die_with_parent()  # a killed flow takes its tasks along, and they their jobs
    job = job_of(folder, recipe, run_root, *flags)
    live = cards.stage_card(card, run_root, folder)
    try:
        result = run(job, load_profile(), live.refresh)
    except JobError as e:
        live.failed(str(e))
        raise StageError(str(e)) from None
    live.finished(result)
    return small(result.outputs, result.figures)


@foreseen()
def run_quietly(recipe: str, run_root: str, *folders: str) -> None:
    """Runs stages one after the other, without a card. Raises StageError."""
    from olmo_core_jax.launch.job import job_of
    from olmo_core_jax.launch.profile import load_profile
    from olmo_core_jax.launch.run import run

    for folder in folders:
        run(job_of(folder, recipe, run_root), load_profile())


def require(holds: bool, verdict: str) -> None:
    """Raises StageError with the verdict where it is a bad one."""
    if not holds:
        raise StageError(verdict)


def small(outputs: dict[str, str], figures: dict[str, float]) -> dict:
    """An artifact that the UI can show: all URIs and as many figures as fit."""
    kept: dict = {"outputs": dict(outputs), "figures": {}}
    used = len(str(kept))
    for name, value in figures.items():
        used += len(name) + 26
        if used > ARTIFACT_BYTES:
            break
        kept["figures"][name] = value
    return kept


def prepare(flow: str) -> None:
    """Fixes what trips people on Metaflow's command line, before Metaflow sees it."""
    _name_the_user()
    try:
        arguments = safer_arguments(flow, sys.argv[1:])
        # Metaflow lints the flow on every start where pylint is there, and says so where it is not.
        sys.argv[1:] = (
            ["--no-pylint", *arguments] if {"run", "resume"} & {*arguments} else arguments
        )
    except UserError as e:
        sys.exit(f"{e}")


def safer_arguments(flow: str, argv: list[str]) -> list[str]:
    """`resume` without an origin takes the newest run (Metaflow: the last `run`, even after a resume); a run id that
    exists is refused (Metaflow mixes the two runs)."""
    verb = next((a for a in argv if a in ("run", "resume", "step")), None)
    if verb in ("run", "resume") and "--run-id" in argv[:-1]:
        wanted = argv[argv.index("--run-id") + 1]
        if wanted in _local_runs(flow):
            raise UserError(
                f"--run-id {wanted} exists already: leave the option out, or name a new one"
            )
    if verb == "resume" and not any(a.startswith("--origin-run-id") for a in argv):
        runs = _local_runs(flow)
        if runs and not {"-h", "--help"} & set(argv):
            print(f"resuming run {runs[-1]} (another one: --origin-run-id)", file=sys.stderr)
            return [*argv, "--origin-run-id", runs[-1]]
    return argv


def _local_runs(flow: str) -> list[str]:
    """Run ids in Metaflow's local datastore, oldest first; none where another metadata provider is in use."""
    if os.environ.get("METAFLOW_DEFAULT_METADATA", "local") != "local":
        return []
    root = os.environ.get("METAFLOW_DATASTORE_SYSROOT_LOCAL")
    for folder in [Path(root)] if root else [Path.cwd(), *Path.cwd().parents]:
        store = folder if folder.name == ".metaflow" else folder / ".metaflow"
        if store.is_dir():
            runs = [p for p in (store / flow).glob("*") if p.name.isdigit()]
            return [p.name for p in sorted(runs, key=lambda p: int(p.name))]
    return []


def _name_the_user() -> None:
    """Metaflow wants a user name and takes no root: containers get one here."""
    names = (os.environ.get(v) for v in ("METAFLOW_USER", "SUDO_USER", "USERNAME", "USER"))
    if not any(name and name != "root" for name in names):
        user = getpass.getuser()
        os.environ["USERNAME"] = user if user != "root" else "container"
