"""Do the documents end with the token that the recipe names?

Two tokenizers that differ in little else have been mixed up before, and nothing fails then:
documents are never told apart.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from olmo_core_jax.data import shards
from olmo_core_jax.storage.readers import CONNECTIONS, Reader, reader_for

SCANNED_TOKENS = 1_000_000
"""Tokens at a shard's begin in which an end of document is expected."""
SCANNED_SHARDS = 64
"""Shards of a bucket that are read so far; a folder's are all read."""


def missing_eos(base: str, samples: Sequence[shards.Sample], dtype: str, eos_id: int) -> list[str]:
    """Faults of shards without an EOS. Most are settled by the sampled windows and cost nothing."""
    unsettled = [
        s for s in samples if s.size > s.start and not np.any(shards.tokens_of(s, dtype) == eos_id)
    ]
    reader = reader_for(base)
    if reader.concurrent and len(unsettled) > SCANNED_SHARDS:
        spread = np.linspace(0, len(unsettled) - 1, SCANNED_SHARDS).astype(int)
        unsettled = [unsettled[i] for i in spread]
    with ThreadPoolExecutor(CONNECTIONS if reader.concurrent else 1) as pool:
        found = list(pool.map(lambda s: _has_eos(reader, s, dtype, eos_id), unsettled))
    return [
        f"{s.uri} has no EOS {eos_id} in its first {min(SCANNED_TOKENS, _tokens(s, dtype))} tokens"
        for s, has in zip(unsettled, found, strict=True)
        if not has
    ]


def _tokens(sample: shards.Sample, dtype: str) -> int:
    return (sample.size - sample.start) // shards.itemsize(dtype)


def _has_eos(reader: Reader, sample: shards.Sample, dtype: str, eos_id: int) -> bool:
    size = shards.itemsize(dtype)
    length = min(SCANNED_TOKENS, _tokens(sample, dtype)) * size
    data = reader.read(sample.uri, sample.start, length)
    return bool(np.any(np.frombuffer(data, f"<u{size}") == eos_id))
