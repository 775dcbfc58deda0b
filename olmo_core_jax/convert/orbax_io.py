"""Orbax steps written and read piece by piece, so that a model of any size passes through a few
hundred megabytes.

Orbax itself takes whole arrays. Its handler for numpy arrays is given here a second kind of
value, LazyArray, whose bytes it asks for one chunk at a time; everything else (layout, metadata,
atomic commit) stays Orbax's own. A step is `<folder>/<step>/` with the items `state` (arrays) and
`meta` (JSON), as train/checkpoint.py describes them.
"""

import asyncio
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath
from orbax.checkpoint import type_handlers

from olmo_core_jax import storage
from olmo_core_jax.convert.names import flatten, put
from olmo_core_jax.convert.tensors import PIECE_BYTES, LazyArray, Spec, numpy_dtype
from olmo_core_jax.errors import JobError, UserError
from olmo_core_jax.train.checkpoint import FORMAT, MetaArgs, MetaHandler
from olmo_core_jax.train.checksums import array_checksum

STATE, META = "state", "meta"
IN_FLIGHT = 2  # pieces: one is read while the one before it is written


class LazyHandler(type_handlers.NumpyHandler):
    """Orbax's numpy handler for LazyArrays: it writes chunk by chunk and notes the checksum of
    every array.
    """

    def __init__(self, checksums: dict[str, int]):
        super().__init__(deepcopy_host_arrays=False)
        self._checksums = checksums

    async def _background_serialize(self, values, infos, args=None):
        self._room = asyncio.Semaphore(IN_FLIGHT)
        self._error: Exception | None = None
        self._keys = {
            id(value): info.name.replace(".", "/")
            for value, info in zip(values, infos, strict=True)
        }
        await super()._background_serialize(values, infos, args)
        if self._error is not None:
            raise self._error

    async def _open_and_write(self, value: LazyArray, tspec: dict, ts_context):
        # An error is kept until all arrays have stopped: Orbax would leave the others hanging.
        try:
            await self._write(value, tspec, ts_context)
        except Exception as e:
            self._error = self._error or e

    async def _write(self, value: LazyArray, tspec: dict, ts_context) -> None:
        base = tspec.get("base", tspec)
        base["metadata"] |= {"chunks": list(value.chunk_shape()), "compressor": None}
        array = await ts.open(ts.Spec(tspec), create=True, open=True, context=ts_context)
        total, done = 0, 0
        for c, start, stop in value.pieces():
            async with self._room:
                if self._error is not None:
                    return
                rows = await asyncio.to_thread(value.read, c, start, stop)
                total += await asyncio.to_thread(array_checksum, rows, done)
                await array[value.index(c, start, stop)].write(rows)
                done += rows.size
        self._checksums[self._keys[id(value)]] = total % 2**32


class LateMeta(MetaHandler):
    """Writes the metadata once more when all arrays are on disk, for it holds their checksums."""

    def __init__(self, full: Mapping[str, Any]):
        super().__init__()
        self._full = full

    def finalize(self, directory: epath.Path) -> None:
        (directory / "metadata").write_text(json.dumps(self._full))
        super().finalize(directory)


@ocp.args.register_with_handler(LateMeta, for_save=True, for_restore=True)
@dataclass
class LateMetaArgs(MetaArgs):
    """What LateMeta saves at first."""


def write_step(folder: str, step: int, state: Mapping, meta: Mapping[str, Any]) -> str:
    """Writes one step and returns its path. state: nested dicts of LazyArrays and numpy arrays.

    The step has its name only when all of it is on disk. Raises UserError where the step exists
    already, or where a piece cannot be read or written.
    """
    path = storage.join(folder, str(step))
    if epath.Path(path).exists():
        raise UserError(f"checkpoint {path} exists already; choose another output folder")
    checksums = {
        "/".join(p): array_checksum(v) for p, v in flatten(state) if isinstance(v, np.ndarray)
    }
    full = {"format": FORMAT, "step": step, **meta, "checksums": checksums}
    state_handler = ocp.PyTreeCheckpointHandler(type_handler_registry=_registry(checksums))
    # The order is the order of finalisation: metadata and file list come last.
    handler = ocp.CompositeCheckpointHandler(**{STATE: state_handler, META: LateMeta(full)})
    args = ocp.args.Composite(**{STATE: ocp.args.PyTreeSave(state), META: LateMetaArgs(full)})
    try:
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(epath.Path(path), args=args, force=False)
    except Exception as e:
        cause = _job_error(e)
        if cause is not None:
            raise cause from None
        if isinstance(e, OSError) or "No space left" in str(e):
            raise UserError(f"checkpoint {path} cannot be written: {_first_line(e)}") from None
        raise
    return path


def _registry(checksums: dict[str, int]):
    standard = [
        (kind, type_handlers.get_type_handler(kind))
        for kind in (int, float, np.number, np.ndarray, jax.Array, str)
    ]
    # A registry finds a handler by type when it saves; both kinds are stored as numpy arrays.
    registry = type_handlers.create_type_handler_registry(*standard)
    registry.add(LazyArray, LazyHandler(checksums), override=True, ignore_warnings=True)
    return registry


