"""Orbax steps written piece by piece, so that any model passes through a few hundred megabytes.

Orbax itself takes whole arrays. Its handler for numpy arrays is given here a second kind of value,
LazyArray, whose bytes it asks for one chunk at a time; everything else (layout, metadata, atomic
commit) stays Orbax's own. A step is what train/step_directory.py describes.
"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath
from orbax.checkpoint import type_handlers

from olmo_core_jax import storage
from olmo_core_jax.convert.names import flatten
from olmo_core_jax.convert.tensors import LazyArray, part_checksum
from olmo_core_jax.errors import JobError, UserError
from olmo_core_jax.train import step_directory
from olmo_core_jax.train.checksums import array_checksum
from olmo_core_jax.train.step_directory import FORMAT, MetaArgs, MetaHandler, first_line

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
        base["metadata"] |= {"chunks": list(value.chunk), "compressor": None}
        array = await ts.open(ts.Spec(tspec), create=True, open=True, context=ts_context)
        total = 0
        for where in value.pieces():
            async with self._room:
                if self._error is not None:
                    return
                part = await asyncio.to_thread(value.read, where)
                total += await asyncio.to_thread(part_checksum, part, where, value.shape)
                await array[where].write(part)
        self._checksums[self._keys[id(value)]] = total % 2**32


class LateMeta(MetaHandler):
    """Writes the metadata once more when all arrays are on disk, for it holds their checksums."""

    def __init__(self, full: Mapping[str, Any], expected: Mapping[str, int]):
        super().__init__()
        self._full, self._expected = full, expected

    def finalize(self, directory: epath.Path) -> None:
        sums = self._full["checksums"]
        changed = sorted(name for name, value in self._expected.items() if sums.get(name) != value)
        if changed:
            raise UserError(f"the source's {changed[0]} is not what was saved there (its checksum)")
        (directory / "metadata").write_text(json.dumps(self._full))
        super().finalize(directory)


@ocp.args.register_with_handler(LateMeta, for_save=True, for_restore=True)
@dataclass
class LateMetaArgs(MetaArgs):
    """What LateMeta saves at first."""


def write_step(
    folder: str,
    step: int,
    state: Mapping,
    meta: Mapping[str, Any],
    expected: Mapping[str, int] = MappingProxyType({}),
) -> str:
    """Writes one step and returns its path. state: nested dicts of LazyArrays and numpy arrays.

    expected: checksums that arrays must have ("params/embed/weight": ...). The step has its name
    only when all of it is on disk; a damaged one of that name is moved aside. Raises UserError
    where the step exists already and is whole, or where a piece cannot be read or written.
    """
    path = storage.join(folder, str(step))
    if step_directory.problem(folder, step) is None:
        raise UserError(f"checkpoint {path} exists already; choose another output folder")
    if epath.Path(path).exists():
        step_directory.move_aside(folder, step)
    checksums = {
        "/".join(p): array_checksum(v) for p, v in flatten(state) if isinstance(v, np.ndarray)
    }
    full = {"format": FORMAT, "step": step, **meta, "checksums": checksums}
    state_handler = ocp.PyTreeCheckpointHandler(type_handler_registry=_registry(checksums))
    # The order is the order of finalisation: metadata and file list come last.
    handler = ocp.CompositeCheckpointHandler(
        **{STATE: state_handler, META: LateMeta(full, expected)}
    )
    args = ocp.args.Composite(**{STATE: ocp.args.PyTreeSave(state), META: LateMetaArgs(full)})
    try:
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(epath.Path(path), args=args, force=False)
    except Exception as e:
        cause = _job_error(e)
        if cause is not None:
            raise cause from None
        if isinstance(e, OSError) or "No space left" in str(e):
            raise UserError(f"checkpoint {path} cannot be written: {first_line(e)}") from None
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
