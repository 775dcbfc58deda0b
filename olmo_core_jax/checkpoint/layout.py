"""What one checkpoint looks like on disk, and how to tell a whole one from the rest.

    <dir>/<step>/state/          Orbax: every array of the state
    <dir>/<step>/meta/metadata   JSON: what this step is, with a checksum of every array
    <dir>/<step>/meta/files      JSON: name and size of every file under state/

Orbax gives the step its name when all of it is written. A step is good when it has its name, is
ours, and every file that it lists is there in its size.
"""

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from olmo_core_jax import storage
from olmo_core_jax.checkpoint.checksums import key_name
from olmo_core_jax.errors import UserError

log = logging.getLogger(__name__)

FORMAT = 1
TMP_MARK = ".orbax-checkpoint-tmp"

Shapes = dict[str, tuple[tuple[int, ...], str]]
"""Path of an array in the state -> its shape and dtype."""


class Damaged(UserError):
    """A step that looks whole but cannot be read back as it was saved."""

    def __init__(self, directory: str, step: int, reason: str):
        super().__init__(f"checkpoint {storage.join(directory, str(step))}: {reason}")
        self.reason = reason


class MetaHandler(ocp.JsonCheckpointHandler):
    """Writes the metadata and, last of all before the commit, the sizes of the state's files."""

    def finalize(self, directory: epath.Path) -> None:
        sizes = dict(storage.walk(str(directory.parent / "state")))
        if not sizes:
            raise RuntimeError(f"{directory.parent}: the state has to be written before its list")
        (directory / "files").write_text(json.dumps(sizes))


@ocp.args.register_with_handler(MetaHandler, for_save=True, for_restore=True)
@dataclass
class MetaArgs(ocp.args.CheckpointArgs):
    item: Mapping[str, Any] | None = None


def read_meta(directory: str, step: int) -> dict[str, Any]:
    return _mapping(_path(directory, step) / "meta" / "metadata")


def _mapping(path: epath.Path) -> dict[str, Any]:
    """A JSON object. Raises ValueError where it is anything else."""
    try:
        content = json.loads(path.read_text())
    except (IsADirectoryError, UnicodeDecodeError):
        content = None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object")
    return content


def problem(directory: str, step: int) -> str | None:
    """Why the step cannot be used; None for a good one. Reads names and sizes, not arrays."""
    where = _path(directory, step)
    if not where.is_dir():
        return "it is not a directory" if where.exists() else "it does not exist"
    for name in ("metadata", "files"):
        if not (where / "meta" / name).exists():
            return f"it is incomplete or not ours: meta/{name} is missing"
    try:
        meta = read_meta(directory, step)
        listed = _mapping(where / "meta" / "files")
    except ValueError:
        return "its metadata is not a JSON object"
    except PermissionError as e:  # says nothing about the step: to pass over it would lose updates
        raise UserError(f"{where} cannot be read: {e}; correct its permissions") from None
    if meta.get("format") != FORMAT:
        return f"its format is {meta.get('format')!r}, not {FORMAT}"
    if meta.get("step") != step:
        return f"it calls itself step {meta.get('step')}"
    if not isinstance(meta.get("checksums"), dict) or not listed:
        return "its metadata lists no arrays or no files"
    there = dict(storage.walk(str(where / "state")))
    bad = sorted(name for name, size in listed.items() if there.get(name) != size)
    if not bad:
        return None
    size = there.get(bad[0])
    what = "is missing" if size is None else f"has {size} of {listed[bad[0]]} bytes"
    return f"state/{bad[0]} {what}" + (f", and {len(bad) - 1} more files" if len(bad) > 1 else "")


def names_of_steps(directory: str) -> list[tuple[int, str]]:
    """(step, name) of everything under `directory` that is, or was to become, a step; in order."""
    names = [(e.name.partition(TMP_MARK)[0], e.name) for e in storage.list_dir(directory)]
    return sorted((int(number), name) for number, name in names if number.isdigit())


def move_aside(directory: str, step: int) -> None:
    """Renames what has this step's name, whole or half, so that the step can be saved."""
    for number, name in names_of_steps(directory):
        if number != step:
            continue
        kind = "incomplete" if TMP_MARK in name else "damaged"
        stamp = f"{time.strftime('%Y%m%dT%H%M%S')}-{time.monotonic_ns() % 10**6:06d}"
        old, new = epath.Path(directory) / name, f"{step}.{kind}-{stamp}"
        old.rename(epath.Path(directory) / new)
        log.warning("%s is in the way of a new save: moved to %s", old, new)


def saved_shapes(directory: str, step: int) -> Shapes:
    """The arrays that a step says it holds. Raises Damaged where it cannot be read."""
    try:
        return shapes_of(
            ocp.PyTreeCheckpointHandler().metadata(_path(directory, step) / "state").tree
        )
    except Exception as e:
        raise Damaged(
            directory, step, f"its array metadata cannot be read ({first_line(e)})"
        ) from e


def shapes_of(tree) -> Shapes:
    """The arrays of a tree; leaves are whatever has a shape and a dtype."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: hasattr(x, "shape"))
    return {key_name(path): (tuple(x.shape), np.dtype(x.dtype).name) for path, x in leaves}


def differences(saved: Shapes, wanted: Shapes) -> list[str]:
    """What keeps `saved` from being restored as `wanted`, a line an array."""
    lines = [f"{k} is missing" for k in sorted(wanted.keys() - saved.keys())]
    lines += [f"{k} is not expected" for k in sorted(saved.keys() - wanted.keys())]
    both = sorted(wanted.keys() & saved.keys())
    return lines + [
        f"{k} is {_text(saved[k])}, expected {_text(wanted[k])}"
        for k in both
        if saved[k] != wanted[k]
    ]


def first_line(error: BaseException) -> str:
    """An error of a library, short enough for a message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _path(directory: str, step: int) -> epath.Path:
    return epath.Path(directory) / str(step)


def _text(array: tuple[tuple[int, ...], str]) -> str:
    shape, dtype = array
    return f"{dtype}[{','.join(map(str, shape))}]"
