"""What torch.save writes (a zip of a pickle and raw records), read by byte range, no PyTorch."""

import io
import zipfile
import zlib
from dataclasses import dataclass

import numpy as np

from olmo_core_jax.checkpoint.formats import pickles
from olmo_core_jax.errors import UserError
from olmo_core_jax.storage.ranges import read_range

EDGE = 8192  # bytes read at once at either end: there the zip's directory and the pickle are
LOCAL_HEADER = 30


class RangeFile(io.RawIOBase):
    """A part of a file as a file of its own, for zipfile. Both ends are read at once and kept."""

    def __init__(self, uri: str, offset: int, length: int):
        self.uri, self._offset, self._length, self._at = uri, offset, length, 0
        edge = min(EDGE, length)
        self._head = read_range(uri, offset, edge)
        self._tail_start = max(length - edge, 0)
        whole = length <= EDGE
        self._tail = self._head if whole else read_range(uri, offset + self._tail_start, edge)

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, where: int, whence: int = io.SEEK_SET) -> int:
        self._at = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[
            whence
        ] + where
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, n: int = -1) -> bytes:
        n = self._length - self._at if n is None or n < 0 else min(n, self._length - self._at)
        start, self._at = self._at, self._at + max(n, 0)
        if start + n <= len(self._head):
            return self._head[start : start + n]
        if start >= self._tail_start:
            return self._tail[start - self._tail_start :][:n]
        return read_range(self.uri, self._offset + start, n)


@dataclass
class SavedTensor:
    """One saved tensor: its numbers are raw bytes from `start` of the file.

    crc: of the numbers, 0 where the file has none; checked when they are read from end to end.
    """

    uri: str
    start: int
    dtype: np.dtype
    shape: tuple[int, ...]
    crc: int = 0
    _next: int = 0
    _running: int = 0

    def rows(self, first: int, last: int) -> np.ndarray:
        """Rows [first, last), or of a 0-d tensor its value as [1]."""
        row_shape = self.shape[1:]
        row = int(np.prod(row_shape, dtype=np.int64)) * self.dtype.itemsize
        data = read_range(self.uri, self.start + first * row, (last - first) * row)
        self._check(data, first, last)
        return np.frombuffer(data, self.dtype).reshape(last - first, *row_shape)

    def _check(self, data: bytes, first: int, last: int) -> None:
        if first == 0:
            self._next, self._running = 0, 0
        if not self.crc or first != self._next:
            return
        self._next, self._running = last, zlib.crc32(data, self._running)
        if last == (self.shape[0] if self.shape else 1) and self._running != self.crc:
            raise UserError(f"{self.uri}: the bytes from {self.start} on have changed (CRC-32)")


def _open(uri: str, offset: int, length: int, what: str) -> tuple[RangeFile, zipfile.ZipFile]:
    file = RangeFile(uri, offset, length)
    try:
        return file, zipfile.ZipFile(file)
    except (zipfile.BadZipFile, ValueError) as e:
        raise UserError(f"{uri}: {what} at byte {offset} is not whole: {e}") from None


def open_tensor(uri: str, offset: int, length: int, what: str) -> SavedTensor:
    """Finds a tensor that torch.save wrote into bytes [offset, offset + length) of a file.

    Raises UserError where the bytes are no such tensor, or where its numbers are not stored
    plainly.
    """
    file, archive = _open(uri, offset, length, what)
    root = archive.namelist()[0].partition("/")[0]
    stored = pickles.load(_record(archive, root, uri), f"{uri} ({what})", pickles.TENSOR)
    if not isinstance(stored, pickles.StoredTensor) or not stored.contiguous:
        raise UserError(f"{uri}: {what} is not a tensor that is stored row after row")
    _require_little_endian(archive, root, f"{uri} ({what})")
    record = archive.getinfo(f"{root}/data/{stored.record}")
    nbytes = int(np.prod(stored.shape, dtype=np.int64)) * stored.dtype.itemsize
    if record.compress_type != zipfile.ZIP_STORED or record.file_size != nbytes:
        raise UserError(
            f"{uri}: {what} has {record.file_size} bytes where its shape needs {nbytes}"
        )
    start = record.header_offset + _local_header_bytes(file, record.header_offset)
    return SavedTensor(uri, offset + start, stored.dtype, stored.shape, record.CRC)


def _local_header_bytes(file: RangeFile, at: int) -> int:
    # Name and padding of the record's own header may differ in length from the directory's.
    file.seek(at)
    header = file.read(LOCAL_HEADER)
    return (
        LOCAL_HEADER
        + int.from_bytes(header[26:28], "little")
        + int.from_bytes(header[28:30], "little")
    )


def _require_little_endian(archive: zipfile.ZipFile, root: str, what: str) -> None:
    name = f"{root}/byteorder"
    if name in archive.namelist() and archive.read(name) != b"little":
        raise UserError(f"{what} was written on a big-endian machine, which is not read")


def load_pickle(uri: str, length: int) -> object:
    """The object of a whole torch.save file that holds counters and the like; its tensors stay
    opaque.
    """
    _, archive = _open(uri, 0, length, "the file")
    root = archive.namelist()[0].partition("/")[0]
    return pickles.load(_record(archive, root, uri), uri, pickles.TRAINER)


def _record(archive: zipfile.ZipFile, root: str, uri: str) -> bytes:
    try:
        return archive.read(f"{root}/data.pkl")
    except (zipfile.BadZipFile, KeyError) as e:
        raise UserError(f"{uri} is not a whole torch.save file: {e}") from None
