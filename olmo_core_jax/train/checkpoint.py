"""Checkpoints: one atomic step directory holds the whole training state and says how to prove that it is whole.

    <dir>/<step>/state/   Orbax: every array of the state
    <dir>/<step>/meta/    metadata: JSON (what this step is; an array's checksum under "checksums"); files: sizes under state/

A step counts as good when it is committed, is ours, and every file it lists is there in its size. Anything else is skipped
with the reason, and is never deleted: where a new save needs the name, the old directory is moved aside.
"""

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from olmo_core_jax import storage
from olmo_core_jax.errors import JobError, UserError
from olmo_core_jax.train.checksums import checksums, key_name

log = logging.getLogger(__name__)

FORMAT = 1
MAX_EXPIRED = 64
TMP_MARK = ".orbax-checkpoint-tmp"


class Damaged(Exception):
    """A step that is listed as good but cannot be read back as it was saved."""


class MetaHandler(ocp.JsonCheckpointHandler):
    """Writes the metadata, and at the very end, still inside the uncommitted step, the sizes of the state's files."""

    def finalize(self, directory: epath.Path) -> None:
        sizes = dict(storage.walk(str(directory.parent / "state")))
        if not sizes:
            raise RuntimeError(
                f"{directory.parent}: the state was not written before its file list"
            )
        (directory / "files").write_text(json.dumps(sizes))


@ocp.args.register_with_handler(MetaHandler, for_save=True, for_restore=True)
@dataclass
class MetaArgs(ocp.args.CheckpointArgs):
    item: Mapping[str, Any] | None = None


