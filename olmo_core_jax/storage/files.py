"""Local folders and gs:// through one small door.

A URI is a local path or `gs://bucket/key`. Writes are atomic: a reader sees the old object, the new one, or none.
The Google client is imported only when a gs:// URI is touched.
"""

import contextlib
import functools
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from olmo_core_jax.errors import UserError

RETRY_SECONDS = 120.0
"""How long a failing request to a bucket is repeated before it is an error."""


@dataclass(frozen=True)
class Entry:
    """One name in a folder. size is in bytes, 0 for folders."""

    name: str
    size: int
    is_dir: bool


def is_remote(uri: str | os.PathLike) -> bool:
    return str(uri).startswith("gs://")


def join(root: str | os.PathLike, *parts: str) -> str:
    """Path or URI of `parts` under `root`."""
    return "/".join([str(root).rstrip("/"), *(p.strip("/") for p in parts)])


def local_path(uri: str | os.PathLike) -> Path:
    """The path of a local URI; a remote one is refused."""
    if is_remote(uri):
        raise UserError(f"{uri} is in a bucket; a local path is needed here")
    return Path(uri)


def exists(uri: str) -> bool:
    """Is there a file (or, locally, a folder) of this name?"""
    return _blob(uri).exists(retry=_retry(), timeout=60) if is_remote(uri) else Path(uri).exists()


def size(uri: str) -> int:
    """Bytes of a file. Raises FileNotFoundError."""
    if not is_remote(uri):
        with _foreseen(uri, "read"):
            return Path(uri).stat().st_size
    return _loaded(uri).size


def read_bytes(uri: str, start: int | None = None, length: int | None = None) -> bytes:
    """A file's bytes, or `length` of them from `start`. Raises FileNotFoundError, or UserError for what is no file."""
    if is_remote(uri):
        from google.api_core.exceptions import NotFound

        begin = start or 0
        end = None if length is None else begin + length - 1
        try:
            return _blob(uri).download_as_bytes(start=start, end=end, retry=_retry(), timeout=60)
        except NotFound:
            raise FileNotFoundError(f"{uri} does not exist") from None
    with _foreseen(uri, "read"), open(uri, "rb") as f:
        f.seek(start or 0)
        return f.read() if length is None else f.read(length)


def read_text(uri: str) -> str:
    return read_bytes(uri).decode()


def read_json(uri: str) -> Any:
    """Parsed JSON. Raises FileNotFoundError, or UserError where the file is not JSON."""
    try:
        return json.loads(read_bytes(uri))
    except ValueError as e:
        raise UserError(f"{uri} is not valid JSON ({e}); move it away and run again") from None


def read_mapping(uri: str) -> dict[str, Any]:
    """Parsed JSON that has to be an object. Raises FileNotFoundError, or UserError where it is anything else."""
    content = read_json(uri)
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise UserError(f"{uri} holds no JSON object but a {kind}; move it away and run again")
    return content


@contextlib.contextmanager
def _foreseen(uri: str, done: str) -> Iterator[None]:
    """What a person can put right, and no missing file: something else lies at the place, or its permissions."""
    try:
        yield
    except (IsADirectoryError, NotADirectoryError, FileExistsError, PermissionError) as e:
        raise UserError(
            f"{uri} cannot be {done}: {e.strerror}; move away what is in its place, or correct its permissions"
        ) from None


def write_bytes(uri: str, data: bytes) -> None:
    """Writes a whole file atomically; on a local disk it is durable when this returns."""
    if is_remote(uri):
        _blob(uri).upload_from_string(data, retry=_retry(), timeout=60)
        return
    path = Path(uri)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.replace(partial, path)
    except OSError as e:
        raise UserError(
            f"{uri} cannot be written: {e.strerror}; choose a writable output folder"
        ) from None
    finally:
        partial.unlink(missing_ok=True) if path.parent.is_dir() else None


def write_file(uri: str, source: str | os.PathLike) -> None:
    """Writes a copy of a local file, in pieces: for files larger than memory. A local target is written atomically."""
    if is_remote(uri):
        _blob(uri).upload_from_filename(str(source), retry=_retry(), timeout=60)
        return
    path = Path(uri)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_text(uri: str, text: str) -> None:
    write_bytes(uri, text.encode())


def write_json(uri: str, value: Any) -> None:
    write_bytes(uri, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode())


def make_folder_of(uri: str) -> None:
    """The folder that a file is to be in; a bucket needs none. Raises UserError where something is in its place."""
    if not is_remote(uri):
        with _foreseen(uri, "written"):
            Path(uri).parent.mkdir(parents=True, exist_ok=True)


def append(uri: str, data: bytes) -> None:
    """Adds bytes to the end of a file that one writer owns, and creates it. Readers see whole appends."""
    if not is_remote(uri):
        try:
            with _foreseen(uri, "written"), open(uri, "ab") as f:
                f.write(data)
        except OSError as e:  # a full disk
            raise UserError(f"{uri} cannot be written: {e.strerror}") from None
        return
    from google.api_core.exceptions import PreconditionFailed

    now = _existing(uri)
    target, piece = _blob(uri), _blob(f"{uri}.piece")
    piece.upload_from_string(data, retry=_retry(), timeout=60)
    sources = [target, piece] if now else [piece]
    generation = int(now.generation) if now else 0
    try:
        target.compose(sources, if_generation_match=generation, retry=_retry(), timeout=60)
    except PreconditionFailed:  # a retried request may have met its own first attempt
        if size(uri) != (now.size if now else 0) + len(data):
            raise UserError(f"{uri} has another writer: two jobs share this run root") from None
    delete(f"{uri}.piece")


