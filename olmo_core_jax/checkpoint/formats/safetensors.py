"""The safetensors file format, read and written in pieces.

A file is: 8 bytes little-endian header length, a JSON header {name: {dtype, shape,
data_offsets}}, the data. The safetensors package reads whole tensors of local files only, and
bfloat16 not at all without torch or JAX.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from olmo_core_jax import storage
from olmo_core_jax.checkpoint.tensors import Spec
from olmo_core_jax.errors import UserError
from olmo_core_jax.storage import ranges

DTYPES = {
    "F64": np.dtype("float64"),
    "F32": np.dtype("float32"),
    "F16": np.dtype("float16"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype("int64"),
    "I32": np.dtype("int32"),
    "U8": np.dtype("uint8"),
    "BOOL": np.dtype("bool"),
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
MAX_HEADER = 100_000_000


class SafetensorsFile:
    """One file's tensors. Only the header is read at first. Raises UserError where the file is
    not whole.
    """

    def __init__(self, uri: str):
        self.where = uri
        size = ranges.size(uri)
        if size is None:
            raise UserError(f"weight file {uri} does not exist")
        header, self._start = _read_header(uri, size)
        self.metadata = header.pop("__metadata__", {})
        self._places = {name: _place(uri, name, entry) for name, entry in header.items()}
        self._check_size(size)

    def specs(self) -> dict[str, Spec]:
        return {name: spec for name, (spec, _) in self._places.items()}

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of a tensor, [1] of a 0-d one."""
        spec, begin = self._places[name]
        row_shape = spec.shape[1:]
        row = int(np.prod(row_shape, dtype=np.int64)) * spec.dtype.itemsize
        data = ranges.read_range(
            self.where, self._start + begin + start * row, (stop - start) * row
        )
        return np.frombuffer(data, spec.dtype).reshape(stop - start, *row_shape)

    def _check_size(self, size: int) -> None:
        # As the format demands: tensors fill the data part, end to end, in some order.
        end = 0
        for name, (spec, begin) in sorted(self._places.items(), key=lambda item: item[1][1]):
            if begin != end:
                raise UserError(
                    f"weight file {self.where}: tensor {name} starts at byte {begin}, not {end}"
                )
            end = begin + spec.nbytes
        if self._start + end != size:
            raise UserError(
                f"weight file {self.where} has {size} bytes where its header describes "
                f"{self._start + end}: it is truncated or not whole; download it again"
            )


def _read_header(uri: str, size: int) -> tuple[dict, int]:
    """The parsed header and where the data starts."""
    length = int.from_bytes(ranges.read_range(uri, 0, 8), "little") if size >= 8 else -1
    if not 2 <= length <= min(MAX_HEADER, size - 8):
        raise UserError(
            f"weight file {uri} is not a safetensors file: "
            f"its header would have {length} of {size} bytes"
        )
    try:
        header = json.loads(ranges.read_range(uri, 8, length))
        assert isinstance(header, dict)
    except (ValueError, AssertionError):
        raise UserError(
            f"weight file {uri} is not a safetensors file: its header is not JSON"
        ) from None
    return header, 8 + length


def _place(uri: str, name: str, entry: dict) -> tuple[Spec, int]:
    """What a tensor is and where in the data it begins."""
    try:
        dtype, shape = DTYPES[entry["dtype"]], tuple(int(n) for n in entry["shape"])
        begin, end = entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise UserError(
            f"weight file {uri}: the header's entry for {name} cannot be used: {entry}"
        ) from None
    spec = Spec(dtype, shape)
    if end - begin != spec.nbytes or begin < 0:
        raise UserError(
            f"weight file {uri}: tensor {name} {spec} needs {spec.nbytes} bytes, "
            f"the header gives {end - begin}"
        )
    return spec, begin


