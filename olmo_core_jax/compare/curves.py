"""Per-update curves: our metrics.jsonl, the reference's CSV, and the gaps between them.

A curve is `Rows`: update number (from 1) -> metric name -> value. Names are OLMo-core's.
"""

import csv
import io
import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from olmo_core_jax import storage
from olmo_core_jax.errors import UserError

CE = "train/CE loss"
Z = "train/Z loss"
GRAD_NORM = "optim/total grad norm"
GRAD_NORM_FP64 = "optim/total grad norm (fp64)"
LR = "optim/LR (group 0)"
SKIPPED = "optim/step skipped"
TPS = "throughput/device/TPS"
BPS = "throughput/device/BPS"

ALIASES = {"Step": "step", "_step": "step", "optim/LR": LR}
"""Other spellings of columns in published CSVs."""

REPEATABLE = (CE, Z, GRAD_NORM, LR, SKIPPED)
"""What a repeated update has to give again, to the last bit."""

BLOCK = 2**24
"""Bytes of a log that are read at once."""

KEPT = (*REPEATABLE, TPS, BPS)
"""What is kept of our own metrics: a run of a million updates has to fit into a card's process."""

Rows = dict[int, dict[str, float]]


def read_csv(uri: str) -> Rows:
    """A reference curve: a header with `step` and metric names, a row an update.

    Empty cells are left out.
    Raises UserError that names the file and the line.
    """
    try:
        table = csv.DictReader(io.StringIO(storage.read_text(uri)))
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"reference curve {uri} cannot be read: {e}") from None
    rows: Rows = {}
    for line in table:
        named = {ALIASES.get(k, k): v for k, v in line.items() if k and v}
        try:
            step = int(float(named.pop("step")))
            rows[step] = {k: float(v) for k, v in named.items()}
        except (KeyError, ValueError) as e:
            reason = "there is no column `step`" if isinstance(e, KeyError) else str(e)
            raise UserError(f"reference curve {uri}, line {table.line_num}: {reason}") from None
    if not rows:
        raise UserError(f"reference curve {uri} holds no updates")
    return rows


@dataclass
class Metrics:
    """What a run has logged so far. rows: the newest attempt of every update."""

    rows: Rows = field(default_factory=dict)
    attempt_of: dict[int, int] = field(default_factory=dict)
    attempts: set[int] = field(default_factory=set)
    repeated: set[int] = field(default_factory=set)
    repeat_difference: float = 0.0
    torn_lines: int = 0

    @property
    def last_step(self) -> int:
        return max(self.rows, default=0)

    def add(self, row: dict) -> None:
        """One logged update; a step that is known already counts as repeated."""
        step = int(row["step"])
        values = {k: float(row[k]) for k in KEPT if isinstance(row.get(k), int | float)}
        attempt = int(row.get("attempt", 1))
        self.attempts.add(attempt)
        before = self.rows.get(step)
        if before is not None:
            self.repeated.add(step)
            self.repeat_difference = max(self.repeat_difference, _difference(before, values))
        if before is None or attempt >= self.attempt_of[step]:
            self.rows[step], self.attempt_of[step] = values, attempt


class MetricsReader:
    """Follows a metrics.jsonl that is still being written: read() takes in only what is new."""

    def __init__(self, uri: str):
        self.uri = uri
        self.metrics = Metrics()
        self._offset = 0
        self._rest = b""

    def read(self) -> Metrics:
        """All updates logged so far; none where the file does not exist yet."""
        try:
            size = storage.size(self.uri)
        except FileNotFoundError:
            return self.metrics
        while size > self._offset:
            length = min(size - self._offset, BLOCK)
            new = storage.read_bytes(self.uri, start=self._offset, length=length)
            if not new:
                break
            self._offset += len(new)
            *lines, self._rest = (self._rest + new).split(b"\n")
            for line in lines:
                self._take(line)
        return self.metrics

    def _take(self, line: bytes) -> None:
        row = _parse(line)
        if row is None:
            self.metrics.torn_lines += bool(line.strip())
        else:
            self.metrics.add(row)


