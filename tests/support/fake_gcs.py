"""A loopback server that answers the read side of Google Storage's JSON API, on demand badly.

Objects are bytes, or a size and a function of (offset, length): terabytes cost nothing.
It counts what was asked and sent. It knows listings and media reads; the rest is 501.
"""

import json
import re
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PAGE = 1000


@dataclass
class Virtual:
    """An object that is computed when it is read."""

    size: int
    content: Callable[[int, int], bytes]


@dataclass
class Request:
    """kind: list or media; sent: bytes of the body."""

    kind: str
    name: str
    start: int = 0
    length: int = 0
    sent: int = 0


class FakeGcs:
    """faults: taken from the front, one a media request: 503, reset, half, slow, or None for none.

    always: a fault for every request. delay: seconds before every answer.
    """

    def __init__(self):
        self.objects: dict[str, bytes | Virtual] = {}
        self.requests: list[Request] = []
        self.faults: list[str | None] = []
        self.always: str | None = None
        self.delay = 0.0
        self.in_flight = self.most_in_flight = 0
        self.lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"store": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def media(self) -> list[Request]:
        return [r for r in self.requests if r.kind == "media"]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def next_fault(self) -> str | None:
        with self.lock:
            return self.always or (self.faults.pop(0) if self.faults else None)


class _Handler(BaseHTTPRequestHandler):
    store: FakeGcs
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    disable_nagle_algorithm = True

    def do_GET(self):
        url = urllib.parse.urlsplit(self.path)
        query = {k: v[0] for k, v in urllib.parse.parse_qs(url.query).items()}
        match = re.fullmatch(r"(?:/download)?/storage/v1/b/([^/]+)/o(?:/(.+))?", url.path)
        if not match:
            return self._answer(501, b"{}")
        with self.store.lock:
            self.store.in_flight += 1
            self.store.most_in_flight = max(self.store.most_in_flight, self.store.in_flight)
        try:
            time.sleep(self.store.delay)
            name = urllib.parse.unquote(match[2] or "")
            if not name:
                self._list(query)
            elif query.get("alt") == "media":
                self._media(name)
            else:
                self.store.requests.append(Request("metadata", name))
                self._metadata(name)
        finally:
            with self.store.lock:
                self.store.in_flight -= 1

    def _list(self, query: dict[str, str]):
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        self.store.requests.append(Request("list", prefix))
        names, folders = [], set()
        for name in sorted(self.store.objects):
            rest = name[len(prefix) :]
            if not name.startswith(prefix):
                continue
            if delimiter and delimiter in rest:
                folders.add(prefix + rest.partition(delimiter)[0] + delimiter)
            else:
                names.append(name)
        begin = int(query.get("pageToken", 0))
        page = names[begin : begin + PAGE]
        body = {
            "items": [self._described(n) for n in page],
            "prefixes": sorted(folders) if begin == 0 else [],
        }
        if begin + PAGE < len(names):
            body["nextPageToken"] = str(begin + PAGE)
        self._answer(200, json.dumps(body).encode())

    def _described(self, name: str) -> dict:
        stored = self.store.objects[name]
        size = stored.size if isinstance(stored, Virtual) else len(stored)
        return {"name": name, "size": str(size), "bucket": "b", "generation": "1"}

    def _metadata(self, name: str):
        if name in self.store.objects:
            self._answer(200, json.dumps(self._described(name)).encode())
        else:
            self._answer(404, b"{}")

    def _media(self, name: str):
        stored = self.store.objects.get(name)
        if stored is None:
            return self._answer(404, b"no such object")
        size = stored.size if isinstance(stored, Virtual) else len(stored)
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "bytes=0-"))
        start, end = int(match[1]), min(int(match[2] or size - 1), size - 1)
        request = Request("media", name, start, end - start + 1)
        self.store.requests.append(request)
        if start >= size:
            return self._answer(416, b"")
        if isinstance(stored, Virtual):
            body = stored.content(start, end - start + 1)
        else:
            body = stored[start : end + 1]
        self._faulty(self.store.next_fault(), body, f"bytes {start}-{end}/{size}", request)

    def _faulty(self, fault: str | None, body: bytes, content_range: str, request: Request):
        if fault == "503":
            return self._answer(503, b"try later")
        if fault == "reset":
            return self._reset()
        headers = {"Content-Range": content_range}
        if fault in ("half", "slow"):
            self._head(206, len(body), headers)
            half = body[: len(body) // 2]
            self.wfile.write(half)
            self.wfile.flush()
            request.sent = len(half)
            if fault == "slow":
                time.sleep(5)
            return self._reset()
        request.sent = len(body)
        return self._answer(206, body, headers)

    def _reset(self):
        """Ends the connection with RST, as a dying server does."""
        self.close_connection = True
        linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.connection.close()

    def _head(self, status: int, length: int, headers: dict[str, str]):
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None):
        self._head(status, len(body), headers or {})
        self.wfile.write(body)

    def log_message(self, *_):
        pass

    def handle_one_request(self):
        try:
            super().handle_one_request()
        except (OSError, ValueError):
            self.close_connection = True
