"""Bytes of shards behind one `read(uri, offset, length)`, wherever they are.

Local files are read by position rather than through a mapping: a shard that shrinks under a mapping
kills the process by SIGBUS, a short read can be told. Remote reads are one range request each,
repeated on anything that may pass.
"""

import os
import random
import threading
import time
import urllib.error
import urllib.request
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from olmo_core_jax.errors import CRASH, JobError, UserError

CONNECTIONS = 32
"""Requests in flight a process."""
OPEN_FILES = 256
TRY_SECONDS = 20.0
"""Longest silence of a server before a request is tried again."""
DEADLINE_SECONDS = 180.0
"""How long one read is tried before it is an error."""


class ReadFailed(JobError):
    """A store did not answer within the deadline; a later attempt may succeed."""

    exit_code = CRASH


class Reader(Protocol):
    """concurrent: a batch's rows are worth asking for at the same time."""

    concurrent: bool

    def read(self, uri: str, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`. Raises UserError for a missing or shorter file."""
        ...


def reader_for(base: str) -> "Reader":
    """The reader for a recipe's `base`: a folder, gs:// or https://."""
    if base.startswith("gs://"):
        from olmo_core_jax.storage.gcs import GcsReader

        return GcsReader()
    if base.startswith(("https://", "http://")):
        return HttpReader()
    return LocalReader()


class LocalReader:
    """Positional reads of local or gcsfuse files, a bounded number of them open at a time.

    Safe for threads; a pickled copy opens its own.
    """

    concurrent = False

    def __init__(self, open_files: int = OPEN_FILES):
        self._open_files = open_files
        self._files: OrderedDict[str, _File] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, uri: str, offset: int, length: int) -> bytes:
        file = self._file(uri)  # held while it is read: another thread may let go of it
        data = os.pread(file.fd, length, offset)
        if len(data) != length:
            raise short(uri, offset, length, len(data))
        return data

    def _file(self, uri: str) -> "_File":
        with self._lock:
            file = self._files.get(uri)
            if file is None:
                file = self._files[uri] = _File(uri)
                if len(self._files) > self._open_files:
                    self._files.popitem(last=False)
            else:
                self._files.move_to_end(uri)
            return file

    def __reduce__(self):
        return LocalReader, (self._open_files,)


class _File:
    """A file descriptor that is closed when the last user lets go of it."""

    def __init__(self, uri: str):
        try:
            self.fd = os.open(uri, os.O_RDONLY)
        except OSError as e:
            raise UserError(f"shard {uri} cannot be read: {e.strerror}") from None

    def __del__(self):
        if hasattr(self, "fd"):
            os.close(self.fd)


class HttpReader:
    """Range requests to a plain web server."""

    concurrent = True

    def read(self, uri: str, offset: int, length: int) -> bytes:
        request = urllib.request.Request(
            uri, headers={"Range": f"bytes={offset}-{offset + length - 1}"}
        )

        def attempt() -> bytes:
            with urllib.request.urlopen(request, timeout=TRY_SECONDS) as answer:
                if answer.status != 206:
                    raise UserError(f"{uri}: the server answers no range requests; mirror it first")
                promised = int(answer.headers["Content-Length"])
                if promised != length:
                    raise short(uri, offset, length, promised)
                return answer.read()  # raises IncompleteRead where the body breaks off

        try:
            return repeat(f"{uri} at byte {offset}", attempt, _http_verdict)
        except urllib.error.HTTPError as e:
            if e.code == 416:
                raise short(uri, offset, length, 0) from None
            raise missing(uri) if e.code == 404 else refused(uri, e) from None

    def size(self, uri: str) -> int | None:
        """Bytes by a HEAD request, None where there is no such file."""
        request = urllib.request.Request(uri, method="HEAD")

        def attempt() -> int | None:
            try:
                with urllib.request.urlopen(request, timeout=TRY_SECONDS) as answer:
                    length = answer.headers["Content-Length"]
                    if length is None:
                        raise UserError(
                            f"{uri}: the server does not tell the size; mirror it first"
                        )
                    return int(length)
            except urllib.error.HTTPError as e:
                if e.code in (403, 404):
                    return None
                raise

        return repeat(uri, attempt, _http_verdict)


def _http_verdict(error: Exception) -> bool:
    if isinstance(error, urllib.error.HTTPError):
        return error.code in (408, 429) or error.code >= 500
    return isinstance(error, OSError) or type(error).__module__ == "http.client"


def repeat(what: str, attempt: Callable, passing: Callable[[Exception], bool]):
    """Result of `attempt`, tried again with growing pauses while its error may pass.

    Raises the error itself where it may not, ReadFailed after the deadline.
    """
    begun, pause, tries = time.monotonic(), 0.2, 0
    while True:
        tries += 1
        try:
            return attempt()
        except JobError:
            raise
        except Exception as e:
            spent = time.monotonic() - begun
            if not passing(e):
                raise
            if spent + pause > DEADLINE_SECONDS:
                raise ReadFailed(
                    f"{what} could not be read within {DEADLINE_SECONDS:.0f} s ({tries} tries): {e}"
                ) from None
        time.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(2 * pause, 10.0)


def short(uri: str, offset: int, length: int, got: int) -> UserError:
    return UserError(
        f"shard {uri} is truncated: {got} of {length} bytes at byte {offset}; "
        "restore it, or build a new index in a new run root"
    )


def missing(uri: str) -> UserError:
    return UserError(f"{uri} does not exist: restore it, or correct data.base")


def refused(uri: str, error: Exception) -> UserError:
    return UserError(f"{uri} cannot be read: {error}; check who may read it")
