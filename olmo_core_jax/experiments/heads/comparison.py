"""Two arms that differ in their heads only: was the comparison fair, how far apart are the curves, and how fast was each?"""

import statistics
from dataclasses import dataclass, field

from olmo_core_jax import storage
from olmo_core_jax.compare import curves
from olmo_core_jax.compare.curves import Gap, Rows
from olmo_core_jax.experiments.resume.comparison import checksums
from olmo_core_jax.results import read_result
from olmo_core_jax.stages import landmark_folder, train_folder

TAIL = 50
"""Updates at the end whose mean loss is compared; of a short run, its last quarter."""


FAST = 0.9
"""The share of updates that are slower than the fastest tenth."""


@dataclass(frozen=True)
class Trained:
    """What an arm left: metrics and batch digests by update, checksums of its first weights, held-out loss by domain."""

    name: str
    rows: Rows
    batches: dict[int, str]
    start: dict[str, int]
    heldout: dict[str, float] = field(default_factory=dict)

    def mean(self, metric: str, first: int, last: int) -> float:
        """Over the updates first to last; NaN where there is none."""
        values = [
            row[metric] for s, row in self.rows.items() if first <= s <= last and metric in row
        ]
        return statistics.fmean(values) if values else float("nan")

    def speed(self, share: float = 0.5) -> float:
        """Tokens a second and device that this share of the updates does not reach; NaN where none was timed.

        0.5: the median. Other work on the machine slows the fastest updates least, so where the
        ratio at FAST is another than the median's, the arms were not timed alike.
        """
        rates = sorted(row[curves.TPS] for row in self.rows.values() if curves.TPS in row)
        return rates[int(share * len(rates))] if rates else float("nan")

    @property
    def skipped(self) -> int:
        return len(curves.skipped(self.rows))


def read_arm(run_root: str, name: str, last_step: int) -> Trained:
    """An arm from its run root, stage 1 up to its last update."""
    folder = storage.join(run_root, train_folder("stage1"))
    evaluated = read_result(run_root, landmark_folder(last_step))
    figures = evaluated.figures if evaluated else {}
    head, tail = "heldout/", "/CE loss"
    return Trained(
        name,
        curves.read_metrics(storage.join(folder, "metrics", "metrics.jsonl")).rows,
        curves.read_instances(storage.join(folder, "instances.jsonl"))[0],
        checksums(storage.join(run_root, "convert_weights"), 0),
        {
            key.removeprefix(head).removesuffix(tail): value
            for key, value in figures.items()
            if key.startswith(head) and key.endswith(tail)
        },
    )


@dataclass(frozen=True)
class Ablation:
    """The baseline and the ablated arm. Differences are ablated minus baseline."""

    baseline: Trained
    ablated: Trained
    last_step: int

    @property
    def arms(self) -> tuple[Trained, Trained]:
        return self.baseline, self.ablated

    @property
    def gap(self) -> Gap:
        """Of the cross-entropy, by update."""
        return curves.gap(self.ablated.rows, self.baseline.rows, curves.CE)

    @property
    def tail(self) -> tuple[int, int]:
        """The first and the last of the updates at the end."""
        return self.last_step - min(TAIL, -(-self.last_step // 4)) + 1, self.last_step

    def speed_ratio(self, share: float = 0.5) -> float:
        """Tokens a second of the ablated arm, over the baseline's."""
        return self.ablated.speed(share) / self.baseline.speed(share)

    def unfair(self) -> dict[str, int]:
        """How often the arms differed in what has to be the same: all zeros in a fair comparison."""
        a, b = self.arms
        steps = range(1, self.last_step + 1)
        rate = curves.gap(b.rows, a.rows, curves.LR).values
        names = a.start.keys() | b.start.keys()
        return {
            "updates that an arm lacks": sum(s not in a.rows or s not in b.rows for s in steps),
            "updates with other batches": sum(
                s not in a.batches or a.batches[s] != b.batches.get(s) for s in steps
            ),
            "updates with another learning rate": len([v for v in rate if v]),
            f"arrays that start otherwise, of {len(names)}": len(
                [n for n in names if a.start.get(n) != b.start.get(n)]
            ),
        }

    @property
    def fair(self) -> bool:
        return bool(self.baseline.start) and not any(self.unfair().values())

    def figures(self) -> dict[str, float]:
        """Numbers by name, for an artifact; without those that were not measured."""
        gap, (first, last) = self.gap, self.tail
        found = {}
        for arm in self.arms:
            found[f"{arm.name}/CE loss, mean of updates {first} to {last}"] = arm.mean(
                curves.CE, first, last
            )
            found[f"{arm.name}/tokens per second and device"] = arm.speed()
            found[f"{arm.name}/tokens per second and device, fastest tenth"] = arm.speed(FAST)
            found[f"{arm.name}/skipped updates"] = arm.skipped
            found |= {f"{arm.name}/heldout/{d}": v for d, v in arm.heldout.items()}
        found |= {
            "CE loss, max |difference|": gap.largest,
            "CE loss, update of the max": gap.at,
            "tokens per second, ratio": self.speed_ratio(),
            "tokens per second, ratio of the fastest tenths": self.speed_ratio(FAST),
        }
        return {name: value for name, value in found.items() if value == value}


def compare_arms(roots: dict[str, str], last_step: int) -> Ablation:
    """roots: run roots by arm, the baseline first."""
    baseline, ablated = (read_arm(root, name, last_step) for name, root in roots.items())
    return Ablation(baseline, ablated, last_step)
