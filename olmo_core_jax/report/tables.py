"""Tables of a report, as Markdown for cards and as HTML for the page."""

import html
from collections.abc import Mapping
from dataclasses import dataclass

from olmo_core_jax.compare import checks
from olmo_core_jax.compare.checks import Verdict
from olmo_core_jax.compare.curves import TPS
from olmo_core_jax.report.run import Run
from olmo_core_jax.report.svg import short
from olmo_core_jax.stages import LANDMARKS, PIPELINE
from olmo_core_jax.terminal import text_table

MARKS = {"pass": "✓ pass", "FAIL": "✗ **FAIL**", "not measured": "… not measured"}


class Badge(str):
    """A cell that holds a verdict's word."""


@dataclass(frozen=True)
class Table:
    """The first column is text, the others are numbers (right-aligned) unless named in `texts`."""

    columns: list[str]
    rows: list[list[str]]
    texts: tuple[str, ...] = ()

    def _numeric(self, i: int) -> bool:
        return i > 0 and self.columns[i] not in self.texts

    def markdown(self) -> str:
        line = ["---:" if self._numeric(i) else ":---" for i in range(len(self.columns))]
        # A card's narrow cells would break 1e-6 at its hyphen: U+2011 holds it together.
        rows = [
            [MARKS[c] if isinstance(c, Badge) else c.replace("e-", "e\u2011") for c in row]
            for row in self.rows
        ]
        escaped = [[c.replace("|", "\\|") for c in row] for row in [self.columns, line, *rows]]
        return "\n".join(f"| {' | '.join(row)} |" for row in escaped)

    def html(self) -> str:
        head = "".join(
            f"<th{' class=number' if self._numeric(i) else ''}>{html.escape(c)}</th>"
            for i, c in enumerate(self.columns)
        )
        body = "".join(
            f"<tr>{''.join(self._cell(i, c) for i, c in enumerate(row))}</tr>" for row in self.rows
        )
        return (
            f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
            f"<tbody>{body}</tbody></table></div>"
        )

    def _cell(self, i: int, text: str) -> str:
        if isinstance(text, Badge):
            return f'<td><span class="badge {text.split()[0].lower()}">{text}</span></td>'
        return f"<td{' class=number' if self._numeric(i) else ''}>{html.escape(text)}</td>"


def number(value: float | None) -> str:
    """Whole numbers with separators, small and large ones with three digits."""
    if value is None:
        return "–"
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return short(value)


def loss(value: float | None) -> str:
    return "–" if value is None else f"{value:.6f}"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.3f}%"


def seconds(value: float | None) -> str:
    """A duration: 4.2 s, 3 min 05 s, 2 h 07 min, 12 d 3 h."""
    if value is None:
        return "–"
    if value < 60:
        return f"{value:.1f} s"
    units = [("d", 86400), ("h", 3600), ("min", 60), ("s", 1)]
    i = next(i for i, (_, size) in enumerate(units) if value >= size)
    (big, n), (small, m) = units[i], units[i + 1]
    return f"{int(value // n)} {big} {int(value % n // m):02d} {small}"


def verdict_table(verdicts: list[Verdict]) -> Table:
    """Each check: measured, limit, verdict."""
    rows = []
    for v in verdicts:
        c = v.check
        show = percent if c.figure.endswith(checks.TOP1) else number
        sign = "=" if not c.limit else "≤" if c.sense == "at most" else "≥"
        where = f" (update {v.update})" if v.update and v.measured else ""
        rows.append([c.title + where, show(v.measured), f"{sign} {show(c.limit)}", Badge(v.word)])
    return Table(["check", "measured", "limit", "verdict"], rows, texts=("verdict",))


def verdict_text(verdicts: list[Verdict]) -> str:
    """The same for a terminal: a line a check."""
    return text_table(
        [(w, title, f"{m} ({limit})") for title, m, limit, w in verdict_table(verdicts).rows]
    )


def landmark_table(results: Mapping[str, Mapping[str, float]]) -> Table:
    """Held-out loss by domain, KL and top-1 agreement; a row a checkpoint (name -> figures)."""
    domains = sorted({d for f in results.values() for d in heldout_domains(f)})
    columns = ["checkpoint", *domains, "largest |Δ|", "KL mean", "KL max", "top-1 agreement"]
    rows = []
    for name, f in results.items():
        losses = [_four(f.get(f"heldout/{d}/CE loss")) for d in domains]
        compared = [number(f.get(k)) for k in (checks.HELDOUT, checks.KL_MEAN, checks.KL_MAX)]
        rows.append([name, *losses, *compared, percent(f.get(checks.TOP1))])
    return Table(columns, rows)


def heldout_table(figures: Mapping[str, float]) -> Table:
    """One checkpoint's held-out loss against the reference's, a row a domain."""
    rows = []
    for domain in heldout_domains(figures):
        ours = figures.get(f"heldout/{domain}/CE loss")
        theirs = figures.get(f"heldout/{domain}/CE loss (reference)")
        difference = None if ours is None or theirs is None else ours - theirs
        rows.append([domain, loss(ours), loss(theirs), number(difference)])
    return Table(["held-out domain", "ours", "reference", "difference"], rows)


def heldout_domains(figures: Mapping[str, float]) -> list[str]:
    return sorted(
        k.split("/")[1] for k in figures if k.startswith("heldout/") and k.endswith("loss")
    )


def task_table(figures: Mapping[str, float]) -> Table:
    """lm-evaluation-harness results, ours and the reference's."""
    rows = []
    for name, ours in sorted(figures.items()):
        if not name.startswith("lm_eval/") or name.endswith("(reference)"):
            continue
        _, task, metric = name.split("/", 2)
        theirs = figures.get(f"{name} (reference)")
        difference = None if theirs is None else ours - theirs
        rows.append([task, metric, f"{ours:.4f}", _four(theirs), number(difference)])
    return Table(["task", "metric", "ours", "reference", "difference"], rows, texts=("metric",))


def _four(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def timing_table(run: Run) -> Table:
    """Seconds of each finished stage, and the trainers' speed."""
    rows = []
    for name in (stage.name for stage in PIPELINE):
        results = [run.results[name]] if name in run.results else []
        if name == LANDMARKS:
            results = list(run.landmarks.values())
        took = sum(r.seconds for r in results) if results else None
        rows.append([name.replace("_", " "), seconds(took), _speed(run, name)])
    return Table(["stage", "time", "tokens/s a device (median)"], rows)


def _speed(run: Run, folder: str) -> str:
    comparison = run.stages.get(folder.removesuffix("_train"))
    rates = (
        sorted(r[TPS] for r in comparison.metrics.rows.values() if TPS in r) if comparison else []
    )
    return f"{rates[len(rates) // 2]:,.0f}" if rates else ""


def version_table(run: Run) -> Table:
    return Table(
        ["software", "version"], [[k, v] for k, v in sorted(run.versions.items())], ("version",)
    )


def notes_table(figures: Mapping[str, float], notes: Mapping[str, str]) -> Table:
    """A stage's own figures and notes, as they are."""
    rows = [[k, number(v)] for k, v in figures.items()] + [[k, v] for k, v in notes.items()]
    return Table(["what", "value"], rows, texts=() if figures else ("value",))
