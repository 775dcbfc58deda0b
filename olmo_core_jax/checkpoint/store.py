"""The checkpoints of one stage: saved in the background, proven when they are read, kept by rule.

One atomic step holds the whole training state (step_directory.py says how it lies on disk). What is
not good is skipped with the reason and never deleted; where a new save needs its name, it is moved
aside. Restored arrays are compared with the checksums that were saved with them.
"""

import itertools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from olmo_core_jax import storage
from olmo_core_jax.checkpoint import layout
from olmo_core_jax.checkpoint.checksums import checksums, nonfinite
from olmo_core_jax.checkpoint.layout import (
    FORMAT,
    Damaged,
    MetaArgs,
    MetaHandler,
    Shapes,
    first_line,
)
from olmo_core_jax.errors import Diverged, JobError, UserError

__all__ = ["CheckpointStore", "Damaged"]

log = logging.getLogger(__name__)

NAMED = 8
"""Arrays that an error names."""


class CheckpointStore:
    """The steps under one directory (a path or gs:// URI).

    In a job of several processes every process calls every method. keep: newest periodic steps
    that stay; landmarks: steps that always stay.
    """

    def __init__(self, directory: str, *, keep: int = 2, landmarks: Sequence[int] = ()):
        self.directory = str(directory)
        where = epath.Path(self.directory)
        if where.exists() and not where.is_dir():
            raise UserError(f"{where} is not a folder: checkpoints go there; move it away")
        self._keep, self._landmarks = keep, frozenset(landmarks)
        self._unreadable: dict[int, str] = {}
        self._reported: set[str] = set()
        self._expired: frozenset[int] = frozenset()
        self._manager: ocp.CheckpointManager | None = None

    def exists(self, step: int) -> bool:
        """Is there anything of this name, good or not?"""
        return (epath.Path(self.directory) / str(step)).exists()

    def problem(self, step: int) -> str | None:
        """Why the step cannot be used; None for a good one. Reads names and sizes, not arrays."""
        return self._unreadable.get(step) or layout.problem(self.directory, step)

    def good_steps(self) -> list[int]:
        """Good steps, oldest first, the same on every process. Logs once why others are skipped."""
        return sorted(_from_first_process(lambda: list(self._good())))

    def latest_good(self) -> int | None:
        """The newest good step, or None."""
        newest = _from_first_process(lambda: list(itertools.islice(self._good(), 1)))
        return newest[0] if newest else None

    def meta(self, step: int) -> dict[str, Any]:
        """What was saved beside the arrays. Raises UserError where the step is not good."""
        reason = self.problem(step)
        if reason is not None:
            raise UserError(f"checkpoint {storage.join(self.directory, str(step))}: {reason}")
        return layout.read_meta(self.directory, step)

    def save(self, step: int, state: Mapping[str, Any], meta: Mapping[str, Any]) -> bool:
        """Starts to write a step in the background; returns once the arrays may be reused.

        False: the step is there already and good. Raises JobError where this save failed, or the
        one before it, and Diverged, before anything is written, where the state holds a NaN or an
        infinity: such a step is no place to go on from, and may not push a sound one out.
        """
        self.wait()
        self._require_sound(step, state)
        # Landmarks stay whatever they are: nothing has to be read of them.
        passed = self._landmarks - {step}
        good = _from_first_process(lambda: list(self._good(passed)))
        if step in good:
            return False
        if jax.process_index() == 0:
            layout.move_aside(self.directory, step)
        self._unreadable.pop(step, None)
        self._expired = self._expired_by(step, good)
        full = {"format": FORMAT, "step": step, **meta, "checksums": checksums(state)}
        items = ocp.args.Composite(state=ocp.args.PyTreeSave(state), meta=MetaArgs(full))
        try:
            manager = self._open_manager()
            manager.reload()
            manager.save(step, args=items, force=True)
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

    def restore(self, step: int, like) -> tuple[Any, dict[str, Any]]:
        """(state, meta) of a good step on the shardings of `like`, arrays or ShapeDtypeStructs.

        The saved tree must have exactly the keys, shapes and dtypes of `like`: UserError names
        those that differ. Raises Damaged where what is read is not what was saved.
        """
        meta = self.meta(step)
        self._require_same(step, like, layout.saved_shapes(self.directory, step))
        return self._read(step, like, meta), meta

    def restore_params(self, step: int, like) -> tuple[Any, dict[str, Any]]:
        """(params, meta): only the parameters, of any of our checkpoints. like: their tree."""
        meta = self.meta(step)
        saved = layout.saved_shapes(self.directory, step)
        only = {k: v for k, v in saved.items() if k.startswith("params/")}
        self._require_same(step, {"params": like}, only)
        return self._read(step, {"params": like}, meta)["params"], meta

    def restore_latest(
        self, like, accept: Callable[[int, dict], None]
    ) -> tuple[Any, dict[str, Any]] | None:
        """(state, meta) of the newest step that can be read back whole, None where none was saved.

        accept(step, meta) raises UserError for a checkpoint that does not belong to this run. Raises
        JobError where steps are there and none of them can be read: that may pass, as when storage
        is away, and to begin anew is not for a program to decide.
        """
        while (step := self.latest_good()) is not None:
            accept(step, self.meta(step))
            try:
                return self.restore(step, like)
            except Damaged as e:
                self._unreadable[step] = e.reason
        if self._unreadable:
            step, reason = max(self._unreadable.items())
            raise JobError(
                f"no checkpoint under {self.directory} can be read back ({step}: {reason}); move the folder away "
                "to begin this stage anew"
            )
        return None

    def should_preserve(self, checkpoints, *, context) -> list[bool]:
        """Orbax's preservation policy: asked in a save, acted on once the new step is committed."""
        return [info.step not in self._expired for info in checkpoints]

    def _expired_by(self, new: int, good: list[int]) -> frozenset[int]:
        """Periodic steps that go once `new` is there; a good one stays beside the unproven one."""
        periodic = sorted(s for s in good if s not in self._landmarks)
        return frozenset(periodic[: -max(self._keep - 1, 1)])

    def _good(self, passed: Collection[int] = ()) -> Iterator[int]:
        """Good steps, newest first, but those in `passed`. Logs once why others are skipped."""
        for step, name in reversed(layout.names_of_steps(self.directory)):
            if step in passed:
                continue
            committed = name == str(step)
            reason = self.problem(step) if committed else "it was never committed"
            if reason is None:
                yield step
            elif name not in self._reported:
                self._reported.add(name)
                log.warning("%s skipped: %s", storage.join(self.directory, name), reason)

    def _require_sound(self, step: int, state: Mapping[str, Any]) -> None:
        if bad := _poisoned(state):
            more = f" and {len(bad) - 1} more arrays" if len(bad) > 1 else ""
            raise Diverged(
                f"after update {step} {bad[0]}{more} hold values that are not finite; nothing was saved; "
                f"last good checkpoint: {self._last_good()}"
            )

    def _last_good(self) -> str:
        good = next(self._good(), None)  # no talk with the other processes: they may be gone
        return "none" if good is None else storage.join(self.directory, str(good))

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

    def _require_same(self, step: int, like, saved: Shapes) -> None:
        lines = layout.differences(saved, layout.shapes_of(like))
        if lines:
            more = f" (and {len(lines) - NAMED} more)" if len(lines) > NAMED else ""
            raise UserError(
                f"checkpoint {storage.join(self.directory, str(step))} does not fit this model or "
                f"optimizer: {'; '.join(lines[:NAMED])}{more}"
            )

    def _read(self, step: int, like, meta: dict):
        target = jax.tree.map(_abstract, like)
        args = ocp.args.PyTreeRestore(
            target,
            restore_args=ocp.checkpoint_utils.construct_restore_args(target),
            partial_restore=True,
        )
        try:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
                state = reader.restore(epath.Path(self.directory) / str(step) / "state", args=args)
        except (MemoryError, OSError, jax.errors.JaxRuntimeError):  # says nothing about the step
            raise
        except Exception as e:
            raise Damaged(
                self.directory, step, f"its arrays cannot be read ({first_line(e)})"
            ) from e
        saved = meta.get("checksums") or {}
        now = checksums(state) if saved else {}
        changed = sorted(k for k, v in now.items() if saved.get(k) != v)
        if changed:
            what = ", ".join(changed[:NAMED])
            raise Damaged(self.directory, step, f"{what}: not what was saved (checksum)")
        if bad := _poisoned(state):
            raise Damaged(self.directory, step, f"{bad[0]} holds values that are not finite")
        return state

    def _failed(self, error: Exception) -> JobError:
        return JobError(
            f"a checkpoint under {self.directory} could not be written: {first_line(error)}; "
            f"last good checkpoint: {self._last_good()}"
        )


def _poisoned(state: Mapping[str, Any]) -> list[str]:
    """Weights and moments with a NaN or an infinity, from which no update leads away."""
    return nonfinite({k: state[k] for k in ("params", "mu", "nu") if k in state})


def _abstract(x) -> jax.ShapeDtypeStruct:
    sharding = x.sharding if isinstance(x, jax.Array | jax.ShapeDtypeStruct) else None
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _from_first_process(find: Callable[[], list[int]]) -> list[int]:
    """What the first process finds, on every process."""
    mine = find() if jax.process_index() == 0 else []
    if jax.process_count() == 1:
        return mine
    count = int(multihost_utils.broadcast_one_to_all(np.int32(len(mine))))
    padded = np.asarray(mine or [0] * count, np.int32)
    return [int(s) for s in multihost_utils.broadcast_one_to_all(padded)]
