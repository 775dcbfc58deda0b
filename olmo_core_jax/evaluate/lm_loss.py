"""Held-out loss: mean cross-entropy over fixed windows of documents that were never trained on."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from olmo_core_jax import storage
from olmo_core_jax.data.index import default_dtype
from olmo_core_jax.errors import UserError
from olmo_core_jax.evaluate.scoring import Scorer, batches_of
from olmo_core_jax.recipes.schema import Recipe


@dataclass(frozen=True)
class Windows:
    """tokens_NS: int32 [N, S], a file cut into consecutive windows."""

    domain: str
    tokens_NS: np.ndarray


def read_windows(recipe: Recipe) -> list[Windows]:
    """Every held-out file in windows of stage 1's sequence length, its remainder dropped.

    Raises UserError that names a file which is missing, truncated, too short, or holds an id
    beyond the vocabulary.
    """
    data = recipe.stage1.data
    dtype = np.dtype(data.dtype or default_dtype(recipe.model.vocab_size)).newbyteorder("<")
    return [
        Windows(domain, _cut(uri, dtype, data.sequence_length, recipe.model.vocab_size))
        for domain, uri in recipe.evaluation.heldout.items()
    ]


def _cut(uri: str, dtype: np.dtype, length: int, vocab_size: int) -> np.ndarray:
    try:
        raw = storage.read_bytes(uri)
    except OSError as e:
        raise UserError(f"evaluation.heldout: {uri} cannot be read: {e.strerror or e}") from None
    if len(raw) % dtype.itemsize:
        raise UserError(
            f"evaluation.heldout: {uri} has {len(raw)} bytes, no multiple of {dtype.itemsize}: "
            "it is truncated, or not a raw token file"
        )
    tokens = np.frombuffer(raw, dtype)
    count = len(tokens) // length
    if not count:
        raise UserError(
            f"evaluation.heldout: {uri} has {len(tokens)} tokens, less than one window of {length}"
        )
    if tokens.max() >= vocab_size:
        raise UserError(
            f"evaluation.heldout: {uri} holds id {tokens.max()}, the vocabulary has {vocab_size}"
        )
    return tokens[: count * length].reshape(count, length).astype(np.int32)


def heldout_losses(
    scorer: Scorer, params: dict, windows: list[Windows], batch_size: int
) -> dict[str, float]:
    """Mean CE in nats a token by domain, without z-loss, over the S-1 targets inside each window.

    Log-probabilities are fp32, their sum is float64 on the host in the order of the file: the
    same weights give the same bits, whatever was evaluated before.
    """
    return {w.domain: _loss(scorer, params, w.tokens_NS, batch_size) for w in windows}


def _loss(scorer: Scorer, params: dict, tokens_NS: np.ndarray, batch_size: int) -> float:
    total = 0.0
    for tokens_BS, real in batches_of(tokens_NS, batch_size):
        targets_BS = np.roll(tokens_BS, -1, axis=1)  # the last column has no target and is left out
        logp_BS = np.asarray(scorer.score(params, tokens_BS, targets_BS).logp_BS)
        total -= float(np.sum(logp_BS[:real, :-1], dtype=np.float64))
    return total / (tokens_NS.shape[0] * (tokens_NS.shape[1] - 1))


def loss_figures(ours: Mapping[str, float], reference: Mapping[str, float]) -> dict[str, float]:
    """Figures by name; the largest difference only where every domain has a reference."""
    figures = {f"heldout/{domain}/CE loss": loss for domain, loss in ours.items()}
    figures |= {
        f"heldout/{domain}/CE loss (reference)": reference[domain]
        for domain in ours
        if domain in reference
    }
    if ours and ours.keys() <= reference.keys():
        figures["heldout max |difference|"] = max(abs(ours[d] - reference[d]) for d in ours)
    return figures
