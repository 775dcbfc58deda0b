"""What one update is made of, as the host sees it."""

from typing import NamedTuple

import numpy as np


class Batch(NamedTuple):
    """tokens: int32[B, S]; instance_mask: bool[B], False where the targets do not count."""

    tokens: np.ndarray
    instance_mask: np.ndarray
