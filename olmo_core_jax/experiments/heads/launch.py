"""What flows/ablate_heads.py needs beside the common entry: the arms, the quiet stages around training, a verdict."""

import os
from dataclasses import dataclass

from olmo_core_jax.errors import UserError
from olmo_core_jax.launch import flow_entry
from olmo_core_jax.launch.flow_entry import foreseen, run_quietly
from olmo_core_jax.stages import landmark_folder


@dataclass(frozen=True)
class AblationPlan:
    """arms: names of the baseline and the ablated one; each has its recipe at `<run root>/<arm>.yaml`.

    costs: parameters and FLOPs a token, the same for both.
    """

    run_root: str
    arms: list[str]
    updates: int
    costs: dict[str, float]


@foreseen()
def two_arms(recipe_name: str, output: str, run_id: str, updates: int) -> AblationPlan:
    """Both arms' recipes, written under the run root. Raises StageError for two that may not be compared."""
    from olmo_core_jax import recipes, storage
    from olmo_core_jax.experiments.heads import plan

    found = flow_entry.plan(recipe_name, output, f"ablate-{run_id}")
    arms = plan.arms_of(recipe_name, updates)
    for arm in arms:
        _keep(storage.join(found.run_root, f"{arm.name}.yaml"), recipes.dump_recipe(arm.recipe))
    costs = {"parameters": arms[0].parameters, "FLOPs a token": arms[0].flops}
    last_step = arms[0].recipe.stage1.last_step
    return AblationPlan(found.run_root, [arm.name for arm in arms], last_step, costs)


def prepare(recipe: str, run_root: str) -> None:
    """The first weights and the data order, without a card. Raises StageError."""
    run_quietly(recipe, run_root, "convert_weights", "build_index")


@foreseen()
def held_out(recipe: str, run_root: str) -> None:
    """The last checkpoint's held-out loss, where the recipe names held-out text. Raises StageError."""
    from olmo_core_jax.recipes import load_recipe

    found = load_recipe(recipe)
    if found.evaluation.heldout:
        run_quietly(recipe, run_root, landmark_folder(found.stage1.last_step))


def one_at_a_time() -> None:
    """Lets Metaflow train one arm after the other: beside each other on one machine, each would slow the other down.

    `--max-workers 2` on the command line overrides it, for a cluster that has room for both.
    """
    for verb in ("RUN", "RESUME"):
        os.environ.setdefault(f"METAFLOW_{verb}_MAX_WORKERS", "1")


def _keep(where: str, text: str) -> None:
    """Writes a recipe. Raises UserError where another one is there already, and leaves it alone."""
    from olmo_core_jax import storage

    try:
        new = storage.create_exclusive(where, text.encode())
    except OSError as e:
        raise UserError(
            f"{where} cannot be written ({e}): choose a writable output folder"
        ) from None
    if not new and storage.read_text(where) != text:
        raise UserError(f"{where} is of another ablation: choose another output folder")
