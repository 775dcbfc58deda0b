"""AI2's order of instances, computed once, stored beside the index, and read a block at a time.

An epoch's order is numpy's shuffle by PCG64(seed + epoch), epochs counted from 1, of chunks of
consecutive instances (OLMo-core's NumpyFSLDataLoader). It is stored as OLMo-core stores it,
headerless uint32, with a JSON beside it that holds a digest of every block: whoever reads a block
knows that it is the one that was written.
"""

import hashlib
import os
import tempfile
from collections import OrderedDict
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from olmo_core_jax import storage
from olmo_core_jax.errors import UserError

VERSION = 1
BLOCK = 1 << 20
"""Instances a block: 4 MiB, the unit of reading and of verification."""
KEPT_BLOCKS = 4


@dataclass(frozen=True)
class Shuffle:
    """What decides an epoch's order.

    chunk: instances that stay together, max_target_sequence_length / sequence_length.
    """

    instances: int
    seed: int
    chunk: int = 1

    def compute(self, epoch: int) -> np.ndarray:
        """uint32[instances rounded down to whole chunks].

        Memory: the result itself when chunk is 1, else 1 + 1/chunk times it.
        """
        if not 0 < self.instances < np.iinfo(np.uint32).max:
            raise UserError(f"{self.instances} instances cannot be numbered in 32 bits")
        generator = np.random.Generator(np.random.PCG64(self.seed + epoch))
        chunks = np.arange(self.instances // self.chunk, dtype=np.uint32)
        generator.shuffle(chunks)
        if self.chunk == 1:
            return chunks
        order = np.empty((len(chunks), self.chunk), np.uint32)
        for i in range(self.chunk):
            order[:, i] = chunks * np.uint32(self.chunk) + np.uint32(i)
        return order.reshape(-1)


def order_uri(folder: str, epoch: int) -> str:
    return storage.join(folder, f"order_epoch{epoch}.u32")


def build_order(folder: str, shuffle: Shuffle, epoch: int) -> str:
    """Writes an epoch's order under `folder` (path or gs://) unless it is there; returns its URI."""
    uri = order_uri(folder, epoch)
    if _described(uri, shuffle, epoch) is not None:
        return uri
    order = shuffle.compute(epoch)
    digests = [_digest(order[i : i + BLOCK]) for i in range(0, len(order), BLOCK)]
    if storage.is_remote(uri):
        with tempfile.NamedTemporaryFile() as f:
            order.tofile(f)
            f.flush()
            storage.write_file(uri, f.name)
    else:
        _write_array(Path(uri), order)
    description = asdict(shuffle) | {"epoch": epoch, "numpy": np.__version__, "digests": digests}
    description |= {"version": VERSION, "length": len(order), "block": BLOCK}
    storage.write_json(f"{uri}.json", description)  # last: it vouches for the array
    return uri


class Order:
    """The instance ids of every update, as a pure function of the step.

    folder: where build_order wrote. batch_instances: B, the global batch. Steps count from 1 and
    roll over epochs; the tail of an epoch that fills no batch is dropped.
    """

    def __init__(self, folder: str, shuffle: Shuffle, batch_instances: int):
        self.folder, self.shuffle, self.batch_instances = folder, shuffle, batch_instances
        usable = shuffle.instances // shuffle.chunk * shuffle.chunk
        self.steps_per_epoch = usable // batch_instances
        if self.steps_per_epoch == 0:
            raise UserError(
                f"the data holds {usable} instances, less than one batch of {batch_instances}: "
                "add data or lower batch_tokens"
            )
        self._epochs: dict[int, _StoredOrder] = {}

    def locate(self, step: int) -> tuple[int, int]:
        """(epoch from 1, batch in the epoch from 0) of update `step`, which counts from 1."""
        if step < 1:
            raise ValueError(f"updates count from 1, not {step}")
        epoch, row = divmod(step - 1, self.steps_per_epoch)
        return epoch + 1, row

    def batch(self, step: int) -> np.ndarray:
        """uint32[B]: the instances of update `step`, in row order.

        Raises UserError where the stored order is missing or damaged.
        """
        epoch, row = self.locate(step)
        return self.epoch(epoch).read(row * self.batch_instances, self.batch_instances)

    def epoch(self, epoch: int) -> "_StoredOrder":
        if epoch not in self._epochs:
            self._epochs[epoch] = _StoredOrder(self.folder, self.shuffle, epoch)
        return self._epochs[epoch]

    def __getstate__(self):
        return self.__dict__ | {"_epochs": {}}  # worker processes open the files themselves


class _StoredOrder:
    """One epoch's file, verified block by block on first touch."""

    def __init__(self, folder: str, shuffle: Shuffle, epoch: int):
        self.uri = order_uri(folder, epoch)
        description = _described(self.uri, shuffle, epoch)
        if description is None:
            raise UserError(f"{self.uri} does not exist: run build_index with enough epochs")
        self.length, self._block = description["length"], description["block"]
        self._digests = description["digests"]
        self._remote = storage.is_remote(self.uri)
        self._map = None if self._remote else np.memmap(self.uri, np.uint32, "r")
        self._kept: OrderedDict[int, np.ndarray] = OrderedDict()
        self._verified: set[int] = set()

    def read(self, start: int, count: int) -> np.ndarray:
        """uint32[count] from place `start` of the epoch."""
        first, last = start // self._block, (start + count - 1) // self._block
        parts = [self._read_block(b) for b in range(first, last + 1)]
        joined = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return np.array(joined[start - first * self._block :][:count])

    def _read_block(self, number: int) -> np.ndarray:
        begin, end = number * self._block, min((number + 1) * self._block, self.length)
        if self._map is not None:
            block = self._map[begin:end]
            if number not in self._verified:
                self._verify(number, block)
            return block
        block = self._kept.get(number)
        if block is None:
            data = storage.read_bytes(self.uri, 4 * begin, 4 * (end - begin))
            block = self._kept[number] = self._verify(number, np.frombuffer(data, np.uint32))
            if len(self._kept) > KEPT_BLOCKS:
                self._kept.popitem(last=False)
        return block

    def _verify(self, number: int, block: np.ndarray) -> np.ndarray:
        if _digest(block) != self._digests[number]:
            raise UserError(
                f"{self.uri} is damaged (block {number} has another digest): "
                "move it and its .json away and run build_index again"
            )
        self._verified.add(number)
        return block


def _described(uri: str, shuffle: Shuffle, epoch: int) -> dict | None:
    """The JSON of a stored order, None where it has not been written.

    Raises UserError where it is another order's.
    """
    try:
        found = storage.read_mapping(f"{uri}.json")
    except FileNotFoundError:
        return None
    wanted = asdict(shuffle) | {"epoch": epoch, "version": VERSION}
    differs = [
        f"{k} {found.get(k)!r} instead of {v!r}" for k, v in wanted.items() if found.get(k) != v
    ]
    if differs:
        raise UserError(f"{uri} is another order ({', '.join(differs)}): use another run root")
    if not _is_whole(found):
        raise UserError(
            f"{uri}.json does not describe an order: move it and {uri} away and run build_index again"
        )
    try:
        size = storage.size(uri)
    except FileNotFoundError:
        size = 0
    if size != 4 * found["length"]:
        raise UserError(
            f"{uri} has {size} bytes instead of {4 * found['length']}: "
            "move it and its .json away and run build_index again"
        )
    return found


def _is_whole(description: dict) -> bool:
    """Does it say the order's length, and a digest of each of its blocks?"""
    length, block, digests = (description.get(k) for k in ("length", "block", "digests"))
    if not (isinstance(length, int) and isinstance(block, int) and isinstance(digests, list)):
        return False
    return length > 0 < block and len(digests) == -(-length // block)


def _digest(block: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(block).data).hexdigest()


def _write_array(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as f:
            array.tofile(f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
