"""What every job shares: arguments, log, lock, stop signal, result.json, exit code.

A job is a `Job` with four parts: its flags, the folder it writes, the digests of what it reads, and its work. `run`
does the rest in one order: look for a valid result, take the lock, work, write the result last.
"""

import argparse
import importlib.metadata
import logging
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from olmo_core_jax import recipes, storage
from olmo_core_jax.errors import CRASH, OK, PREEMPTED, JobError, UserError
from olmo_core_jax.hardware.chips import GPU_MEMORY_SHARE
from olmo_core_jax.hardware.topology import Topology, load_topology, process_id
from olmo_core_jax.jobs import maintenance
from olmo_core_jax.recipes import Recipe
from olmo_core_jax.results import StageResult, read_result, run_root, write_result
from olmo_core_jax.signals import StopNow, StopRequest, grace_from_environment
from olmo_core_jax.storage import lock

log = logging.getLogger("olmo")

VERSIONED = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "lm-eval")


@dataclass(frozen=True)
class Context:
    """What a job's work is given. folder: path or URI that it may write under."""

    recipe: Recipe
    run_root: str
    folder: str
    args: argparse.Namespace
    topology: Topology
    stop: StopRequest

    def path(self, *parts: str) -> str:
        """A path or URI under the job's own folder."""
        return storage.join(self.folder, *parts)

    def upstream(self, *parts: str) -> str:
        """A path or URI under the run root."""
        return storage.join(self.run_root, *parts)


@dataclass
class Outcome:
    """What a job's work returns; becomes result.json."""

    outputs: dict[str, str] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """folder: name under the run root; inputs: digests by name, cheap to compute; work: the job itself."""

    name: str
    folder: Callable[[argparse.Namespace], str]
    inputs: Callable[[Context], dict[str, str]]
    work: Callable[[Context], Outcome]
    flags: Callable[[argparse.ArgumentParser], None] = lambda parser: None


def main(job: Job, argv: Sequence[str] | None = None) -> int:
    """Runs a job from the command line and returns its exit code (errors.py)."""
    stop = StopRequest(grace_from_environment()).install()
    maintenance.watch()
    try:
        _log_to_stdout()
        return run(job, _parser(job).parse_args(argv), stop)
    except JobError as e:
        log.error("%s: %s", type(e).__name__, e)
        return e.exit_code
    except StopNow as e:
        log.error("Preempted: %s", e)
        return PREEMPTED
    except Exception:
        log.exception("the job crashed")
        return CRASH


def _parser(job: Job) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m olmo_core_jax.jobs.{job.name}")
    parser.add_argument("--recipe", required=True, help="name of a shipped recipe, or a YAML file")
    parser.add_argument(
        "--run-root", required=True, type=run_root, help="folder or gs:// URI of the whole run"
    )
    parser.add_argument(
        "--topology", help="YAML or JSON: mesh, kernels, workers (default: this machine)"
    )
    job.flags(parser)
    return parser


def _log_to_stdout() -> None:
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stdout,
        force=True,
        format="%(asctime)s %(message)s",
        datefmt="%H:%M:%S",
    )
    # A log that cannot be written, on a full disk, must not bury the one line that says so.
    logging.raiseExceptions = False
    # Loggers of libraries stay at warnings: their INFO lines bury ours.
    for noisy in ("absl", "jax", "orbax", "grain", "google", "urllib3"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def leave(code: int) -> NoReturn:
    """Ends the process at once: after a failed save, threads of Orbax wait for minutes for what will not come."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


def run(job: Job, args: argparse.Namespace, stop: StopRequest) -> int:
    """The common order of every job. Raises JobError for foreseen endings."""
    recipe = recipes.load_recipe(args.recipe)
    topology = load_topology(args.topology)
    _prepare_backend(topology)
    folder_name = job.folder(args)
    folder = storage.join(args.run_root, folder_name)
    context = Context(recipe, args.run_root, folder, args, topology, stop)
    claim_run_root(args.run_root, recipe)
    inputs = {"recipe": recipes.digest(recipe)} | job.inputs(context)
    if finished(args.run_root, folder_name, inputs):
        log.info("%s is already done for these inputs", folder_name)
        return OK
    if process_id(topology) != 0:  # one writer: the others only take part
        job.work(context)
        return OK
    with lock.hold(folder):
        _log_to_file(folder)
        log.info("%s: recipe %s, run root %s", folder_name, recipe.name, args.run_root)
        began = time.monotonic()
        outcome = job.work(context)
        result = StageResult(
            stage=folder_name,
            inputs=inputs,
            outputs=outcome.outputs,
            figures=outcome.figures,
            notes=outcome.notes,
            versions=versions(),
            seconds=round(time.monotonic() - began, 3),
        )
        write_result(args.run_root, folder_name, result)
        log.info("%s: done in %.1f s", folder_name, result.seconds)
    return OK


def claim_run_root(run_root: str, recipe: Recipe) -> None:
    """Marks a run root as this recipe's. Raises UserError where it is another's."""
    uri = storage.join(run_root, "recipe.yaml")
    if storage.create_exclusive(uri, recipes.dump_recipe(recipe).encode()):
        return
    there = recipes.load_recipe(uri)
    if recipes.digest(there) != recipes.digest(recipe):
        raise UserError(
            f"{run_root} holds a run of recipe {there.name!r} that differs from {recipe.name!r}: "
            "choose another output folder, or go back to that recipe"
        )


def finished(run_root: str, folder: str, inputs: dict[str, str]) -> bool:
    """Is there a valid result from the same inputs? Raises UserError where it came from others."""
    result = read_result(run_root, folder)
    if result is None:
        return False
    changed = sorted(k for k in inputs | result.inputs if inputs.get(k) != result.inputs.get(k))
    if changed:
        raise UserError(
            f"{storage.join(run_root, folder)} was made from other inputs ({', '.join(changed)} changed): "
            "choose another output folder; nothing is overwritten"
        )
    return True


def versions() -> dict[str, str]:
    """Versions of what can change numbers."""
    found = {"python": platform.python_version(), "olmo-core-jax": "unknown"}
    for name in (*VERSIONED, "olmo-core-jax"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return found


def _prepare_backend(topology: Topology) -> None:
    """What has to be in the environment before JAX is imported."""
    flags = list(topology.xla_flags)
    if topology.host_devices:
        flags.append(f"--xla_force_host_platform_device_count={topology.host_devices}")
    if flags:
        os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags]).strip()
    if topology.libtpu_flags:
        known = os.environ.get("LIBTPU_INIT_ARGS", "")
        os.environ["LIBTPU_INIT_ARGS"] = " ".join([known, *topology.libtpu_flags]).strip()
    if topology.platform == "cuda" and "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", str(GPU_MEMORY_SHARE))
    if topology.platform:
        os.environ["JAX_PLATFORMS"] = topology.platform


def _log_to_file(folder: str) -> None:
    # A launcher that keeps this process's whole output in log.txt says so; by hand, the job keeps its own.
    if storage.is_remote(folder) or os.environ.get("OLMO_LOG_CAPTURED"):
        return
    handler = logging.FileHandler(storage.join(folder, "log.txt"))
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logging.getLogger().addHandler(handler)
