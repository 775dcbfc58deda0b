"""One update: loss, gradients, optimizer. Written for the global batch; a mesh decides where."""

from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from olmo_core_jax.data.batch import Batch
from olmo_core_jax.errors import UserError
from olmo_core_jax.hardware.topology import Topology
from olmo_core_jax.model.olmo3 import bind
from olmo_core_jax.model.options import ModelOptions, Shard, model_options
from olmo_core_jax.optim.schedules import check_schedule
from olmo_core_jax.optim.skip_step_adamw import SkipStepAdamWState, global_norm, skip_step_adamw
from olmo_core_jax.recipes.schema import Model, Precision, Stage
from olmo_core_jax.train.loss import HeadLoss, Targets, head_loss, loss_divisor, shifted_targets


class TrainState(NamedTuple):
    """Everything that an update changes. step counts updates, skipped ones included.

    Leaves are arrays, or what stands for them: shardings, descriptions.
    """

    params: dict
    opt: SkipStepAdamWState
    step: Any  # int32 []


class StepMetrics(NamedTuple):
    """f32 scalars of one update. z_loss includes its multiplier and ce_loss does not include it;
    grad_norm is before clipping; skipped is 0 or 1; masked: the share of the whole batch's
    instances that the repetition filter left out."""

    ce_loss: jax.Array
    z_loss: jax.Array
    grad_norm: jax.Array
    skipped: jax.Array
    masked: jax.Array


def init_state(params: dict, stage: Stage, precision: Precision | None = None) -> TrainState:
    """The state before the first update of a stage. Pure, so it can be born sharded under jit."""
    precision = precision or Precision()
    params = jax.tree.map(lambda p: jnp.asarray(p, precision.params), params)
    opt = skip_step_adamw(stage.optimizer, precision.moments).init(params)
    return TrainState(params, cast(SkipStepAdamWState, opt), jnp.zeros((), jnp.int32))


def make_train_step(
    model: Model,
    stage: Stage,
    precision: Precision | None = None,
    topology: Topology | None = None,
    mesh: Mesh | None = None,
    *,
    pad_id: int | None = None,
    accumulation: int | None = None,
) -> jax.stages.Wrapped:
    """jitted f(state, batch, learning_rate) -> (state, StepMetrics); the state's buffers are reused.

    learning_rate: np.float32, of this update (optim/schedules.py). pad_id: the targets that the
    recipe's loss.mask_pad_targets leaves out. accumulation: micro-batches an update, default the
    topology's; the result depends on it by rounding only. Raises UserError when it does not divide
    the batch, or the stage's schedule makes no sense.
    """
    precision, topology = precision or Precision(), topology or Topology()
    check_schedule(stage)
    if stage.loss.mask_pad_targets and pad_id is None:
        raise UserError("loss.mask_pad_targets needs the tokenizer's pad_id")
    micro = accumulation or topology.accumulation or 1
    if stage.batch_instances % micro:
        raise UserError(
            f"topology: accumulation {micro} does not divide the {stage.batch_instances} instances "
            "of an update"
        )
    opts = model_options(topology, precision.compute, _shard(mesh))
    ignored = pad_id if stage.loss.mask_pad_targets else None
    optimizer = skip_step_adamw(stage.optimizer, precision.moments)
    part = partial(
        _micro_loss, cfg=model, opts=opts, z=stage.loss.z_loss, chunks=topology.loss_chunks
    )

    def train_step(state: TrainState, batch: Batch, learning_rate):
        targets = shifted_targets(batch.tokens, batch.instance_mask, ignored)
        divisor = loss_divisor(targets, batch.instance_mask)
        with opts.exact_matmuls():
            loss, grads = _accumulate(part, state.params, batch.tokens, targets, divisor, micro)
        norm = global_norm(grads)
        updates, opt = optimizer.update(
            grads,
            state.opt,
            state.params,
            loss=loss.ce,
            learning_rate=jnp.asarray(learning_rate, jnp.float32),
            grad_norm=norm,
        )
        opt = cast(SkipStepAdamWState, opt)
        skipped = (opt.count == state.opt.count).astype(jnp.float32)
        params = cast(dict, optax.apply_updates(state.params, updates))
        masked = 1 - jnp.mean(batch.instance_mask, dtype=jnp.float32)
        metrics = StepMetrics(loss.ce, loss.z, norm, skipped, masked)
        return TrainState(params, opt, state.step + 1), metrics

    return jax.jit(train_step, donate_argnums=0)


def _micro_loss(
    params, tokens_BS, targets: Targets, divisor, *, cfg: Model, opts: ModelOptions, z, chunks
) -> tuple[jax.Array, HeadLoss]:
    net = bind(params, cfg, opts)
    h_BSD = net.hidden_states(tokens_BS)
    loss = head_loss(h_BSD, net.lm_head.weight[...], targets, divisor, z, chunks)
    return loss.total, loss


def _accumulate(micro_loss, params, tokens_BS, targets: Targets, divisor, micro: int):
    """(loss, gradients) of the batch: sums over micro-batches, each divided by the batch's divisor.

    Row b goes to micro-batch b % micro, so that rows spread over devices stay spread in each.
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

    zero = jnp.zeros((), jnp.float32)
    start = (HeadLoss(zero, zero, zero), optax.tree.zeros_like(params, dtype=jnp.float32))
    total, _ = jax.lax.scan(add, start, jax.tree.map(split, (tokens_BS, targets)))
    return total


def _shard(mesh: Mesh | None) -> Shard | None:
    """Logical axis names to shardings on the mesh, or None where there is none."""
    if mesh is None:
        return None
    from olmo_core_jax.train.mesh import named_sharding  # mesh.py knows of TrainState

    return partial(named_sharding, mesh)
