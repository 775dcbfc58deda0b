"""What a stage takes from a checkpoint, in one table: taken, reset, or from the recipe, with the
values on both sides.

Weights, both moments and the Adam count go on; the run step, the schedule and the data position
begin again; the skip window and every setting follow the recipe. Nothing else is in the new
state.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from olmo_core_jax import storage
from olmo_core_jax.checkpoint.formats.olmo_core import open_native
from olmo_core_jax.checkpoint.formats.orbax_read import OrbaxStep, lazy_section
from olmo_core_jax.errors import UserError
from olmo_core_jax.model.weights import leaves
from olmo_core_jax.optim.schedules import learning_rate
from olmo_core_jax.recipes.schema import Recipe, Stage
from olmo_core_jax.stages import train_folder
from olmo_core_jax.terminal import text_table

TAKEN, RESET, RECIPE = "taken", "reset", "from recipe"
UNKNOWN = "not in the checkpoint"


@dataclass(frozen=True)
class Row:
    """One thing that a checkpoint may hold: what it was, what the stage begins with, and by which
    rule.
    """

    what: str
    before: str
    after: str
    rule: str


@dataclass(frozen=True)
class Found:
    """What a checkpoint holds, whichever its format; trees are of LazyArrays. None: it is not in
    there.
    """

    where: str
    params: dict
    mu: dict
    nu: dict
    adam_count: int
    run_step: int | None
    schedule_count: int | None
    tokens_seen: int | None
    data: Mapping[str, Any]
    window: tuple[np.ndarray, np.ndarray, int] | None
    settings: str
    generators: str
    checksums: Mapping[str, int]


def from_ours(path: str, recipe: Recipe) -> Found:
    """Reads a training checkpoint of this project. Raises UserError where it is another kind or
    model.
    """
    step = OrbaxStep(path)
    meta, model = step.meta, recipe.model.model_dump(mode="json")
    if meta.get("model") != model:
        there = meta.get("model") or {}
        differ = sorted(k for k in {*there, *model} if there.get(k) != model.get(k))
        raise UserError(f"{path} holds another model than the recipe's: {', '.join(differ)} differ")
    expected = {("params", *leaf.path) for leaf in leaves(recipe.model)}
    expected |= {(part, *path[1:]) for part in ("mu", "nu") for path in expected}
    expected |= {(name,) for name in ("count", "losses", "grad_norms", "seen", "step")}
    _require_same_arrays(path, set(step.paths), expected)
    numbers = {name: int(step.value((name,))) for name in ("count", "seen", "step")}
    return Found(
        where=path,
        params=lazy_section(step, "params"),
        mu=lazy_section(step, "mu"),
        nu=lazy_section(step, "nu"),
        adam_count=numbers["count"],
        run_step=numbers["step"],
        schedule_count=meta.get("schedule_count", numbers["step"]),
        tokens_seen=meta.get("tokens_seen"),
        data=meta.get("data", {}),
        window=(step.value(("losses",)), step.value(("grad_norms",)), numbers["seen"]),
        settings="in the recipe",
        generators="none: training draws no random numbers",
        checksums={
            name: value
            for name, value in meta.get("checksums", {}).items()
            if name.partition("/")[0] in ("params", "mu", "nu")
        },
    )


def _require_same_arrays(path: str, there: set, expected: set) -> None:
    for kind, names in (("lacks", expected - there), ("has an unknown", there - expected)):
        if names:
            raise UserError(
                f"{path} {kind} {'.'.join(sorted(names)[0])}: "
                "it is no training checkpoint of this model"
            )


def from_native(path: str, recipe: Recipe) -> Found:
    """Reads a native OLMo-core checkpoint with its optimizer state."""
    native = open_native(path, recipe.model)
    precision = recipe.precision
    assert native.adam_step is not None
    return Found(
        where=path,
        params=native.params(precision.params),
        mu=native.moments("mu", precision.moments),
        nu=native.moments("nu", precision.moments),
        adam_count=native.adam_step,
        run_step=native.step,
        schedule_count=native.step,
        tokens_seen=_integer(native.trainer.get("global_train_tokens_seen")),
        data=native.trainer.get("data_loader") or {},
        window=None,
        settings="lr, betas, eps, weight decay of its groups",
        generators="states of Python, NumPy and torch" if "rng" in native.trainer else UNKNOWN,
        checksums={},
    )


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def warm_state(found: Found, stage: Stage) -> dict[str, Any]:
    """The state that a stage begins with, as a tree for write_step."""
    window = stage.optimizer.skip.window if stage.optimizer.skip else 2
    losses, norms, seen = np.zeros(window, np.float32), np.zeros(window, np.float32), 0
    if _keeps_window(found, stage):
        assert found.window is not None
        losses, norms, seen = found.window
        if losses.shape != (window,):
            raise UserError(
                f"{found.where} has a skip window of {losses.shape[0]} updates, the recipe's stage "
                f"one of {window}; they have to be equal where skip.persist_window is set"
            )
    return {
        "params": found.params,
        "mu": found.mu,
        "nu": found.nu,
        "count": np.asarray(found.adam_count, np.int32),
        "losses": np.asarray(losses, np.float32),
        "grad_norms": np.asarray(norms, np.float32),
        "seen": np.asarray(seen, np.int32),
        "step": np.asarray(0, np.int32),
    }


def _keeps_window(found: Found, stage: Stage) -> bool:
    skip = stage.optimizer.skip
    return bool(skip and skip.persist_window and found.window is not None)


def surgery_table(found: Found, stage: Stage) -> list[Row]:
    """Every thing that a checkpoint can hold, and what becomes of it at the start of `stage`."""
    skip, opt = stage.optimizer.skip, stage.optimizer
    seen = UNKNOWN if found.window is None else f"{found.window[2]} updates"
    kept = _keeps_window(found, stage)
    settings = (
        f"betas {opt.beta1}, {opt.beta2}; eps {opt.eps}; "
        f"weight decay {opt.weight_decay}, embedding {opt.embedding_weight_decay}"
    )
    first, last = (repr(learning_rate(stage, n)) for n in (1, stage.last_step))
    rates = f"{first} at update 1, {last} at {stage.last_step}"
    return [
        Row("weights", found.where, "the same bits", TAKEN),
        Row("first moments (mu)", found.where, "the same bits", TAKEN),
        Row("second moments (nu)", found.where, "the same bits", TAKEN),
        Row("Adam count", str(found.adam_count), str(found.adam_count), TAKEN),
        Row("schedule count", _text(found.schedule_count), "0", RESET),
        Row("run step", _text(found.run_step), "0", RESET),
        Row("tokens seen", _text(found.tokens_seen), "0", RESET),
        Row(
            "learning rate",
            "not a state: computed from the step",
            rates,
            RECIPE,
        ),
        Row("optimizer settings", found.settings, settings, RECIPE),
        Row(
            "data position",
            _position(found.data),
            f"seed {stage.data.seed}, epoch 1, batch 0",
            RECIPE,
        ),
        Row(
            "skip window",
            seen,
            seen if kept else "empty",
            (TAKEN if kept else RESET) if skip is not None else RECIPE,
        ),
        Row("random generators", found.generators, "none: training draws no random numbers", RESET),
    ]


def _text(value: Any) -> str:
    return UNKNOWN if value is None else str(value)


def _position(data: Mapping[str, Any]) -> str:
    parts = [
        f"{key} {data[key]}"
        for key in ("seed", "epoch", "batches_processed")
        if isinstance(data.get(key), int)
    ]
    return ", ".join(parts) or UNKNOWN


def format_table(rows: list[Row]) -> str:
    """The table as text, columns aligned."""
    cells = [tuple(asdict(row).values()) for row in rows]
    return text_table(cells, ["", "in the checkpoint", "at the start", "rule"])


def table_json(rows: list[Row]) -> list[dict[str, str]]:
    return [asdict(row) for row in rows]


def last_checkpoint(run_root: str, stage: str, step: int) -> str:
    """Path of the checkpoint that a finished stage left. Raises UserError where it is missing."""
    path = storage.join(run_root, train_folder(stage), "checkpoints", str(step))
    if not storage.exists(storage.join(path, "meta", "metadata")):
        raise UserError(f"{path} is not there: run {stage} to its end first")
    return path
