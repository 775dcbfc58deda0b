"""What an update reports, by OLMo-core's names."""

import math
from dataclasses import dataclass, field

from olmo_core_jax.hardware.chips import peak_flops
from olmo_core_jax.hardware.flops import training_flops
from olmo_core_jax.recipes.schema import Model, Stage

PPL_BELOW = 10.0
"""OLMo-core leaves the perplexity out where the cross-entropy is above this."""


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
