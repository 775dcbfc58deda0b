"""Runs a job on whatever the launch profile names: the one place that knows every backend."""

from olmo_core_jax.launch.job import Job, Tick
from olmo_core_jax.launch.profile import Profile
from olmo_core_jax.results import StageResult


def run(job: Job, profile: Profile, tick: Tick = lambda: None) -> StageResult:
    """Runs a job to its end and returns its validated result. Raises JobError for every other ending."""
    if profile.backend == "local":
        from olmo_core_jax.launch import local as backend
    else:
        from olmo_core_jax.launch.gke import watch as backend
    return backend.run(job, profile, tick)
