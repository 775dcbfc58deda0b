"""What pods can see: buckets, mounted volumes, and what is in their image; not this machine's disk."""

import dataclasses

from olmo_core_jax import recipes, storage
from olmo_core_jax.errors import UserError
from olmo_core_jax.launch.gke.profile import GKE
from olmo_core_jax.launch.job import Job


def is_visible(path: str, gke: GKE, writable: bool = False) -> bool:
    """Do the pods see this path or URI (and may they write there)?"""
    if storage.is_remote(path):
        return True
    mounts = [b.path for b in gke.buckets if not (writable and b.read_only)]
    mounts += [c.path for c in gke.claims if not (writable and c.read_only)]
    return any(
        path == m or path.startswith(m.rstrip("/") + "/") for m in (*mounts, *gke.shared_paths)
    )


def as_pods_see(job: Job, gke: GKE) -> Job:
    """The job as its pods run it: a recipe of this machine's disk is read from the run root.

    Nothing is written. Raises UserError where pods could not write the run root, or the recipe is none.
    """
    if not is_visible(job.run_root, gke, writable=True):
        raise UserError(
            f"run root {job.run_root} is on this machine's disk, which pods do not see: "
            "use gs://BUCKET/PATH, or name a shared volume under gke.claims or gke.shared_paths"
        )
    if job.recipe in recipes.shipped_recipes() or is_visible(job.recipe, gke):
        return job
    recipes.load_recipe(job.recipe)
    return dataclasses.replace(job, recipe=storage.join(job.run_root, "recipe.yaml"))


def for_pods(job: Job, gke: GKE) -> Job:
    """The same, and the recipe is put there. Raises UserError where the run root holds another recipe."""
    seen = as_pods_see(job, gke)
    if seen.recipe == job.recipe:
        return job
    recipe = recipes.load_recipe(job.recipe)
    if not storage.create_exclusive(seen.recipe, recipes.dump_recipe(recipe).encode()):
        there = recipes.load_recipe(seen.recipe)
        if recipes.digest(there) != recipes.digest(recipe):
            raise UserError(
                f"{job.run_root} holds a run of recipe {there.name!r} that differs from {recipe.name!r}: "
                "choose another output folder, or go back to that recipe"
            )
    return seen
