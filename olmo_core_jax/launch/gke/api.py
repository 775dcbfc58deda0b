"""The Kubernetes API through the official client, with one policy for every fault.

Faults are of four kinds. Passing ones (429, 5xx, timeouts, cut or refused connections, names that do not resolve) are
retried with jittered backoff for as long as `patience` says, Retry-After honoured. Stale credentials (401, 403) are
loaded anew once; refused again, they end the watch and never the job. Answers (404, 409, 410) are exceptions that the
caller reads. A refused manifest (400, 422) is the user's mistake and keeps the field's path.
"""

import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from olmo_core_jax.errors import JobError, UserError

CONNECT_SECONDS, READ_SECONDS = 10.0, 30.0
FIRST_DELAY, LONGEST_DELAY = 1.0, 60.0
PASSING = frozenset({408, 429, 500, 502, 503, 504})

Object = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """A resource of the API. group "" is the core API, whose methods the client names by `singular`.

    namespace: where it always is, whatever namespace jobs run in.
    """

    group: str
    version: str
    plural: str
    singular: str = ""
    namespaced: bool = True
    namespace: str = ""


JOBSETS = Kind("jobset.x-k8s.io", "v1alpha2", "jobsets")
WORKLOADS = Kind("kueue.x-k8s.io", "v1beta2", "workloads")
PODS = Kind("", "v1", "pods", "pod")
EVENTS = Kind("", "v1", "events", "event")
CRDS = Kind("apiextensions.k8s.io", "v1", "customresourcedefinitions", namespaced=False)


class NotFound(Exception):
    """The API server itself says that there is no such object."""


class Conflict(Exception):
    """The name is taken, or a precondition does not hold."""


class Expired(Exception):
    """What was to be continued (a watch, a paged list) is no longer kept."""


class NotYet(Exception):
    """A log of a container that has not started."""


class Cut(Exception):
    """A stream that broke before its end."""


class Denied(JobError):
    """The credentials are not accepted, fresh ones included."""


class Unreachable(JobError):
    """The API did not answer for longer than we were told to be patient."""


class Refused(UserError):
    """The API server does not take the object; the message names the fields."""


class _Fault(Exception):
    """A status other than 2xx."""

    def __init__(self, status: int, body: str, headers: Any):
        super().__init__(f"{status}: {_message(body)}")
        self.status, self.body, self.headers = status, body, headers


def connect(context: str | None):
    """An ApiClient with freshly loaded credentials: the pod's own cluster, or a kubeconfig context."""
    try:
        from kubernetes import client, config
    except ImportError:
        raise UserError("the gke backend needs the extra: pip install -e '.[gke]'") from None
    settings = client.Configuration()
    file = os.environ.get("KUBECONFIG")  # as it is now: the client looks when it is imported
    try:
        if context is None and os.environ.get("KUBERNETES_SERVICE_HOST"):
            config.load_incluster_config(client_configuration=settings)
        else:
            config.load_kube_config(file, context, client_configuration=settings)
    except (config.ConfigException, OSError) as e:
        where = file or "~/.kube/config"
        remedy = "`gcloud container clusters get-credentials` makes them"
        raise UserError(f"no usable Kubernetes credentials in {where} ({e}): {remedy}") from None
    settings.retries = False  # urllib3 would retry behind our back
    return client.ApiClient(settings)


