"""What one update is made of, as the host sees it."""

from typing import Any, NamedTuple


class Batch(NamedTuple):
    """tokens: int32[B, S]; instance_mask: bool[B], False where the targets do not count.

    NumPy arrays on the host, JAX's on devices, and shapes alone where a step is only compiled.
    """

    tokens: Any
    instance_mask: Any
