"""Where a stage begins: its own newest good checkpoint, else the step 0 made by the stage before.

Nothing of a checkpoint is taken silently: recipe, stage, model and data have to be the ones that
this run has, or the run is refused with both sides named.
"""

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from olmo_core_jax import recipes, storage
from olmo_core_jax.checkpoint.store import CheckpointStore
from olmo_core_jax.data.index import Index
from olmo_core_jax.data.order import Order
from olmo_core_jax.data.resume import check_state
from olmo_core_jax.errors import UserError
from olmo_core_jax.model.olmo3 import abstract_params, init_params
from olmo_core_jax.optim.skip_step_adamw import SkipStepAdamWState
from olmo_core_jax.recipes import Recipe
from olmo_core_jax.train.mesh import param_shardings, state_shardings
from olmo_core_jax.train.step import TrainState, init_state

log = logging.getLogger("olmo")


class Start(NamedTuple):
    """What a run goes on from. skipped: updates of this stage that were skipped before. data_notes: what makes the data's
    order another than the one that was begun."""

    state: TrainState
    skipped: int = 0
    data_notes: tuple[str, ...] = ()


def state_tree(state: TrainState) -> dict[str, Any]:
    """The state as checkpoints hold it: params, mu, nu, count, losses, grad_norms, seen, step."""
    return {"params": state.params, **state.opt._asdict(), "step": state.step}


def from_tree(tree: Mapping[str, Any]) -> TrainState:
    """The inverse of state_tree."""
    opt = SkipStepAdamWState(*(tree[field] for field in SkipStepAdamWState._fields))
    return TrainState(tree["params"], opt, tree["step"])


def abstract_state(recipe: Recipe, stage: str, mesh: Mesh) -> TrainState:
    """The state's shapes, dtypes and shardings; nothing is allocated."""
    shapes = jax.eval_shape(
        lambda: init_state(init_params(recipe.model, 0), recipe.stage(stage), recipe.precision)
    )
    return _with_shardings(shapes, state_shardings(mesh, recipe.model))


def starting_state(
    recipe: Recipe,
    stage: str,
    data: tuple[Index, Order],
    mesh: Mesh,
    store: CheckpointStore,
    upstream: str,
    accept_other_data: bool = False,
) -> Start:
    """Where to go on from; upstream: the directory whose checkpoint 0 a stage begins with.

    Raises UserError where what is there belongs to something else; other data may be accepted (data/resume.py)."""
    like = state_tree(abstract_state(recipe, stage, mesh))
    identity = run_identity(recipe, stage)

    def accept(step: int, meta: dict) -> None:
        _require_same(store, step, meta, identity)
        check_state(meta["data"], *data, step, accept_other_data)

    found = store.restore_latest(like, accept)
    if found is not None:
        tree, meta = found
        log.info("resumed from checkpoint %d of %s", meta["step"], store.directory)
        now = check_state(meta["data"], *data, meta["step"], accept_other_data)
        for note in now:
            log.warning("%s", note)
        return Start(from_tree(tree), meta["skipped"], (*meta.get("data_notes", ()), *now))
    begin = CheckpointStore(upstream)
    reason = begin.problem(0)
    if reason is not None:
        if stage == "stage1" and recipe.weights.hf is None and not begin.exists(0):
            log.info("begins with our own initialisation, seed %d", recipe.weights.init_seed)
            return Start(_fresh(recipe, stage, mesh, None))
        where = storage.join(upstream, "0")
        raise UserError(f"{stage} begins with {where}, but {reason}: run the stage before it")
    _require_same(begin, 0, begin.meta(0), {"recipe": identity["recipe"]})
    log.info("begins with %s", storage.join(upstream, "0"))
    if stage == "stage2":
        return Start(from_tree(begin.restore(0, like)[0]))
    shapes = _with_shardings(abstract_params(recipe.model), param_shardings(mesh, recipe.model))
    return Start(_fresh(recipe, stage, mesh, begin.restore_params(0, shapes)[0]))


def run_identity(recipe: Recipe, stage: str) -> dict[str, Any]:
    """What a checkpoint has to agree with before anything of it is used."""
    return {
        "recipe": recipes.digest(recipe),
        "stage": stage,
        "model": recipe.model.model_dump(mode="json"),
        "precision": recipe.precision.model_dump(mode="json"),
    }


def _require_same(store: CheckpointStore, step: int, meta: dict, identity: dict) -> None:
    for name, wanted in identity.items():
        # What a checkpoint says nothing about is not contradicted; its arrays are compared anyway.
        if meta.get(name) is not None and meta[name] != wanted:
            raise UserError(
                f"checkpoint {storage.join(store.directory, str(step))} is of another {name}: "
                f"{_differences(meta[name], wanted)}. Choose another output folder, or go back"
            )


def _differences(there, here) -> str:
    if isinstance(there, dict) and isinstance(here, dict):
        keys = sorted(k for k in there.keys() | here.keys() if there.get(k) != here.get(k))
        return ", ".join(f"{k} {there.get(k)!r} there, {here.get(k)!r} here" for k in keys)
    return f"{there} there, {here} here"


def _fresh(recipe: Recipe, stage: str, mesh: Mesh, params) -> TrainState:
    """The state before the first update of a new run, born on its shardings."""
    section, precision = recipe.stage(stage), recipe.precision

    def build(params=None) -> TrainState:
        if params is None:
            params = init_params(recipe.model, recipe.weights.init_seed)
        return init_state(params, section, precision)

    arguments = () if params is None else (params,)
    shardings = state_shardings(mesh, recipe.model)
    return jax.jit(build, out_shardings=shardings)(*arguments)


def _with_shardings(shapes, shardings):
    return jax.tree.map(
        lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding),
        shapes,
        shardings,
    )
