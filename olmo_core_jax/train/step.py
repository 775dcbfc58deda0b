"""One update: loss, gradients, optimizer. Written for the global batch; the mesh decides where it is computed."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from olmo_core_jax.data.batch import Batch
from olmo_core_jax.errors import UserError
from olmo_core_jax.model.olmo3 import bind
from olmo_core_jax.model.options import ModelOptions, model_options
from olmo_core_jax.optim.skip_step_adamw import SkipStepAdamWState, global_norm, skip_step_adamw
from olmo_core_jax.recipes.schema import Model, Precision, Stage
from olmo_core_jax.topology import Topology
from olmo_core_jax.train.loss import Targets, head_loss, loss_divisor, shifted_targets


class TrainState(NamedTuple):
    """Everything that an update changes. step counts updates, skipped ones included."""

    params: dict
    opt: SkipStepAdamWState
    step: jax.Array


class StepMetrics(NamedTuple):
    """f32 scalars of one update. grad_norm is before clipping; z_loss includes its multiplier; skipped is 0 or 1."""

    ce_loss: jax.Array
    z_loss: jax.Array
    grad_norm: jax.Array
    skipped: jax.Array


def init_state(params: dict, stage: Stage, precision: Precision = Precision()) -> TrainState:
    """The state before the first update of a stage. Pure: jit it with out_shardings for a large model."""
    params = jax.tree.map(lambda p: jnp.asarray(p, precision.params), params)
    opt = skip_step_adamw(stage.optimizer, precision.moments).init(params)
    return TrainState(params, opt, jnp.zeros((), jnp.int32))


def make_train_step(
    model: Model,
    stage: Stage,
    precision: Precision = Precision(),
    topology: Topology = Topology(),
    mesh=None,
    *,
    pad_id: int | None = None,
    accumulation: int | None = None,
):
    """jitted f(state, batch, learning_rate) -> (state, StepMetrics); the state's buffers are reused.

    learning_rate: np.float32 of this update (optim/schedules.py). pad_id: targets that the recipe's
    loss.mask_pad_targets leaves out. accumulation: micro-batches, default the topology's; the result does not depend
    on it beyond rounding. Raises UserError when it does not divide the batch.
    """
    if stage.loss.mask_pad_targets and pad_id is None:
        raise UserError("loss.mask_pad_targets needs the tokenizer's pad_id")
    micro = accumulation or topology.accumulation or 1
    if stage.batch_instances % micro:
        raise UserError(
            f"topology: accumulation {micro} does not divide the batch of {stage.batch_instances} instances"
        )
    opts = model_options(topology, precision.compute, _shard(mesh))
    ignored = pad_id if stage.loss.mask_pad_targets else None
    optimizer = skip_step_adamw(stage.optimizer, precision.moments)
    micro_loss = partial(
        _micro_loss, cfg=model, opts=opts, z=stage.loss.z_loss, chunks=topology.loss_chunks
    )

    def train_step(
        state: TrainState, batch: Batch, learning_rate
    ) -> tuple[TrainState, StepMetrics]:
        targets = shifted_targets(batch.tokens, batch.instance_mask, ignored)
        divisor = loss_divisor(targets, batch.instance_mask)
        with opts.exact_matmuls():
            loss, grads = _accumulate(
                micro_loss, state.params, batch.tokens, targets, divisor, micro
            )
        norm = global_norm(grads)
        lr = jnp.asarray(learning_rate, jnp.float32)
        updates, opt = optimizer.update(
            grads, state.opt, state.params, loss=loss["ce"], learning_rate=lr, grad_norm=norm
        )
        skipped = (opt.count == state.opt.count).astype(jnp.float32)
        params = optax.apply_updates(state.params, updates)
        return TrainState(params, opt, state.step + 1), StepMetrics(
            loss["ce"], loss["z"], norm, skipped
        )

    # Without this the compiler may choose other shardings for the new state than the old one has: one more compile.
    shardings = None if mesh is None else (_state_shardings(mesh, model), None)
    return jax.jit(train_step, donate_argnums=0, out_shardings=shardings)


def _micro_loss(
    params, tokens_BS, targets: Targets, divisor, *, cfg: Model, opts: ModelOptions, z, chunks
):
    net = bind(params, cfg, opts)
    loss = head_loss(
        net.hidden_states(tokens_BS), net.lm_head.weight[...], targets, divisor, z, chunks
    )
    return loss.total, {"ce": loss.ce, "z": loss.z}


def _accumulate(micro_loss, params, tokens_BS, targets: Targets, divisor, micro: int):
    """Sums of the micro-batches' losses and gradients; all are divided by the whole update's divisor.

    Row b goes to micro-batch b % micro, so that rows which are spread over devices stay spread in each.
    """
    value_and_grad = jax.value_and_grad(micro_loss, has_aux=True)
    if micro == 1:
        (_, loss), grads = value_and_grad(params, tokens_BS, targets, divisor)
        return loss, grads

    def split(x):
        return jnp.moveaxis(x.reshape(-1, micro, *x.shape[1:]), 1, 0)

    def add(total, part):
        (_, loss), grads = value_and_grad(params, *part, divisor)
        return jax.tree.map(jnp.add, total, (loss, grads)), None

    start = (
        {"ce": jnp.float32(0), "z": jnp.float32(0)},
        optax.tree.zeros_like(params, dtype=jnp.float32),
    )
    total, _ = jax.lax.scan(add, start, jax.tree.map(split, (tokens_BS, targets)))
    return total


def _shard(mesh):
    """Logical names to shardings on a mesh, or None where there is none."""
    if mesh is None:
        return None
    from olmo_core_jax.train.mesh import named_sharding

    return partial(named_sharding, mesh)


def _state_shardings(mesh, model: Model) -> TrainState:
    from olmo_core_jax.train.mesh import state_shardings

    return state_shardings(mesh, model)
