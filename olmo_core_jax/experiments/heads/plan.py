"""Two recipes that differ in nothing but how attention's width is split into heads, and what each costs.

Arithmetic only, no JAX. The ablated recipe `extends` its baseline. Both arms start from our own initialisation of one seed:
the shapes of the arrays do not depend on the split, so it gives both the same numbers. (Published step-0 weights name their
heads in config.json, and the conversion refuses other ones.)
"""

from dataclasses import dataclass

from olmo_core_jax.errors import UserError
from olmo_core_jax.hardware.flops import training_flops
from olmo_core_jax.model.weights import n_params
from olmo_core_jax.recipes.load import base_location, load_recipe
from olmo_core_jax.recipes.schema import Recipe, Weights

SPLIT = {"model.n_heads", "model.n_kv_heads", "model.head_dim"}
"""The only fields in which two arms may differ, beside their texts."""

TEXTS = {"name", "description"}


@dataclass(frozen=True)
class Arm:
    """name: heads x width of a head, as `32x128`; flops: of a token, forward and backward (hardware/flops.py)."""

    name: str
    recipe: Recipe
    parameters: int
    flops: float


def arms_of(name_or_path: str, updates: int = 0) -> tuple[Arm, Arm]:
    """The baseline and the ablated arm, cut to what is compared: stage 1 without a reference (its first `updates`; 0: all).

    Raises UserError for a recipe that extends none, and for two that may not be compared.
    """
    base = base_location(name_or_path)
    if base is None:
        raise UserError(
            f"recipe {name_or_path} extends no other one: an ablation is a recipe that extends its baseline and "
            "changes model.n_heads, n_kv_heads and head_dim, such as laptop_2x24"
        )
    baseline, ablated = (_arm(load_recipe(where), updates) for where in (base, name_or_path))
    require_comparable(baseline, ablated)
    return baseline, ablated


def require_comparable(baseline: Arm, ablated: Arm) -> None:
    """Raises UserError unless the arms differ in their heads only and cost the same."""
    a, b = baseline.recipe, ablated.recipe
    pair = f"{a.name} and {b.name}"
    changed = {key for key in differences(a.model_dump(), b.model_dump()) if key not in TEXTS}
    if not changed & SPLIT:
        raise UserError(
            f"{pair} have the same heads ({baseline.name}): there is nothing to compare"
        )
    if changed - SPLIT:
        named = ", ".join(sorted(changed - SPLIT))
        raise UserError(f"{pair} differ in more than their heads: {named}")
    for what, x, y in (
        ("parameters", baseline.parameters, ablated.parameters),
        ("FLOPs a token", baseline.flops, ablated.flops),
    ):
        if x != y:
            raise UserError(
                f"{pair} differ in {what} ({x:,.0f} and {y:,.0f}): n_heads * head_dim and n_kv_heads * head_dim "
                f"have to stay {a.model.n_heads * a.model.head_dim} and {a.model.n_kv_heads * a.model.head_dim}"
            )


def differences(a: dict, b: dict, prefix: str = "") -> list[str]:
    """Dotted names of the fields that differ."""
    found = []
    for key in a.keys() | b.keys():
        x, y = a.get(key), b.get(key)
        if isinstance(x, dict) and isinstance(y, dict):
            found += differences(x, y, f"{prefix}{key}.")
        elif x != y:
            found.append(f"{prefix}{key}")
    return found


def _arm(recipe: Recipe, updates: int) -> Arm:
    stage = recipe.stage1
    if not 0 <= updates <= stage.last_step:
        raise UserError(
            f"--updates {updates}: stage 1 of {recipe.name} has {stage.last_step} (0: all of them)"
        )
    changes = {
        "stop_at": updates or stage.stop_at,
        "reference": None,
        "checkpoints": stage.checkpoints.model_copy(update={"landmarks": []}),
    }
    cut = recipe.model_copy(
        update={
            "weights": Weights(init_seed=recipe.weights.init_seed),
            "stage1": stage.model_copy(update=changes),
            "stage2": None,
            "evaluation": recipe.evaluation.model_copy(update={"tasks": [], "tasks_path": None}),
        }
    )
    model, length = cut.model, cut.stage1.data.sequence_length
    name = f"{model.n_heads}x{model.head_dim}"
    return Arm(name, cut, n_params(model), training_flops(model, length))