class CheckpointStore:
    """The steps under one directory (a path or gs:// URI). In a multi-process job every process calls every method.

    keep: newest periodic steps that stay; landmarks: steps that always stay.
    """

    def __init__(self, directory: str, *, keep: int = 2, landmarks: Sequence[int] = ()):
        self.directory = str(directory)
        self._keep, self._landmarks = keep, frozenset(landmarks)
        self._unreadable: dict[int, str] = {}
        self._reported: set[str] = set()
        self._expired: frozenset[int] = frozenset()
        self._manager: ocp.CheckpointManager | None = None

    # -- what is there ------------------------------------------------------------------------------------------------

    def exists(self, step: int) -> bool:
        """Is there anything of this name, good or not?"""
        return (epath.Path(self.directory) / str(step)).exists()

    def problem(self, step: int) -> str | None:
        """Why the step cannot be used; None for a good one. Reads names and sizes, not arrays."""
        if step in self._unreadable:
            return self._unreadable[step]
        where = epath.Path(self.directory) / str(step)
        if not where.is_dir():
            return "it is not a directory" if where.exists() else "it does not exist"
        try:
            meta = json.loads((where / "meta" / "metadata").read_text())
            listed = json.loads((where / "meta" / "files").read_text())
        except FileNotFoundError as e:
            return f"it is incomplete or foreign ({storage.join('meta', str(e.filename or 'metadata').rpartition('/')[2])} is missing)"
        except ValueError:
            return "its metadata is not JSON"
        if meta.get("format") != FORMAT:
            return f"its format is {meta.get('format')!r}, not {FORMAT}"
        if meta.get("step") != step:
            return f"it calls itself step {meta.get('step')}"
        there = dict(storage.walk(str(where / "state")))
        bad = sorted(name for name, size in listed.items() if there.get(name) != size)
        if bad:
            what = (
                "is missing"
                if bad[0] not in there
                else f"has {there[bad[0]]} of {listed[bad[0]]} bytes"
            )
            return f"state/{bad[0]} {what}" + (f", and {len(bad) - 1} more" if len(bad) > 1 else "")
        return None

    def good_steps(self) -> list[int]:
        """Good steps, oldest first, the same on every process. Logs once why others are skipped."""
        found = []
        if jax.process_index() == 0:
            for entry in storage.list_dir(self.directory):
                name, mark, _ = entry.name.partition(TMP_MARK)
                if not name.isdigit():
                    continue
                reason = "it was never committed" if mark else self.problem(int(name))
                if reason is None:
                    found.append(int(name))
                elif entry.name not in self._reported:
                    self._reported.add(entry.name)
                    log.warning(
                        "checkpoint %s skipped: %s",
                        storage.join(self.directory, entry.name),
                        reason,
                    )
        return sorted(_from_first_process(found))

    def latest_good(self) -> int | None:
        """The newest good step, or None."""
        return max(self.good_steps(), default=None)

    def meta(self, step: int) -> dict[str, Any]:
        """What was saved beside the arrays. Raises UserError where the step is not good."""
        self._require_good(step)
        return json.loads(
            (epath.Path(self.directory) / str(step) / "meta" / "metadata").read_text()
        )

    # -- writing ------------------------------------------------------------------------------------------------------

    def save(self, step: int, state: Mapping[str, Any], meta: Mapping[str, Any]) -> bool:
        """Starts to write a step in the background and returns once the arrays may be reused.

        False: the step is there already and good. Raises JobError where this save, or the one before it, failed.
        """
        self.wait()
        if step in self.good_steps():
            return False
        if jax.process_index() == 0:
            self._move_aside(step)
        self._expired = frozenset(_from_first_process(self._expired_by(step)))
        full = {"format": FORMAT, "step": step, **meta, "checksums": checksums(state)}
        try:
            manager = self._open_manager()
            manager.reload()
            manager.save(
                step,
                args=ocp.args.Composite(state=ocp.args.PyTreeSave(state), meta=MetaArgs(full)),
                force=True,
            )
        except Exception as e:
            raise self._failed(e) from e
        return True

    def wait(self) -> None:
        """Returns when everything saved is durable. Raises JobError where a save failed."""
        if self._manager is not None:
            try:
                self._manager.wait_until_finished()
            except Exception as e:
                raise self._failed(e) from e

    def close(self) -> None:
        """Waits and frees threads. Raises JobError where a save failed."""
        manager = self._manager
        if manager is not None:
            self.wait()
            self._manager = None
            manager.close()

    # -- reading ------------------------------------------------------------------------------------------------------

    def restore(self, step: int, like) -> tuple[Any, dict[str, Any]]:
        """(state, meta) of a good step on the shardings of `like`, a tree of arrays or ShapeDtypeStructs.

        The saved tree must have exactly the keys, shapes and dtypes of `like`: UserError names those that differ.
        Raises Damaged where what is read is not what was saved.
        """
        meta = self.meta(step)
        self._require_same(step, like, self._saved_shapes(step), partial=False)
        return self._read(step, like, meta), meta

    def restore_params(self, step: int, like) -> tuple[Any, dict[str, Any]]:
        """(params, meta): only the parameters, from any of our checkpoints. `like` is the tree of parameters."""
        meta = self.meta(step)
        self._require_same(step, {"params": like}, self._saved_shapes(step), partial=True)
        return self._read(step, {"params": like}, meta)["params"], meta

    def restore_latest(self, like, accept: Callable[[int, dict], None]) -> tuple[Any, dict] | None:
        """(state, meta) of the newest step that can be read, None where there is none.

        accept(step, meta) raises UserError for a checkpoint that does not belong to this run.
        """
        while (step := self.latest_good()) is not None:
            accept(step, self.meta(step))
            try:
                return self.restore(step, like)
            except Damaged as e:
                self._unreadable[step] = str(e)
        return None

    # -- inside -------------------------------------------------------------------------------------------------------

    def _open_manager(self) -> ocp.CheckpointManager:
        if self._manager is None:
            options = ocp.CheckpointManagerOptions(create=True, preservation_policy=self)
            self._manager = ocp.CheckpointManager(
                self.directory,
                options=options,
                item_names=("state", "meta"),
                # The order is the order of finalisation: the file list is made last.
                item_handlers={"state": ocp.PyTreeCheckpointHandler(), "meta": MetaHandler()},
            )
        return self._manager

    def should_preserve(self, checkpoints, *, context) -> list[bool]:
        """Orbax asks this while it saves, and deletes what we do not keep once the new step is committed."""
        return [info.step not in self._expired for info in checkpoints]

    def _expired_by(self, new: int) -> list[int]:
        """Good periodic steps that may go once `new` is there. One good step always stays beside the unproven new one."""
        if jax.process_index() != 0:
            return []
        periodic = [s for s in self.good_steps() if s != new and s not in self._landmarks]
        stay = max(self._keep - 1, 1)
        return periodic[:-stay][:MAX_EXPIRED]

    def _move_aside(self, step: int) -> None:
        for entry in storage.list_dir(self.directory):
            if entry.name.partition(TMP_MARK)[0] != str(step):
                continue
            kind = "incomplete" if TMP_MARK in entry.name else "damaged"
            old = epath.Path(self.directory) / entry.name
            new = (
                epath.Path(self.directory)
                / f"{step}.{kind}-{time.strftime('%Y%m%dT%H%M%S')}-{time.monotonic_ns() % 10**6:06d}"
            )
            old.rename(new)
            log.warning("%s is in the way of a new save: moved to %s", old, new.name)

    def _saved_shapes(self, step: int) -> dict[str, tuple]:
        where = epath.Path(self.directory) / str(step) / "state"
        try:
            tree = ocp.PyTreeCheckpointHandler().metadata(where).tree
        except Exception as e:
            raise Damaged(f"its array metadata cannot be read ({_first_line(e)})") from e
        return _shapes(tree)

    def _require_good(self, step: int) -> None:
        reason = self.problem(step)
        if reason is not None:
            raise UserError(f"checkpoint {storage.join(self.directory, str(step))}: {reason}")

    def _require_same(self, step: int, like, saved: dict[str, tuple], partial: bool) -> None:
        wanted = _shapes(like)
        roots = {key.partition("/")[0] for key in wanted}
        if partial:
            saved = {k: v for k, v in saved.items() if k.partition("/")[0] in roots}
        lines = [f"{k} is missing" for k in sorted(wanted.keys() - saved.keys())]
        lines += [f"{k} is not expected" for k in sorted(saved.keys() - wanted.keys())]
        lines += [
            f"{k} is {_text(saved[k])}, expected {_text(wanted[k])}"
            for k in sorted(wanted.keys() & saved.keys())
            if saved[k] != wanted[k]
        ]
        if lines:
            more = f" (and {len(lines) - 8} more)" if len(lines) > 8 else ""
            raise UserError(
                f"checkpoint {storage.join(self.directory, str(step))} does not fit this model or optimizer: "
                + "; ".join(lines[:8])
                + more
            )

    def _read(self, step: int, like, meta: dict):
        where = epath.Path(self.directory) / str(step) / "state"
        target = jax.tree.map(_abstract, like)
        args = ocp.args.PyTreeRestore(
            target,
            restore_args=ocp.checkpoint_utils.construct_restore_args(target),
            partial_restore=True,
        )
        try:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
                state = reader.restore(where, args=args)
        except Exception as e:
            raise Damaged(f"its arrays cannot be read ({_first_line(e)})") from e
        saved = meta.get("checksums", {})
        now = checksums(state) if saved else {}
        changed = sorted(k for k, v in now.items() if saved.get(k) != v)
        if changed:
            raise Damaged(f"{', '.join(changed[:4])} changed since the save (checksum)")
        return state

    def _failed(self, error: Exception) -> JobError:
        good = max(
            (s for s in _local_steps(self.directory) if self.problem(s) is None), default=None
        )
        last = "none" if good is None else storage.join(self.directory, str(good))
        return JobError(
            f"a checkpoint under {self.directory} could not be written: {_first_line(error)}; last good checkpoint: {last}"
        )


def _abstract(x) -> jax.ShapeDtypeStruct:
    sharding = x.sharding if isinstance(x, jax.Array | jax.ShapeDtypeStruct) else None
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _shapes(tree) -> dict[str, tuple]:
    return {
        key_name(path): (tuple(x.shape), np.dtype(x.dtype).name)
        for path, x in jax.tree_util.tree_leaves_with_path(
            tree, is_leaf=lambda x: hasattr(x, "shape")
        )
    }


def _text(shape_dtype: tuple) -> str:
    shape, dtype = shape_dtype
    return f"{dtype}[{','.join(map(str, shape))}]"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _local_steps(directory: str) -> list[int]:
    return [int(e.name) for e in storage.list_dir(directory) if e.name.isdigit()]


def _from_first_process(steps: list[int]) -> list[int]:
    """The first process's list, on every process."""
    if jax.process_count() == 1:
        return steps
    count = int(multihost_utils.broadcast_one_to_all(np.int32(len(steps))))
    mine = steps if jax.process_index() == 0 else [0] * count
    return [int(s) for s in multihost_utils.broadcast_one_to_all(np.asarray(mine, np.int32))]
