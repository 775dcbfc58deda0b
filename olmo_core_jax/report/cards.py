"""Metaflow cards of the stages, live while a stage runs and whole when it has ended.

live = cards.stage_card(current.card["stage"], run_root, "stage1_train")
live.refresh()          # whenever there may be news
live.finished(result)   # or live.failed("why")
"""

import sys
import time
import traceback
from typing import Protocol

from olmo_core_jax import recipes, storage
from olmo_core_jax.compare import checks, curves
from olmo_core_jax.recipes import Recipe
from olmo_core_jax.report import html, tables, vega
from olmo_core_jax.report.run import read_run
from olmo_core_jax.report.training_card import Training, gap_chart, overlay
from olmo_core_jax.results import StageResult, read_result
from olmo_core_jax.stages import FINAL, LANDMARKS, stage_of

PAUSE = 20
"""A card rests this many times as long as it took to draw."""


class View(Protocol):
    """What a card shows: Metaflow components, and how they follow the run root."""

    components: list

    def update(self, run_root: str) -> None:
        """Shows what the run root holds now; cheap, and safe at any moment of a stage."""


def view_of(recipe: Recipe, folder: str) -> View:
    """The view of a stage folder (`stage1_train`, `eval_landmarks/100`, `final_eval`, ...)."""
    if folder.endswith("_train"):
        return Training(recipe, folder.removesuffix("_train"))
    if folder.startswith(LANDMARKS):
        return Landmark(folder)
    return Final(recipe) if folder == FINAL else Plain(folder)


def stage_card(card, run_root: str, folder: str) -> "StageCard":
    """A stage's view on a Metaflow card (`current.card["..."]`)."""
    return StageCard(card, run_root, folder)


class StageCard:
    """Drives one card. Whatever goes wrong in drawing is printed: a card may never end a stage."""

    def __init__(self, card, run_root: str, folder: str):
        from metaflow.cards import Markdown

        self.run_root, self.folder = run_root, folder
        self._card = card
        self._view: View | None = None
        self._next = 0.0
        self._note = Markdown(f"{folder.replace('_', ' ')}: starting …")
        card.append(self._note)
        card.refresh()

    def refresh(self) -> None:
        """Shows what is new under the run root; less often where drawing takes long."""
        if time.monotonic() >= self._next:
            self._draw()

    def _draw(self) -> None:
        began = time.monotonic()
        try:
            self._update()
        except Exception:
            print(f"card of {self.folder}: {traceback.format_exc()}", file=sys.stderr)
        now = time.monotonic()
        self._next = now + PAUSE * (now - began)

    def failed(self, why: str) -> None:
        """The stage has ended without a result."""
        self._draw()
        self._note.update(f"**Not finished.**\n\n```\n{why}\n```")
        self._card.refresh()

    def finished(self, result: StageResult) -> None:
        """The stage has its result; after the last stage the report page is written too."""
        self._draw()
        self._note.update(f"Finished in {tables.seconds(result.seconds)}.")
        if self.folder == FINAL:
            page = html.write(self.run_root)
            self._note.update(f"The whole comparison on one page: `{page}`")
        self._card.refresh()

    def _update(self) -> None:
        where = storage.join(self.run_root, "recipe.yaml")
        if self._view is None:
            if not storage.exists(where):  # the first job writes it, a moment after it has started
                return
            self._view = view_of(recipes.load_recipe(where), self.folder)
            self._note.update("")
            self._card.extend(self._view.components)
        self._view.update(self.run_root)
        self._card.refresh()


class Plain:
    """What the stage is for, and its figures when it has finished."""

    def __init__(self, folder: str):
        from metaflow.cards import Markdown

        self.folder = folder
        title = f"# {folder.replace('_', ' ')}\n\n{stage_of(folder).text}"
        self._body = Markdown("running …")
        self.components = [Markdown(title), self._body]

    def update(self, run_root: str) -> None:
        result = read_result(run_root, self.folder)
        if result is None:
            return
        rows = tables.notes_table(result.figures, result.notes).markdown()
        self._body.update(rows)


class Landmark:
    """A checkpoint against the reference's of the same update."""

    def __init__(self, folder: str):
        from metaflow.cards import Markdown

        self.folder = folder
        self._body = Markdown("running …")
        self.components = [Markdown(f"# Landmark: update {folder.split('/')[-1]}"), self._body]

    def update(self, run_root: str) -> None:
        result = read_result(run_root, self.folder)
        if result is None:
            return
        f = result.figures
        compared = tables.landmark_table({"update " + self.folder.split("/")[-1]: f})
        parts = [tables.heldout_table(f), compared, tables.task_table(f)]
        self._body.update("\n\n".join(t.markdown() for t in parts if t.rows))


class Final:
    """The verdicts, the charts of the stages and the tables of the whole run."""

    def __init__(self, recipe: Recipe):
        from metaflow.cards import Markdown, VegaChart

        self._head, self._body = Markdown("running …"), Markdown("")
        self._charts = {
            name: [VegaChart(vega.lines(name, {})) for _ in range(2)]
            for name in ("stage1", "stage2")
            if (section := getattr(recipe, name)) and section.reference
        }
        charts = [chart for pair in self._charts.values() for chart in pair]
        self.components = [Markdown(f"# {recipe.name}"), self._head, *charts, self._body]

    def update(self, run_root: str) -> None:
        run = read_run(run_root)
        if not run.complete:
            return
        for name, (loss, gap) in self._charts.items():
            title = name.replace("stage", "stage ")
            loss.update(vega.lines(f"CE loss, {title}", overlay(run.stages[name], curves.CE)))
            gap.update(gap_chart(f"|difference| in CE loss, {title}", run.stages[name]))
        self._head.update(headline(run.verdicts))
        marks = {f"update {s:,}": r.figures for s, r in sorted(run.landmarks.items())}
        sections = {
            "Every check": tables.verdict_table(run.verdicts),
            "Landmarks": tables.landmark_table(marks),
            "The final model, held-out loss": tables.heldout_table(run.figures),
            "Benchmark tasks": tables.task_table(run.figures),
            "Stages": tables.timing_table(run),
            "Software": tables.version_table(run),
        }
        shown = [f"## {name}\n\n{t.markdown()}" for name, t in sections.items() if t.rows]
        self._body.update("\n\n".join(shown))


def headline(verdicts: list[checks.Verdict]) -> str:
    """One sentence: how many checks hold."""
    passed = sum(v.passed for v in verdicts)
    mark = "✓" if passed == len(verdicts) else "✗"
    return f"{mark} **{passed} of {len(verdicts)} checks hold.**"
