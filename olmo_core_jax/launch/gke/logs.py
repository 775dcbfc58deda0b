"""Pods' logs kept in the run root as they come: a restart deletes pods, and their logs with them.

    <run_root>/<stage>/pod_logs/<pod's creation>.<pod>.<container>/00001.log, 00002.log ...

Every line carries Kubernetes' time stamp. A file is written whole, again and again, until it is a megabyte; then the
next one begins: so it works the same on a disk and in a bucket, and a restarted controller goes on after the last line.
"""

import re
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from olmo_core_jax import storage
from olmo_core_jax.errors import JobError
from olmo_core_jax.launch.gke import names
from olmo_core_jax.launch.gke.api import PODS, Cut, Kube, NotFound, NotYet

PART_BYTES = 1 << 20
FLUSH_SECONDS = 15.0
RETRY_SECONDS = 1.0
SKEW_SECONDS = 90
"""How much more of a log is asked for than the clocks say, against clocks that differ; repeats are dropped."""

MOST_STREAMS = 128
"""Containers that are followed at once; later ones are taken up when earlier ones end."""


class PodLogs:
    """Follows the containers of a stage's pods, a thread each."""

    def __init__(self, kube: Kube, folder: str):
        self.kube = kube
        self.root = storage.join(folder, "pod_logs")
        self._followers: dict[tuple[str, str], _Follower] = {}

    def follow(self, pods: list[dict[str, Any]], leader_only: bool = False) -> None:
        """Takes up pods that are not followed yet; those that have not started are taken up later."""
        for pod in sorted(pods, key=_host):
            phase = (pod.get("status") or {}).get("phase")
            if phase in (None, "Pending", "Unknown") or (leader_only and _host(pod) != 0):
                continue
            for container in pod["spec"]["containers"]:
                key = (pod["metadata"]["uid"], container["name"])
                alive = sum(f.is_alive() for f in self._followers.values())
                if key not in self._followers and alive < MOST_STREAMS:
                    self._followers[key] = _Follower(self.kube, self.root, pod, container["name"])
                    self._followers[key].start()

    def close(self, patience: float = 10.0) -> None:
        """Waits a little for logs of ended pods to be complete, then leaves the others where they are."""
        deadline = time.monotonic() + patience
        for follower in self._followers.values():
            follower.leave_when_idle.set()
        for follower in self._followers.values():
            follower.join(max(0.0, deadline - time.monotonic()))
            follower.stop.set()
        for follower in self._followers.values():
            follower.save()


class _Follower(threading.Thread):
    """One container's log, from where the run root's copy ends to where the container ends."""

    def __init__(self, kube: Kube, root: str, pod: dict[str, Any], container: str):
        name = pod["metadata"]["name"]
        super().__init__(daemon=True, name=f"log of {name}")
        created = pod["metadata"]["creationTimestamp"].replace("-", "").replace(":", "")
        self.kube, self.pod, self.container = kube, name, container
        self.stop = threading.Event()
        self.leave_when_idle = threading.Event()
        self._guard = threading.Lock()
        self._copy = _Copy(storage.join(root, f"{created}.{name}.{container}"))

    def run(self) -> None:
        try:
            self._copy.resume()
            while not self.stop.is_set():
                try:
                    if self._read_once() or self.leave_when_idle.wait(RETRY_SECONDS):
                        break
                except Cut:  # whatever has become of the container, its log goes on
                    self.save()
                    self.stop.wait(RETRY_SECONDS)
            self.save()
        except JobError as e:  # the watch itself meets the same fault and deals with it
            self.kube.say(f"log of {self.pod}: {e}")

    def save(self) -> None:
        with self._guard:
            self._copy.save()

    def _read_once(self) -> bool:
        """Reads until the stream ends. True: the container has ended, or its log is gone. Raises Cut."""
        saved = time.monotonic()
        try:
            for line in self.kube.follow_log(self.pod, self.container, self._copy.seconds_since()):
                with self._guard:
                    self._copy.add(line)
                if time.monotonic() - saved > FLUSH_SECONDS:
                    self.save()
                    saved = time.monotonic()
                if self.stop.is_set():
                    return True
        except NotFound:
            return True
        except NotYet:
            return False
        self.save()
        return self._ended()

    def _ended(self) -> bool:
        try:
            pod = self.kube.get(PODS, self.pod)
        except NotFound:
            return True
        return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


