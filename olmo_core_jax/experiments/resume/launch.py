"""What flows/verify_resume.py needs beside the common entry: a short recipe, the stages before training, a verdict."""

from olmo_core_jax.errors import UserError
from olmo_core_jax.experiments.resume.plan import parse_plan
from olmo_core_jax.launch.flow_entry import Plan, foreseen, plan, require, run_quietly


@foreseen()
def short_plan(
    recipe_name: str, output: str, run_id: str, updates: int, every: int, interrupt: str
) -> Plan:
    """The plan of the recipe's first `updates` of stage 1, written as a recipe of its own.

    Raises StageError for a recipe that cannot be cut so, or an interruption that cannot happen.
    """
    from olmo_core_jax import recipes, storage

    found = plan(recipe_name, output, f"verify-{run_id}")
    recipe = recipes.load_recipe(recipe_name)
    if not 1 <= updates <= recipe.stage1.last_step:
        raise UserError(
            f"--updates {updates}: stage 1 of {recipe.name} has {recipe.stage1.last_step}"
        )
    if every < 1:
        raise UserError(f"--every {every}: a checkpoint needs an update at least")
    _require_possible(interrupt, updates, every)
    checkpoints = recipe.stage1.checkpoints.model_copy(update={"every": every, "landmarks": []})
    stage = recipe.stage1.model_copy(update={"stop_at": updates, "checkpoints": checkpoints})
    short = recipe.model_copy(update={"name": f"{recipe.name}-{updates}", "stage1": stage})
    file = storage.join(found.run_root, "short.yaml")
    storage.write_text(file, recipes.dump_recipe(short))
    return Plan(short.name, file, found.run_root, [], short.stages())


@foreseen()
def prepare(recipe_name: str, run_root: str) -> None:
    """The stages before training, without a card. Raises StageError."""
    from olmo_core_jax.recipes import load_recipe

    converted = load_recipe(recipe_name).weights.hf is not None
    before = ["convert_weights"] if converted else []
    run_quietly(recipe_name, run_root, *before, "build_index")


def require_all_interrupted(interrupt: str, attempts: int) -> None:
    """Raises StageError where there were too few attempts for every planned interruption to have ended one."""
    planned = len(parse_plan(interrupt))
    require(
        attempts > planned,
        f"{planned} interruptions were planned, but there are {attempts} attempts: not every interruption "
        "happened, so equal runs prove nothing; choose a fresh --output, and see the interrupted run's log",
    )


def _require_possible(interrupt: str, updates: int, every: int) -> None:
    for planned in parse_plan(interrupt):
        if planned.step >= updates:  # at the last one there may be nothing left for another attempt
            raise UserError(
                f"--interrupt {interrupt}: update {planned.step} does not come before the last of --updates {updates}"
            )
        if planned.kind == "save" and planned.step % every:
            raise UserError(
                f"--interrupt {interrupt}: no checkpoint of update {planned.step} is written: "
                f"choose a multiple of --every {every}"
            )
