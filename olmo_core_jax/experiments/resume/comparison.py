"""The resume check: an unbroken and an interrupted run of the same recipe, update by update."""

from dataclasses import dataclass

from olmo_core_jax import storage
from olmo_core_jax.compare import curves
from olmo_core_jax.stages import train_folder

METRICS = (curves.CE, curves.Z, curves.GRAD_NORM, curves.LR, curves.SKIPPED)


@dataclass(frozen=True)
class ResumeCheck:
    """largest: of each metric, the largest difference and its update (0: nowhere).

    arrays: names of the arrays of the last checkpoint whose bits differ, of array_count.
    attempts: of the interrupted run, those that were killed before they logged a line included.
    """

    updates: int
    missing: list[int]
    largest: dict[str, tuple[float, int]]
    other_batches: list[int]
    arrays: list[str]
    array_count: int
    attempts: int
    repeated: int
    repeat_difference: float

    @property
    def same(self) -> bool:
        """Every update of one was made by the other, with a difference of exactly 0 everywhere."""
        nothing = not (self.missing or self.other_batches or self.arrays)
        exact = all(size == 0 for size, _ in self.largest.values())
        return nothing and exact and self.updates > 0 and self.array_count > 0


def compare_runs(unbroken: str, interrupted: str, stage: str, last_step: int) -> ResumeCheck:
    """Compares two run roots' stage up to its last update. NaN equals NaN: it is the same bits."""
    folders = [storage.join(root, train_folder(stage)) for root in (unbroken, interrupted)]
    a, b = (curves.read_metrics(storage.join(f, "metrics", "metrics.jsonl")) for f in folders)
    batches = [curves.read_instances(storage.join(f, "instances.jsonl"))[0] for f in folders]
    sums = [checksums(folder, last_step) for folder in folders]
    steps = range(1, last_step + 1)
    return ResumeCheck(
        updates=len(a.rows.keys() & b.rows.keys()),
        missing=[s for s in steps if s not in a.rows or s not in b.rows],
        largest={metric: _largest(a.rows, b.rows, metric) for metric in METRICS},
        other_batches=[s for s in steps if batches[0].get(s) != batches[1].get(s)],
        arrays=sorted(k for k in sums[0] | sums[1] if sums[0].get(k) != sums[1].get(k)),
        array_count=len(sums[0]),
        attempts=max(b.attempts, default=0),
        repeated=len(b.repeated),
        repeat_difference=b.repeat_difference,
    )


def _largest(a: curves.Rows, b: curves.Rows, metric: str) -> tuple[float, int]:
    largest, at = 0.0, 0
    for step in sorted(a.keys() & b.keys()):
        x, y = a[step].get(metric), b[step].get(metric)
        if x == y or (x != x and y != y):
            continue
        size = abs(x - y) if x is not None and y is not None else float("inf")
        if not size <= largest:
            largest, at = size, step
    return largest, at


def checksums(folder: str, step: int) -> dict[str, int]:
    """A fingerprint of every array of a checkpoint; equal ones have equal bits."""
    where = storage.join(folder, "checkpoints", str(step), "meta", "metadata")
    try:
        return storage.read_mapping(where)["checksums"]
    except FileNotFoundError:
        return {}
