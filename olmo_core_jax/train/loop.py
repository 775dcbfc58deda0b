"""The loop: batch, update, metrics, checkpoint. The step number is the one clock of all of them.

After checkpoint N the state holds N updates, the loader has given N batches, and the learning
rate of N was the last one used; a save checks that. While the device makes update n + 1, the host
fetches what update n reports.
"""

import logging
import time
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from olmo_core_jax import storage
from olmo_core_jax.checkpoint.store import CheckpointStore
from olmo_core_jax.data.instance_log import Line, digest
from olmo_core_jax.data.loader import Loader
from olmo_core_jax.errors import Diverged, Preempted
from olmo_core_jax.experiments.resume.plan import Interruption
from olmo_core_jax.optim.schedules import learning_rate
from olmo_core_jax.recipes.schema import Stage
from olmo_core_jax.signals import StopRequest
from olmo_core_jax.train.delivered import Delivered
from olmo_core_jax.train.mesh import global_batch
from olmo_core_jax.train.metrics import Meter, Update
from olmo_core_jax.train.resume import state_tree
from olmo_core_jax.train.run_log import LineLog, MetricsWriter
from olmo_core_jax.train.step import StepMetrics, TrainState
from olmo_core_jax.train.stopping import StopVote

log = logging.getLogger("olmo")

PATIENCE = 5
"""Updates in a row with a non-finite loss or gradient that end a run."""
PRINT_SECONDS = 5.0


class Dispatched(NamedTuple):
    """An update that was handed to the device; what it reports may not be there yet.

    instances: uint32[B] of the whole batch; tokens_digest: None where other processes hold a part.
    """

    step: int
    learning_rate: float
    metrics: StepMetrics
    vote: jax.Array | None
    data_seconds: float
    instances: jax.Array | np.ndarray
    tokens_digest: str | None


