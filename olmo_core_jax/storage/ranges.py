"""Files of a checkpoint by byte range: folders, gs:// and https:// behind three functions."""

import functools
import hashlib
import json
from typing import Any

from olmo_core_jax import storage
from olmo_core_jax.errors import UserError
from olmo_core_jax.storage.readers import HttpReader


def is_web(uri: str) -> bool:
    return uri.startswith(("https://", "http://"))


@functools.cache
def _web() -> HttpReader:
    return HttpReader()


def read_range(uri: str, offset: int, length: int) -> bytes:
    """Exactly `length` bytes from `offset`. Raises UserError where the file is missing or
    shorter.
    """
    if length == 0:
        return b""
    if is_web(uri):
        return _web().read(uri, offset, length)
    try:
        data = _read(uri, offset, length)
    except OSError as e:
        raise UserError(f"{uri} cannot be read: {e.strerror or e}") from None
    if len(data) != length:
        raise UserError(f"{uri} is truncated: {len(data)} of {length} bytes at byte {offset}")
    return data


def _read(uri: str, offset: int, length: int) -> bytes:
    if storage.is_remote(uri):
        return storage.read_bytes(uri, offset, length)
    with open(uri, "rb", buffering=0) as f:
        f.seek(offset)
        return f.read(length) or b""


def size(uri: str) -> int | None:
    """Bytes of a file, None where there is none."""
    if is_web(uri):
        return _web().size(uri)
    try:
        return storage.size(uri)
    except OSError:
        return None


def read_whole(uri: str) -> bytes:
    """A small file's content. Raises UserError where it is missing."""
    length = size(uri)
    if length is None:
        raise UserError(f"{uri} does not exist")
    return read_range(uri, 0, length)


def read_json(uri: str) -> Any:
    """A small JSON file's content. Raises UserError where it is missing or not JSON."""
    try:
        return json.loads(read_whole(uri))
    except ValueError as e:
        raise UserError(f"{uri} is not valid JSON ({e})") from None


def digest(uri: str) -> str:
    """sha256 of a small file."""
    return hashlib.sha256(read_whole(uri)).hexdigest()
