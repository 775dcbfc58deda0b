"""SIGTERM at any moment ends a job with PREEMPTED inside its grace period, also while XLA compiles.

Python runs signal handlers only between bytecodes, so a compile of minutes would swallow the signal. The C-level wake-up
file descriptor is written at once; a watcher thread reads it and ends the process when the grace is over. And Python
swallows what a handler raises inside a destructor or a callback of the garbage collector (JAX has one): it says so to
sys.unraisablehook, and the watcher sends the signal again.
"""

import logging
import os
import signal
import socket
import sys
import threading
import time

from olmo_core_jax.errors import PREEMPTED, Preempted

log = logging.getLogger(__name__)

AGAIN_SECONDS = 0.02
"""Before a swallowed signal is sent again, so that it does not meet the same destructor."""


class StopNow(BaseException):
    """Raised by the signal handler. No Exception: logging, and many a library, would swallow one."""


class StopRequest:
    """Has somebody asked this job to stop?

    Before `poll()` is called a signal raises StopNow in the main thread. After it, the job looks at `requested`
    between its steps, saves, and raises Preempted itself.
    """

    def __init__(self, grace_seconds: float):
        self.grace_seconds = grace_seconds
        self._event = threading.Event()
        self._polling = False
        self._raised = False
        self._swallowed = threading.Event()

    @property
    def requested(self) -> bool:
        return self._event.is_set()

    def poll(self) -> None:
        """From now on the job itself watches `requested`."""
        self._polling = True
        self.check()

    def check(self) -> None:
        """Raises Preempted if a stop was requested."""
        if self.requested:
            raise Preempted("told to stop")

    def request(self) -> None:
        """Ask for a stop from inside (a maintenance notice, a test)."""
        self._event.set()

    def install(self) -> "StopRequest":
        """Takes SIGTERM. Main thread only."""
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._handle)
        sys.unraisablehook = self._unraisable
        threading.Thread(
            target=self._watch, args=(reader, writer), daemon=True, name="grace"
        ).start()
        return self

    def _handle(self, signum, frame):
        self._event.set()
        if not self._polling and not self._raised:  # a second signal must not break the ending
            self._raised = True
            raise StopNow("told to stop")

    def _unraisable(self, unraisable) -> None:
        if unraisable.exc_type is StopNow:
            self._swallowed.set()
        else:
            sys.__unraisablehook__(unraisable)

    def _watch(self, reader: socket.socket, writer: socket.socket) -> None:
        while signal.SIGTERM not in reader.recv(16):
            pass
        self._event.set()
        deadline = time.monotonic() + self.grace_seconds
        while (left := deadline - time.monotonic()) > 0:
            if self._swallowed.wait(left):
                time.sleep(AGAIN_SECONDS)
                self._swallowed.clear()
                self._raised = False
                os.kill(os.getpid(), signal.SIGTERM)
        log.warning("grace of %.0f s is over: leaving with the last checkpoint", self.grace_seconds)
        logging.shutdown()
        os._exit(PREEMPTED)


def grace_from_environment() -> float:
    """Seconds between SIGTERM and a hard exit: OLMO_GRACE_SECONDS, default 25 (Kubernetes kills at 30)."""
    return float(os.environ.get("OLMO_GRACE_SECONDS", "25"))