class SafetensorsFolder:
    """A checkpoint's tensors, from `model.safetensors` or the shards that
    `model.safetensors.index.json` lists.
    """

    def __init__(self, folder: str):
        self.where = folder
        index = storage.join(folder, "model.safetensors.index.json")
        if ranges.size(index) is not None:
            listed = ranges.read_json(index).get("weight_map", {})
            shards = sorted(set(listed.values()))
        else:
            listed, shards = None, ["model.safetensors"]
        self._files = [SafetensorsFile(self._shard(folder, shard, listed)) for shard in shards]
        self._owner = {name: f for f in self._files for name in f.specs()}
        if listed is not None:
            self._check_index(listed)

    @staticmethod
    def _shard(folder: str, shard: str, listed: Mapping | None) -> str:
        uri = storage.join(folder, shard)
        if ranges.size(uri) is None:
            why = "that its index lists" if listed else "(nor an index of shards)"
            raise UserError(f"{folder}: there is no {shard} {why}; download it again")
        return uri

    def _check_index(self, listed: Mapping[str, str]) -> None:
        for f in self._files:
            shard = f.where.rpartition("/")[2]
            there, said = set(f.specs()), {name for name, where in listed.items() if where == shard}
            if there != said:
                name = sorted(there ^ said)[0]
                raise UserError(
                    f"{f.where}: tensor {name} is in the index or in the file, but not in both"
                )

    def specs(self) -> dict[str, Spec]:
        return {name: spec for f in self._files for name, spec in f.specs().items()}

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        return self._owner[name].read(name, start, stop)


class SafetensorsWriter:
    """Writes one file whose tensors are known beforehand, in pieces and in any order.

    The file has its name only when `close` is called, with every byte on the disk.
    """

    def __init__(self, path: str | os.PathLike, specs: Mapping[str, Spec]):
        self.path = Path(path)
        self._partial = self.path.with_name(f".{self.path.name}.partial")
        header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
        self._places: dict[str, tuple[Spec, int]] = {}
        end = 0
        for name, spec in specs.items():
            header[name] = {
                "dtype": CODES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [end, end + spec.nbytes],
            }
            self._places[name] = (spec, end)
            end += spec.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the format asks for aligned data
        self._start = 8 + len(text)
        self._fd = os.open(self._partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        os.pwrite(self._fd, len(text).to_bytes(8, "little") + text, 0)
        os.ftruncate(self._fd, self._start + end)

    def write(self, name: str, start: int, rows: np.ndarray) -> None:
        """Puts rows at [start, start + len(rows)) of a tensor. Their dtype has to be the
        tensor's.
        """
        spec, begin = self._places[name]
        assert rows.dtype == spec.dtype, (name, rows.dtype, spec.dtype)
        row = int(np.prod(spec.shape[1:], dtype=np.int64)) * spec.dtype.itemsize
        data = np.ascontiguousarray(rows).view(np.uint8).reshape(-1).data
        offset = self._start + begin + start * row
        while data:
            done = os.pwrite(self._fd, data[: 2**30], offset)
            data, offset = data[done:], offset + done

    def close(self) -> None:
        """Makes the file durable and gives it its name."""
        os.fsync(self._fd)
        self._close_descriptor()
        os.replace(self._partial, self.path)

    def abandon(self) -> None:
        """Removes what was written so far; a file that is closed already stays."""
        self._close_descriptor()
        self._partial.unlink(missing_ok=True)

    def _close_descriptor(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def split_shards(specs: Mapping[str, Spec], shard_bytes: int) -> dict[str, dict[str, Spec]]:
    """File name -> tensors, in order, each file up to `shard_bytes` (more only for a single
    larger tensor).
    """
    groups: list[dict[str, Spec]] = [{}]
    used = 0
    for name, spec in specs.items():
        if groups[-1] and used + spec.nbytes > shard_bytes:
            groups.append({})
            used = 0
        groups[-1][name] = spec
        used += spec.nbytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {
        f"model-{n:05d}-of-{len(groups):05d}.safetensors": group
        for n, group in enumerate(groups, 1)
    }


def index_json(shards: Mapping[str, Iterable[str]], total_bytes: int) -> bytes:
    """Content of model.safetensors.index.json."""
    weight_map = {name: shard for shard, names in shards.items() for name in names}
    index = {
        "metadata": {"total_size": total_bytes},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return (json.dumps(index, indent=2) + "\n").encode()
