"""Tensors that are read piece by piece: what every format looks like to the code that moves
weights.

A source names tensors and reads rows of them. A LazyArray is an array of our tree that is not in
memory: it knows its shape and dtype and how to read rows of one of its tensors. Nothing here
holds more than one piece.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import ml_dtypes
import numpy as np

from olmo_core_jax.checkpoint.checksums import array_checksum
from olmo_core_jax.errors import UserError
from olmo_core_jax.model.tree import put
from olmo_core_jax.model.weights import Leaf

PIECE_BYTES = 8 * 2**20
"""Most bytes of one piece, and of a chunk on disk. Larger ones cost up to four times the processor
time: they leave its cache, and every buffer of that size is fresh memory from the system."""

IN_FLIGHT = 4
"""Pieces that are moved at once: some are read or written while others are computed with."""

LOSSLESS = {
    "float32": ("float32", "bfloat16", "float16"),
    "bfloat16": ("bfloat16",),
    "float16": ("float16",),
    "float64": ("float64", "float32", "bfloat16", "float16"),
}
"""target dtype -> dtypes that it holds exactly."""


@dataclass(frozen=True)
class Spec:
    """What a tensor is: numpy dtype (ml_dtypes' bfloat16 included) and shape."""

    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype.name}{list(self.shape)}"


