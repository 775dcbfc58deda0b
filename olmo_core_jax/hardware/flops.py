"""Model FLOPs of a token, attention counted as it is: a query sees its past, or its window of it.

A multiply-add is two operations; backward costs twice the forward; recomputation does not count,
nor do norms, softmax, rotary embedding or the optimizer.
MFU = FLOPs a token * tokens a second / (devices * peak).
"""

from olmo_core_jax.model.weights import n_matmul_params
from olmo_core_jax.recipes.schema import Model


def mean_visible_keys(sequence: int, window: int) -> float:
    """Keys that a query sees, itself included, averaged over the positions; window -1: its past."""
    w = sequence if window < 0 else min(window, sequence)
    return (w * (w + 1) / 2 + (sequence - w) * w) / sequence


def attention_flops(model: Model, sequence: int) -> float:
    """Forward FLOPs a token of q.k and of weights times v, all layers."""
    keys = sum(mean_visible_keys(sequence, w) for w in model.pattern) * model.n_cycles
    return 4 * model.n_heads * model.head_dim * keys


def training_flops(model: Model, sequence: int) -> float:
    """FLOPs a token of one update, forward and backward."""
    return 3 * (2 * n_matmul_params(model) + attention_flops(model, sequence))
