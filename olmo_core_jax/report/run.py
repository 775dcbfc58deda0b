"""Everything that a run has written so far; works on unfinished and dead runs too."""

from dataclasses import dataclass, field
from functools import cached_property

from olmo_core_jax import recipes
from olmo_core_jax.compare import checks
from olmo_core_jax.compare.stage import StageComparison, read_stage
from olmo_core_jax.recipes import Recipe
from olmo_core_jax.results import StageResult, read_result
from olmo_core_jax.stages import FINAL, PIPELINE, landmark_folder


@dataclass
class Run:
    """results: by stage folder; landmarks: by step; stages: those that have a reference."""

    root: str
    recipe: Recipe
    results: dict[str, StageResult] = field(default_factory=dict)
    landmarks: dict[int, StageResult] = field(default_factory=dict)
    stages: dict[str, StageComparison] = field(default_factory=dict)

    @cached_property
    def figures(self) -> dict[str, float]:
        """Numbers of the whole run by name, as far as they are known."""
        figures: dict[str, float] = {}
        for comparison in self.stages.values():
            if comparison.metrics.rows:
                figures |= comparison.figures()
        figures |= checks.worst_of([r.figures for r in self.landmarks.values()])
        return figures | (self.results[FINAL].figures if FINAL in self.results else {})

    @cached_property
    def verdicts(self) -> list[checks.Verdict]:
        return checks.verdicts(self.figures, checks.checks_of(self.recipe))

    @property
    def complete(self) -> bool:
        return FINAL in self.results

    @property
    def versions(self) -> dict[str, str]:
        """Of the stage that ran last."""
        known = [self.results[s.name].versions for s in PIPELINE if s.name in self.results]
        return known[-1] if known else {}


def read_run(run_root: str) -> Run:
    """Raises UserError where the folder holds no run."""
    recipe = recipes.recipe_of_run(run_root)
    run = Run(run_root, recipe)
    found = {stage.name: read_result(run_root, stage.name) for stage in PIPELINE}
    run.results = {name: result for name, result in found.items() if result}
    for step in recipe.landmarks():
        result = read_result(run_root, landmark_folder(step))
        if result:
            run.landmarks[step] = result
    for name in ("stage1", "stage2"):
        comparison = read_stage(recipe, run_root, name)
        if comparison:
            run.stages[name] = comparison
    return run
