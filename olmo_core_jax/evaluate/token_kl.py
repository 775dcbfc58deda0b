"""Two models' next-token distributions, compared at every position of the held-out windows."""

import numpy as np

from olmo_core_jax.evaluate.lm_loss import Windows
from olmo_core_jax.evaluate.scoring import Scorer, batches_of


def divergence_figures(
    scorer: Scorer, reference: dict, ours: dict, windows: list[Windows], batch_size: int
) -> dict[str, float]:
    """KL(reference || ours) in nats, mean and maximum, and the share of positions with the same
    top token.

    reference and ours are parameter trees of one shape. Every position of every window counts,
    the last included.
    """
    total, largest, agree, count = 0.0, 0.0, 0, 0
    for w in windows:
        for tokens_BS, real in batches_of(w.tokens_NS, batch_size):
            found = scorer.compare(reference, ours, tokens_BS)
            kl = np.asarray(found.kl_BS)[:real].astype(np.float64)
            total += float(kl.sum())
            largest = max(largest, float(kl.max()))
            agree += int(np.asarray(found.agree_BS)[:real].sum())
            count += kl.size
    return {
        "KL mean": total / count,
        "KL max": largest,
        "top-1 agreement": agree / count,
        "positions compared": count,
    }