class _Copy:
    """The parts of one container's log in the run root."""

    def __init__(self, folder: str):
        self.folder = folder
        self.last = b""  # time stamp of the newest line
        self._repeats = 0  # lines of that time stamp
        self._seen, self._seen_repeats = b"", 0  # what a new stream may repeat
        self._part = 1
        self._lines: list[bytes] = []
        self._size = self._saved = 0

    def resume(self) -> None:
        """Goes on after the last line that an earlier controller saved."""
        parts = [e.name for e in storage.list_dir(self.folder) if e.name.endswith(".log")]
        if parts:
            self._part = int(parts[-1].removesuffix(".log"))
            self._lines = storage.read_bytes(self._uri()).splitlines()
            self._size = self._saved = sum(len(line) + 1 for line in self._lines)
            self.last = _stamp(self._lines[-1]) if self._lines else b""
            self._repeats = sum(_stamp(line) == self.last for line in self._lines)

    def seconds_since(self) -> int | None:
        """How far back a new stream should begin; None: at the beginning."""
        self._seen, self._seen_repeats = self.last, self._repeats
        if not self.last:
            return None
        then = datetime.fromisoformat(self.last.decode()[:19]).replace(tzinfo=UTC)
        return max(1, int((datetime.now(UTC) - then).total_seconds()) + SKEW_SECONDS)

    def add(self, line: bytes) -> None:
        stamp = _stamp(line)
        if stamp and stamp < self._seen:
            return
        if stamp and stamp == self._seen and self._seen_repeats:
            self._seen_repeats -= 1
            return
        self._repeats = self._repeats + 1 if stamp == self.last else 1
        self.last = stamp or self.last
        if self._size > PART_BYTES:
            self.save()
            self._part, self._lines, self._size, self._saved = self._part + 1, [], 0, 0
        self._lines.append(line)
        self._size += len(line) + 1

    def save(self) -> None:
        if self._size > self._saved:
            storage.write_bytes(self._uri(), b"\n".join(self._lines) + b"\n")
            self._saved = self._size

    def _uri(self) -> str:
        return storage.join(self.folder, f"{self._part:05d}.log")


def saved_logs(run_root: str, folder: str, all_hosts: bool = False) -> Iterator[tuple[str, str]]:
    """(pod and container, its whole log) of a stage's pods, oldest first; without all_hosts only of first hosts."""
    root = storage.join(run_root, folder, "pod_logs")
    for entry in storage.list_dir(root):
        if not all_hosts and not re.search(rf"-{names.JOB}-\d+-0-\w+\.", entry.name):
            continue
        parts = storage.list_dir(storage.join(root, entry.name))
        texts = (storage.read_text(storage.join(root, entry.name, p.name)) for p in parts)
        yield entry.name, "".join(texts)


def _host(pod: dict[str, Any]) -> int:
    """A pod's number inside its slice; leaders are 0."""
    found = pod["metadata"].get("annotations") or {}
    return int(found.get("batch.kubernetes.io/job-completion-index", 0))


def _stamp(line: bytes) -> bytes:
    """The RFC 3339 stamp before a line with all nine digits of its second, so that they sort; b"" if there is none."""
    stamp, space, _ = line.partition(b" ")
    if not space or len(stamp) < 20 or not stamp[:1].isdigit():
        return b""
    return stamp[:19] + b"." + stamp[20:].rstrip(b"Z").ljust(9, b"0")