class Source(Protocol):
    """A checkpoint as named tensors. where: for messages."""

    where: str

    def specs(self) -> Mapping[str, Spec]:
        """dtype and shape of every tensor, by name."""
        ...

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of a tensor in its own dtype; of a 0-d one (start 0, stop 1) the
        value as [1].
        """
        ...


Where = tuple[slice, ...]
"""A part of an array: slices of its first two axes at most, the others whole."""


@dataclass(frozen=True)
class LazyArray:
    """An array that is read piece by piece.

    chunk: how it is cut where it is stored, and will be where it is written; read: the values of a
    part that is made of whole chunks.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    chunk: tuple[int, ...]
    read: Callable[[Where], np.ndarray]

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def pieces(self) -> Iterator[Where]:
        """The parts to read it in: whole chunks, together up to PIECE_BYTES or else one chunk of
        rows, in order.
        """
        cut = list(self.shape[:2])
        steps = [min(c, n) for c, n in zip(self.chunk, cut, strict=False)]
        row = int(np.prod(self.shape[2:], dtype=np.int64)) * self.dtype.itemsize
        if steps:
            room = max(1, PIECE_BYTES // max(1, row * int(np.prod(steps, dtype=np.int64))))
            steps[-1] *= room
        for corner in np.ndindex(*(-(-n // s) for n, s in zip(cut, steps, strict=True))):
            yield tuple(
                slice(k * s, min((k + 1) * s, n))
                for k, s, n in zip(corner, steps, cut, strict=True)
            )

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        out = np.empty(self.shape, self.dtype)
        for where in self.pieces():
            out[where] = self.read(where)
        return out if dtype is None else out.astype(dtype)


def all_finite(values: np.ndarray) -> bool:
    """Is there neither NaN nor infinity? Of bfloat16 by its bits: numpy is slow with that type."""
    if values.dtype == ml_dtypes.bfloat16:
        return int(np.max(values.view(np.uint16) & 0x7FFF, initial=0)) < 0x7F80
    return bool(np.isfinite(values).all())


def rounded(values: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, int]:
    """Values in another dtype, and how many of them that changed."""
    if values.dtype == dtype:
        return values, 0
    if (values.dtype, dtype) == (np.float32, ml_dtypes.bfloat16):
        # A bfloat16 is the upper half of a float32: what changes has something in the lower one.
        lower = np.ascontiguousarray(values).view(np.uint32).astype(np.uint16)
        return values.astype(dtype), int(np.count_nonzero(lower))
    cast = values.astype(dtype)
    return cast, int(np.count_nonzero(cast.astype(values.dtype) != values))


def part_checksum(values: np.ndarray, where: Where, shape: tuple[int, ...]) -> int:
    """What a part adds to the checksum of its array (checkpoint/checksums.py), modulo 2^32."""
    if len(where) < 2:
        start = where[0].start * int(np.prod(shape[1:], dtype=np.int64)) if where else 0
        return array_checksum(values, start)
    row = int(np.prod(shape[2:], dtype=np.int64))
    firsts = [(c * shape[1] + where[1].start) * row for c in range(where[0].start, where[0].stop)]
    return sum(array_checksum(v, start) for v, start in zip(values, firsts, strict=True)) % 2**32


def rows_of_chunk(shape: tuple[int, ...], dtype: np.dtype) -> int:
    """Rows of a tensor in one chunk: the largest divisor of their count within PIECE_BYTES, where
    there is a decent one.
    """
    row_bytes = int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize
    most = max(1, min(shape[0], PIECE_BYTES // max(row_bytes, 1)))
    divisor = next(n for n in range(most, 0, -1) if shape[0] % n == 0)
    return divisor if divisor * 4 >= most else most


def numpy_dtype(name: str) -> np.dtype:
    """The numpy dtype of a name such as bfloat16."""
    return np.dtype(getattr(ml_dtypes, name, name))


def lazy_tree(
    source: Source,
    table: list[Leaf],
    names: Callable[[Leaf], tuple[str, ...]],
    dtype: str,
    *,
    allow_lossy: bool = False,
) -> dict:
    """Our tree of LazyArrays over a source's tensors, in `dtype`.

    A vocabulary tensor with fewer rows than ours is followed by rows of zeros. Raises UserError
    where a tensor is missing, has another shape or a dtype that `dtype` does not hold exactly;
    when read, where a value is not finite.
    """
    tree: dict = {}
    specs, target = source.specs(), numpy_dtype(dtype)
    for leaf in table:
        for name in names(leaf):
            check_tensor(source, specs, leaf, name, target, allow_lossy)
        rows = rows_of_chunk(leaf.tensor_shape, target)
        chunk = (*((1,) if leaf.stacked else ()), rows, *leaf.tensor_shape[1:])
        read = _reader(source, leaf, names(leaf), target)
        put(tree, leaf.path, LazyArray(leaf.shape, target, chunk, read))
    return tree


def check_tensor(source, specs, leaf: Leaf, name: str, target: np.dtype, allow_lossy: bool) -> None:
    """Raises UserError unless a source has this tensor in a fitting shape and dtype."""
    if name not in specs:
        raise UserError(f"{source.where}: tensor {name} is missing")
    spec = specs[name]
    expected, rows = leaf.tensor_shape, spec.shape[0] if spec.shape else 0
    fits = spec.shape[1:] == expected[1:] and len(spec.shape) == len(expected)
    if not fits or not (rows == expected[0] or (leaf.vocabulary and rows <= expected[0])):
        raise UserError(
            f"{source.where}: tensor {name} has shape {list(spec.shape)}, "
            f"the recipe's model has {list(expected)}"
        )
    if spec.dtype.name not in LOSSLESS[target.name] and not allow_lossy:
        raise UserError(
            f"{source.where}: {name} is {spec.dtype.name}, which {target.name} does not hold "
            "exactly; set precision.params to its dtype, or say that rounding is meant"
        )


def _reader(source: Source, leaf: Leaf, names: tuple[str, ...], target: np.dtype):
    specs = source.specs()
    present = {name: specs[name].shape[0] for name in names}

    def rows_of(name: str, start: int, stop: int) -> np.ndarray:
        rows = source.read(name, min(start, present[name]), min(stop, present[name]))
        if not all_finite(rows):
            row = start + int(np.argwhere(~np.isfinite(rows))[0][0])
            raise UserError(
                f"{source.where}: tensor {name} holds a value that is not finite, in row {row}"
            )
        rows = rows.astype(target, copy=False)
        missing = (stop - start) - rows.shape[0]
        if missing:
            rows = np.concatenate([rows, np.zeros((missing, *rows.shape[1:]), target)])
        return rows

    def read(where: Where) -> np.ndarray:
        if not leaf.stacked:
            return rows_of(names[0], where[0].start, where[0].stop)
        cycles, rows = range(where[0].start, where[0].stop), where[1]
        parts = [rows_of(names[c], rows.start, rows.stop) for c in cycles]
        return parts[0][None] if len(parts) == 1 else np.stack(parts)

    return read


def check_nothing_left(source: Source, used: set[str]) -> None:
    """Raises UserError that names tensors which no part of the model takes."""
    extra = sorted(set(source.specs()) - used)
    if extra:
        more = f" and {len(extra) - 3} more" if len(extra) > 3 else ""
        raise UserError(
            f"{source.where}: tensors that no part of the recipe's model takes: "
            f"{', '.join(extra[:3])}{more}"
        )
