"""Parity checks of the conversion job: against stored logits, and against transformers where it
is installed.
"""

import importlib.util
import logging

import numpy as np

from olmo_core_jax import storage
from olmo_core_jax.checkpoint.contents import open_checkpoint
from olmo_core_jax.checkpoint.formats.orbax_read import OrbaxStep, lazy_section, total_bytes
from olmo_core_jax.errors import UserError
from olmo_core_jax.parity import traces, verdicts
from olmo_core_jax.recipes.schema import Model
from olmo_core_jax.storage import ranges

log = logging.getLogger("olmo")

LONGEST = 1024  # tokens of a sequence that is drawn for a comparison
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


def check_stored_logits(checkpoint: str, cfg: Model, uri: str) -> verdicts.LogitGap:
    """Our fp32 logits on a checkpoint against stored ones. Raises UserError where they are not
    the same function.
    """
    tokens_BS, logits_BSV = load_reference(uri, cfg)
    ours = traces.logits_ours(checkpoint, tokens_BS, "float32")
    gap = verdicts.compare_logits(ours, logits_BSV)
    failures = gap.failures(verdicts.FLOORS["float32"])
    if failures:
        raise UserError(
            f"the weights do not compute the reference's logits ({uri}): {'; '.join(failures)}. "
            "Are they the weights of this reference, and is recipe.model its model?"
        )
    return gap


def check_transformers(
    checkpoint: str, folder: str, tokens_BS: np.ndarray
) -> verdicts.Verdict | None:
    """Our model against transformers' on the source, part by part; None where it is not installed
    or too large.
    """
    elsewhere = storage.is_remote(folder) or ranges.is_web(folder)
    if elsewhere or not all(importlib.util.find_spec(m) for m in ("torch", "transformers")):
        return None
    if total_bytes(lazy_section(OrbaxStep(checkpoint), "params")) > SMALL_BYTES:
        return None
    ours = traces.trace_ours(checkpoint, tokens_BS, "float32")
    theirs = traces.trace_hf(folder, tokens_BS, "float32")
    verdict = verdicts.judge("ours", "transformers", "float32", ours, theirs)
    if not verdict.ok:
        raise UserError(
            f"our model departs from transformers' on {folder}: {'; '.join(verdict.failures)}"
        )
    return verdict


def compare_checkpoints(
    a: str,
    b: str,
    *,
    dtype: str = "float32",
    tokens: str | None = None,
    batch: int = 2,
    length: int | None = None,
    seed: int = 0,
) -> verdicts.Verdict:
    """Runs two checkpoints of any kind on the same tokens and compares them part by part.

    tokens: an npz with `tokens` [B, S] or an npy; None draws random ids [batch, length]. length:
    None reaches past the sliding window, up to LONGEST.
    """
    if dtype not in verdicts.FLOORS:
        raise UserError(f"dtype {dtype!r}: parity is judged in {' or '.join(verdicts.FLOORS)}")
    models = [m for m in (open_checkpoint(path).model for path in (a, b)) if m is not None]
    if not models:
        raise UserError(f"neither {a} nor {b} says which model it is")
    window = max(*models[0].pattern, 1)
    if tokens is not None:
        tokens_BS = _load_tokens(tokens)
    else:
        vocabulary = min(m.vocab_size for m in models)
        length = length or min(window + 32, LONGEST)
        tokens_BS = np.random.default_rng(seed).integers(0, vocabulary, (batch, length))
    if tokens_BS.shape[1] <= window:
        log.warning(
            "sequences of %d tokens stay within the window of %d: its width is not tested",
            tokens_BS.shape[1],
            window,
        )
    sides = [traces.trace_side(path, tokens_BS, dtype) for path in (a, b)]
    return verdicts.judge(a, b, dtype, *sides)


def _load_tokens(path: str) -> np.ndarray:
    try:
        stored = np.load(path)
        tokens_BS = stored["tokens"] if hasattr(stored, "files") else stored
    except (OSError, KeyError, ValueError) as e:
        raise UserError(f"{path} is no npz with `tokens` and no npy ({e})") from None
    if tokens_BS.ndim != 2:
        raise UserError(f"{path}: tokens [B, S] are expected, not {list(tokens_BS.shape)}")
    return tokens_BS
