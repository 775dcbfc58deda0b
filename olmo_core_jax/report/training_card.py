"""The live card of a training stage: progress with ETA, loss and its gap, norm, LR, speed."""

from olmo_core_jax import storage
from olmo_core_jax.compare import checks, curves
from olmo_core_jax.compare.curves import MetricsReader
from olmo_core_jax.compare.stage import StageComparison, from_reference
from olmo_core_jax.recipes import Recipe
from olmo_core_jax.report import segments, tables, vega
from olmo_core_jax.stages import train_folder


class Training:
    """Progress with ETA, loss against the reference with its gap, gradient norm, LR, speed."""

    def __init__(self, recipe: Recipe, stage: str):
        from metaflow.cards import Markdown, ProgressBar, VegaChart

        self.stage = stage
        section = recipe.stage(stage)
        self.last_step, self.batch_tokens = section.last_step, section.batch_tokens
        self._reference = section.reference
        self._reader: MetricsReader | None = None
        self._comparison: StageComparison | None = None
        self._progress = ProgressBar(max=self.last_step, label="updates", metadata="starting")
        self._status = Markdown("")
        self._charts = {name: VegaChart(vega.lines(name, {})) for name in self._names()}
        title = Markdown(f"# {recipe.name}: {stage.replace('stage', 'stage ')}")
        self._segments = Markdown("")
        charts = self._charts.values()
        self.components = [title, self._progress, self._status, self._segments, *charts]

    def update(self, run_root: str) -> None:
        uri = storage.join(run_root, train_folder(self.stage), "metrics", "metrics.jsonl")
        if self._reader is None or self._reader.uri != uri:
            self._reader, self._comparison = MetricsReader(uri), None
        metrics = self._reader.read()
        if self._comparison is None:
            self._comparison = self._start(metrics)
        c = self._comparison
        self._progress.update(metrics.last_step, metadata=eta(metrics, self.last_step))
        self._status.update(status(c))
        found = segments.segments(
            metrics, segments.read_attempts(run_root, train_folder(self.stage))
        )
        self._segments.update(segments.table(found).markdown() if found else "")
        for chart, spec in zip(self._charts.values(), self._specs(c), strict=True):
            chart.update(spec)

    def _start(self, metrics: curves.Metrics) -> StageComparison:
        if self._reference is None:
            return StageComparison(self.stage, metrics, {}, last_step=self.last_step)
        return from_reference(self.stage, metrics, self._reference, self.last_step)

    def _names(self) -> list[str]:
        gap = (
            ["|difference| in CE loss (points) over the reference's own noise"]
            if self._reference
            else []
        )
        return ["CE loss", *gap, "Gradient norm", "Learning rate", "Tokens a second and device"]

    def _specs(self, c: StageComparison) -> list[dict]:
        names = iter(self._names())
        specs = [vega.lines(next(names), overlay(c, curves.CE))]
        if self._reference:
            specs.append(gap_chart(next(names), c))
        specs += [
            vega.lines(next(names), overlay(c, curves.GRAD_NORM)),
            vega.lines(next(names), overlay(c, curves.LR)),
            vega.lines(next(names), {"this run": vega.curve(c.metrics.rows, curves.TPS)}),
        ]
        return specs


def gap_chart(title: str, c: StageComparison) -> dict:
    """|CE difference| of the run so far, over the reference's own noise."""
    noise = c.band(curves.CE).up_to(max(1, c.metrics.last_step))
    return vega.gaps(title, c.gap(curves.CE), noise, checks.limit_of(c.name, checks.CE))


def overlay(c: StageComparison, metric: str) -> vega.Lines:
    """Both runs' values of one metric."""
    ours = {"this run": vega.curve(c.metrics.rows, metric)}
    return ({"reference": vega.curve(c.reference, metric)} if c.reference else {}) | ours


def eta(metrics: curves.Metrics, last_step: int) -> str:
    """The time that the remaining updates take at the median speed of the last 50, as text."""
    left = last_step - metrics.last_step
    if left <= 0:
        return "done"
    newest = sorted(metrics.rows)[-50:]
    rates = sorted(metrics.rows[s][curves.BPS] for s in newest if metrics.rows[s].get(curves.BPS))
    if not rates:
        return "starting" if not newest else "running"
    rate = rates[len(rates) // 2]
    return f"{tables.seconds(left / rate)} left at {rate:.3g} updates/s"


def status(c: StageComparison) -> str:
    """The newest update in one paragraph."""
    if not c.metrics.rows:
        return "No update yet: the job is starting, or compiling."
    step = c.metrics.last_step
    row = c.metrics.rows[step]
    parts = [f"Update **{step:,}**: CE loss **{row.get(curves.CE, float('nan')):.6f}**"]
    gap = c.gap(curves.CE)
    if gap.values:
        parts.append(
            "largest difference from the reference "
            f"**{tables.number(gap.largest)}** (update {gap.at})"
        )
    if c.metrics.repeated:
        parts.append(
            f"{len(c.metrics.repeated)} updates repeated after a restart, "
            f"largest difference {tables.number(c.metrics.repeat_difference)}"
        )
    skipped = len(curves.skipped(c.metrics.rows))
    return "; ".join([*parts, f"{skipped} skipped"]) + "."