def create_exclusive(uri: str, data: bytes) -> bool:
    """Writes a file only if there is none. True: it is ours; False: somebody else's exists."""
    if is_remote(uri):
        return write_if(uri, data, 0) is not None
    path = Path(uri)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(data)
    except OSError as e:
        raise UserError(
            f"{uri} cannot be written: {e.strerror}; choose a writable output folder"
        ) from None
    try:
        os.link(
            partial, path
        )  # a link is atomic and never replaces; the content is whole from the start
        return True
    except FileExistsError:
        return False
    finally:
        partial.unlink(missing_ok=True)


def read_versioned(uri: str) -> tuple[bytes, int]:
    """A bucket object's content and its generation; (b"", 0) where there is none."""
    from google.api_core.exceptions import NotFound, PreconditionFailed

    bucket, key = _split(uri)
    while True:
        blob = _client().bucket(bucket).get_blob(key, retry=_retry(), timeout=60)
        if blob is None or blob.generation is None:
            return b"", 0
        generation = int(blob.generation)
        try:
            content = blob.download_as_bytes(
                if_generation_match=generation, retry=_retry(), timeout=60
            )
            return content, generation
        except (NotFound, PreconditionFailed):
            continue  # it was replaced between the two requests: look again


def write_if(uri: str, data: bytes, generation: int) -> int | None:
    """Writes a bucket object if its generation is still this one (0: if there is none). The new generation, or None."""
    from google.api_core.exceptions import PreconditionFailed

    blob = _blob(uri)
    try:
        blob.upload_from_string(data, if_generation_match=generation, retry=_retry(), timeout=60)
        return int(blob.generation)
    except PreconditionFailed:
        content, now = read_versioned(uri)  # a retried request may have met its own first attempt
        return now if content == data else None


def list_dir(uri: str) -> list[Entry]:
    """The names in a folder, sorted; empty where there is none."""
    if not is_remote(uri):
        path = Path(uri)
        if not path.is_dir():
            return []
        return [
            Entry(p.name, 0 if p.is_dir() else p.stat().st_size, p.is_dir())
            for p in sorted(path.iterdir())
        ]
    bucket, key = _split(uri)
    prefix = f"{key.rstrip('/')}/" if key else ""
    blobs = _client().list_blobs(bucket, prefix=prefix, delimiter="/", retry=_retry(), timeout=60)
    files = [Entry(b.name[len(prefix) :], b.size, False) for b in blobs if b.name != prefix]
    folders = [Entry(p[len(prefix) :].rstrip("/"), 0, True) for p in blobs.prefixes]
    return sorted(files + folders, key=lambda e: e.name)


def walk(uri: str) -> Iterator[tuple[str, int]]:
    """(path relative to `uri`, bytes) of every file below it."""
    if is_remote(uri):
        bucket, key = _split(uri)
        prefix = f"{key.rstrip('/')}/" if key else ""
        for blob in _client().list_blobs(bucket, prefix=prefix, retry=_retry(), timeout=60):
            yield blob.name[len(prefix) :], blob.size
    else:
        for path in sorted(Path(uri).rglob("*")):
            if path.is_file():
                yield str(path.relative_to(uri)), path.stat().st_size


def delete(uri: str, generation: int | None = None) -> None:
    """Removes one file that this run wrote itself; a missing one is no error.

    generation: in a bucket, only this one of the object goes; another one stays, without an error.
    """
    if is_remote(uri):
        from google.api_core.exceptions import NotFound, PreconditionFailed

        try:
            _blob(uri).delete(if_generation_match=generation, retry=_retry(), timeout=60)
        except (NotFound, PreconditionFailed):
            pass
    else:
        Path(uri).unlink(missing_ok=True)


def _split(uri: str) -> tuple[str, str]:
    bucket, _, key = str(uri)[len("gs://") :].partition("/")
    if not bucket:
        raise UserError(f"{uri!r} names no bucket; write gs://BUCKET/PATH")
    return bucket, key


@functools.cache
def _client() -> Any:  # google's own types call most of a blob optional
    try:
        from google.cloud import storage
    except ImportError:
        raise UserError("gs:// needs the extra: pip install -e '.[gcs]'") from None
    return storage.Client()


def _retry():
    from google.cloud.storage.retry import DEFAULT_RETRY

    return DEFAULT_RETRY.with_timeout(RETRY_SECONDS)


def _blob(uri: str):
    bucket, key = _split(uri)
    return _client().bucket(bucket).blob(key)


def _existing(uri: str):
    """The blob as it is in the bucket, None where there is none."""
    bucket, key = _split(uri)
    return _client().bucket(bucket).get_blob(key, retry=_retry(), timeout=60)


def _loaded(uri: str):
    blob = _existing(uri)
    if blob is None:
        raise FileNotFoundError(f"{uri} does not exist")
    return blob
