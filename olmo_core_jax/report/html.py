"""report.html: the whole comparison on one page that needs nothing but itself."""

import html

from olmo_core_jax import storage
from olmo_core_jax.compare import checks
from olmo_core_jax.compare.stage import EARLY, StageComparison
from olmo_core_jax.report import tables
from olmo_core_jax.report.charts import SCRIPT, stage_figure
from olmo_core_jax.report.run import Run, read_run
from olmo_core_jax.report.style import CSS
from olmo_core_jax.stages import FINAL

TITLES = {"stage1": "Stage 1: pre-training", "stage2": "Stage 2: mid-training"}


def page_uri(run_root: str) -> str:
    """Where a run's report page is."""
    return storage.join(run_root, FINAL, "report.html")


def write(run_root: str, output: str | None = None) -> str:
    """Writes the page (default: to page_uri) from what the run has left; returns where."""
    where = output or page_uri(run_root)
    storage.write_text(where, page(read_run(run_root)))
    return where


def page(run: Run) -> str:
    """The page as text."""
    name = html.escape(run.recipe.name)
    sections = [_header(run), _verdict(run), _tiles(run)]
    sections += [_start(run), _stage(run, "stage1"), _landmarks(run), _between(run)]
    sections += [_stage(run, "stage2"), _final(run), _checks(run), _provenance(run)]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{name}: reproduction</title>"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{CSS}</style></head><body><main>{''.join(sections)}</main>"
        f"<script>{SCRIPT}</script></body></html>"
    )


def _header(run: Run) -> str:
    m = run.recipe.model
    shape = f"{m.n_layers} layers, width {m.d_model}, {m.vocab_size:,} tokens of vocabulary"
    return (
        f'<header><p class="eyebrow">Reproduction report</p><h1>{html.escape(run.recipe.name)}</h1>'
        f"<p>{html.escape(run.recipe.description.rstrip('. '))}: {shape}.</p></header>"
    )


def _verdict(run: Run) -> str:
    failed = [v for v in run.verdicts if v.measured is not None and not v.passed]
    unknown = [v for v in run.verdicts if v.measured is None]
    total = len(run.verdicts)
    if failed:
        kind, mark = "fail", "✕"
        text = f"{len(failed)} of {total} checks fail"
        small = "; ".join(v.check.title for v in failed[:4])
    elif unknown or not total:
        kind, mark, small = (
            "not",
            "…",
            "The run is not finished, or its reference has no figure to compare.",
        )
        text = f"{total - len(unknown)} of {total} checks hold so far"
    else:
        kind, mark, text = "pass", "✓", f"All {total} checks hold"
        small = "The run in JAX is the reference's, up to the rounding of fp32."
    return (
        f'<div class="verdict {kind}"><span class="mark">{mark}</span>'
        f"<div>{text}<small>{html.escape(small)}</small></div></div>"
    )


def _tiles(run: Run) -> str:
    f = run.figures
    compared = sum(v for k, v in f.items() if k.endswith("/batches compared"))
    tiles = []
    if compared:
        same = compared - sum(v for k, v in f.items() if k.endswith(f"/{checks.BATCHES}"))
        text = "updates fed with the reference's very token ids"
        tiles.append((f"{same:,.0f} <i>of {compared:,.0f}</i>", text))
    for ending, text in (
        (checks.CE, "nats: the largest difference in CE loss at any update"),
        (checks.WEIGHTS, "of the largest weight: how far apart the weights end"),
        (checks.KL_MEAN, "nats of KL between the two models' next-token distributions"),
    ):
        worst = max(
            (v for v in run.verdicts if v.check.figure.endswith(ending) and v.measured is not None),
            key=lambda v: v.measured or 0.0,
            default=None,
        )
        if worst:
            limit = f"<i>≤ {tables.number(worst.check.limit)}</i>"
            tiles.append((f"{tables.number(worst.measured)} {limit}", text))
    return f'<div class="tiles">{"".join(map(_tile, tiles))}</div>'


