"""Batches of a host, in the order of the data, from any update on.

Grain runs the workers. One element of its data set is a host's whole batch of one update, computed
from nothing but the index, the order and the step: neither workers, nor hosts, nor restarts can
change what an update sees.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import grain
import numpy as np

from olmo_core_jax.data import worker
from olmo_core_jax.data.batch import Batch
from olmo_core_jax.data.index import Index
from olmo_core_jax.data.order import Order
from olmo_core_jax.data.read_batch import BatchReader
from olmo_core_jax.data.repetition import RepetitionFilter
from olmo_core_jax.data.resume import data_state
from olmo_core_jax.errors import UserError

PREFETCHED = 4
"""Batches that are read ahead, a process."""


@dataclass(frozen=True)
class _Updates:
    """Grain's random-access source: element i is this host's part of update first_step + i."""

    read: BatchReader
    order: Order
    rows: np.ndarray
    first_step: int
    last_step: int
    name: str

    def __len__(self) -> int:
        return self.last_step - self.first_step + 1

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        step = self.first_step + int(index)
        ids = self.order.batch(step)[self.rows]
        tokens, mask = self.read(ids)
        return {"step": np.array(step), "ids": ids, "tokens": tokens, "mask": mask}

    def __repr__(self) -> str:
        # Grain compares this text on a restore; the default one holds an address, different in
        # every process.
        return f"Updates({self.name})"


class Loader:
    """Iterator of (step, ids uint32[b], Batch): b rows of every update's batch, in order.

    first_step, last_step: updates, from 1, both included.
    rows: which rows of the global batch this host reads, in the order it wants them (default: all).
    workers: processes that read ahead; 0 reads with threads of this process. The stream is the
    same. Use as a context manager, or call close(): no process is left behind.
    """

    def __init__(
        self,
        index: Index,
        order: Order,
        *,
        last_step: int,
        first_step: int = 1,
        rows: Sequence[int] | np.ndarray | None = None,
        workers: int = 0,
        repetition: RepetitionFilter | None = None,
        prefetch: int = PREFETCHED,
    ):
        _check(index, order, first_step, last_step)
        self.index, self.order = index, order
        self.rows = np.arange(order.batch_instances) if rows is None else np.asarray(rows)
        self.step = first_step
        self._first_step, self._workers = first_step, workers
        source = _Updates(
            BatchReader(index, repetition),
            order,
            self.rows,
            first_step,
            last_step,
            index.fingerprint,
        )
        self._data = _dataset(source, workers, prefetch)
        self._iterator = iter(self._data)

    def __iter__(self) -> Iterator[tuple[int, np.ndarray, Batch]]:
        return self

    def __next__(self) -> tuple[int, np.ndarray, Batch]:
        element = next(self._iterator)
        step = int(element["step"])
        if step != self.step:
            raise RuntimeError(f"the data workers delivered update {step} instead of {self.step}")
        self.step += 1
        return step, element["ids"], Batch(element["tokens"], element["mask"])

    def state(self) -> dict:
        """What a checkpoint after the last delivered update says about the data.

        The position follows from the step alone; Grain's own count is compared with it.
        """
        delivered = self._delivered()
        if self._first_step + delivered != self.step:
            raise RuntimeError(
                f"Grain's iterator stands at update {self._first_step + delivered}, "
                f"the loader at {self.step}"
            )
        return data_state(self.index, self.order, self.step) | {
            "iterator": self._first_step - 1 + delivered
        }

    def close(self) -> None:
        close = getattr(self._iterator, "close", None)
        if close is not None:
            close()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _delivered(self) -> int:
        """Elements that Grain's iterator says it has given out."""
        state = self._iterator.get_state()
        # With workers, every one has a state of its own (none while it has not begun).
        parts = state.get("iterators_in_use_states", [state])
        return sum(int(part["next_index"]) for part in parts if part is not None)


def _dataset(source: _Updates, workers: int, prefetch: int):
    data = grain.MapDataset.source(source)
    threads = grain.ReadOptions(num_threads=2 if prefetch else 0, prefetch_buffer_size=prefetch)
    batches = data.to_iter_dataset(threads)
    if workers == 0:
        return batches
    _parse_absl_flags()
    # Batches come through pipes: a pod's /dev/shm is 64 MiB, and segments of a killed worker stay.
    pipes = grain.experimental.DatasetOptions(min_shm_size=1 << 62)
    batches = grain.experimental.WithOptionsIterDataset(batches, pipes)
    options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=2)
    return batches.mp_prefetch(options, worker.begin)


def _parse_absl_flags() -> None:
    """Grain's workers read absl flags, which a program that is no absl app has not parsed."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS(sys.argv[:1])


def _check(index: Index, order: Order, first_step: int, last_step: int) -> None:
    if index.instances != order.shuffle.instances or index.chunk != order.shuffle.chunk:
        raise UserError(
            f"the order is of {order.shuffle.instances} instances in chunks of "
            f"{order.shuffle.chunk}, the index has {index.instances} in chunks of {index.chunk}: "
            "they are of different data"
        )
    if not 1 <= first_step <= last_step + 1:
        raise ValueError(f"first_step {first_step}, last_step {last_step}")
