"""The recipe's benchmark tasks, run by lm-evaluation-harness, offline where the recipe brings its
own task files.
"""

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from olmo_core_jax import storage
from olmo_core_jax.errors import UserError
from olmo_core_jax.recipes.schema import Evaluation

if TYPE_CHECKING:
    from olmo_core_jax.evaluate.harness import OlmoLM

log = logging.getLogger("olmo")

PLACEHOLDER = "{TASKS_DIR}"
"""In a task file: the folder that the file lies in, so that its data can lie beside it."""


@dataclass
class TaskResults:
    """scores: task -> metric -> value; settings: task -> what has to be equal for a comparison."""

    scores: dict[str, dict[str, float]] = field(default_factory=dict)
    settings: dict[str, dict[str, str]] = field(default_factory=dict)
    truncated_samples: int = 0
    tokens_cut: int = 0


def run_tasks(lm: "OlmoLM", evaluation: Evaluation, seed: int = 1234) -> TaskResults:
    """Runs every task of the recipe on one model; seed: of shots that a task draws at random.

    Raises UserError for unknown tasks and missing data.
    """
    prepare(evaluation)
    with _task_folder(evaluation.tasks_path) as folder:
        from lm_eval.evaluator import simple_evaluate
        from lm_eval.tasks import TaskManager

        manager = TaskManager(include_path=folder, include_defaults=folder is None)
        _require_known(manager, evaluation)
        try:
            found = simple_evaluate(
                model=lm,
                tasks=list(evaluation.tasks),
                task_manager=manager,
                limit=evaluation.limit,
                bootstrap_iters=0,
                log_samples=False,
                fewshot_random_seed=seed,
            )
        except (FileNotFoundError, ConnectionError) as e:
            raise UserError(f"evaluation.tasks: data cannot be read: {e}") from None
    assert found is not None  # this process is the only one
    return _results(found, lm, evaluation.limit)


def _results(found: Mapping, lm: "OlmoLM", limit: int | None) -> TaskResults:
    cut = lm.truncation
    results = TaskResults({}, {}, cut.truncated_samples, cut.tokens_cut)
    for task, row in found["results"].items():
        results.scores[task] = {
            metric_name(k): float(v)
            for k, v in row.items()
            if isinstance(v, int | float) and "," in k and "_stderr" not in k
        }
        results.settings[task] = {
            "version": str(found["versions"].get(task)),
            "n_shot": str(found["n-shot"].get(task)),
            "limit": str(limit),
        }
    return results


def metric_name(key: str) -> str:
    """The harness's `acc,none` as `acc`; other filters stay."""
    return key.removesuffix(",none")


def task_figures(
    ours: TaskResults, reference: Mapping[str, Mapping[str, float]]
) -> dict[str, float]:
    """Figures by name. reference: task -> the harness's metric name -> score of its hf backend.

    The largest difference is relative where a score is above 1, as perplexities are.
    """
    figures: dict[str, float] = {}
    gaps = []
    for task, scores in ours.scores.items():
        theirs = {metric_name(k): v for k, v in reference.get(task, {}).items()}
        for metric, value in scores.items():
            figures[f"lm_eval/{task}/{metric}"] = value
            if isinstance(theirs.get(metric), int | float):
                figures[f"lm_eval/{task}/{metric} (reference)"] = theirs[metric]
                gaps.append(abs(value - theirs[metric]) / max(1.0, abs(theirs[metric])))
    if gaps:
        figures["lm_eval max |difference|"] = max(gaps)
    return figures | {
        "truncated_samples": ours.truncated_samples,
        "tokens_cut": ours.tokens_cut,
    }


def require_comparable(
    ours: Mapping[str, Mapping[str, str]], theirs: Mapping[str, Mapping[str, str]]
) -> None:
    """Raises UserError where a task ran in another version, with other shots, or on other
    samples.
    """
    for task, settings in ours.items():
        for name, value in theirs.get(task, {}).items():
            if name in settings and settings[name] != str(value):
                raise UserError(
                    f"task {task}: {name} is {settings[name]} here and {value} in the reference: "
                    "such scores cannot be compared"
                )


def _require_known(manager, evaluation: Evaluation) -> None:
    known = set(manager.all_tasks)
    unknown = [t for t in evaluation.tasks if t not in known]
    if unknown:
        where = evaluation.tasks_path or "the harness's own tasks"
        raise UserError(f"evaluation.tasks: {', '.join(unknown)} not found in {where}")


@contextlib.contextmanager
def _task_folder(tasks_path: str | None) -> Iterator[str | None]:
    """A temporary copy of the recipe's task files, their placeholder filled in; None without such
    files.
    """
    if tasks_path is None:
        yield None
        return
    source = storage.local_path(tasks_path)
    if not source.is_dir():
        raise UserError(f"evaluation.tasks_path: {source} is no folder")
    with tempfile.TemporaryDirectory(prefix="olmo-tasks-") as folder:
        for path in source.rglob("*"):
            target = Path(folder, path.relative_to(source))
            if path.suffix == ".yaml":
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(path.read_text().replace(PLACEHOLDER, str(path.parent.resolve())))
            elif path.suffix == ".py":
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target)
        yield folder


def prepare(evaluation: Evaluation) -> None:
    """Before `datasets` is imported: bundled data needs no hub, and logs need no progress bars."""
    for noisy in ("lm_eval", "datasets"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    os.environ.setdefault("TQDM_DISABLE", "1")
    if evaluation.tasks_path is not None:
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
            os.environ.setdefault(name, "1")
