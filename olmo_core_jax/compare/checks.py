"""What a faithful reproduction has to hold, and whether it does: the one place of all limits.

They are for fp32 on CPU at a calm learning rate, where the reference agrees with itself to
1e-6 in CE.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from olmo_core_jax.recipes.schema import Recipe, Stage

BATCHES = "batches that differ"
CE = "CE loss, max |difference|"
GRAD_NORM = "grad norm, max relative difference"
CE_AT, NORM_AT = "CE loss, update of the max", "grad norm, update of the max"
WEIGHTS = "end weights, max |difference| / largest weight"
HELDOUT = "heldout max |difference|"
KL_MEAN, KL_MAX = "KL mean", "KL max"
TOP1 = "top-1 agreement"


@dataclass(frozen=True)
class Check:
    """figure: a name in result.json's figures; at: the figure that says at which update."""

    figure: str
    title: str
    sense: Literal["at most", "at least"]
    limit: float
    at: str | None = None

    def holds(self, measured: float) -> bool:
        return measured <= self.limit if self.sense == "at most" else measured >= self.limit


@dataclass(frozen=True)
class Verdict:
    """measured is None where the figure is not there: such a check has not passed."""

    check: Check
    measured: float | None
    update: int | None = None

    @property
    def passed(self) -> bool:
        return self.measured is not None and self.check.holds(self.measured)

    @property
    def word(self) -> str:
        if self.measured is None:
            return "not measured"
        return "pass" if self.passed else "FAIL"


def _training(stage: str, title: str) -> list[Check]:
    rows: list[tuple[str, str, float, str | None]] = [
        (BATCHES, "batches that are not the reference's", 0, None),
        ("updates missing", "updates missing", 0, None),
        (CE, "CE loss, largest difference", 2e-5, CE_AT),
        (GRAD_NORM, "gradient norm, largest relative difference", 2e-3, NORM_AT),
        ("LR, max relative difference", "learning rate, largest relative difference", 1e-12, None),
        ("skipped updates that differ", "updates skipped by one run only", 0, None),
        ("repeated updates, max |difference|", "repeated updates, largest difference", 0, None),
        (WEIGHTS, "weights at the end, of the largest", 1e-4, None),
    ]  # fmt: skip
    return [
        Check(f"{stage}/{f}", f"{title}: {t}", "at most", v, at and f"{stage}/{at}")
        for f, t, v, at in rows
    ]


LANDMARKS = "landmarks"


def _evaluation(prefix: str, title: str) -> list[Check]:
    """Checks of a checkpoint against the reference's of the same step."""
    return [
        Check(f"{prefix}{HELDOUT}", f"{title}: held-out loss, largest difference", "at most", 1e-5),
        Check(f"{prefix}{KL_MEAN}", f"{title}: KL from the reference, nats", "at most", 1e-7),
        Check(f"{prefix}{TOP1}", f"{title}: top-1 agreement", "at least", 0.999),
    ]


def worst_of(landmarks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The landmarks' figures that are checked, the worst of each."""
    figures = {}
    for check in _evaluation("", ""):
        values = [f[check.figure] for f in landmarks if check.figure in f]
        if values and len(values) == len(landmarks):
            worst = max if check.sense == "at most" else min
            figures[f"{LANDMARKS}/{check.figure}"] = worst(values)
    return figures


def verdicts(figures: Mapping[str, float], checks: list[Check]) -> list[Verdict]:
    """Each check with what was measured."""
    return [
        Verdict(c, figures.get(c.figure), int(figures[c.at]) if c.at and c.at in figures else None)
        for c in checks
    ]


def checks_of(recipe: Recipe) -> list[Check]:
    """The checks that a run of this recipe has to pass, as far as its reference reaches."""
    checks = _stage_checks("stage1", recipe.stage1)
    if recipe.evaluation.heldout and any(
        step in (recipe.stage1.reference.hf if recipe.stage1.reference else {})
        for step in recipe.landmarks()
    ):
        checks += _evaluation(f"{LANDMARKS}/", "landmarks, worst")
    checks += _stage_checks("stage2", recipe.stage2)
    last = recipe.stage2 or recipe.stage1
    if recipe.evaluation.heldout and last.reference and last.last_step in last.reference.hf:
        checks += _evaluation("", "final model")
    return checks


def limit_of(stage: str, name: str) -> float:
    """The limit of a training figure, without the stage's prefix."""
    return next(c.limit for c in _training(stage, stage) if c.figure == f"{stage}/{name}")


def _stage_checks(name: str, stage: Stage | None) -> list[Check]:
    if stage is None or stage.reference is None:
        return []
    absent = set()
    if stage.reference.batches is None:
        absent.add(f"{name}/{BATCHES}")
    if stage.last_step not in stage.reference.hf:
        absent.add(f"{name}/{WEIGHTS}")
    return [c for c in _training(name, name.replace("stage", "stage ")) if c.figure not in absent]
