"""One stage as a job: what is started to run it."""

from collections.abc import Callable
from dataclasses import dataclass

from olmo_core_jax import stages
from olmo_core_jax.errors import JobError
from olmo_core_jax.hardware.topology import Topology

Tick = Callable[[], None]
"""Called every few seconds while a job runs: for cards."""


@dataclass(frozen=True)
class Job:
    """module: under olmo_core_jax; folder: what it writes under the run root; flags: its own.

    distributed: may several processes share it?
    """

    module: str
    folder: str
    recipe: str
    run_root: str
    flags: tuple[str, ...] = ()
    distributed: bool = False

    def arguments(self, topology: Topology) -> list[str]:
        """Everything after `python`: the same line that a person would type."""
        return [
            "-m",
            f"olmo_core_jax.{self.module}",
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


def job_of(folder: str, recipe: str, run_root: str, *flags: str) -> Job:
    """The job that writes a stage folder (`stage1_train`, `eval_landmarks/100`); flags: more of its own.

    Raises UserError that lists the stages.
    """
    stage, own = stages.stage_of(folder), stages.flags_of(folder)
    return Job(stage.module, folder, recipe, run_root, (*own, *flags), stage.distributed)
