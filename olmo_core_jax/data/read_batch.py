"""Token ids of some instances, as one array."""

import functools
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from olmo_core_jax.data.index import Index, Place
from olmo_core_jax.data.repetition import RepetitionFilter
from olmo_core_jax.errors import UserError
from olmo_core_jax.storage.readers import CONNECTIONS, reader_for


class BatchReader:
    """Called with uint32[b] instance ids; returns (int32[b, S] tokens, bool[b] instance mask).

    Raises UserError where a shard is truncated or holds an id outside the vocabulary, with file and
    byte.
    """

    def __init__(self, index: Index, repetition: RepetitionFilter | None = None):
        self.index, self.repetition = index, repetition
        self._reader = reader_for(index.base)

    def __call__(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        places = [self.index.place(int(i)) for i in ids]
        tokens = np.empty((len(ids), self.index.sequence_length), np.int32)
        each = _pool().map if self._reader.concurrent else map
        for row, raw in enumerate(each(self._read, places)):
            # Checked in its own type: an id beyond int32 has to be seen before it is cast.
            if raw.max() >= self.index.vocab_size:
                raise self._bad_id(places[row], raw)
            tokens[row] = raw
        if self.repetition is None:
            return tokens, np.ones(len(ids), bool)
        return tokens, self.repetition.keep(tokens)

    def _read(self, place: Place) -> np.ndarray:
        length = self.index.sequence_length * self.index.itemsize
        data = self._reader.read(place.uri, place.offset, length)
        return np.frombuffer(data, f"<u{self.index.itemsize}")

    def _bad_id(self, place: Place, raw: np.ndarray) -> UserError:
        at = int(np.argmax(raw >= self.index.vocab_size))
        offset = place.offset + at * self.index.itemsize
        return UserError(
            f"shard {place.uri} holds id {raw[at]} at byte {offset} (instance {place.instance}), "
            f"the vocabulary has {self.index.vocab_size}: restore the file, or correct data.dtype"
        )


@functools.cache
def _pool() -> ThreadPoolExecutor:
    """One a process: bounds the requests in flight, however many batches are read ahead."""
    return ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="shard-read")
