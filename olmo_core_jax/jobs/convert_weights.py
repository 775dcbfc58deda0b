"""Job: the recipe's step-0 weights into our checkpoint, with proof. Writes
convert_weights/checkpoints/0.
"""

import logging

import numpy as np

from olmo_core_jax import recipes, storage
from olmo_core_jax.checkpoint import download
from olmo_core_jax.checkpoint.formats import hf
from olmo_core_jax.errors import UserError
from olmo_core_jax.hardware.topology import process_id
from olmo_core_jax.jobs.common import Context, Job, Outcome, leave, main
from olmo_core_jax.model.weights import leaves
from olmo_core_jax.results import digest_of, file_digest

log = logging.getLogger("olmo")

FOLDER = "convert_weights"
# Batch and length of what is compared with transformers where no tokens are given.
CHECKED_TOKENS = (2, 64)


def inputs(context: Context) -> dict[str, str]:
    """Digests of what the job reads, cheaply: large weight files enter by name and size."""
    weights = context.recipe.weights
    if weights.hf is None:
        return {"weights": digest_of("initialisation", str(weights.init_seed))}
    found = {"weights": download.identity(weights)}
    if weights.parity:
        found["parity"] = file_digest(weights.parity)
    return found


def work(context: Context) -> Outcome:
    outcome = Outcome()
    if process_id(context.topology) != 0:
        return outcome
    if context.recipe.weights.hf is None:
        _initialise(context, outcome)
    else:
        _convert(context, outcome)
    return outcome


def _initialise(context: Context, outcome: Outcome) -> None:
    """No weights are given: our own initialisation, as a checkpoint like any other."""
    import jax

    from olmo_core_jax.checkpoint.store import CheckpointStore
    from olmo_core_jax.model.olmo3 import init_params

    recipe = context.recipe
    store = CheckpointStore(context.path("checkpoints"))
    params = jax.jit(lambda: init_params(recipe.model, recipe.weights.init_seed))()
    store.save(0, {"params": params}, _meta(context, {"initialisation": recipe.weights.init_seed}))
    store.close()
    outcome.outputs["checkpoint"] = context.path("checkpoints", "0")
    outcome.notes["weights"] = f"own initialisation, seed {recipe.weights.init_seed}"


def _convert(context: Context, outcome: Outcome) -> None:
    from olmo_core_jax.checkpoint.formats import orbax_write
    from olmo_core_jax.checkpoint.store import CheckpointStore

    recipe, folder = context.recipe, context.path("checkpoints")
    source = download.local_weights(recipe.weights, context.folder)
    found = hf.open_hf(source, recipe.model)
    params = hf.params_from_hf(found, recipe.precision.params)
    meta = _meta(context, {"weights": download.identity(recipe.weights), "dtypes": found.dtypes})
    store = CheckpointStore(folder)
    if store.problem(0) is None:
        if store.meta(0).get("source") != meta["source"]:
            raise UserError(
                f"{folder}/0 was converted from other weights; choose another output folder"
            )
        log.info("checkpoint %s/0 is whole already", folder)
    else:
        log.info(
            "converting %s (%.2f GB) to %s", source, found.nbytes / 1e9, recipe.precision.params
        )
        orbax_write.write_step(folder, 0, {"params": params}, meta)
    table = leaves(recipe.model)
    outcome.outputs |= {"checkpoint": storage.join(folder, "0"), "source": source}
    outcome.figures |= {
        "tensors": sum(len(leaf.hf) for leaf in table),
        "parameters": sum(int(np.prod(leaf.shape)) for leaf in table),
        "vocabulary rows added as zeros": recipe.model.padded_vocab_size - found.rows,
    }
    outcome.notes["dtype"] = f"{', '.join(found.dtypes)} -> {recipe.precision.params}, exactly"
    _prove(context, source, outcome)


def _prove(context: Context, source: str, outcome: Outcome) -> None:
    from olmo_core_jax.parity import checks

    recipe, checkpoint = context.recipe, context.path("checkpoints", "0")
    if recipe.weights.parity:
        gap = checks.check_stored_logits(checkpoint, recipe.model, recipe.weights.parity)
        outcome.figures |= gap.figures("parity with the reference: ")
        log.info(
            "logits against the reference's: max difference %.3g, top-1 %.4f", gap.max_abs, gap.top1
        )
        tokens_BS, _ = checks.load_reference(recipe.weights.parity, recipe.model)
    else:
        tokens_BS = np.random.default_rng(0).integers(0, recipe.model.vocab_size, CHECKED_TOKENS)
    verdict = checks.check_transformers(checkpoint, source, tokens_BS)
    if verdict is None:
        outcome.notes["transformers"] = (
            "not compared: it is not installed here, or the model is too large for this check"
        )
    else:
        outcome.figures |= verdict.logits.figures("parity with transformers: ")
        worst = max(verdict.parts, key=lambda gap: gap.relative)
        outcome.notes["transformers"] = (
            f"every part agrees; the farthest is {worst.part}, {worst.relative:.2g} relative"
        )
        log.info("transformers: max logit difference %.3g", verdict.logits.max_abs)


def _meta(context: Context, source: dict) -> dict:
    """What the checkpoint says about itself."""
    recipe = context.recipe
    return {
        "recipe": recipes.digest(recipe),
        "stage": FOLDER,
        "model": recipe.model.model_dump(mode="json"),
        "precision": recipe.precision.model_dump(mode="json"),
        "source": source,
    }


JOB = Job("convert_weights", lambda args: FOLDER, inputs, work)

if __name__ == "__main__":
    leave(main(JOB))
