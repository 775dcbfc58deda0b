"""From devices to a mesh, and from logical axis names to shardings on it. One table decides.

Mesh axes: replica (copies of everything), fsdp (parameters and batch), tensor (heads, MLP,
vocabulary), context (sequence). The recipe's global batch is cut by what the *whole* mesh holds,
never by what one process sees.
"""

import functools
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from olmo_core_jax.data.batch import Batch
from olmo_core_jax.errors import UserError
from olmo_core_jax.hardware import topology as topologies
from olmo_core_jax.model.olmo3 import abstract_params
from olmo_core_jax.model.weights import logical_axes
from olmo_core_jax.optim.skip_step_adamw import SkipStepAdamWState
from olmo_core_jax.recipes.schema import Model, Stage

log = logging.getLogger(__name__)

AXES = ("replica", "fsdp", "tensor", "context")

RULES: dict[str, tuple[str, ...]] = {
    # parameters, and with them both moments
    "embed": ("fsdp", "context"),
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "cycle": (),
    "norm": (),
    # activations
    "batch": ("replica", "fsdp"),
    "sequence": ("context",),
    "act_heads": ("tensor",),
    "act_mlp": ("tensor",),
    "act_embed": (),
}
"""Logical axis -> the mesh axes that split it. Gains are small and stay whole on every device."""


def make_mesh(wanted: topologies.Mesh, devices: Sequence | None = None) -> Mesh:
    """The mesh over jax.Devices, by default all of the job's. Raises UserError where its sizes do not fit them."""
    devices = jax.devices() if devices is None else list(devices)
    sizes = mesh_sizes(wanted, len(devices))
    slices = len({getattr(d, "slice_index", 0) for d in devices})
    if slices > 1:
        grid = mesh_utils.create_hybrid_device_mesh(*_over_slices(sizes, slices), devices=devices)
    else:
        grid = mesh_utils.create_device_mesh(sizes, devices=devices)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def mesh_sizes(wanted: topologies.Mesh, devices: int) -> tuple[int, ...]:
    """Sizes along AXES, the -1 filled in."""
    sizes = [getattr(wanted, axis) for axis in AXES]
    fixed = math.prod(s for s in sizes if s > 0)
    if -1 in sizes and devices % fixed == 0:
        sizes[sizes.index(-1)] = devices // fixed
    if math.prod(sizes) != devices:
        text = " x ".join(f"{axis} {size}" for axis, size in zip(AXES, sizes, strict=True))
        raise UserError(f"topology.mesh: {text} does not make the {devices} devices that are here")
    return tuple(sizes)


def _over_slices(sizes: tuple[int, ...], slices: int) -> tuple[list[int], list[int]]:
    """(sizes inside a slice, sizes over slices): the slow network carries replicas, else FSDP."""
    for axis in ("replica", "fsdp"):
        i = AXES.index(axis)
        if sizes[i] % slices == 0:
            inside, over = list(sizes), [1] * len(sizes)
            inside[i], over[i] = sizes[i] // slices, slices
            return inside, over
    raise UserError(
        f"topology.mesh: {slices} slices divide neither replica {sizes[0]} nor fsdp {sizes[1]}"
    )


def named_sharding(mesh: Mesh, names: Sequence[str | None]) -> NamedSharding:
    """The sharding of an array whose axes have these logical names; None: not split."""
    return _sharding(mesh, [RULES[n] if n else () for n in names])


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def param_shardings(mesh: Mesh, model: Model) -> dict:
    """The tree of parameters' shardings. An axis that its mesh axes do not divide stays whole."""

    def sharding(leaf: jax.ShapeDtypeStruct, names: tuple[str, ...]) -> NamedSharding:
        axes = [_dividing(mesh, n, size) for n, size in zip(names, leaf.shape, strict=True)]
        return _sharding(mesh, axes)

    return jax.tree.map(sharding, abstract_params(model), logical_axes(model))


def _dividing(mesh: Mesh, name: str, size: int) -> tuple[str, ...]:
    """As many of a logical axis' mesh axes, from the first on, as divide its size."""
    axes = RULES[name]
    for count in range(len(axes), -1, -1):
        if size % math.prod(mesh.shape[a] for a in axes[:count]) == 0:
            break
    if count < len(axes):
        _tell_once(f"parameter axis {name!r} of {size} is split over {axes[:count]}, not {axes}")
    return axes[:count]


@functools.cache
def _tell_once(text: str) -> None:
    log.warning(text)


