"""What an update reports, by OLMo-core's names: to metrics.jsonl, TensorBoard and the log.

One line an update and attempt; nothing is ever rewritten. After a kill the updates since the last
checkpoint are made, and logged, again with the next attempt number.
"""

import json
import logging
import math
import time
from dataclasses import dataclass, field
from typing import Any, cast

from olmo_core_jax import storage
from olmo_core_jax.chips import peak_flops
from olmo_core_jax.recipes.schema import Model, Stage
from olmo_core_jax.train.flops import training_flops

log = logging.getLogger("olmo")

PPL_BELOW = 10.0
"""OLMo-core leaves the perplexity out where the cross-entropy is above this."""
FLUSH_SECONDS = 30.0
"""How long lines for a bucket are gathered; local ones are written one by one."""
TAIL = 1 << 16


class LineLog:
    """Appends JSON objects, a line each, to a file or object. `attempt` counts its writers."""

    def __init__(self, uri: str):
        self.uri = uri
        tail = _tail(uri)
        self.attempt = 1 + max((_attempt(line) for line in tail.split(b"\n")), default=0)
        # A writer that was killed may have left half a line.
        self._pending = b"\n" if tail and not tail.endswith(b"\n") else b""
        self._flushed = time.monotonic()

    def write(self, row: dict) -> None:
        self._pending += (json.dumps(row) + "\n").encode()
        late = time.monotonic() - self._flushed > FLUSH_SECONDS
        if late or not storage.is_remote(self.uri):
            self.flush()

    def flush(self) -> None:
        """Everything written so far survives the process."""
        if self._pending:
            storage.append(self.uri, self._pending)
        self._pending, self._flushed = b"", time.monotonic()


def _tail(uri: str) -> bytes:
    try:
        size = storage.size(uri)
    except FileNotFoundError:
        if not storage.is_remote(uri):
            storage.local_path(uri).parent.mkdir(parents=True, exist_ok=True)
        return b""
    return storage.read_bytes(uri, max(0, size - TAIL), min(size, TAIL)) if size else b""


def _attempt(line: bytes) -> int:
    try:
        return int(json.loads(line)["attempt"])
    except (ValueError, KeyError, TypeError):
        return 0  # half a line


class MetricsWriter:
    """metrics.jsonl and TensorBoard events under one folder. For the first process only.

    Events are written below tensorboardX's SummaryWriter, which would rewrite OLMo-core's names.
    """

    def __init__(self, folder: str, first_step: int):
        from tensorboardX import FileWriter
        from tensorboardX.proto import event_pb2

        events = cast(Any, event_pb2)  # protobuf makes the classes when it is imported
        self._lines = LineLog(storage.join(folder, "metrics.jsonl"))
        self.attempt = self._lines.attempt
        self._board = FileWriter(folder, flush_secs=30)
        # TensorBoard forgets what an earlier attempt logged from here on.
        self._board.add_event(events.Event(step=first_step, file_version="brain.Event:2"))
        start = events.SessionLog(status=events.SessionLog.START)
        self._board.add_event(events.Event(step=first_step, session_log=start))

    def write(self, step: int, values: dict[str, float]) -> None:
        """One update's values; floats keep all their digits."""
        from tensorboardX.proto import summary_pb2

        summary = cast(Any, summary_pb2).Summary
        self._lines.write({"step": step, "attempt": self.attempt, **values})
        entries = [summary.Value(tag=name, simple_value=v) for name, v in values.items()]
        self._board.add_summary(summary(value=entries), step)

    def flush(self) -> None:
        self._lines.flush()

    def close(self) -> None:
        self._lines.flush()
        self._board.close()


@dataclass(frozen=True)
class Update:
    """What is known about an update once the device has made it. Times in seconds."""

    step: int
    ce_loss: float
    z_loss: float
    grad_norm: float
    skipped: float
    learning_rate: float
    masked: float = 0.0
    data_seconds: float = 0.0
    seconds: float | None = None

    @property
    def finite(self) -> bool:
        return math.isfinite(self.ce_loss) and math.isfinite(self.grad_norm)


