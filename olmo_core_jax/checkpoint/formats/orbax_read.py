"""The arrays of one of our checkpoints, read in pieces through tensorstore and checked on the
way.
"""

import json
from collections.abc import Mapping

import numpy as np
import tensorstore as ts
from etils import epath

from olmo_core_jax import storage
from olmo_core_jax.checkpoint import layout
from olmo_core_jax.checkpoint.layout import first_line
from olmo_core_jax.checkpoint.tensors import LazyArray, Spec
from olmo_core_jax.errors import UserError
from olmo_core_jax.model.tree import flatten, put


class OrbaxStep:
    """A step's arrays, read in pieces, and its `meta`.

    Raises UserError where it is no whole checkpoint.
    """

    def __init__(self, path: str):
        self.where = path.rstrip("/")
        folder, _, name = self.where.rpartition("/")
        reason: str | None = "its name is no step number"
        if name.isdigit():
            reason = layout.problem(folder or ".", int(name))
        if reason is not None:
            raise UserError(f"checkpoint {path} cannot be used: {reason}")
        self.meta = layout.read_meta(folder or ".", int(name))
        self._base = epath.Path(self.where) / "state"
        tree = json.loads((self._base / "_METADATA").read_text())
        self._ocdbt, self._zarr3 = tree.get("use_ocdbt", True), tree.get("use_zarr3", False)
        self._open: dict[tuple[str, ...], ts.TensorStore] = {}
        self.paths = [
            tuple(str(key["key"]) for key in entry["key_metadata"])
            for entry in tree["tree_metadata"].values()
        ]

    def array(self, path: tuple[str, ...]) -> ts.TensorStore:
        """The open array at a path of the tree. Raises UserError where it is missing."""
        if path not in self._open:
            name = ".".join(path)
            remote = storage.is_remote(self.where)
            root = f"{self._base}/" if remote else f"file://{self._base.resolve()}/"
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
                    f"{self.where}: array {name} cannot be opened: {first_line(e)}"
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

    def require_checksum(self, path: tuple[str, ...], total: int) -> None:
        """Raises UserError unless the checksums of an array's parts add up to the saved one."""
        saved = self.checksum(path)
        if saved is not None and saved != total % 2**32:
            name = ".".join(path)
            raise UserError(f"{self.where}: array {name} is not what was saved (its checksum)")

    def checksum(self, path: tuple[str, ...]) -> int | None:
        """What the checkpoint says, None where it says nothing."""
        return self.meta.get("checksums", {}).get("/".join(path))

    def _values(self, array: ts.TensorStore, path: tuple[str, ...]) -> np.ndarray:
        try:
            return np.asarray(array.read().result())
        except ValueError as e:
            raise UserError(
                f"{self.where}: array {'.'.join(path)} cannot be read: {first_line(e)}"
            ) from None

    def lazy(self, path: tuple[str, ...]) -> LazyArray:
        """An array of the step that is read when it is asked for, cut as it is on disk."""
        array = self.array(path)
        chunk = tuple(n or 1 for n in array.chunk_layout.read_chunk.shape or ())
        read = lambda where: self._values(array[where] if where else array, path)  # noqa: E731
        return LazyArray(tuple(array.shape), array.dtype.numpy_dtype, chunk, read)


def lazy_section(step: OrbaxStep, section: str) -> dict:
    """A part of the state (`params`, `mu`, `nu`) as a tree of LazyArrays."""
    tree: dict = {}
    for path in step.paths:
        if path[0] == section:
            put(tree, path[1:], step.lazy(path))
    if not tree:
        raise UserError(f"{step.where} has no {section}")
    return tree


def total_bytes(tree: Mapping) -> int:
    """Bytes of all arrays of a tree."""
    return sum(value.nbytes for _, value in flatten(tree))
