"""All that is measured at one checkpoint: held-out loss, divergence from the reference, benchmark
tasks.
"""

import logging
import math
from dataclasses import dataclass, field
from pathlib import Path

from jax.sharding import Mesh

from olmo_core_jax import storage
from olmo_core_jax.errors import UserError
from olmo_core_jax.evaluate import lm_loss, tasks, token_kl
from olmo_core_jax.evaluate.scoring import Scorer
from olmo_core_jax.evaluate.weights import our_params, reference_params
from olmo_core_jax.hardware.topology import Topology
from olmo_core_jax.model.options import model_options
from olmo_core_jax.recipes.schema import Recipe, Reference
from olmo_core_jax.train.mesh import RULES, named_sharding, replicated

log = logging.getLogger("olmo")


@dataclass
class Measured:
    """figures and notes as they go into result.json; the two parameter trees for further
    comparisons.
    """

    params: dict
    reference: dict | None = None
    figures: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluator:
    """What all checkpoints of a job share; programs are compiled once."""

    recipe: Recipe
    topology: Topology
    mesh: Mesh
    scorer: Scorer
    batch_size: int

    def measure(self, checkpoints: str, stage: str, step: int) -> Measured:
        """Our checkpoint of a stage, and the reference's of the same step where there is one."""
        reference = self.recipe.stage(stage).reference
        found = Measured(*self.pair(checkpoints, stage, step))
        if found.reference is None:
            found.notes["reference"] = f"the recipe has no reference checkpoint of {stage}/{step}"
        self._heldout(found, reference, stage, step)
        if self.recipe.evaluation.tasks:
            self._tasks(found, reference, stage, step)
        return found

    def pair(self, checkpoints: str, stage: str, step: int) -> tuple[dict, dict | None]:
        """Our parameters of a step, and the reference's where the recipe names them."""
        reference = self.recipe.stage(stage).reference
        ours = our_params(checkpoints, step, self.recipe, self.mesh)
        if reference is None or step not in reference.hf:
            return ours, None
        return ours, reference_params(reference.hf[step], self.recipe, self.mesh)

    def _heldout(self, found: Measured, reference: Reference | None, stage: str, step: int) -> None:
        windows = lm_loss.read_windows(self.recipe)
        if not windows:
            return
        ours = lm_loss.heldout_losses(self.scorer, found.params, windows, self.batch_size)
        theirs = stored(reference.heldout if reference else None, stage, step)
        if theirs:
            found.notes["heldout (reference)"] = "computed by the reference's own framework"
        elif found.reference is not None:
            theirs = lm_loss.heldout_losses(self.scorer, found.reference, windows, self.batch_size)
            found.notes["heldout (reference)"] = "computed by this model on the reference's weights"
        found.figures |= lm_loss.loss_figures(ours, theirs)
        if found.reference is not None:
            found.figures |= token_kl.divergence_figures(
                self.scorer, found.reference, found.params, windows, self.batch_size
            )
        log.info("%s step %d: held-out loss %s", stage, step, _rounded(ours))

    def _tasks(self, found: Measured, reference: Reference | None, stage: str, step: int) -> None:
        recipe = self.recipe
        lm = self._harness(found.params)
        ours = tasks.run_tasks(lm, recipe.evaluation)
        theirs = stored(reference.lm_eval if reference else None, stage, step)
        settings = theirs.pop("settings", {})
        tasks.require_comparable(ours.settings, settings)
        found.figures |= tasks.task_figures(ours, theirs)
        for task, values in ours.settings.items():
            found.notes[f"lm_eval/{task}"] = ", ".join(f"{k} {v}" for k, v in values.items())
        if lm.joined_tokens:
            found.notes["lm_eval joins"] = f"{lm.joined_tokens} continuations were encoded apart"

    def _harness(self, params: dict):
        from tokenizers import Tokenizer

        from olmo_core_jax.evaluate.harness import OlmoLM

        recipe = self.recipe
        if recipe.tokenizer.path is None:
            raise UserError("evaluation.tasks need tokenizer.path: a folder with tokenizer.json")
        file = Path(storage.local_path(recipe.tokenizer.path), "tokenizer.json")
        if not file.is_file():
            raise UserError(f"tokenizer.path: there is no {file}")
        return OlmoLM(
            lambda tokens, targets: self.scorer.score(params, tokens, targets),
            Tokenizer.from_file(str(file)),
            eos_id=recipe.tokenizer.eos_id,
            max_length=recipe.stage1.data.sequence_length,
            batch_size=self.batch_size,
        )


def make_evaluator(recipe: Recipe, topology: Topology, mesh: Mesh) -> Evaluator:
    """An evaluator on a mesh; batches are rounded up to a multiple of its data-parallel ways."""

    def shard(names):
        return named_sharding(mesh, names)

    options = model_options(topology, recipe.precision.compute, shard)
    ways = math.prod(mesh.shape[axis] for axis in RULES["batch"])
    batch_size = -(-recipe.evaluation.batch_size // ways) * ways
    scorer = Scorer(recipe.model, options, replicated(mesh))
    return Evaluator(recipe, topology, mesh, scorer, batch_size)


def stored(uri: str | None, stage: str, step: int) -> dict:
    """What a reference's JSON file holds for a step: {stage: {step: {...}}} or {step: {...}}; {}
    for nothing.
    """
    if uri is None:
        return {}
    try:
        content = storage.read_json(uri)
    except OSError as e:
        raise UserError(f"reference file {uri} cannot be read: {e.strerror or e}") from None
    by_step = content.get(stage, content) if isinstance(content, dict) else {}
    found = by_step.get(str(step), {}) if isinstance(by_step, dict) else {}
    return dict(found)


def _rounded(losses: dict[str, float]) -> str:
    return ", ".join(f"{domain} {loss:.4f}" for domain, loss in losses.items())
