"""What a model says of given tokens at every position, without the logits of whole sequences.

B batch, S sequence, D model width, V real vocabulary (padding rows of the head never take part).
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from olmo_core_jax.model.olmo3 import bind
from olmo_core_jax.model.options import ModelOptions
from olmo_core_jax.recipes.schema import Model

LOGIT_BYTES = 2**29
"""fp32 logits that may exist at once."""


class TokenScores(NamedTuple):
    """logp_BS: fp32 log-probability of each target; best_BS: int32 most likely token."""

    logp_BS: jax.Array
    best_BS: jax.Array


class Divergence(NamedTuple):
    """kl_BS: fp32 KL(reference || ours) in nats, never negative; agree_BS: same most likely
    token.
    """

    kl_BS: jax.Array
    agree_BS: jax.Array


class Scorer:
    """Compiled scoring functions of one model shape; weights are arguments, so checkpoints share
    the programs.
    """

    def __init__(self, cfg: Model, opts: ModelOptions, result: NamedSharding | None = None):
        self.compilations = 0

        def score(params, tokens_BS, targets_BS):
            self.compilations += 1  # runs when it is traced: once for every new shape
            return _score(cfg, opts, params, tokens_BS, targets_BS)

        self._score = jax.jit(score, out_shardings=result)
        self._compare = jax.jit(partial(_compare, cfg, opts), out_shardings=result)

    def score(self, params: dict, tokens_BS: np.ndarray, targets_BS: np.ndarray) -> TokenScores:
        """Scores of targets_BS[b, s] given tokens_BS[b, :s+1], both int32."""
        return self._score(params, tokens_BS, targets_BS)

    def compare(self, reference: dict, ours: dict, tokens_BS: np.ndarray) -> Divergence:
        """Two models' next-token distributions at every position."""
        return self._compare(reference, ours, tokens_BS)


def _score(cfg: Model, opts: ModelOptions, params, tokens_BS, targets_BS) -> TokenScores:
    with opts.exact_matmuls():
        model = bind(params, cfg, opts)

        def chunk(h_BTD, targets_BT):
            logits = model.logits(h_BTD)[..., : cfg.vocab_size]
            at_target = jnp.take_along_axis(logits, targets_BT[..., None], axis=-1)[..., 0]
            logp = at_target - jax.nn.logsumexp(logits, axis=-1)
            return logp, jnp.argmax(logits, axis=-1).astype(jnp.int32)

        h_BSD = model.hidden_states(tokens_BS)
        return TokenScores(*_in_chunks(chunk, cfg.padded_vocab_size, h_BSD, targets_BS))


def _compare(cfg: Model, opts: ModelOptions, reference, ours, tokens_BS) -> Divergence:
    with opts.exact_matmuls():
        models = [bind(p, cfg, opts) for p in (reference, ours)]

        def chunk(*hidden):
            p, q = (m.logits(h)[..., : cfg.vocab_size] for m, h in zip(models, hidden, strict=True))
            return kl_of_logits(p, q), jnp.argmax(p, axis=-1) == jnp.argmax(q, axis=-1)

        hidden = [m.hidden_states(tokens_BS) for m in models]
        return Divergence(*_in_chunks(chunk, cfg.padded_vocab_size, *hidden))


def kl_of_logits(p_logits: jax.Array, q_logits: jax.Array) -> jax.Array:
    """KL(softmax p || softmax q) over the last axis, exact to fp32 also where it is far below
    fp32's epsilon.

    With e = q - p and u = e - E_p[e]:  KL = log E_p[exp u] = log1p(E_p[exp(u) - 1 - u]), as
    E_p[u] = 0. Every term is positive, so nothing cancels; the plain sum of p (log p - log q)
    would have an error of some 1e-7.
    """
    p = jax.nn.softmax(p_logits, axis=-1)
    total = jnp.sum(p, axis=-1)
    e = q_logits - p_logits
    u = e - (jnp.sum(p * e, axis=-1) / total)[..., None]
    small = u * u * (0.5 + u * (1 / 6 + u / 24))
    excess = jnp.where(jnp.abs(u) < 0.02, small, jnp.expm1(u) - u)
    return jnp.log1p(jnp.sum(p * excess, axis=-1) / total)


def _in_chunks(function, vocabulary: int, *arrays_BS):
    """function over pieces of the sequence axis, one after another, so that logits stay under
    LOGIT_BYTES.
    """
    batch, length = arrays_BS[0].shape[:2]
    pieces = 1
    while 4 * batch * vocabulary * length > LOGIT_BYTES * pieces and length % (2 * pieces) == 0:
        pieces *= 2
    if pieces == 1:
        return function(*arrays_BS)
    cut = [
        jnp.moveaxis(a.reshape(batch, pieces, length // pieces, *a.shape[2:]), 1, 0)
        for a in arrays_BS
    ]
    out = jax.lax.map(lambda piece: function(*piece), cut)
    return tuple(jnp.moveaxis(o, 0, 1).reshape(batch, length) for o in out)


def batches_of(rows: np.ndarray, size: int):
    """Pieces of exactly `size` rows, and how many of each are real: the last one repeats its
    first row.
    """
    for start in range(0, len(rows), size):
        piece = rows[start : start + size]
        filler = np.repeat(piece[:1], size - len(piece), axis=0)
        yield np.concatenate([piece, filler]), len(piece)
