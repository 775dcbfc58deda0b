"""Orbax steps written piece by piece, so that any model passes through a few hundred megabytes.

Orbax itself takes whole arrays. Its handler for numpy arrays is given here a second kind of value,
LazyArray, whose bytes it asks for one chunk at a time; everything else (layout, metadata, atomic
commit) stays Orbax's own. A step is what checkpoint/layout.py describes.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath
from orbax.checkpoint import type_handlers

from olmo_core_jax import storage
from olmo_core_jax.checkpoint import layout
from olmo_core_jax.checkpoint.checksums import array_checksum
from olmo_core_jax.checkpoint.layout import FORMAT, MetaArgs, MetaHandler, first_line
from olmo_core_jax.checkpoint.tensors import IN_FLIGHT, LazyArray, Where, part_checksum
from olmo_core_jax.errors import JobError, UserError
from olmo_core_jax.model.tree import flatten

STATE, META = "state", "meta"
PENDING = 32
"""Pieces that are on their way to the disk at most. A commit takes all that wait for one, so that a
bucket, which lets an object change once a second, is kept busy too."""

NO_ROOM = ("No space left on device", "Disk quota exceeded", "File too large")
"""The system's words, which tensorstore passes on in errors of its own."""


@dataclass
class Written:
    """What the arrays' writer tells: checksums by name, and what went wrong, first thing first.

    It raises nothing itself. Orbax would log a trace for every thread that hears of it, and leave
    arrays hanging; LateMeta raises, before the step has its name.
    """

    checksums: dict[str, int]
    errors: list[Exception] = field(default_factory=list)


class LazyHandler(type_handlers.NumpyHandler):
    """Orbax's numpy handler for LazyArrays: it writes chunk by chunk and notes the checksum of
    every array.
    """

    def __init__(self, written: Written):
        super().__init__(deepcopy_host_arrays=False)
        self._written = written

    async def _background_serialize(self, values, infos, args=None):
        self._room, self._pending = asyncio.Semaphore(IN_FLIGHT), asyncio.Semaphore(PENDING)
        self._keys = {
            id(value): info.name.replace(".", "/")
            for value, info in zip(values, infos, strict=True)
        }
        await super()._background_serialize(values, infos, args)

    async def _open_and_write(self, value: LazyArray, tspec: dict, ts_context):
        commits: list[asyncio.Future] = []
        try:
            await self._write(value, tspec, ts_context, commits)
        except Exception as e:
            self._written.errors.append(e)
        await asyncio.gather(*commits)

    async def _write(self, value: LazyArray, tspec: dict, ts_context, commits: list) -> None:
        base = tspec.get("base", tspec)
        base["metadata"] |= {"chunks": list(value.chunk), "compressor": None}
        array = await ts.open(ts.Spec(tspec), create=True, open=True, context=ts_context)
        total = 0
        for where in value.pieces():
            async with self._room:
                if self._written.errors:
                    return
                part, added = await asyncio.to_thread(_read, value, where)
                total += added
                await self._pending.acquire()
                commits.append(asyncio.ensure_future(self._commit(array[where].write(part))))
        self._written.checksums[self._keys[id(value)]] = total % 2**32

    async def _commit(self, writing: ts.WriteFutures) -> None:
        try:
            await writing
        except Exception as e:
            self._written.errors.append(e)
        finally:
            self._pending.release()


def _read(value: LazyArray, where: Where) -> tuple[np.ndarray, int]:
    """A piece and what it adds to its array's checksum."""
    part = value.read(where)
    return part, part_checksum(part, where, value.shape)


class LateMeta(MetaHandler):
    """Writes the metadata once more when all arrays are on disk, for it holds their checksums."""

    def __init__(self, full: Mapping[str, Any], written: Written, expected: Mapping[str, int]):
        super().__init__()
        self._full, self._written, self._expected = full, written, expected

    def finalize(self, directory: epath.Path) -> None:
        if self._written.errors:
            raise self._written.errors[0]
        sums = self._written.checksums
        changed = sorted(name for name, value in self._expected.items() if sums.get(name) != value)
        if changed:
            raise UserError(f"the source's {changed[0]} is not what was saved there (its checksum)")
        full = {**self._full, "checksums": sums}
        (directory / "metadata").write_text(json.dumps(full))
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
    if layout.problem(folder, step) is None:
        raise UserError(f"checkpoint {path} exists already; choose another output folder")
    if epath.Path(path).exists():
        layout.move_aside(folder, step)
    checksums = {
        "/".join(p): array_checksum(v) for p, v in flatten(state) if isinstance(v, np.ndarray)
    }
    written = Written(checksums)
    full = {"format": FORMAT, "step": step, **meta}
    state_handler = ocp.PyTreeCheckpointHandler(type_handler_registry=_registry(written))
    # The order is the order of finalisation: metadata and file list come last.
    handler = ocp.CompositeCheckpointHandler(
        **{STATE: state_handler, META: LateMeta(full, written, expected)}
    )
    args = ocp.args.Composite(**{STATE: ocp.args.PyTreeSave(state), META: LateMetaArgs(full)})
    try:
        with _quiet_threads(), ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(epath.Path(path), args=args, force=False)
    except Exception as e:
        e = written.errors[0] if written.errors else e
        cause = _job_error(e)
        if cause is not None:
            raise cause from None
        if isinstance(e, OSError) or any(sign in str(e) for sign in NO_ROOM):
            raise UserError(f"checkpoint {path} cannot be written: {_reason(e)}") from None
        raise e
    return path


@contextlib.contextmanager
def _quiet_threads():
    """Orbax's threads log the trace of an error that `save` raises all the same."""
    log = logging.getLogger("absl")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


def _reason(error: Exception) -> str:
    """tensorstore's messages begin with what was written and end with why it could not be."""
    if isinstance(error, OSError):
        return first_line(error)
    return next(sign for sign in NO_ROOM if sign in str(error))


def _registry(written: Written):
    standard = [
        (kind, type_handlers.get_type_handler(kind))
        for kind in (int, float, np.number, np.ndarray, jax.Array, str)
    ]
    # A registry finds a handler by type when it saves; both kinds are stored as numpy arrays.
    registry = type_handlers.create_type_handler_registry(*standard)
    registry.add(LazyArray, LazyHandler(written), override=True, ignore_warnings=True)
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
