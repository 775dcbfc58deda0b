"""Range reads from gs:// with Google's own client: one request a read, many in flight, tried again
when it may help.
"""

import functools
from typing import Any

import requests
from requests.adapters import HTTPAdapter

from olmo_core_jax.data import readers
from olmo_core_jax.errors import UserError


class GcsReader:
    """Ranges of objects, without a metadata call. Safe for threads; a pickled copy makes its own
    client.
    """

    concurrent = True

    def read(self, uri: str, offset: int, length: int) -> bytes:
        bucket, _, key = uri.removeprefix("gs://").partition("/")
        blob = _client().bucket(bucket).blob(key)

        def attempt() -> bytes:
            # Tries are counted and bounded in one place, readers.repeat; a range has no checksum.
            options: dict[str, Any] = {"retry": None, "checksum": None, "raw_download": True}
            end = offset + length - 1
            return blob.download_as_bytes(
                start=offset, end=end, timeout=int(readers.TRY_SECONDS), **options
            )

        return readers.retried(uri, offset, length, attempt, _passing)


def _passing(error: Exception) -> bool:
    """Is it worth asking again? Raises UserError for a missing object or a range beyond its end."""
    from google.api_core import exceptions

    if isinstance(error, exceptions.NotFound):
        raise UserError("the object does not exist: restore it, or correct data.base") from None
    if isinstance(error, exceptions.GoogleAPICallError):
        return error.code in (408, 429) or (error.code or 0) >= 500
    return isinstance(error, OSError | requests.RequestException)


@functools.cache
def _client():
    """One a process, with as many kept connections as there are requests in flight."""
    try:
        from google.cloud import storage
    except ImportError:
        raise UserError("gs:// needs the extra: pip install 'olmo-core-jax[gcs]'") from None
    client = storage.Client()
    adapter = HTTPAdapter(pool_connections=4, pool_maxsize=readers.CONNECTIONS, pool_block=True)
    client._http.mount("https://", adapter)
    client._http.mount("http://", adapter)
    return client