@dataclass
class Trainer:
    """One stage's training. identity: what its checkpoints say about recipe, model and data.

    metrics and instances are None on every process but the first.
    """

    stage: Stage
    mesh: Mesh
    step_fn: "jax.stages.Wrapped"
    state: TrainState
    loader: Loader
    store: CheckpointStore
    stop: StopRequest
    meter: Meter
    identity: dict
    metrics: MetricsWriter | None = None
    instances: LineLog | None = None
    skipped: int = 0
    interruption: Interruption | None = None
    last: Update | None = None
    _bad_in_a_row: int = field(default=0, init=False)
    _in_flight: deque = field(default_factory=deque, init=False)
    _began: float = field(default=0.0, init=False)
    _ended: float | None = field(default=None, init=False)
    _printed: float = field(default=0.0, init=False)
    _saving: dict[str, float] = field(default_factory=dict, init=False)
    _delivered: Delivered = field(init=False)

    def __post_init__(self):
        rows = self.loader.rows
        self._delivered = Delivered(self.mesh, self.stage.batch_instances, rows)

    def run(self) -> TrainState:
        """Trains to the stage's last update and returns the final state, saved and durable.

        Raises Preempted (a checkpoint of the last update is saved), Diverged, or JobError.
        """
        vote = StopVote(self.mesh) if jax.process_count() > 1 else None
        begun = step = int(self.state.step)
        self.stop.poll()
        self._began = time.monotonic()
        while step < self.stage.last_step:
            step += 1
            self._dispatch(step, vote)
            self._strike(step, "update")
            stop = self._settle(leave=1)
            if stop or self._is_saved(step):
                stop = self._settle(leave=0) or stop
                self._save(step)
            if stop:
                self.store.wait()
                raise Preempted(f"told to stop: checkpoint {step} is saved")
        self._settle(leave=0)
        if begun == step:
            self._log("nothing left to do: %d updates are made", step)
        self._save(step)
        self.store.wait()
        return self.state

    def _is_saved(self, step: int) -> bool:
        c = self.stage.checkpoints
        return step % c.every == 0 or step in c.landmarks or step == self.stage.last_step

    def _dispatch(self, step: int, vote: StopVote | None) -> None:
        """Hands update `step` to the device and returns at once."""
        asked = time.monotonic()
        number, ids, batch = next(self.loader)
        waited = time.monotonic() - asked
        if number != step:
            raise RuntimeError(f"the loader gave batch {number} for update {step}")
        rate = learning_rate(self.stage, step)
        whole = global_batch(self.mesh, self.stage.batch_instances, self.loader.rows, batch)
        self.state, metrics = self.step_fn(self.state, whole, np.float32(rate))
        cast = vote.cast(self.stop.requested) if vote else None
        alone = len(ids) == self.stage.batch_instances
        given = ids if alone else self._delivered.gather(ids)
        tokens = digest(batch.tokens) if alone and self.instances is not None else None
        self._in_flight.append(Dispatched(step, rate, metrics, cast, waited, given, tokens))

    def _settle(self, leave: int) -> bool:
        """Reports updates until `leave` are in flight. True: somebody asked to stop."""
        votes = 0
        while len(self._in_flight) > leave:
            done: Dispatched = self._in_flight.popleft()
            self._report(done)
            votes += 0 if done.vote is None else int(done.vote)
        # Several processes go by their votes alone, which all of them see alike.
        return votes > 0 or (self.stop.requested and jax.process_count() == 1)

    def _report(self, done: Dispatched) -> None:
        ce, z, norm, skipped, masked = (float(x) for x in jax.device_get(done.metrics))
        now = time.monotonic()
        seconds = None if self._ended is None else now - self._ended
        if seconds is None:
            self._log("the first update took %.1f s, compile included", now - self._began)
        self._ended = now
        update = Update(
            done.step,
            ce,
            z,
            norm,
            skipped,
            done.learning_rate,
            masked,
            done.data_seconds,
            seconds,
        )
        values = self.meter.values(update) | self._saving
        self._saving = {}
        self.last, self.skipped = update, self.skipped + int(skipped)
        if self.metrics is not None:
            self.metrics.write(done.step, values)
        if self.instances is not None:
            given = digest(np.asarray(done.instances))
            line = Line(done.step, self.instances.attempt, given, done.tokens_digest)
            self.instances.write(line.__dict__)
        if now - self._printed > PRINT_SECONDS or update.step == self.stage.last_step:
            self._log(self.meter.line(update))
            self._printed = now
        self._watch(update)

    def _watch(self, update: Update) -> None:
        self._bad_in_a_row = 0 if update.finite else self._bad_in_a_row + 1
        if self._bad_in_a_row < PATIENCE:
            return
        self.store.wait()
        good = self.store.latest_good()
        where = "none" if good is None else storage.join(self.store.directory, str(good))
        first = update.step - PATIENCE + 1
        raise Diverged(
            f"updates {first} to {update.step} had a non-finite loss or gradient; "
            f"last good checkpoint: {where}"
        )

    def _save(self, step: int) -> None:
        """Writes checkpoint `step` in the background; all counters have to agree with its name."""
        made, adam = int(self.state.step), int(self.state.opt.count)
        given = self.loader.step - 1
        if not made == given == step:
            raise RuntimeError(f"checkpoint {step}: {made} updates made, {given} batches given")
        for lines in (self.metrics, self.instances):
            if lines is not None:
                lines.flush()
        meta = {
            **self.identity,
            "tokens_seen": step * self.stage.batch_tokens,
            "adam_count": adam,
            "schedule_count": step,
            "skipped": self.skipped,
            "data": self.loader.state(),
        }
        began = time.monotonic()
        if self.store.save(step, state_tree(self.state), meta):
            self._saving = {"checkpoint/save_duration_s": time.monotonic() - began}
            self._log(
                "checkpoint %d: run step %d, schedule %d, Adam %d, batches %d, tokens %d",
                *(step, made, step, adam, given, meta["tokens_seen"]),
            )
            self._strike(step, "save")

    def _log(self, text: str, *values) -> None:
        if jax.process_index() == 0:
            log.info(text, *values)

    def _strike(self, step: int, moment) -> None:
        if self.interruption is not None:
            self.interruption.strike(step, moment)
