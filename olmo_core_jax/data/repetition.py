"""OLMo-core's repetition filter: long stretches of a short period are not learnt from.

OLMo-core (find_periodic_sequences) finds, for a period p, a stretch of tokens that repeats every p,
and counts how often p fits into it, partial rows at both ends included; its method needs 3 repeats
and p <= S / 3. That is the same as: some run of consecutive i with x[i] == x[i - p] is at least
(count - 1) * p long. The masked instance stays in the batch, its targets do not count.
"""

from dataclasses import dataclass

import numpy as np

PROBES = 8
"""Evenly spaced places that a long run must cover: what is compared before a run is measured."""


@dataclass(frozen=True)
class RepetitionFilter:
    """max_count: this many repeats of a period in [min_period, max_period] mask an instance."""

    min_period: int = 1
    max_period: int = 13
    max_count: int = 32

    def keep(self, tokens: np.ndarray) -> np.ndarray:
        """bool[B] for ids [B, S] of any integer type: True where the instance counts."""
        rows, length = tokens.shape
        keep = np.ones(rows, bool)
        for period in range(self.min_period, min(self.max_period, length // 3) + 1):
            run = (max(self.max_count, 3) - 1) * period
            for row in np.flatnonzero(_suspects(tokens, period, run) & keep):
                keep[row] = _longest_run(tokens[row, period:] == tokens[row, :-period]) < run
        return keep


def _suspects(tokens: np.ndarray, period: int, run: int) -> np.ndarray:
    """bool[B]: False where no run of that length can exist.

    A run covers at least `run // stride` neighbouring multiples of the stride, so places in between
    need no look.
    """
    stride = max(1, run // PROBES)
    first = -(-period // stride) * stride
    hits = tokens[:, first::stride] == tokens[:, first - period : -period : stride]
    needed = run // stride
    if hits.shape[1] < needed:
        return np.zeros(len(tokens), bool)
    covered = 1  # hits[i] says that places i .. i + covered - 1 all match
    while covered < needed:
        step = min(covered, needed - covered)
        hits = hits[:, :-step] & hits[:, step:]
        covered += step
    return hits.any(axis=1)


def _longest_run(same: np.ndarray) -> int:
    """Length of the longest stretch of True."""
    breaks = np.flatnonzero(~same)
    edges = np.concatenate(([-1], breaks, [len(same)]))
    return int(np.diff(edges).max()) - 1
