"""A stage in segments: which updates ran on which shape, and how fast a device was there."""

import statistics
from dataclasses import dataclass

from olmo_core_jax import storage
from olmo_core_jax.compare.curves import TPS, Metrics
from olmo_core_jax.report.tables import Table


@dataclass(frozen=True)
class Segment:
    """Consecutive updates on one shape. tps: median tokens a second and device; attempts: starts of the trainer."""

    shape: str
    devices: int
    first: int
    last: int
    attempts: int
    tps: float


def read_attempts(run_root: str, folder: str) -> dict[int, dict]:
    """What each attempt of a training stage ran on, by number."""
    where = storage.join(run_root, folder, "attempts")
    found = [
        storage.read_mapping(storage.join(where, e.name))
        for e in storage.list_dir(where)
        if e.name.endswith(".json")
    ]
    return {a["attempt"]: a for a in found}


def segments(metrics: Metrics, attempts: dict[int, dict]) -> list[Segment]:
    """Updates in order, grouped by what their newest attempt ran on."""
    groups: list[tuple[tuple[str, int], list[int]]] = []
    for step in sorted(metrics.rows):
        about = attempts.get(metrics.attempt_of[step], {})
        key = (about.get("shape", "unknown"), about.get("devices", 0))
        if not groups or groups[-1][0] != key:
            groups.append((key, []))
        groups[-1][1].append(step)
    return [
        Segment(
            *key,
            first=steps[0],
            last=steps[-1],
            attempts=len({metrics.attempt_of[s] for s in steps}),
            tps=statistics.median(metrics.rows[s].get(TPS, 0.0) for s in steps),
        )
        for key, steps in groups
    ]


def table(found: list[Segment]) -> Table:
    """The segments for a card."""
    rows = [
        [s.shape, str(s.devices), f"{s.first} to {s.last}", str(s.attempts), f"{s.tps:,.0f}"]
        for s in found
    ]
    return Table(["ran on", "devices", "updates", "starts", "tokens/s and device"], rows)
