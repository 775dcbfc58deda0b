"""Pickles of PyTorch checkpoints, read without PyTorch and without running anything that they
name.

A pickle may call any function it can name. So every name is looked up in a short list of what
belongs in such a file, and stands for an inert object here; any other name ends the reading.
"""

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from olmo_core_jax.errors import UserError

# torch's dtypes and storage classes that weights and counters come in
DTYPES = {
    "float32": np.dtype("float32"),
    "float64": np.dtype("float64"),
    "float16": np.dtype("float16"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "int64": np.dtype("int64"),
    "int32": np.dtype("int32"),
    "uint8": np.dtype("uint8"),
    "bool": np.dtype("bool"),
}
STORAGES = {
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}


class Inert:
    """Stands for an object of a known class: it takes any state and does nothing."""

    def __init__(self, *args: Any, **fields: Any):
        self.args = args
        self.__dict__.update(fields)

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        elif isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
            self.__dict__.update(state[1])
        else:
            self.state = state


def _inert(name: str) -> type:
    return type(name, (Inert,), {})


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as torch.save describes it: where in which record its numbers are."""

    dtype: np.dtype
    record: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    stored: int

    @property
    def contiguous(self) -> bool:
        """Rows lie one after the other, and the record holds nothing else."""
        wanted, step = [], 1
        for n in reversed(self.shape):
            wanted.append(step)
            step *= n
        real = [s for s, n in zip(self.strides, self.shape, strict=True) if n != 1]
        expected = [s for s, n in zip(reversed(wanted), self.shape, strict=True) if n != 1]
        return real == expected and self.offset == 0 and self.stored == step


def _rebuild(storage: tuple, offset: int, shape: tuple, strides: tuple, *_: Any) -> StoredTensor:
    kind, dtype, record, _, count = storage
    assert kind == "storage"
    return StoredTensor(dtype, record, offset, tuple(shape), tuple(strides), count)


_DCP = "torch.distributed.checkpoint.metadata"
METADATA: dict[tuple[str, str], Any] = {
    (_DCP, "Metadata"): _inert("Metadata"),
    (_DCP, "MetadataIndex"): _inert("MetadataIndex"),
    (_DCP, "StorageMeta"): _inert("StorageMeta"),
    (_DCP, "TensorStorageMetadata"): _inert("TensorStorageMetadata"),
    (_DCP, "BytesStorageMetadata"): _inert("BytesStorageMetadata"),
    (_DCP, "ChunkStorageMetadata"): _inert("ChunkStorageMetadata"),
    (_DCP, "TensorProperties"): _inert("TensorProperties"),
    (_DCP, "_MEM_FORMAT_ENCODING"): lambda value: value,
    ("olmo_core.distributed.checkpoint.filesystem", "_StorageInfo"): _inert("_StorageInfo"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _inert("_StorageInfo"),
    ("torch.serialization", "_get_layout"): lambda name: name,
    ("torch", "Size"): lambda values=(): tuple(values),
    **{("torch", name): dtype for name, dtype in DTYPES.items()},
}
"""What the `.metadata` of a distributed checkpoint is made of."""

TENSOR: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild,
    ("collections", "OrderedDict"): OrderedDict,
    **{("torch", name): DTYPES[kind] for name, kind in STORAGES.items()},
}
"""What the `data.pkl` of one saved tensor is made of."""

TRAINER: dict[tuple[str, str], Any] = {
    **TENSOR,
    ("numpy", "ndarray"): _inert("ndarray"),
    ("numpy", "dtype"): _inert("dtype"),
    ("numpy._core.multiarray", "_reconstruct"): lambda *_: Inert(),
    ("numpy.core.multiarray", "_reconstruct"): lambda *_: Inert(),
    ("numpy._core.multiarray", "scalar"): lambda *_: Inert(),
    ("numpy.core.multiarray", "scalar"): lambda *_: Inert(),
    ("_codecs", "encode"): lambda *_: b"",
}
"""What `train/rank*.pt` is made of: counters, and generator states, which stay opaque."""


class _Reader(pickle.Unpickler):
    def __init__(self, data: bytes, where: str, allowed: Mapping[tuple[str, str], Any]):
        super().__init__(io.BytesIO(data))
        self._where, self._allowed = where, allowed

    def find_class(self, module: str, name: str) -> Callable:
        if (module, name) not in self._allowed:
            raise UserError(
                f"{self._where}: the file asks for {module}.{name}, which has no place in a "
                "checkpoint; it is not read further and nothing of it was run"
            )
        return self._allowed[module, name]

    def persistent_load(self, pid: Any) -> Any:
        if isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage":
            return pid
        raise UserError(f"{self._where}: the file refers to something outside itself: {pid!r}")


def load(data: bytes, where: str, allowed: Mapping[tuple[str, str], Any]) -> Any:
    """The object of a pickle that is made of `allowed` names only. Raises UserError for any
    other.
    """
    try:
        return _Reader(data, where, allowed).load()
    except UserError:
        raise
    except Exception as e:
        raise UserError(f"{where} cannot be read: {type(e).__name__}: {e}") from None