class Kube:
    """Requests in one namespace. Thread-safe; every request has timeouts."""

    def __init__(
        self,
        connect: Callable[[], Any],
        namespace: str,
        patience: float,
        say: Callable[[str], None] = print,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self.namespace = namespace
        self.patience = patience
        self.say = say
        self.sleep = sleep
        self._connect = connect
        self._lock = threading.Lock()
        self._client = connect()
        self._generation = 0  # of the credentials

    def get(self, kind: Kind, name: str) -> Object:
        """One object. Raises NotFound."""
        return self._json(f"get {kind.plural} {name}", self._method(kind, "get"), name)

    def select(self, kind: Kind, labels: str = "", fields: str = "") -> list[Object]:
        """All objects of a kind that the selectors fit, page by page."""
        selectors = {k: v for k, v in (("label_selector", labels), ("field_selector", fields)) if v}
        items: list[Object] = []
        more: dict[str, str] = {}
        while True:
            try:
                page = self._json(
                    f"list {kind.plural}",
                    self._method(kind, "list"),
                    limit=500,
                    **selectors,
                    **more,
                )
            except Expired:  # the collection changed too much between two pages
                items, more = [], {}
                self.sleep(FIRST_DELAY)
                continue
            items += page.get("items", [])
            if not (token := page.get("metadata", {}).get("continue")):
                return items
            more = {"_continue": token}

    def create(self, kind: Kind, body: Object, dry_run: bool = False) -> Object:
        """Creates an object; unknown fields are refused. Raises Conflict, Refused."""
        options = {"dry_run": "All"} if dry_run else {}
        create = self._method(kind, "create")
        return self._json(
            f"create {kind.plural}", create, body, field_validation="Strict", **options
        )

    def patch(self, kind: Kind, name: str, body: Object) -> Object:
        """Merge-patches an object. Raises NotFound, Conflict, Refused."""
        patch = self._method(kind, "patch")
        return self._json(
            f"patch {kind.plural} {name}", patch, name, body, field_validation="Strict"
        )

    def delete(self, kind: Kind, name: str, uid: str) -> None:
        """Deletes this very object after all that it owns. Raises NotFound, and Conflict if the uid is another's."""
        from kubernetes import client

        options = client.V1DeleteOptions(
            propagation_policy="Foreground", preconditions=client.V1Preconditions(uid=uid)
        )
        self._json(f"delete {kind.plural} {name}", self._method(kind, "delete"), name, body=options)

    def version(self) -> str:
        """The cluster's version, such as v1.34.1-gke.3084001."""
        from kubernetes import client

        found = self._json("version", lambda c, **raw: client.VersionApi(c).get_code(**raw))
        return found["gitVersion"]

    def watch(self, kind: Kind, name: str, version: str, seconds: float) -> Iterator[Object]:
        """Events of one object after `version`, until `seconds` are over or the stream ends. Raises Expired.

        A stream that breaks simply ends: whoever watches looks again anyway.
        """
        lines = self._lines(
            f"watch {kind.plural}",
            self._method(kind, "list"),
            (CONNECT_SECONDS, seconds + CONNECT_SECONDS),
            field_selector=f"metadata.name={name}",
            resource_version=version,
            timeout_seconds=max(1, round(seconds)),
            allow_watch_bookmarks=True,
            watch=True,
        )
        try:
            for line in lines:
                event = json.loads(line)
                if event["type"] == "ERROR":
                    if event["object"].get("code") == 410:
                        raise Expired(event["object"].get("message", "too old"))
                    return
                if event["type"] != "BOOKMARK":
                    yield event
        except (Cut, ValueError):  # between two lines, or in the middle of one
            return

    def follow_log(self, pod: str, container: str, since_seconds: int | None) -> Iterator[bytes]:
        """Lines of a container's log with time stamps, as they come. Raises NotFound, NotYet."""
        options = {} if since_seconds is None else {"since_seconds": since_seconds}
        yield from self._lines(
            f"log of {pod}",
            lambda c, **raw: _core(c).read_namespaced_pod_log(pod, self.namespace, **raw),
            (CONNECT_SECONDS, 60.0),
            container=container,
            follow=True,
            timestamps=True,
            **options,
        )

    def _method(self, kind: Kind, verb: str) -> Callable[..., Any]:
        """The client's method for a verb on a kind, as a function of the ApiClient."""
        if not kind.group:
            name = (
                {"get": "read"}.get(verb, verb)
                + ("_namespaced_" if kind.namespaced else "_")
                + kind.singular
            )
            where = (kind.namespace or self.namespace,) if kind.namespaced else ()
            return lambda c, *args, **raw: getattr(_core(c), name)(
                *_around(verb, args, where), **raw
            )
        name = f"{verb}_{'namespaced' if kind.namespaced else 'cluster'}_custom_object"
        where = (
            kind.group,
            kind.version,
            *((kind.namespace or self.namespace,) if kind.namespaced else ()),
            kind.plural,
        )
        return lambda c, *args, **raw: getattr(_custom(c), name)(*where, *args, **raw)

    def _json(self, what: str, method: Callable[..., Any], *args: Any, **options: Any) -> Object:
        def once() -> Object:
            response = self._send(method, (CONNECT_SECONDS, READ_SECONDS), *args, **options)
            data = response.data
            return json.loads(data) if data else {}

        return self._persist(what, once)

    def _lines(
        self, what: str, method: Callable[..., Any], timeout: tuple[float, float], **options
    ) -> Iterator[bytes]:
        from urllib3.exceptions import HTTPError

        response = self._persist(what, lambda: self._send(method, timeout, **options))
        rest = b""
        try:
            for chunk in response.stream(65536):
                *lines, rest = (rest + chunk).split(b"\n")
                yield from (line for line in lines if line)
        except (HTTPError, OSError) as e:
            raise Cut(f"{what}: {type(e).__name__}: {e}") from None
        finally:
            response.close()
        if rest:
            yield rest

    def _send(
        self, method: Callable[..., Any], timeout: tuple[float, float], *args: Any, **options: Any
    ):
        """One request: the response, its body unread. Raises _Fault for every status but 2xx."""
        from kubernetes.client.exceptions import ApiException

        try:
            response = method(
                self._client, *args, _preload_content=False, _request_timeout=timeout, **options
            )
        except ApiException as e:  # older clients raise by themselves
            body = (
                e.body.decode(errors="replace") if isinstance(e.body, bytes) else str(e.body or "")
            )
            raise _Fault(e.status or 0, body, e.headers or {}) from None
        if not 200 <= response.status <= 299:
            raise _Fault(response.status, response.data.decode(errors="replace"), response.headers)
        return response

    def _persist(self, what: str, once: Callable[[], Any]) -> Any:
        """Does one request until it is answered. Raises what the class names."""
        from urllib3.exceptions import HTTPError

        began = time.monotonic()
        delay = FIRST_DELAY
        told = renewed = False
        while True:
            generation = self._generation
            try:
                return once()
            except _Fault as fault:
                if fault.status in (401, 403) and not renewed:
                    self._renew(generation)
                    renewed = True
                    continue
                _judge(what, fault)
                problem, wait = str(fault), _retry_after(fault.headers)
            except (HTTPError, OSError) as e:
                problem, wait = f"{type(e).__name__}: {e}", 0.0
            if time.monotonic() - began > self.patience:
                raise Unreachable(
                    f"{what}: the Kubernetes API gave no answer for {self.patience:.0f} s ({problem})"
                )
            if not told:
                self.say(f"{what}: {problem}; trying again")
                told = True
            self.sleep(max(wait, delay * random.uniform(0.5, 1.0)))
            delay = min(2 * delay, LONGEST_DELAY)

    def _renew(self, generation: int) -> None:
        """Loads credentials anew, unless another thread has done so since `generation`."""
        with self._lock:
            if generation == self._generation:
                self._client = self._connect()
                self._generation += 1


def _judge(what: str, fault: _Fault) -> None:
    """Returns where the request should be repeated; raises the answer's exception elsewhere."""
    if fault.status in (401, 403):
        raise Denied(
            f"{what}: {fault}. Log in again, or give the account the right, then start again"
        )
    if fault.status == 404:
        raise NotFound(what)
    if fault.status == 409:
        raise Conflict(str(fault))
    if fault.status == 410:
        raise Expired(str(fault))
    if fault.status == 400 and "waiting to start" in fault.body:
        raise NotYet(what)
    if fault.status not in PASSING:
        raise Refused(f"{what}: {'; '.join(_causes(fault.body)) or fault}")


def _core(api_client):
    from kubernetes import client

    return client.CoreV1Api(api_client)


def _custom(api_client):
    from kubernetes import client

    return client.CustomObjectsApi(api_client)


def _around(verb: str, args: tuple, where: tuple) -> tuple:
    """Core methods take (name, namespace, ...), except that create takes (namespace, body)."""
    return (*where, *args) if verb in ("create", "list") else (*args[:1], *where, *args[1:])


def _message(body: str) -> str:
    try:
        return json.loads(body).get("message") or body
    except (ValueError, AttributeError):
        return body[:300]


def _causes(body: str) -> list[str]:
    """`field: message` of every cause in a Status body."""
    try:
        causes = (json.loads(body).get("details") or {}).get("causes") or []
    except (ValueError, AttributeError):
        return []
    return [f"{c.get('field', '?')}: {c.get('message', '')}" for c in causes]


def _retry_after(headers: Any) -> float:
    try:
        return min(float(headers.get("Retry-After", 0)), 10 * LONGEST_DELAY)
    except (TypeError, ValueError):
        return 0.0
