"""A bucket on loopback (gcp-storage-emulator) with what our locks and tensorstore need and the emulator leaves out.

Left out by it: conditional uploads, generations on downloads, conditional downloads, and startOffset/endOffset of listings
(without which tensorstore's delete_range would empty the whole bucket).
"""

import contextlib
import functools
import json
import logging
import socket
import threading
from collections.abc import Iterator
from http import HTTPStatus

from gcp_storage_emulator import server as emulator
from gcp_storage_emulator.handlers import objects

BUCKET = "olmo-runs"


@contextlib.contextmanager
def bucket_on_loopback() -> Iterator[str]:
    """Serves an empty bucket from memory; the emulator's URL."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)
    with _completed():
        server = emulator.create_server("127.0.0.1", port, in_memory=True, default_bucket=BUCKET)
        server.start()
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.stop()


@contextlib.contextmanager
def _completed() -> Iterator[None]:
    kept = objects.download
    download = _with_generations(objects.download)
    changed = []
    objects.download = download  # objects.get looks it up by name
    for _, methods in emulator.HANDLERS:
        for verb, handler in list(methods.items()):
            better = {
                kept: download,
                objects.ls: _with_offsets(objects.ls),
                objects.insert: _on_condition(objects.insert),
            }.get(handler)
            if better:
                changed.append((methods, verb, handler))
                methods[verb] = better
    try:
        yield
    finally:
        objects.download = kept
        for methods, verb, handler in changed:
            methods[verb] = handler


def _with_generations(handler):
    @functools.wraps(handler)
    def download(request, response, storage, *args, **kwargs):
        try:
            found = storage.get_file_obj(request.params["bucket_name"], request.params["object_id"])
        except Exception:
            return handler(request, response, storage, *args, **kwargs)
        generation = str(found.get("generation", "1"))
        response["x-goog-generation"] = generation
        if request.query.get("ifGenerationNotMatch", [""])[0] == generation:
            response.status = HTTPStatus.NOT_MODIFIED
            return None
        if request.query.get("ifGenerationMatch", [generation])[0] != generation:
            response.status = HTTPStatus.PRECONDITION_FAILED
            return None
        return handler(request, response, storage, *args, **kwargs)

    return download


def _on_condition(handler):
    """Uploads only over the generation that the client names; 0: only where there is nothing."""
    one_at_a_time = threading.Lock()

    @functools.wraps(handler)
    def insert(request, response, storage, *args, **kwargs):
        with one_at_a_time:
            wanted = request.query.get("ifGenerationMatch", [None])[0]
            if wanted is not None:
                name = request.query.get("name", [None])[0] or request.data["meta"]["name"]
                try:
                    bucket = request.params["bucket_name"]
                    now = str(storage.get_file_obj(bucket, name)["generation"])
                except Exception:
                    now = "0"
                if wanted != now:
                    response.status = HTTPStatus.PRECONDITION_FAILED
                    return None
            return handler(request, response, storage, *args, **kwargs)

    return insert


def _with_offsets(handler):
    @functools.wraps(handler)
    def ls(request, response, storage, *args, **kwargs):
        handler(request, response, storage, *args, **kwargs)
        first = request.query.get("startOffset", [""])[0]
        last = request.query.get("endOffset", [""])[0]
        if response.status == HTTPStatus.OK and (first or last):
            body = json.loads(response._content)
            names = [o for o in body.get("items", []) if first <= o["name"]]
            body["items"] = [o for o in names if not last or o["name"] < last]
            response.json(body)

    return ls
