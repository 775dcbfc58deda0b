"""Sizes of many shards at once, and what a few sampled windows say about their content."""

import ast
import hashlib
import os
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from olmo_core_jax import storage
from olmo_core_jax.storage.readers import CONNECTIONS, HttpReader, Reader, reader_for

HEAD = 4096
WINDOW = 8192
MAGIC = b"\x93NUMPY"


@dataclass(frozen=True)
class Sample:
    """A shard's first bytes and one window elsewhere.

    start: bytes before the tokens; npy_dtype: what a .npy header says.
    """

    uri: str
    size: int
    start: int
    npy_dtype: str | None
    windows: tuple[tuple[int, bytes], ...]

    @property
    def digest(self) -> str:
        """sha256 of the sampled bytes and their places."""
        digest = hashlib.sha256()
        for offset, data in self.windows:
            digest.update(f"{offset}:{len(data)}:".encode() + data)
        return digest.hexdigest()


def itemsize(dtype: str) -> int:
    return np.dtype(dtype).itemsize


def sizes(base: str, paths: Sequence[str]) -> list[int | None]:
    """Bytes of every path under `base`, None for missing ones; asked for in parallel."""
    if base.startswith(("https://", "http://")):
        reader = HttpReader()
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            return list(pool.map(lambda p: reader.size(storage.join(base, p)), paths))
    if not storage.is_remote(base):
        return [_local_size(storage.join(base, p)) for p in paths]
    by_folder = defaultdict(set)
    for path in paths:
        by_folder[path.rpartition("/")[0]].add(path.rpartition("/")[2])

    def list_folder(folder: str) -> dict[str, int]:
        entries = storage.list_dir(storage.join(base, folder) if folder else base)
        return {e.name: e.size for e in entries if not e.is_dir and e.name in by_folder[folder]}

    with ThreadPoolExecutor(CONNECTIONS) as pool:
        listed = dict(zip(by_folder, pool.map(list_folder, by_folder), strict=True))
    return [listed[p.rpartition("/")[0]].get(p.rpartition("/")[2]) for p in paths]


def sample(base: str, paths: Sequence[str], sizes: Sequence[int]) -> list[Sample]:
    """Reads the windows of every shard, in parallel."""
    reader = reader_for(base)
    uris = [storage.join(base, p) for p in paths]
    with ThreadPoolExecutor(CONNECTIONS if reader.concurrent else 4) as pool:
        return list(pool.map(lambda us: _sample(reader, *us), zip(uris, sizes, strict=True)))


def faults(samples: Sequence[Sample], dtype: str, vocab_size: int) -> list[str]:
    """What is wrong with shards that are said to hold `dtype` tokens below vocab_size."""
    return [
        f"{s.uri} {fault}" for s in samples for fault in _faults(s, np.dtype(dtype), vocab_size)
    ]


def tokens_of(sample: Sample, dtype: str) -> np.ndarray:
    """The sampled tokens, windows joined."""
    size = itemsize(dtype)
    parts = []
    for offset, data in sample.windows:
        data = data[max(0, sample.start - offset) :]
        parts.append(np.frombuffer(data[: len(data) // size * size], f"<u{size}"))
    return np.concatenate(parts) if parts else np.empty(0, f"<u{size}")


def _faults(sample: Sample, dtype: np.dtype, vocab_size: int):
    if sample.npy_dtype not in (None, dtype.str, dtype.str.replace("|", "<")):
        yield f"is a .npy file of {sample.npy_dtype}, not {dtype.name}"
        return
    if (sample.size - sample.start) % dtype.itemsize:
        yield f"has {sample.size} bytes, no multiple of {dtype.itemsize}: truncated?"
        return
    tokens = tokens_of(sample, dtype.name)
    if tokens.size and tokens.max() >= vocab_size:
        yield f"holds id {tokens.max()}, the vocabulary has {vocab_size}"
    elif dtype.itemsize == 2 and tokens.size >= 64 and tokens[1::2].max() <= 1 < tokens[::2].max():
        yield "looks like uint32 tokens: every second 16-bit value is 0 or 1"


def _sample(reader: Reader, uri: str, size: int) -> Sample:
    head = reader.read(uri, 0, min(HEAD, size)) if size else b""
    windows = [(0, head)]
    if size > HEAD:
        # The place depends on name and size only, so that a mirror is sampled alike; it is aligned
        # for any dtype.
        seed = hashlib.sha256(f"{os.path.basename(uri)} {size}".encode()).digest()
        span = max(0, size - HEAD - WINDOW) // 8 + 1
        offset = HEAD + int.from_bytes(seed[:8], "little") % span * 8
        windows.append((offset, reader.read(uri, offset, min(WINDOW, size - offset))))
    start, npy_dtype = _npy_header(head)
    return Sample(uri, size, start, npy_dtype, tuple(windows))


def _npy_header(head: bytes) -> tuple[int, str | None]:
    """(bytes of a .npy header, its dtype), (0, None) for headerless files."""
    if not head.startswith(MAGIC) or len(head) < 12:
        return 0, None
    wide = head[6] > 1
    length = int.from_bytes(head[8 : 12 if wide else 10], "little")
    begin = 12 if wide else 10
    try:
        described = ast.literal_eval(head[begin : begin + length].decode("latin1").strip())
        return begin + length, str(described["descr"])
    except (ValueError, SyntaxError, KeyError, TypeError):
        return 0, None


def _local_size(path: str) -> int | None:
    return os.path.getsize(path) if os.path.isfile(path) else None
