"""Objects with resource versions, and the history that watches read."""

import copy
import threading
import uuid
from datetime import UTC, datetime

Key = tuple[str, str, str, str]  # group, plural, namespace, name


class Status(Exception):
    """An answer other than 2xx, as the API server words it."""

    def __init__(self, code: int, reason: str, message: str, causes=(), headers=None):
        super().__init__(message)
        self.code, self.reason, self.headers = code, reason, headers or {}
        self.body = {
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "code": code, "reason": reason, "message": message,
            "details": {"causes": [{"field": f, "message": m, "reason": "FieldValueInvalid"} for f, m in causes]},
        }  # fmt: skip


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Store:
    """All methods are safe to call from any thread and give copies."""

    def __init__(self):
        self.changed = threading.Condition(threading.RLock())
        self.objects: dict[Key, dict] = {}
        self.history: list[tuple[int, str, Key, dict]] = []
        self.version = 0
        self.oldest = 0  # versions up to this one are compacted away
        self.validate = lambda key, body: None

    def create(self, key: Key, body: dict, dry_run: bool = False) -> dict:
        body = copy.deepcopy(body)
        self.validate(key, body)
        with self.changed:
            if key in self.objects:
                raise Status(409, "AlreadyExists", f'{key[1]} "{key[3]}" already exists')
            meta = body.setdefault("metadata", {})
            meta |= {
                "name": key[3],
                "uid": str(uuid.uuid4()),
                "creationTimestamp": now(),
                "generation": 1,
            }
            if key[2]:
                meta["namespace"] = key[2]
            body.setdefault("status", {})
            return body if dry_run else self._write("ADDED", key, body)

    def get(self, key: Key) -> dict:
        with self.changed:
            if key not in self.objects:
                raise Status(404, "NotFound", f'{key[1]} "{key[3]}" not found')
            return copy.deepcopy(self.objects[key])

    def find(self, key: Key) -> dict | None:
        with self.changed:
            return copy.deepcopy(self.objects.get(key))

    def select(
        self, group: str, plural: str, namespace: str, labels: str = "", fields: str = ""
    ) -> list[dict]:
        with self.changed:
            found = [
                copy.deepcopy(o)
                for k, o in sorted(self.objects.items())
                if k[:2] == (group, plural) and (not namespace or k[2] == namespace)
            ]
        return [o for o in found if selected(o, labels, fields)]

    def update(self, key: Key, change, bump_generation: bool = False) -> dict | None:
        """Applies `change` to the stored object in place; None where there is none (any more)."""
        with self.changed:
            if key not in self.objects:
                return None
            body = copy.deepcopy(self.objects[key])
            change(body)
            if body == self.objects[key]:
                return body
            if bump_generation:
                body["metadata"]["generation"] += 1
            return self._write("MODIFIED", key, body)

    def replace(self, key: Key, body: dict) -> dict:
        with self.changed:
            old = self.get(key)
            sent = body.get("metadata", {}).get("resourceVersion")
            if sent and sent != old["metadata"]["resourceVersion"]:
                raise Status(
                    409,
                    "Conflict",
                    "the object has been modified; please apply your changes to the latest version",
                )
            self.validate(key, body)
            body = copy.deepcopy(body) | {
                "metadata": old["metadata"] | body.get("metadata", {}),
                "status": old["status"],
            }
            return self._write("MODIFIED", key, body)

    def merge(self, key: Key, patch: dict, status_only: bool = False) -> dict:
        def change(body):
            kept = copy.deepcopy(body["status"])
            merge_patch(body, {"status": patch.get("status", {})} if status_only else patch)
            if not status_only:
                body["status"] = kept

        with self.changed:
            self.get(key)
            return self.update(key, change, bump_generation=not status_only)

    def mark_deleted(self, key: Key, uid: str | None, policy: str) -> dict:
        """Foreground: the object stays, marked, until `remove`. Else it goes at once."""
        with self.changed:
            body = self.get(key)
            if uid and uid != body["metadata"]["uid"]:
                raise Status(
                    409,
                    "Conflict",
                    f"uid in precondition: {uid}, uid in object meta: {body['metadata']['uid']}",
                )
            if policy != "Foreground":
                self.remove(key)
                return body

            def change(o):
                o["metadata"].setdefault("deletionTimestamp", now())
                o["metadata"]["finalizers"] = ["foregroundDeletion"]

            return self.update(key, change)

    def remove(self, key: Key) -> None:
        with self.changed:
            body = self.objects.pop(key, None)
            if body is not None:
                self.version += 1
                body = copy.deepcopy(body)
                body["metadata"]["resourceVersion"] = str(self.version)
                self.history.append((self.version, "DELETED", key, body))
                self.changed.notify_all()

    def compact(self) -> None:
        """Forgets history: watches from older versions meet 410."""
        with self.changed:
            self.oldest = self.version
            self.history.clear()

    def since(self, version: int, timeout: float) -> list[tuple[int, str, Key, dict]]:
        """Events after `version`, waiting up to `timeout` for the first. Raises Status 410 where they are forgotten."""
        with self.changed:
            self.changed.wait_for(lambda: version < self.oldest or self.version > version, timeout)
            if version < self.oldest:
                raise Status(410, "Expired", f"too old resource version: {version} ({self.oldest})")
            return [e for e in self.history if e[0] > version]

    def _write(self, event: str, key: Key, body: dict) -> dict:
        self.version += 1
        body["metadata"]["resourceVersion"] = str(self.version)
        self.objects[key] = body
        self.history.append((self.version, event, key, copy.deepcopy(body)))
        self.changed.notify_all()
        return copy.deepcopy(body)


def merge_patch(target: dict, patch: dict) -> None:
    """RFC 7396, in place."""
    for name, value in patch.items():
        if value is None:
            target.pop(name, None)
        elif isinstance(value, dict) and isinstance(target.get(name), dict):
            merge_patch(target[name], value)
        else:
            target[name] = copy.deepcopy(value)


def selected(body: dict, labels: str, fields: str) -> bool:
    """Equality selectors, as the client writes them."""
    have = body["metadata"].get("labels") or {}
    for name, value in pairs(labels):
        if have.get(name) != value:
            return False
    for path, value in pairs(fields):
        node = body
        for part in path.split("."):
            node = (node or {}).get(part)
        if node != value:
            return False
    return True


def pairs(selector: str) -> list[list[str]]:
    return [p.split("=", 1) for p in selector.replace("==", "=").split(",") if p]


def set_condition(body: dict, kind: str, status: str, reason: str, message: str = "") -> None:
    """Adds or replaces a condition in status.conditions, as controllers do: old types stay with status False."""
    conditions = body["status"].setdefault("conditions", [])
    entry = {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": message,
        "lastTransitionTime": now(),
    }
    for i, old in enumerate(conditions):
        if old["type"] == kind:
            conditions[i] = entry
            return
    conditions.append(entry)
