"""The files that a run grows by appending: metrics.jsonl, instances.jsonl, TensorBoard events.

One line an update and attempt; nothing is ever rewritten. After a kill the updates since the last
checkpoint are made, and logged, again with the next attempt number. Only the first process writes.
"""

import json
import os
import socket
import struct
import time
from typing import Any, cast

from olmo_core_jax import storage

FLUSH_SECONDS = 30.0
"""How long what goes to a bucket is gathered; on a disk every update is written at once."""
TAIL = 1 << 16


class Appender:
    """Adds bytes to the end of one file or gs:// object."""

    def __init__(self, uri: str):
        self.uri = uri
        self._pending = b""
        self._flushed = time.monotonic()
        storage.make_folder_of(uri)

    def add(self, data: bytes) -> None:
        self._pending += data
        late = time.monotonic() - self._flushed > FLUSH_SECONDS
        if late or not storage.is_remote(self.uri):
            self.flush()

    def flush(self) -> None:
        """Everything added so far survives the process."""
        if self._pending:
            storage.append(self.uri, self._pending)
        self._pending, self._flushed = b"", time.monotonic()


class LineLog(Appender):
    """JSON objects, a line each. attempt: this writer's number, counted in the file."""

    def __init__(self, uri: str):
        super().__init__(uri)
        tail = _tail(uri)
        self.attempt = 1 + max((_attempt(line) for line in tail.split(b"\n")), default=0)
        # A writer that was killed may have left half a line.
        self._pending = b"\n" if tail and not tail.endswith(b"\n") else b""

    def write(self, row: dict) -> None:
        """Appends one object; floats keep all their digits."""
        self.add((json.dumps(row) + "\n").encode())


def _tail(uri: str) -> bytes:
    try:
        size = storage.size(uri)
    except FileNotFoundError:
        return b""
    return storage.read_bytes(uri, max(0, size - TAIL), min(size, TAIL)) if size else b""


def _attempt(line: bytes) -> int:
    try:
        return int(json.loads(line)["attempt"])
    except (ValueError, KeyError, TypeError):
        return 0  # half a line


class EventLog(Appender):
    """A TensorBoard event file with the metrics' exact names.

    tensorboardX's own writer would replace the spaces in OLMo-core's names, and upload the whole
    file again and again to a bucket; its event types and checksums are used here.
    """

    def __init__(self, folder: str, first_step: int):
        from tensorboardX.proto import event_pb2, summary_pb2

        # Protobuf makes its classes when it is imported: no type checker sees them.
        self._events, self._summaries = cast(Any, event_pb2), cast(Any, summary_pb2)
        name = f"events.out.tfevents.{time.time():.3f}.{socket.gethostname()}.{os.getpid()}"
        super().__init__(storage.join(folder, name))
        self._record(first_step, file_version="brain.Event:2")
        # TensorBoard forgets what an earlier attempt logged from here on.
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._record(first_step, session_log=start)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Appends one update's scalars."""
        summary = self._summaries.Summary
        entries = [summary.Value(tag=name, simple_value=v) for name, v in values.items()]
        self._record(step, summary=summary(value=entries))

    def _record(self, step: int, **content) -> None:
        """An event in a TFRecord: length, its checksum, the data, its checksum."""
        from tensorboardX.record_writer import masked_crc32c

        data = self._events.Event(wall_time=time.time(), step=step, **content).SerializeToString()
        length = struct.pack("<Q", len(data))
        sums = [struct.pack("<I", masked_crc32c(part)) for part in (length, data)]
        self.add(length + sums[0] + data + sums[1])


class MetricsWriter:
    """metrics.jsonl and TensorBoard events under one folder."""

    def __init__(self, folder: str, first_step: int):
        self._lines = LineLog(storage.join(folder, "metrics.jsonl"))
        self._events = EventLog(folder, first_step)
        self.attempt = self._lines.attempt

    def write(self, step: int, values: dict[str, float]) -> None:
        """One update's values by name."""
        self._lines.write({"step": step, "attempt": self.attempt, **values})
        self._events.write(step, values)

    def flush(self) -> None:
        """Everything written so far survives the process."""
        self._lines.flush()
        self._events.flush()
