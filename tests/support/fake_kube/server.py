"""The API server: HTTP on loopback, watches as chunked JSON lines, logs, and faults on request."""

import json
import re
import socket
import struct
import threading
import time
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from .store import Status, Store, selected

PATH = re.compile(
    r"^/(?:api|apis/(?P<group>[^/]+))/(?P<version>v[^/]+)(?:/namespaces/(?P<ns>[^/]+))?"
    r"/(?P<plural>[a-z]+)(?:/(?P<name>[^/]+))?(?:/(?P<sub>status|log))?$"
)


@dataclass
class Request:
    """What a client asked for; verb is get, list, watch, create, patch, update, delete or log."""

    verb: str
    plural: str
    name: str
    query: dict
    body: dict | None
    token: str


@dataclass
class Fault:
    """Happens to the next `times` requests that `when` fits.

    kind: a status code, or reset (before headers), reset-after-headers, stall, cut (mid-line), end (a clean early end
    of a stream), gone (410 inside a watch).
    """

    when: Callable[[Request], bool]
    kind: int | str
    times: int = 1
    retry_after: str | None = None
    seconds: float = 5.0


@dataclass
class ApiServer:
    store: Store
    read_log: Callable[[str, str], tuple[bytes, bool]] | None = None
    tokens: set = field(default_factory=lambda: {"token-1"})
    requests: list[Request] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    down: bool = False
    keep_alive: bool = (
        True  # False: a connection a request, so that every request resolves the name
    )

    def __enter__(self):
        self._http = _Server(("127.0.0.1", 0), _Handler)
        self._http.api = self
        self._thread = threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        self._thread.start()
        self.closing = threading.Event()
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        return self

    def __exit__(self, *_):
        self.closing.set()
        self._http.shutdown()
        self._http.server_close()

    def fail(self, kind: int | str, verb: str = "", plural: str = "", **how) -> Fault:
        fault = Fault(
            lambda r: (not verb or r.verb == verb) and (not plural or r.plural == plural),
            kind,
            **how,
        )
        self.faults.append(fault)
        return fault

    def seen(self, verb: str, plural: str = "") -> list[Request]:
        return [r for r in self.requests if r.verb == verb and (not plural or r.plural == plural)]

    def connect(self, token: str | Callable[[], str] = "token-1"):
        """What kube.connect does, for this server."""
        from kubernetes import client

        settings = client.Configuration()
        settings.host = self.url
        settings.retries = False
        settings.api_key = {"authorization": token if isinstance(token, str) else token()}
        settings.api_key_prefix = {"authorization": "Bearer"}
        return client.ApiClient(settings)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128
    api: ApiServer

    def handle_error(self, request, client_address):
        pass  # clients that hang up are part of the tests


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *_):
        pass

    def _serve(self):
        api = self.server.api
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        match = PATH.match(url.path)
        parts = (
            match.groupdict()
            if match
            else {"plural": url.path.rstrip("/"), "name": "-", "sub": None}
        )
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        request = Request(
            self._verb(parts, query), parts["plural"], parts["name"] or "", query, body, token
        )
        api.requests.append(request)
        if api.down:
            return self._reset()
        fault = next((f for f in api.faults if f.times > 0 and f.when(request)), None)
        if fault:
            fault.times -= 1
        try:
            self._answer(api, request, parts, fault)
        except Status as status:
            self._send(status.code, status.body, status.headers)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve

    def _verb(self, parts: dict, query: dict) -> str:
        if parts["sub"] == "log":
            return "log"
        if self.command == "GET":
            return (
                "get"
                if parts["name"]
                else ("watch" if query.get("watch") in ("true", "True") else "list")
            )
        return {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}[
            self.command
        ]

    def _answer(self, api: ApiServer, request: Request, parts: dict, fault: Fault | None):
        kind = fault.kind if fault else None
        if kind == "reset":
            return self._reset()
        if kind == "stall":
            api.closing.wait(fault.seconds)
            return self._reset()
        if isinstance(kind, int):
            headers = {"Retry-After": fault.retry_after} if fault.retry_after else {}
            raise Status(
                kind,
                {404: "NotFound", 409: "AlreadyExists"}.get(kind, "InternalError"),
                f"injected {kind}",
                headers=headers,
            )
        if request.token not in api.tokens:
            raise Status(401, "Unauthorized", "Unauthorized")
        if request.verb == "watch":
            return self._watch(api, parts, request, kind)
        if request.verb == "log":
            return self._log(api, request, kind)
        answer = self._object(api.store, request, parts)
        if kind == "reset-after-headers":  # done, but the client does not hear of it
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            return self._reset()
        self._send(201 if request.verb == "create" else 200, answer)

    def _object(self, store: Store, request: Request, parts: dict) -> dict:
        group, namespace, plural = parts.get("group") or "", parts.get("ns") or "", request.plural
        key = (group, plural, namespace, request.name)
        if request.verb == "create":
            if plural == "selfsubjectaccessreviews":
                return request.body | {"status": {"allowed": True}}
            key = (*key[:3], request.body["metadata"]["name"])
            return store.create(key, request.body, dry_run=request.query.get("dryRun") == "All")
        if request.verb == "get":
            if plural == "/version":
                return {"major": "1", "minor": "34", "gitVersion": "v1.34.1-gke.3084001"}
            return store.get(key)
        if request.verb == "list":
            return self._list(store, key, request.query)
        if request.verb == "patch":
            return store.merge(key, request.body, status_only=parts["sub"] == "status")
        if request.verb == "update":
            return store.replace(key, request.body)
        options = request.body or {}
        uid = (options.get("preconditions") or {}).get("uid")
        return store.mark_deleted(key, uid, options.get("propagationPolicy") or "Background")

    def _list(self, store: Store, key, query: dict) -> dict:
        with store.changed:
            items = store.select(
                *key[:3], query.get("labelSelector", ""), query.get("fieldSelector", "")
            )
            meta = {"resourceVersion": str(store.version)}
        start, limit = int(query.get("continue") or 0), int(query.get("limit") or 0)
        if limit and len(items) > start + limit:
            meta["continue"] = str(start + limit)
        return {
            "kind": "List",
            "metadata": meta,
            "items": items[start : start + limit] if limit else items,
        }

    def _watch(self, api: ApiServer, parts: dict, request: Request, fault):
        version = int(request.query.get("resourceVersion") or api.store.version)
        deadline = time.monotonic() + float(request.query.get("timeoutSeconds") or 300)
        fields, labels = (
            request.query.get("fieldSelector", ""),
            request.query.get("labelSelector", ""),
        )
        wanted = (parts.get("group") or "", parts["plural"])
        self._begin_stream()
        if fault == "gone":
            api.store.compact()
            version = -1
        while (
            fault != "end"
            and time.monotonic() < deadline
            and not (api.closing.is_set() or api.down)
        ):
            try:
                events = api.store.since(version, min(0.05, max(0.0, deadline - time.monotonic())))
            except Status as status:
                self._line({"type": "ERROR", "object": status.body})
                break
            for number, kind, key, body in events:
                version = number
                if key[:2] != wanted or not selected(body, labels, fields):
                    continue
                if fault == "cut":
                    self._chunk(json.dumps({"type": kind, "object": body}).encode()[:40])
                    return self._reset()
                self._line({"type": kind, "object": body})
            if events and request.query.get("allowWatchBookmarks"):
                self._line(
                    {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(version)}}}
                )
        self._end_stream()

    def _log(self, api: ApiServer, request: Request, fault):
        position, container = 0, request.query.get("container", "")
        # Raises Status: 404, or 400 before the start.
        data, ended = api.read_log(request.name, container)
        self._begin_stream("text/plain")
        sent = 0
        while not (api.closing.is_set() or api.down):
            fresh = data[position : data.rfind(b"\n") + 1]
            position += len(fresh)
            for line in fresh.splitlines(keepends=True):
                if fault == "cut" and sent >= 3:
                    self._chunk(line[: len(line) // 2])
                    return self._reset()
                self._chunk(line)
                sent += 1
            if ended or request.query.get("follow") not in ("true", "True"):
                break
            time.sleep(0.02)
            try:
                data, ended = api.read_log(request.name, container)
            except Status:
                break
        self._end_stream()

    def _send(self, code: int, body: dict, headers: dict | None = None):
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self._end_headers()
        self.wfile.write(data)

    def _begin_stream(self, kind: str = "application/json"):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Transfer-Encoding", "chunked")
        self._end_headers()

    def _end_headers(self):
        if not self.server.api.keep_alive:
            self.send_header("Connection", "close")
        self.end_headers()

    def _line(self, event: dict):
        self._chunk(json.dumps(event).encode() + b"\n")

    def _chunk(self, data: bytes):
        if data:
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.flush()

    def _end_stream(self):
        self.wfile.write(b"0\r\n\r\n")
        self.wfile.flush()

    def _reset(self):
        """A TCP reset, as a dying load balancer sends it."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
