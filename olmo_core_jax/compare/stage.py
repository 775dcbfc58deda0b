"""One training stage against its reference: what its curves and batches say, as figures."""

import statistics
from dataclasses import dataclass, field

from olmo_core_jax import storage
from olmo_core_jax.compare import curves
from olmo_core_jax.compare.curves import Gap, Metrics, Rows
from olmo_core_jax.recipes.schema import Recipe, Reference
from olmo_core_jax.stages import train_folder

RELATIVE = {curves.CE: False, curves.Z: False, curves.GRAD_NORM: True, curves.LR: True}
"""Metrics that are compared, and whether relative to the reference."""

EARLY = 50
"""Updates in which the two runs have the same weights up to rounding."""


@dataclass
class StageComparison:
    """Our curve, the reference's, its second run (may be empty), and the batches of both."""

    name: str
    metrics: Metrics
    reference: Rows
    second: Rows = field(default_factory=dict)
    batches: dict[int, str] = field(default_factory=dict)
    reference_batches: dict[int, str] = field(default_factory=dict)
    rewritten_batches: int = 0
    last_step: int = 0

    def gap(self, metric: str) -> Gap:
        """Ours minus the reference."""
        return curves.gap(self.metrics.rows, self.reference, metric, RELATIVE[metric])

    def band(self, metric: str) -> Gap:
        """The reference's second run of itself minus its first: its own noise."""
        return curves.gap(self.second, self.reference, metric, RELATIVE[metric])

    def missing(self) -> list[int]:
        """Updates up to the stage's end that the reference has and we do not."""
        return [s for s in self.reference if s <= self.last_step and s not in self.metrics.rows]

    def skips_that_differ(self) -> set[int]:
        ours, theirs = curves.skipped(self.metrics.rows), curves.skipped(self.reference)
        return {s for s in ours ^ theirs if s in self.metrics.rows and s in self.reference}

    def batches_that_differ(self) -> list[int]:
        """Updates whose token ids are not the reference's, or are not known to be."""
        return [
            s
            for s, digest in self.reference_batches.items()
            if s in self.metrics.rows and self.batches.get(s) != digest
        ]

    def exact_norm(self) -> dict[str, float]:
        """Whose gradient norm is nearer to the reference's fp64 one; {} without that column.

        The fp64 norm is of the reference's gradients, so only the first updates say something of
        the norms: later the weights have drifted apart by more than a norm's rounding.
        """
        if self.name != "stage1":  # a later stage starts from its own end of the one before
            return {}
        exact = curves.GRAD_NORM_FP64
        early = {s: row for s, row in self.reference.items() if s <= EARLY}
        ours = curves.gap(self.metrics.rows, early, curves.GRAD_NORM, True, exact)
        theirs = curves.gap(early, early, curves.GRAD_NORM, True, exact)
        known = dict(zip(theirs.steps, theirs.values, strict=True))
        pairs = [(abs(v), abs(known[s])) for s, v in zip(ours.steps, ours.values, strict=True)]
        if not pairs:
            return {}
        ours_median, theirs_median = (statistics.median(side) for side in zip(*pairs, strict=True))
        name = f"grad norm to fp64, first {EARLY} updates"
        return {
            f"{name}: ours nearer": sum(o < t for o, t in pairs),
            f"{name}: reference nearer": sum(t < o for o, t in pairs),
            f"{name}: median relative difference": ours_median,
            f"{name}: median relative difference (reference)": theirs_median,
        }

    def figures(self) -> dict[str, float]:
        """Numbers by name, each under the stage's own name."""
        ce, z, norm, lr = (self.gap(m) for m in RELATIVE)
        band = {"CE loss": curves.CE, "grad norm": curves.GRAD_NORM}
        figures: dict[str, float] = {
            "updates compared": len(ce.steps),
            "updates missing": len(self.missing()),
            "CE loss, max |difference|": ce.largest,
            "CE loss, update of the max": ce.at,
            "Z loss, max |difference|": z.largest,
            "grad norm, max relative difference": norm.largest,
            "grad norm, update of the max": norm.at,
            "LR, max relative difference": lr.largest,
            "skipped updates": len(curves.skipped(self.metrics.rows)),
            "skipped updates that differ": len(self.skips_that_differ()),
            "updates repeated after a restart": len(self.metrics.repeated),
            "repeated updates, max |difference|": self.metrics.repeat_difference,
        }
        figures |= {
            f"{name}, reference against itself": self.band(metric).largest
            for name, metric in band.items()
            if self.second
        }
        if self.reference_batches:
            figures["batches compared"] = len(self.reference_batches.keys() & self.metrics.rows)
            figures["batches that differ"] = len(self.batches_that_differ())
            figures["batches that changed on repetition"] = self.rewritten_batches
        figures |= self.exact_norm()
        return {f"{self.name}/{name}": v for name, v in figures.items() if v == v}


def read_stage(recipe: Recipe, run_root: str, name: str) -> StageComparison | None:
    """`stage1` or `stage2` as far as it has gone; None where there is nothing to compare with."""
    stage = getattr(recipe, name)
    if stage is None or stage.reference is None:
        return None
    folder = train_folder(name)
    metrics = curves.read_metrics(storage.join(run_root, folder, "metrics", "metrics.jsonl"))
    comparison = from_reference(name, metrics, stage.reference, stage.last_step)
    comparison.batches, comparison.rewritten_batches = curves.read_instances(
        storage.join(run_root, folder, "instances.jsonl")
    )
    return comparison


def from_reference(
    name: str, metrics: Metrics, reference: Reference, last_step: int
) -> StageComparison:
    """A comparison without our batches: what a live card needs. Reads the reference's files."""
    return StageComparison(
        name,
        metrics,
        curves.read_csv(reference.curve),
        curves.read_csv(reference.band) if reference.band else {},
        reference_batches=curves.read_digests(reference.batches) if reference.batches else {},
        last_step=last_step,
    )
