"""How far a stage has come, as its files under the run root say. Unreadable storage is never taken for step 0."""

from datetime import UTC, datetime
from typing import Any

from olmo_core_jax import storage
from olmo_core_jax.launch.job import Job
from olmo_core_jax.results import read_result

LAUNCHES = "launches"


def newest_step(job: Job) -> int | None:
    """The newest whole checkpoint's step; None where the stage has none (or keeps none).

    In a bucket a step has its name while it is being written; the list of its files comes last.
    """
    root = storage.join(job.run_root, job.folder, "checkpoints")
    steps = sorted((int(e.name) for e in storage.list_dir(root) if e.name.isdigit()), reverse=True)
    whole = (s for s in steps if storage.exists(storage.join(root, str(s), "meta", "files")))
    return next(whole, None)


def is_finished(job: Job) -> bool:
    """Is the stage's validated result there? Raises UserError where the file is something else."""
    return read_result(job.run_root, job.folder) is not None


def record_launch(job: Job, jobset: dict[str, Any], facts: dict[str, Any]) -> None:
    """Keeps what a submission ran on, once, in <stage>/launches/<creation>.<uid>.json."""
    meta = jobset["metadata"]
    stamp = meta["creationTimestamp"].replace("-", "").replace(":", "")
    uri = storage.join(job.run_root, job.folder, LAUNCHES, f"{stamp}.{meta['uid'][:8]}.json")
    if not storage.exists(uri):
        seen = {
            "recorded": datetime.now(UTC).isoformat(timespec="seconds"),
            "uid": meta["uid"],
            "jobset": meta["name"],
        }
        storage.write_json(uri, seen | facts)


def note_cancelled(job: Job, uid: str) -> None:
    """Keeps that this JobSet was deleted on purpose, so that no controller makes it anew."""
    storage.write_text(_cancelled(job, uid), "deleted on purpose\n")


def was_cancelled(job: Job, uid: str) -> bool:
    return storage.exists(_cancelled(job, uid))


def _cancelled(job: Job, uid: str) -> str:
    return storage.join(job.run_root, job.folder, LAUNCHES, f"cancelled.{uid[:8]}")


def launches(run_root: str, folder: str) -> list[dict[str, Any]]:
    """All submissions of a stage, oldest first."""
    where = storage.join(run_root, folder, LAUNCHES)
    return [
        storage.read_mapping(storage.join(where, e.name))
        for e in storage.list_dir(where)
        if e.name.endswith(".json")
    ]
