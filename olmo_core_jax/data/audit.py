"""Proof, from what a run logged, that it saw every instance at most once an epoch.

The log holds a digest of the ids that each update was really trained on, gathered from all hosts.
The order says what they should have been. Where all digests agree and the order is a permutation,
nothing was left out, seen twice, or shifted, however often the run was interrupted and on however
many hosts it ran.
"""

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from olmo_core_jax import recipes, storage
from olmo_core_jax.data.index import Index
from olmo_core_jax.data.instance_log import Line, digest, read_lines
from olmo_core_jax.data.order import Order
from olmo_core_jax.data.stage_data import open_stage_data
from olmo_core_jax.recipes import schema
from olmo_core_jax.stages import train_folder

SHOWN = 5
AT_ONCE = 4096
"""Updates whose ids are looked at together: bounds the memory."""


@dataclass
class Coverage:
    """Instances of a label: in the data, and those seen at least once."""

    instances: int
    seen: int = 0


@dataclass
class Audit:
    """A stage's verdict.

    updates: audited ones, from 1; faults: why it fails, empty where all is proved.
    """

    stage: str
    updates: int = 0
    attempts: int = 0
    repeated_updates: int = 0
    torn_lines: int = 0
    instances: int = 0
    epochs: int = 0
    dropped_an_epoch: int = 0
    labels: dict[str, Coverage] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.faults

    def lines(self) -> list[str]:
        """The report as text."""
        seen = sum(c.seen for c in self.labels.values())
        out = [
            f"{self.stage}: {self.updates} updates in {self.attempts} attempt(s), "
            f"{self.repeated_updates} of them trained more than once after a restart",
            f"  {seen} of {self.instances} instances seen, {self.epochs} epoch(s) begun, "
            f"{self.dropped_an_epoch} instances a whole epoch fill no batch and are dropped",
        ]
        for label, c in self.labels.items():
            share = c.seen / c.instances if c.instances else 1.0
            out.append(f"  {label}: {c.seen} of {c.instances} ({share:.2%})")
        out += [f"  FAULT {fault}" for fault in self.faults]
        out.append(f"  {'proved: every instance at most once an epoch' if self.ok else 'FAILED'}")
        return out


def audit(run_root: str) -> list[Audit]:
    """Audits every training stage of a run root that has logged updates."""
    recipe = recipes.recipe_of_run(run_root)
    return [
        audit_stage(run_root, stage, recipe.stage(stage))
        for stage in recipe.stages()
        if storage.exists(log_uri(run_root, stage))
    ]


def log_uri(run_root: str, stage: str) -> str:
    return storage.join(run_root, train_folder(stage), "instances.jsonl")


def audit_stage(run_root: str, stage: str, section: schema.Stage) -> Audit:
    """Audits one stage from its instances.jsonl, index and order."""
    index, order = open_stage_data(storage.join(run_root, "build_index", stage), section)
    logged: dict[int, set[str]] = defaultdict(set)
    lines, torn = read_lines(log_uri(run_root, stage))
    for line in lines:
        logged[line.step].add(line.digest)
    result = Audit(stage, updates=max(logged, default=0), instances=index.instances)
    result.attempts = len({line.attempt for line in lines})
    result.repeated_updates, result.torn_lines = _repeated(lines), torn
    result.dropped_an_epoch = index.instances - order.steps_per_epoch * order.batch_instances
    _compare(result, logged, order)
    _count(result, index, order)
    return result


def _repeated(lines: list[Line]) -> int:
    times: dict[int, int] = defaultdict(int)
    for line in lines:
        times[line.step] += 1
    return sum(t > 1 for t in times.values())


def _compare(result: Audit, logged: dict[int, set[str]], order: Order) -> None:
    """Every update from 1 on is there, and every attempt at it was trained on the order's ids."""
    missing, other = [], []
    for step in range(1, result.updates + 1):
        if step not in logged:
            missing.append(step)
        elif logged[step] != {digest(order.batch(step))}:
            other.append(step)
    if missing:
        result.faults.append(f"{len(missing)} updates are not in the log: {_some(missing)}")
    if other:
        result.faults.append(
            f"{len(other)} updates were trained on other instances than the order's: {_some(other)}"
        )


def _count(result: Audit, index: Index, order: Order) -> None:
    """No instance twice in an epoch; instances seen by label."""
    ever = np.zeros(index.instances, bool)
    step = 1
    while step <= result.updates:
        epoch, row = order.locate(step)
        result.epochs = epoch
        last = min(result.updates, step + order.steps_per_epoch - 1 - row)
        seen = np.zeros(index.instances, bool)
        for begin in range(step, last + 1, AT_ONCE):
            count = min(AT_ONCE, last + 1 - begin)
            ids = order.epoch(epoch).read(
                (begin - step) * order.batch_instances, count * order.batch_instances
            )
            if seen[ids].any() or len(np.unique(ids)) != len(ids):
                result.faults.append(f"the order of epoch {epoch} names an instance twice")
            seen[ids] = True
        ever |= seen
        step = last + 1
    begin = 0
    for shard in index.shards:
        coverage = result.labels.setdefault(shard.label, Coverage(0))
        coverage.instances += shard.instances
        coverage.seen += int(np.count_nonzero(ever[begin : begin + shard.instances]))
        begin += shard.instances


def _some(steps: list[int]) -> str:
    shown = ", ".join(map(str, steps[:SHOWN]))
    return shown + (", ..." if len(steps) > SHOWN else "")
