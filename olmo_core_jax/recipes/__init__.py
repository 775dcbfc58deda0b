"""What is run: validated YAML, free of hardware."""

from olmo_core_jax.recipes.load import (
    digest,
    dump_recipe,
    load_recipe,
    missing_files,
    recipe_of_run,
    shipped_recipes,
)
from olmo_core_jax.recipes.schema import Recipe

__all__ = [
    "Recipe",
    "digest",
    "dump_recipe",
    "load_recipe",
    "missing_files",
    "recipe_of_run",
    "shipped_recipes",
]