def state_shardings(mesh: Mesh, model: Model):
    """TrainState of shardings: both moments lie where their parameters lie, all else is whole."""
    from olmo_core_jax.train.step import TrainState

    params, whole = param_shardings(mesh, model), replicated(mesh)
    return TrainState(params, SkipStepAdamWState(whole, params, params, whole, whole, whole), whole)


def _sharding(mesh: Mesh, axes: list[tuple[str, ...]]) -> NamedSharding:
    """In the form that XLA gives results: mesh axes of one device, and empty ends, left out.

    Otherwise the state's sharding after an update is equal but not the same: one more compile.
    """
    parts = [tuple(a for a in split if mesh.shape[a] > 1) for split in axes]
    while parts and not parts[-1]:
        parts.pop()
    spec = [p[0] if len(p) == 1 else p or None for p in parts]
    return NamedSharding(mesh, PartitionSpec(*spec))


@dataclass(frozen=True)
class BatchPlan:
    """instances = ways * accumulation * per_device; ways: devices that hold different rows."""

    instances: int
    ways: int
    accumulation: int
    per_device: int

    def __str__(self) -> str:
        return (
            f"{self.instances} instances an update = {self.ways} data-parallel x "
            f"{self.accumulation} accumulated x {self.per_device} a device"
        )


def plan_batch(stage: Stage, topology: topologies.Topology, mesh: Mesh) -> BatchPlan:
    """How the recipe's global batch lies on the mesh.

    Raises UserError with the nearest choices where it cannot.
    """
    ways = math.prod(mesh.shape[a] for a in RULES["batch"])
    total = stage.batch_instances
    if total % ways:
        sequence = stage.data.sequence_length
        near = [n * sequence for n in (total // ways * ways, (total // ways + 1) * ways) if n]
        could_be = _nearest(total, ways, math.prod(mesh.shape.values()))
        raise UserError(
            f"a batch of {total} instances ({stage.batch_tokens} tokens) cannot be shared by "
            f"{ways} data-parallel devices: use {_or(could_be)} of them "
            f"(topology.mesh, replica x fsdp), or batch_tokens {_or(near)}"
        )
    rows = total // ways
    asked_micro, asked_size = topology.accumulation, topology.per_device_batch
    for field, value in (("accumulation", asked_micro), ("per_device_batch", asked_size)):
        if value and rows % value:
            raise UserError(
                f"topology.{field} {value} does not divide the {rows} instances that each of "
                f"{ways} devices takes in an update: use {_or(_nearest(rows, value))}"
            )
    if asked_micro and asked_size and asked_micro * asked_size != rows:
        raise UserError(
            f"topology: accumulation {asked_micro} x per_device_batch {asked_size} is not the "
            f"{rows} instances that each of {ways} devices takes in an update: leave one out"
        )
    micro = asked_micro or rows // (asked_size or _largest(rows, topology.max_per_device_batch))
    return BatchPlan(total, ways, micro, rows // micro)


def _largest(rows: int, limit: int | None) -> int:
    """The largest divisor of `rows` that is not above the limit."""
    return max(d for d in _divisors(rows) if d <= (limit or rows))


def _nearest(total: int, wanted: int, limit: int | None = None) -> list[int]:
    """The divisors of `total` next to `wanted`, below and above, up to the limit."""
    divisors = [d for d in _divisors(total) if d <= (limit or total)]
    below, above = [d for d in divisors if d < wanted], [d for d in divisors if d > wanted]
    return below[-1:] + above[:1]


def _divisors(total: int) -> list[int]:
    """Ascending. Batches are typed by hand and may be huge, so only the smaller of each pair is looked for."""
    small = [d for d in range(1, math.isqrt(total) + 1) if total % d == 0]
    return small + [total // d for d in reversed(small) if d * d != total]


def _or(numbers: list[int]) -> str:
    return " or ".join(map(str, numbers))


def local_rows(mesh: Mesh, instances: int) -> np.ndarray:
    """Which rows of the global batch this process's devices need, ascending."""
    where = named_sharding(mesh, ("batch",)).addressable_devices_indices_map((instances,))
    return np.unique(np.concatenate([np.arange(instances)[index] for index in where.values()]))


def global_batch(mesh: Mesh, instances: int, rows: np.ndarray, local: Batch) -> Batch:
    """The update's batch as global arrays, from this process's `rows` of it."""
    place = np.full(instances, -1)
    place[rows] = np.arange(len(rows))

    def put(x: np.ndarray) -> jax.Array:
        sharding = named_sharding(mesh, ("batch",))
        shape = (instances, *x.shape[1:])

        def mine(index):
            return x[place[index[0]]]

        return jax.make_array_from_callback(shape, sharding, mine)

    return Batch(*(put(x) for x in local))