def _tile(pair: tuple[str, str]) -> str:
    return f'<div class="tile"><b>{pair[0]}</b><span>{html.escape(pair[1])}</span></div>'


def _start(run: Run) -> str:
    if "convert_weights" not in run.results:
        return ""
    figures = run.results["convert_weights"].figures
    proof = {k: v for k, v in figures.items() if k.startswith("parity")}
    if not proof:
        return ""
    return (
        '<section><h2>The first weights</h2><p class="lead">The reference\'s step-0 weights, '
        "converted; the logits that both programs compute from them.</p>"
        f"{tables.notes_table(proof, {}).html()}</section>"
    )


def _between(run: Run) -> str:
    if "warm_adam" not in run.results or not run.results["warm_adam"].notes:
        return ""
    return (
        '<section><h2>Between the stages</h2><p class="lead">What stage 2 takes from the end of '
        "stage 1, and what begins again.</p>"
        f"{tables.notes_table({}, run.results['warm_adam'].notes).html()}</section>"
    )


def _stage(run: Run, name: str) -> str:
    c = run.stages.get(name)
    if c is None or not c.metrics.rows:
        return ""
    return f"<section><h2>{TITLES[name]}</h2>{_stage_text(c)}{stage_figure(c)}</section>"


def _stage_text(c: StageComparison) -> str:
    f = {k.removeprefix(f"{c.name}/"): v for k, v in c.figures().items()}
    text = (
        f"{int(f['updates compared']):,} updates compared, "
        f"{int(f['skipped updates'])} skipped; the thick line is the reference, "
        "the thin one on it is this run."
    )
    if f["updates repeated after a restart"]:
        text += (
            f" {int(f['updates repeated after a restart'])} updates were repeated after a restart; "
            f"largest difference: {tables.number(f['repeated updates, max |difference|'])}."
        )
    name = f"grad norm to fp64, first {EARLY} updates"
    if f"{name}: ours nearer" in f:
        ours, theirs = (int(f[f"{name}: {who} nearer"]) for who in ("ours", "reference"))
        text += (
            f" In the first {EARLY} updates, while both have the same weights up to rounding, "
            f"this run's gradient norm is nearer to the fp64 norm in {ours}, the reference's own "
            f"fp32 norm in {theirs}."
        )
    return f'<p class="lead">{text}</p>'


def _landmarks(run: Run) -> str:
    if not run.landmarks:
        return ""
    rows = {f"update {step:,}": r.figures for step, r in sorted(run.landmarks.items())}
    return (
        '<section><h2>Landmarks</h2><p class="lead">Checkpoints along stage 1, each against the '
        "reference's checkpoint of the same update, on documents that neither was trained on. "
        "Losses are in nats a token.</p>"
        f"{tables.landmark_table(rows).html()}</section>"
    )


def _final(run: Run) -> str:
    if FINAL not in run.results:
        return ""
    f = run.results[FINAL].figures
    parts = []
    if tables.heldout_domains(f):
        parts.append(f"<h3>Held-out loss</h3>{tables.heldout_table(f).html()}")
    tasks = tables.task_table(f)
    if tasks.rows:
        parts.append(f"<h3>Benchmark tasks (lm-evaluation-harness)</h3>{tasks.html()}")
    if not parts:
        return ""
    return f"<section><h2>The final model</h2>{''.join(parts)}</section>"


def _checks(run: Run) -> str:
    if not run.verdicts:
        return ""
    return (
        '<section><h2>Every check</h2><p class="lead">What was measured, and what it may be.</p>'
        f"{tables.verdict_table(run.verdicts).html()}</section>"
    )


def _provenance(run: Run) -> str:
    parts = f"<div><h3>Stages</h3>{tables.timing_table(run).html()}</div>"
    if run.versions:
        parts += f"<div><h3>Software</h3>{tables.version_table(run).html()}</div>"
    return (
        f'<section><h2>How it was made</h2><div class="columns">{parts}</div></section>'
        f"<footer>Run root: {html.escape(run.root)}</footer>"
    )
