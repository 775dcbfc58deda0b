"""What flows/verify_resume.py needs beside the common entry: a short recipe, quiet stages, a verdict."""

from olmo_core_jax.errors import JobError
from olmo_core_jax.launch.flow_entry import Plan, foreseen, plan, run_quietly


@foreseen()
def short_plan(
    recipe_name: str, output: str, run_id: str, updates: int, every: int, interrupt: str
) -> Plan:
    """The plan of the recipe's first `updates` of stage 1, written as a recipe of its own.

    Raises StageError for a recipe that cannot be cut so, or an interruption beyond its end.
    """
    from olmo_core_jax import recipes, storage

    found = plan(recipe_name, output, f"verify-{run_id}")
    recipe = recipes.load_recipe(recipe_name)
    checkpoints = recipe.stage1.checkpoints.model_copy(update={"every": every, "landmarks": []})
    stage = recipe.stage1.model_copy(update={"stop_at": updates, "checkpoints": checkpoints})
    if updates > recipe.stage1.last_step:
        raise JobError(f"--updates {updates}: stage 1 of {recipe.name} has fewer")
    _require_inside(interrupt, updates)
    short = recipe.model_copy(update={"name": f"{recipe.name}-{updates}", "stage1": stage})
    file = storage.join(found.run_root, "short.yaml")
    storage.write_text(file, recipes.dump_recipe(short))
    return Plan(short.name, file, found.run_root, [])


@foreseen()
def prepare(recipe_name: str, run_root: str) -> None:
    """The stages before training, without a card. Raises StageError."""
    from olmo_core_jax.launch import job
    from olmo_core_jax.recipes import load_recipe

    convert = load_recipe(recipe_name).weights.hf is not None
    jobs = [job.convert_weights(recipe_name, run_root)] if convert else []
    run_quietly(*jobs, job.build_index(recipe_name, run_root))


def _require_inside(interrupt: str, updates: int) -> None:
    steps = [part.partition(":")[0].strip() for part in interrupt.split(",") if part]
    late = [s for s in steps if s.isdigit() and int(s) > updates]
    if late:
        raise JobError(f"--interrupt {interrupt}: update {late[0]} comes after --updates {updates}")