@dataclass
class Meter:
    """Turns updates into named metrics. devices: of the whole job; kind: JAX's device_kind.

    seconds of an update: from the end of the update before it to its own end, absent for a
    process's first update, which holds the compile.
    """

    model: Model
    stage: Stage
    devices: int
    kind: str
    _seconds: float = field(default=0.0, init=False)
    _updates: int = field(default=0, init=False)

    def __post_init__(self):
        self._flops = training_flops(self.model, self.stage.data.sequence_length)
        self._peak = peak_flops(self.kind)

    def values(self, u: Update) -> dict[str, float]:
        """The update's metrics by OLMo-core's names, with the published reproduction's extras."""
        tokens = u.step * self.stage.batch_tokens
        values = {"train/CE loss": u.ce_loss}
        if u.ce_loss < PPL_BELOW:
            values["train/PPL"] = math.exp(u.ce_loss)
        if self.stage.loss.z_loss:
            values["train/Z loss"] = u.z_loss
            values["train/Z loss unscaled"] = u.z_loss / self.stage.loss.z_loss
        if self.stage.data.repetition_filter:
            values["train/masked instances (%)"] = u.masked
        values |= {
            "optim/total grad norm": u.grad_norm,
            "optim/LR (group 0)": u.learning_rate,
            "optim/LR (group 1)": u.learning_rate,
            "optim/step skipped": int(u.skipped),
            "optim/step_skipped": int(u.skipped),
            "throughput/total tokens": tokens,
            "perf/total_tokens": tokens,
            "throughput/total petaflops": tokens * self._flops / 1e15,
            "throughput/device/data loading (s)": u.data_seconds,
        }
        return values | (self._speed(u) if u.seconds else {})

    def _speed(self, u: Update) -> dict[str, float]:
        seconds = max(u.seconds or 0.0, 1e-9)
        self._seconds, self._updates = self._seconds + seconds, self._updates + 1
        now = self.stage.batch_tokens / seconds / self.devices
        average = self.stage.batch_tokens * self._updates / self._seconds / self.devices
        values = {
            "throughput/device/TPS": now,
            "throughput/device/TPS (actual avg)": average,
            "throughput/device/BPS": 1 / seconds,
            "throughput/device/BPS (actual avg)": self._updates / self._seconds,
            "throughput/device/flopsPS": now * self._flops,
            "throughput/device/flopsPS (actual avg)": average * self._flops,
            "throughput/device/data loading (%)": 100 * u.data_seconds / seconds,
        }
        if self._peak:
            values["throughput/device/MFU"] = 100 * now * self._flops / self._peak
            values["throughput/device/MFU (actual avg)"] = 100 * average * self._flops / self._peak
        return values

    @property
    def tokens_per_second(self) -> float | None:
        """Of the whole job, averaged over this process's updates; None before the second one."""
        done = self.stage.batch_tokens * self._updates
        return done / self._seconds if self._seconds else None

    @property
    def mfu(self) -> str:
        """Model FLOPs utilisation in percent; `unknown` for a chip without a published peak."""
        rate = self.tokens_per_second
        if not self._peak or not rate:
            return "unknown"
        return f"{100 * rate * self._flops / self._peak / self.devices:.2f}"

    def line(self, u: Update) -> str:
        """The update as people read it, with the time that is left."""
        rate = self.tokens_per_second
        left = self.stage.batch_tokens * (self.stage.last_step - u.step)
        speed = f", {rate:,.0f} tokens/s, {_clock(left / rate)} left" if rate else ""
        skipped = ", SKIPPED" if u.skipped else ""
        return (
            f"update {u.step}/{self.stage.last_step}: CE {u.ce_loss:.4f}, "
            f"gradient norm {u.grad_norm:.3f}, LR {u.learning_rate:.3e}{skipped}{speed}"
        )


def _clock(seconds: float) -> str:
    minutes, s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return (f"{days} d " if days else "") + f"{hours}:{minutes:02d}:{s:02d}"
