"""One live writer a stage folder.

On a local disk the kernel holds the lock (flock), so it ends with the process, however that ends. In a bucket the lock is an
object whose generation moves with every heartbeat: a lock whose generation stands still is dead, whatever clocks say.
"""

import contextlib
import fcntl
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator

from olmo_core_jax import storage
from olmo_core_jax.errors import LOCKED, Locked, UserError

log = logging.getLogger("olmo")

HEARTBEAT_SECONDS = 15.0
PATIENCE_SECONDS = 60.0
"""How long a bucket's lock must stand still before it is taken over."""


@contextlib.contextmanager
def hold(folder: str) -> Iterator[None]:
    """Owns `folder` (path or gs:// URI) for the length of the block. Raises Locked while another process does."""
    owner = {"id": uuid.uuid4().hex, "host": socket.gethostname(), "pid": os.getpid()}
    with _hold_remote(folder, owner) if storage.is_remote(folder) else _hold_local(folder, owner):
        yield


@contextlib.contextmanager
def _hold_local(folder: str, owner: dict) -> Iterator[None]:
    path = storage.join(folder, "lock.json")
    storage.create_exclusive(path, b"{}")
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError as e:
        raise UserError(f"lock {path} cannot be opened: {e.strerror}; move it away") from None
    with os.fdopen(descriptor, "r+") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Locked(_message(folder, f.read())) from None
        f.truncate()
        f.write(json.dumps(owner))
        f.flush()
        yield  # closing the file frees the lock; the name stays, so nobody locks a deleted file


@contextlib.contextmanager
def _hold_remote(folder: str, owner: dict) -> Iterator[None]:
    uri = storage.join(folder, "lock.json")
    beat = _acquire_remote(uri, folder, owner)
    stop = threading.Event()

    def keep_alive(generation: int) -> None:
        body = _body(owner)
        while not stop.wait(HEARTBEAT_SECONDS):
            try:
                new = storage.write_if(uri, body, generation)
            except (
                Exception
            ) as e:  # a bucket that is away: the same body again, for it may have arrived
                log.warning("lock %s: no heartbeat (%s: %s)", uri, type(e).__name__, e)
                continue
            if new is None:
                os._exit(LOCKED)  # somebody took over: two writers would be worse than a hard end
            generation, body = new, _body(owner)

    thread = threading.Thread(target=keep_alive, args=(beat,), daemon=True, name="lock")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        _release_remote(uri, owner)


def _acquire_remote(uri: str, folder: str, owner: dict) -> int:
    generation = storage.write_if(uri, _body(owner), 0)
    if generation is not None:
        return generation
    text, seen = storage.read_versioned(uri)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        time.sleep(min(HEARTBEAT_SECONDS / 3, PATIENCE_SECONDS / 3))
        text, now = storage.read_versioned(uri)
        if now != seen:
            break
    else:
        generation = storage.write_if(uri, _body(owner), seen)
        if generation is not None:
            return generation
    if not text:
        return _acquire_remote(uri, folder, owner)
    raise Locked(_message(folder, text.decode()))


def _release_remote(uri: str, owner: dict) -> None:
    """Deletes the lock, unless heartbeats failed for so long that somebody else has it by now."""
    text, generation = storage.read_versioned(uri)
    # By its owner: the generation of a heartbeat whose answer was lost is not known here.
    if owner["id"] in text.decode():
        storage.delete(uri, generation)


def _body(owner: dict) -> bytes:
    return json.dumps(owner | {"beat": uuid.uuid4().hex}).encode()


def _message(folder: str, text: str) -> str:
    try:
        owner = json.loads(text)
        who = f"process {owner['pid']} on {owner['host']}"
    except (ValueError, KeyError):
        who = "another process"
    return f"{folder} is in use by {who}: wait for it or end it, then run again"