def read_metrics(uri: str) -> Metrics:
    """A whole metrics.jsonl."""
    return MetricsReader(uri).read()


class Gap(NamedTuple):
    """Signed differences a - b of one metric (over |b| where relative), at updates of both."""

    metric: str
    steps: list[int]
    values: list[float]

    @property
    def largest(self) -> float:
        """max |difference|; NaN where one is NaN, or where nothing was compared."""
        sizes = [abs(v) for v in self.values]
        if not sizes or any(v != v for v in sizes):
            return float("nan")
        return max(sizes)

    @property
    def at(self) -> int:
        """The update with the largest difference (0: none was compared)."""
        sizes = [abs(v) if v == v else float("inf") for v in self.values]
        return self.steps[sizes.index(max(sizes))] if sizes else 0

    def up_to(self, step: int) -> "Gap":
        pairs = [(s, v) for s, v in zip(self.steps, self.values, strict=True) if s <= step]
        return Gap(self.metric, [s for s, _ in pairs], [v for _, v in pairs])


def gap(a: Rows, b: Rows, metric: str, relative: bool = False, b_metric: str | None = None) -> Gap:
    """Differences of `metric` in a and `b_metric` (default: the same) in b, by update."""
    other = b_metric or metric
    steps = sorted(s for s in a.keys() & b.keys() if metric in a[s] and other in b[s])
    pairs = [(a[s][metric], b[s][other]) for s in steps]
    return Gap(metric, steps, [_relative(x, y) if relative else x - y for x, y in pairs])


def rolling_max(values: Sequence[float], reach: int) -> list[float]:
    """The largest of each value and its `reach` neighbours on both sides."""
    out = []
    window: deque[int] = deque()  # indices of falling values
    for i in range(len(values) + reach):
        if i < len(values):
            while window and values[window[-1]] <= values[i]:
                window.pop()
            window.append(i)
        if i >= reach:
            if window[0] < i - 2 * reach:
                window.popleft()
            out.append(values[window[0]])
    return out


def skipped(rows: Rows) -> set[int]:
    """The updates that the optimizer skipped."""
    return {step for step, row in rows.items() if row.get(SKIPPED)}


def read_digests(uri: str) -> dict[int, str]:
    """A reference's batches: CSV of step and sha256 of the update's token ids."""
    try:
        table = csv.DictReader(io.StringIO(storage.read_text(uri)))
        return {int(line["step"]): line["sha256"].strip().lower() for line in table}
    except (OSError, KeyError, ValueError, AttributeError) as e:
        raise UserError(
            f"reference batches {uri}: columns `step` and `sha256` are expected ({e})"
        ) from None


def read_instances(uri: str) -> tuple[dict[int, str], int]:
    """Our batches' token digests by update, and how many repeats had other tokens than before."""
    digests: dict[int, str] = {}
    changed = 0
    try:
        lines = storage.read_bytes(uri).split(b"\n")
    except FileNotFoundError:
        return {}, 0
    for row in filter(None, map(_parse, lines)):
        step, digest = int(row["step"]), str(row.get("tokens_digest", "")).lower()
        changed += digests.get(step, digest) != digest
        digests[step] = digest
    return digests, changed


def _parse(line: bytes) -> dict | None:
    """A line's object; where a killed writer left half a line, the object after the half."""
    for start in (0, line.rfind(b'{"step"')):
        try:
            row = json.loads(line[max(start, 0) :])
        except ValueError:
            continue
        if isinstance(row, dict) and "step" in row:
            return row
    return None


def _difference(a: dict[str, float], b: dict[str, float]) -> float:
    """Largest |difference| of what has to repeat; infinite where only one is a number."""
    sizes = [
        abs(a[k] - b[k])
        for k in REPEATABLE
        if k in a and k in b and a[k] != b[k] and (a[k] == a[k] or b[k] == b[k])
    ]
    return max((s if s == s else float("inf") for s in sizes), default=0.0)


def _relative(x: float, y: float) -> float:
    if x == y:
        return 0.0
    return (x - y) / abs(y) if y else float("inf")
