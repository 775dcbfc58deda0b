"""Range reads from gs:// with Google's client: one request a read, tried again when it may help."""

import functools
from typing import Any

import requests
import urllib3
from requests.adapters import HTTPAdapter

from olmo_core_jax.errors import UserError
from olmo_core_jax.storage import readers


class GcsReader:
    """Ranges of objects, without metadata calls. Safe for threads and to be pickled."""

    concurrent = True

    def read(self, uri: str, offset: int, length: int) -> bytes:
        bucket, _, key = uri.removeprefix("gs://").partition("/")
        blob = _client().bucket(bucket).blob(key)

        def attempt() -> bytes:
            from google.api_core import exceptions

            # Tries are counted and bounded in one place, readers.repeat; a range has no checksum.
            options: dict[str, Any] = {"retry": None, "checksum": None, "raw_download": True}
            timeout = int(readers.TRY_SECONDS)
            try:
                data = blob.download_as_bytes(
                    start=offset, end=offset + length - 1, timeout=timeout, **options
                )
            except exceptions.NotFound:
                raise readers.missing(uri) from None
            except exceptions.RequestRangeNotSatisfiable:
                raise readers.short(uri, offset, length, 0) from None
            except (exceptions.Forbidden, exceptions.Unauthorized) as e:
                raise readers.refused(uri, e) from None
            # A body that broke off has raised: the object itself is shorter.
            if len(data) != length:
                raise readers.short(uri, offset, length, len(data))
            return data

        return readers.repeat(f"{uri} at byte {offset}", attempt, _passing)


def _passing(error: Exception) -> bool:
    """Is it worth asking again?"""
    from google.api_core import exceptions

    if isinstance(error, exceptions.GoogleAPICallError):
        return error.code in (408, 429) or (error.code or 0) >= 500
    return isinstance(error, OSError | requests.RequestException | urllib3.exceptions.HTTPError)


@functools.cache
def _client():
    """One a process, with as many kept connections as there are requests in flight."""
    try:
        from google.cloud import storage
    except ImportError:
        raise UserError("gs:// needs the extra: pip install -e '.[gcs]'") from None
    client = storage.Client()
    adapter = HTTPAdapter(pool_connections=4, pool_maxsize=readers.CONNECTIONS, pool_block=True)
    client._http.mount("https://", adapter)
    client._http.mount("http://", adapter)
    return client
