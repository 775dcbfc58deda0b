"""One stage as a job: its command, and running it to its result on whatever the launch profile names."""

from collections.abc import Callable
from dataclasses import dataclass

from olmo_core_jax.errors import JobError
from olmo_core_jax.hardware.topology import Topology
from olmo_core_jax.launch.profile import Profile
from olmo_core_jax.results import StageResult

Tick = Callable[[], None]
"""Called every few seconds while a job runs: for cards."""


@dataclass(frozen=True)
class Job:
    """module: file under olmo_core_jax/jobs; folder: what it writes under the run root; flags: its own."""

    module: str
    folder: str
    recipe: str
    run_root: str
    flags: tuple[str, ...] = ()

    def arguments(self, topology: Topology) -> list[str]:
        """Everything after `python`: the same line that a person would type."""
        return [
            "-m",
            f"olmo_core_jax.jobs.{self.module}",
            f"--recipe={self.recipe}",
            f"--run-root={self.run_root}",
            *self.flags,
            f"--topology={topology.model_dump_json(exclude_defaults=True)}",
        ]


class JobFailed(JobError):
    """A job ended without a result. The message has the exit code's meaning and the log's last lines."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


def convert_weights(recipe: str, run_root: str) -> Job:
    return Job("convert_weights", "convert_weights", recipe, run_root)


def build_index(recipe: str, run_root: str) -> Job:
    return Job("build_index", "build_index", recipe, run_root)


def train(recipe: str, run_root: str, stage: str, interrupt: str = "") -> Job:
    """interrupt: updates at which attempts are ended, to prove that a resume is exact."""
    flags = (f"--stage={stage}", *([f"--interrupt={interrupt}"] if interrupt else []))
    return Job("train", f"{stage}_train", recipe, run_root, flags)


def evaluate_landmark(recipe: str, run_root: str, step: int) -> Job:
    return Job(
        "evaluate", f"eval_landmarks/{step}", recipe, run_root, ("--stage=stage1", f"--step={step}")
    )


def warm_adam(recipe: str, run_root: str) -> Job:
    return Job("warm_adam", "warm_adam", recipe, run_root)


def final_eval(recipe: str, run_root: str) -> Job:
    return Job("evaluate", "final_eval", recipe, run_root, ("--final",))


def replay(
    recipe: str, run_root: str, window: str, checkpoints: str = "", partial: bool = False
) -> Job:
    """window: STAGE/N:K; checkpoints: where the reference's step folders are, if not where the recipe says."""
    folder = window.replace("/", "-").replace(":", "-")
    flags = (f"--window={window}", *([f"--checkpoints={checkpoints}"] if checkpoints else []))
    flags = (*flags, "--partial") if partial else flags
    return Job("replay", f"replay/{folder}", recipe, run_root, flags)


def run(job: Job, profile: Profile, tick: Tick = lambda: None) -> StageResult:
    """Runs a job to its end and returns its validated result. Raises JobError for every other ending."""
    if profile.backend == "local":
        from olmo_core_jax.launch import local

        return local.run(job, profile, tick)
    from olmo_core_jax.launch.gke import watch

    return watch.run(job, profile, tick)