def _job_error(error: BaseException | None) -> JobError | None:
    """The JobError that an exception wraps."""
    seen = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, JobError):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


class OrbaxStep:
    """A step's arrays, read in pieces, and its `meta`. Raises UserError where it is no whole
    checkpoint.
    """

    def __init__(self, path: str):
        self.where = path
        state = epath.Path(path) / STATE
        try:
            layout = json.loads((state / "_METADATA").read_text())
            self.meta: dict = self._read_meta()
        except (OSError, ValueError):
            raise UserError(
                f"{path} is not a checkpoint of this project: it has no readable {STATE} and {META}"
            ) from None
        self._ocdbt, self._zarr3 = layout.get("use_ocdbt", True), layout.get("use_zarr3", False)
        self._base = str(state)
        self._open: dict[tuple[str, ...], ts.TensorStore] = {}
        self.paths = [
            tuple(str(key["key"]) for key in entry["key_metadata"])
            for entry in layout["tree_metadata"].values()
        ]

    def _read_meta(self) -> dict:
        return json.loads((epath.Path(self.where) / META / "metadata").read_text())

    def array(self, path: tuple[str, ...]) -> ts.TensorStore:
        """The open array at a path of the tree. Raises UserError where it is missing."""
        if path not in self._open:
            name = ".".join(path)
            root = (
                f"{self._base}/"
                if storage.is_remote(self._base)
                else f"file://{epath.Path(self._base).resolve()}/"
            )
            kvstore = (
                {"driver": "ocdbt", "base": root, "path": f"{name}/"}
                if self._ocdbt
                else f"{root}{name}/"
            )
            try:
                spec = {"driver": "zarr3" if self._zarr3 else "zarr", "kvstore": kvstore}
                self._open[path] = ts.open(spec, read=True, open=True).result()
            except ValueError as e:
                raise UserError(
                    f"{self.where}: array {name} cannot be opened: {_first_line(e)}"
                ) from None
        return self._open[path]

    def specs(self) -> dict[tuple[str, ...], Spec]:
        """dtype and shape of every array."""
        return {
            p: Spec(a.dtype.numpy_dtype, tuple(a.shape))
            for p in self.paths
            for a in [self.array(p)]
        }

    def value(self, path: tuple[str, ...]) -> np.ndarray:
        """A whole array, for the small ones."""
        return self._values(self.array(path), path)

    def blocks(self, path: tuple[str, ...]) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
        """An array in blocks made of whole chunks: (where, values), each block up to PIECE_BYTES
        or one chunk high.

        A block is cut along the first two axes only; a 0-d array is one block.
        """
        array = self.array(path)
        if array.ndim == 0:
            yield (), self._values(array, path)
            return
        chunk = array.chunk_layout.read_chunk.shape
        steps = [min(chunk[axis], array.shape[axis]) for axis in range(min(2, array.ndim))]
        rest = (
            int(np.prod(array.shape[len(steps) :], dtype=np.int64))
            * array.dtype.numpy_dtype.itemsize
        )
        room = max(1, PIECE_BYTES // max(1, rest * int(np.prod(steps))))
        steps[-1] *= room  # several chunks of rows in one block where chunks are small
        for corner in np.ndindex(*(-(-n // s) for n, s in zip(array.shape, steps, strict=False))):
            where = tuple(
                slice(k * s, min((k + 1) * s, n))
                for k, s, n in zip(corner, steps, array.shape, strict=False)
            )
            yield where, self._values(array[where], path)

    def _values(self, array: ts.TensorStore, path: tuple[str, ...]) -> np.ndarray:
        try:
            return np.asarray(array.read().result())
        except ValueError as e:
            raise UserError(
                f"{self.where}: array {'.'.join(path)} cannot be read: {_first_line(e)}"
            ) from None

    def lazy(self, path: tuple[str, ...], stacked: bool, dtype: str | None = None) -> LazyArray:
        """An array of the step as a LazyArray, in its own dtype unless one is named."""
        array = self.array(path)
        target = numpy_dtype(dtype) if dtype else array.dtype.numpy_dtype

        def read(c: int, start: int, stop: int) -> np.ndarray:
            where = (c, slice(start, stop)) if stacked else slice(start, stop)
            return self._values(array[where], path).astype(target, copy=False)

        return LazyArray(tuple(array.shape), target, stacked, read)


def lazy_section(step: OrbaxStep, section: str) -> dict:
    """A part of the state (`params`, `mu`, `nu`) as a tree of LazyArrays."""
    tree: dict = {}
    for path in step.paths:
        if path[0] == section:
            put(tree, path[1:], step.lazy(path, stacked=path[1] == "cycles"))
    if not tree:
        raise UserError(f"{step.where} has no {section}")
    return tree


def total_bytes(tree: Mapping) -> int:
    """Bytes of all arrays of a tree."""
    return sum(value.nbytes for _, value in flatten(tree))
