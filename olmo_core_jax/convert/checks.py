"""Parity checks of the conversion job: against stored logits, and against transformers where it
is installed.
"""

import importlib.util
import logging

import numpy as np

from olmo_core_jax import storage
from olmo_core_jax.convert import parity, sides
from olmo_core_jax.convert.orbax_read import OrbaxStep, lazy_section, total_bytes
from olmo_core_jax.errors import UserError
from olmo_core_jax.recipes.schema import Model

log = logging.getLogger("olmo")

SMALL_BYTES = 2 * 2**30  # a second framework's copy of the model may take this much memory


def load_reference(uri: str, cfg: Model) -> tuple[np.ndarray, np.ndarray]:
    """(tokens [B, S], fp32 logits [B, S, V]) of a parity file. Raises UserError where it is not
    one.
    """
    try:
        if storage.is_remote(uri):
            import io

            stored = np.load(io.BytesIO(storage.read_bytes(uri)))
        else:
            stored = np.load(uri)
        tokens_BS, logits_BSV = stored["tokens"], stored["logits"]
    except (OSError, KeyError, ValueError) as e:
        raise UserError(
            f"weights.parity: {uri} is not an npz with `tokens` and `logits` ({e})"
        ) from None
    fits = logits_BSV.ndim == 3 and logits_BSV.shape[:2] == tokens_BS.shape
    if not fits or not cfg.vocab_size <= logits_BSV.shape[-1] <= cfg.padded_vocab_size:
        raise UserError(
            f"weights.parity: {uri} has tokens {tokens_BS.shape} and logits {logits_BSV.shape}; "
            f"[B, S] and [B, S, {cfg.vocab_size} to {cfg.padded_vocab_size}] are expected"
        )
    return tokens_BS, logits_BSV


def check_stored_logits(checkpoint: str, cfg: Model, uri: str) -> parity.LogitGap:
    """Our fp32 logits on a checkpoint against stored ones. Raises UserError where they are not
    the same function.
    """
    tokens_BS, logits_BSV = load_reference(uri, cfg)
    ours = sides.logits_ours(checkpoint, tokens_BS, "float32")
    gap = parity.compare_logits(ours, logits_BSV)
    failures = gap.failures(parity.FLOORS["float32"])
    if failures:
        raise UserError(
            f"the weights do not compute the reference's logits ({uri}): {'; '.join(failures)}. "
            "Are they the weights of this reference, and is recipe.model its model?"
        )
    return gap


def check_transformers(
    checkpoint: str, folder: str, tokens_BS: np.ndarray
) -> parity.Verdict | None:
    """Our model against transformers' on the source, part by part; None where it is not installed
    or too large.
    """
    if storage.is_remote(folder) or not all(
        importlib.util.find_spec(m) for m in ("torch", "transformers")
    ):
        return None
    if total_bytes(lazy_section(OrbaxStep(checkpoint), "params")) > SMALL_BYTES:
        return None
    ours = sides.trace_ours(checkpoint, tokens_BS, "float32")
    theirs = sides.trace_hf(folder, tokens_BS, "float32")
    verdict = parity.judge("ours", "transformers", "float32", ours, theirs)
    if not verdict.ok:
        raise UserError(
            f"our model departs from transformers' on {folder}: {'; '.join(verdict.failures)}"
        )
    return verdict
